"""Convolutions with a batch-norm behind them, whose factor vectors are received behind the norm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import block_parts, dense_blocks, error, placed_handlers
from torch import Tensor, nn

from flatgauge import LossSurface
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.sweep.accumulate import PARTS
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.curvature.sweep.ops import ConvBatchNormOp
from flatgauge.measures import rho_max, rho_sum
from flatgauge.surface.losses import NormalizedCrossEntropy

SAMPLES = 4


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class Net(nn.Module):
    """A convolution, a norm, a ReLU and a linear map, put together by a function."""

    def __init__(self, conv: nn.Module, norm: nn.Module, features: int, way: Callable) -> None:
        super().__init__()
        self.conv, self.norm, self.head, self.way = conv, norm, nn.Linear(features, 3), way

    def forward(self, x):
        return self.head(self.way(self, x).flatten(1))


class Block(nn.Module):
    """A residual block with a convolution on the shortcut; the second has few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.short, self.norm1 = nn.Conv2d(3, 5, 1, bias=False), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.relu(self.norm(self.conv(x)) + self.norm1(self.short(x)))
        return self.head(x.mean((2, 3)))


def plain(net, x):
    return torch.relu(net.norm(net.conv(x)))


def pooled(net, x):
    return F.max_pool2d(plain(net, x), 2)


def norm_twice(net, x):
    x = net.norm(net.conv(x))
    return torch.relu(x) + 0.3 * x


def conv_twice(net, x):
    x = net.conv(x)
    return torch.relu(net.norm(x)) + 0.3 * x


def major(net, x):
    merged = plain(net, x.reshape(-1, *x.shape[2:]))
    return merged.reshape(x.shape[0], x.shape[1], -1).mean(1)


def minor(net, x):
    merged = plain(net, x.transpose(0, 1).reshape(-1, *x.shape[2:]))
    return merged.reshape(x.shape[1], x.shape[0], -1).mean(0)


def small(conv=None, norm=None, features=12, way=plain) -> Net:
    return Net(conv or nn.Conv2d(2, 3, 3, bias=False), norm or nn.BatchNorm2d(3), features, way)


def silent() -> Net:
    net = small()
    with torch.no_grad():
        net.norm.weight[1] = 0
    return net


def frozen(*names: str) -> Net:
    net = small()
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    return net


def grouped() -> Net:
    return small(nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4), 16)


def strided() -> Net:
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1, dilation=2, bias=False)
    return small(conv, features=12)


#: What is built, and the shape of a sample.
NETWORKS = {
    "plain": (small, (2, 4, 4)),
    "norm without parameters": (lambda: small(norm=nn.BatchNorm2d(3, affine=False)), (2, 4, 4)),
    "a scale of zero": (silent, (2, 4, 4)),
    "frozen norm": (lambda: frozen("norm.weight", "norm.bias"), (2, 4, 4)),
    "frozen scale": (lambda: frozen("norm.weight"), (2, 4, 4)),
    "grouped": (grouped, (2, 4, 4)),
    "strided and dilated": (strided, (2, 4, 4)),
    "one axis": (
        lambda: small(nn.Conv1d(2, 3, 3, padding="same", bias=False), nn.BatchNorm1d(3)),
        (2, 4),
    ),
    "three axes": (
        lambda: small(nn.Conv3d(2, 3, 2, bias=False), nn.BatchNorm3d(3), 3),
        (2, 2, 2, 2),
    ),
    "pooling behind": (
        lambda: small(nn.Conv2d(2, 3, 3, padding=1, bias=False), way=pooled),
        (2, 4, 4),
    ),
    "norm read twice": (lambda: small(way=norm_twice), (2, 4, 4)),
    "positions in front": (lambda: small(way=minor), (3, 2, 4, 4)),
    "positions behind": (lambda: small(way=major), (3, 2, 4, 4)),
    "residual": (Block, (2, 2, 2)),
}

#: The same where the convolution is heard by itself, or not at all.
OTHERS = {
    "a bias": (lambda: small(nn.Conv2d(2, 3, 3)), (2, 4, 4)),
    "transposed": (
        lambda: small(nn.ConvTranspose2d(2, 3, 2, bias=False), features=27),
        (2, 2, 2),
    ),
    "convolution read twice": (lambda: small(way=conv_twice), (2, 4, 4)),
    "frozen convolution": (lambda: frozen("conv.weight"), (2, 4, 4)),
    "linear": (
        lambda: small(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), 3),
        (2,),
    ),
}


def built(name: str) -> Case:
    torch.manual_seed(0)
    build, shape = (NETWORKS | OTHERS)[name]
    model = build().double().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(generator=seeded())
            module.running_var.uniform_(0.5, 2.0, generator=seeded())
            if module.affine:
                with torch.no_grad():
                    module.weight *= torch.randn(len(module.weight), dtype=torch.float64)
                    module.bias.normal_()
    inputs = torch.randn(SAMPLES, *shape, generator=seeded(), dtype=torch.float64)
    return Case(model, "cross_entropy", F.cross_entropy, inputs, torch.arange(SAMPLES) % 3)


@cache
def measured(name: str) -> tuple[Case, LossSurface]:
    """A case and its surface, for tests that leave both as they are."""
    case = built(name)
    return case, case.surface(chunk=3)


def fused_convolutions(surface: LossSurface) -> int:
    owners = {id(owner): owner for owner in placed_handlers(surface, *PARTS)}
    return sum(isinstance(owner, ConvBatchNormOp) for owner in owners.values())


def hold(case: Case, surface: LossSurface, *asked: tuple[str, ...]) -> None:
    """Compare what was asked for with the definitions, for every parameter."""
    dense, spreads = dense_blocks(case), sweep_of(surface).input_std()
    for parts in asked:
        blocks = block_curvature(surface, parts)
        assert all(block.exact for block in blocks.values())
        for name, block in blocks.items():
            layer = block.layer is not None
            right = block_parts(case.model, name, dense[name], spreads.get(name), layer=layer)
            for part in right.keys() & set(parts):
                torch.testing.assert_close(
                    *(block.values[part], right[part]),
                    rtol=1e-9,
                    atol=1e-11,
                    msg=lambda text, where=(name, part): f"{where}: {text}",
                )


@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_every_part_is_the_definition(name):
    # What is measured first is measured by itself: forms then need no gradients.
    hold(*measured(name), ("outgoing",), PARTS)


def test_channels_last():
    case = built("residual")
    images = case.inputs.contiguous(memory_format=torch.channels_last)
    model = case.model.to(memory_format=torch.channels_last)
    other = Case(model, case.loss, case.torch_loss, images, case.targets)
    hold(other, other.surface(chunk=3), PARTS)


def test_factors_of_both_signs():
    def loss(outputs, targets):
        size = (outputs - outputs.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()
        return F.cross_entropy(outputs / size, targets)

    case, surface = measured("residual")
    signed = Case(case.model, case.loss, loss, case.inputs, case.targets)
    hold(signed, surface.with_loss(NormalizedCrossEntropy()), PARTS)


@pytest.mark.parametrize("beside", [False, True])
def test_top_eigenvalues_are_those_of_the_dense_block(beside):
    case = built("residual")
    surface, dense = case.surface(chunk=3), dense_blocks(case)
    if beside:
        block_curvature(surface, keep_factors=True)
    names = ["stem.weight", "conv.weight", "short.weight"]
    options = {"tolerance": 1e-8, "max_matvecs": 200, "generator": seeded()}
    for name, found in block_eigenvalues(surface, names, **options).items():
        assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense[name])[-1]))


@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_vectors_are_received_behind_the_norm_where_it_alone_reads_the_convolution(name):
    expected = 3 if name == "residual" else 0 if name in OTHERS else 1
    assert fused_convolutions(measured(name)[1]) == expected


@pytest.mark.parametrize("scale", [1e-45, 1e-41])
def test_scales_that_are_nearly_zero(scale):
    case = built("plain")
    with torch.no_grad():
        case.model.norm.weight[1], case.model.norm.bias[1] = scale, 0.5
    right = dense_blocks(case)["norm.weight"].diagonal()
    single = copy.deepcopy(case.model).float(), case.loss, (case.inputs.float(), case.targets)
    found = block_curvature(LossSurface(*single))["norm.weight"].values["diagonal"]
    torch.testing.assert_close(found, right, rtol=1e-5, atol=0)


def rescaled(model: Block) -> Block:
    """The same function: factors of two before and behind every norm."""
    twin, generator = copy.deepcopy(model), seeded()

    def factors(count: int) -> Tensor:
        return 2.0 ** torch.randint(-9, 9, (count,), generator=generator)

    with torch.no_grad():
        pairs = (twin.stem, twin.norm0), (twin.conv, twin.norm), (twin.short, twin.norm1)
        for conv, norm in pairs:
            before = factors(norm.num_features)
            conv.weight *= before[:, None, None, None]
            norm.running_mean *= before
            norm.weight /= before
        inner, last = factors(3), factors(5)
        for norm, behind in ((twin.norm0, inner), (twin.norm, last), (twin.norm1, last)):
            norm.weight *= behind
            norm.bias *= behind
        twin.conv.weight /= inner[:, None, None]
        twin.short.weight /= inner[:, None, None]
        twin.head.weight /= last
    return twin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("measure", [rho_max, rho_sum])
def test_factors_of_two_change_no_bit_of_rho(measure, dtype):
    case = built("residual")
    model, data = case.model.to(dtype), (case.inputs.to(dtype), case.targets)
    nets = model, rescaled(model)
    one, other = (measure(LossSurface(net, "cross_entropy", data, chunk=3)) for net in nets)
    assert one.value == other.value
    assert one.data_stderr == other.data_stderr
    assert all(torch.equal(one.units[name], other.units[name]) for name in one.units)
    assert error(*(net.stem.weight.detach() for net in nets)) > 0.1


class Shared(nn.Module):
    """A norm whose scale is also its shift."""

    def __init__(self):
        super().__init__()
        self.conv, self.both = nn.Conv2d(2, 3, 3, bias=False), nn.Parameter(torch.rand(3) + 0.5)
        self.last = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.mean, self.variance, self.both, self.both)
        return self.last(x.relu().mean((2, 3)))


def test_a_parameter_that_is_scale_and_shift_is_not_swept():
    torch.manual_seed(0)
    data = torch.randn(5, 2, 5, 5).double(), torch.arange(5) % 3
    surface = LossSurface(Shared().double(), "cross_entropy", data)
    blocks = block_curvature(surface, ("trace",), generator=torch.Generator().manual_seed(0))
    assert blocks["both"].reason == "it is both scale and shift of a norm"
    assert blocks["conv.weight"].exact
