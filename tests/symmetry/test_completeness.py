"""The gauge that scale inference finds is all there is: the null space that defines it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from reference import gauge_dimension, gauge_rows, nullity
from torch import Generator, Tensor, nn

import flatgauge as fg

Draw = Callable[[Generator], tuple[Tensor, ...]]
CASES: dict[str, tuple[Callable[[], nn.Module], Draw]] = {}


def normal(*shape: int, samples: int = 6) -> Draw:
    """Inputs of normal numbers."""

    def draw(generator: Generator) -> tuple[Tensor, ...]:
        return (torch.randn(samples, *shape, generator=generator, dtype=torch.float64),)

    return draw


def case(draw: Draw) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a builder of a small network with its inputs."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES[build.__name__] = build, draw
        return build

    return register


class Net(nn.Module):
    """Modules and parameters by name, and what to do with them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def conv(*args: int, **options: object) -> nn.Conv2d:
    return nn.Conv2d(*args, 3, padding=1, **options)  # type: ignore[arg-type]


# -- linear maps -------------------------------------------------------------------------------


@case(normal(3))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@case(normal(3))
def mlp_without_bias() -> nn.Module:
    layers = [nn.Linear(a, b, bias=False) for a, b in ((3, 4), (4, 3), (3, 2))]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


@case(normal(3))
def mlp_leaky() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.LeakyReLU(0.2),
        nn.Linear(4, 3, bias=False),
        nn.PReLU(3),
        nn.Linear(3, 2),
    )


@case(normal(3))
def sigmoid_then_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.Linear(3, 2))


@case(normal(3))
def tied_weights() -> nn.Module:
    net = Net(
        lambda m, x: m.last(torch.relu(m.two(torch.relu(m.one(torch.relu(m.zero(x))))))),
        zero=nn.Linear(3, 3),
        one=nn.Linear(3, 3),
        two=nn.Linear(3, 3, bias=False),
        last=nn.Linear(3, 2),
    )
    net.two.weight = net.one.weight
    return net


@case(normal(3))
def untransposed_and_einsum() -> nn.Module:
    return Net(
        lambda m, x: torch.einsum(
            "nj,kj->nk", torch.relu(torch.einsum("ij,ni->nj", m.b, torch.relu(x @ m.a.t()))), m.c
        ),
        a=torch.randn(4, 3),
        b=torch.randn(4, 3),
        c=torch.randn(2, 3),
    )


@case(normal(3))
def joined_weight() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.relu(F.linear(x, torch.cat([m.one, m.two]), m.bias))),
        one=torch.randn(2, 3),
        two=torch.randn(3, 3),
        bias=torch.randn(5),
        last=nn.Linear(5, 2),
    )


@case(normal(3))
def low_rank_update() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.relu(F.linear(x, m.first.weight + m.up @ m.down))),
        first=nn.Linear(3, 4, bias=False),
        up=torch.randn(4, 2),
        down=torch.randn(2, 3),
        last=nn.Linear(4, 2),
    )


@case(normal(3))
def bilinear_map() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.pair(torch.relu(m.one(x)), torch.relu(m.two(x)))),
        one=nn.Linear(3, 2),
        two=nn.Linear(3, 2),
        pair=nn.Bilinear(2, 2, 3),
        last=nn.Linear(3, 2),
    )


@case(normal(3))
def scale_and_shift() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.relu(m.first(x) * m.scale + m.shift)),
        first=nn.Linear(3, 4),
        scale=torch.randn(4),
        shift=torch.randn(4),
        last=nn.Linear(4, 2),
    )


@case(normal(3))
def scalar_scale() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.scale * torch.relu(m.first(x))),
        first=nn.Linear(3, 4),
        scale=torch.randn(()),
        last=nn.Linear(4, 2),
    )


# -- convolutions ------------------------------------------------------------------------------


@case(normal(1, 4, 4, samples=3))
def conv_pool_flatten() -> nn.Module:
    return nn.Sequential(
        conv(1, 2), nn.ReLU(), nn.MaxPool2d(2), conv(2, 3), nn.ReLU(), nn.AvgPool2d(2, 1),
        nn.Flatten(), nn.Linear(3, 2),
    )  # fmt: skip


@case(normal(1, 2, 2, samples=4))
def flattened_places() -> nn.Module:
    return nn.Sequential(conv(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


@case(normal(2, 6, samples=4))
def conv_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 2, 2, bias=False), nn.AdaptiveMaxPool1d(1),
        nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip


@case(normal(2, 3, 3, samples=3))
def transposed_conv() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, stride=2), nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2, groups=2), nn.ReLU(), nn.Conv2d(4, 1, 2),
    )  # fmt: skip


@case(normal(2, 3, 3, samples=3))
def grouped_conv() -> nn.Module:
    return nn.Sequential(
        conv(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)
    )


@case(normal(2, 4, 4, samples=3))
def depthwise_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.ReLU(), conv(3, 3, groups=3), nn.ReLU(),
        conv(3, 6, groups=3, bias=False), nn.ReLU(), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


@case(normal(2, 3, 3, samples=3))
def channel_shuffle() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU(), nn.ChannelShuffle(2),
        nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1),
    )  # fmt: skip


@case(normal(2, 3, 3, samples=3))
def plain_residual() -> nn.Module:
    return Net(
        lambda m, x: m.head(
            torch.relu(m.stem(x) + m.two(torch.relu(m.one(m.stem(x))))).mean((2, 3))
        ),
        stem=nn.Conv2d(2, 3, 1),
        one=nn.Conv2d(3, 2, 1),
        two=nn.Conv2d(2, 3, 1),
        head=nn.Linear(3, 2),
    )


def _residual(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.relu(m.norm0(m.stem(x)))
    y = m.norm2(m.two(torch.relu(m.norm1(m.one(x)))))
    return m.head(torch.relu(x + y).mean((2, 3)))


@case(normal(2, 3, 3, samples=3))
def batch_norm_residual() -> nn.Module:
    return Net(
        _residual,
        stem=nn.Conv2d(2, 3, 1, bias=False),
        norm0=nn.BatchNorm2d(3),
        one=nn.Conv2d(3, 2, 1, bias=False),
        norm1=nn.BatchNorm2d(2),
        two=nn.Conv2d(2, 3, 1),
        norm2=nn.BatchNorm2d(3),
        head=nn.Linear(3, 2),
    )


@case(normal(3))
def batch_norm_without_affine() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.Linear(4, 2)
    )


def _dense(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.cat([x, torch.relu(m.one(x))], 1)
    x = torch.cat([x, torch.relu(m.two(x))], 1)
    return m.head(torch.relu(m.norm(x)).mean((2, 3)))


@case(normal(2, 2, 2, samples=4))
def dense_block() -> nn.Module:
    return Net(
        _dense,
        one=nn.Conv2d(2, 2, 1),
        two=nn.Conv2d(4, 2, 1),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 2),
    )


def _squeeze_excite(m: nn.Module, x: Tensor) -> Tensor:
    x = torch.relu(m.stem(x))
    gate = torch.sigmoid(m.up(torch.relu(m.down(x.mean((2, 3), keepdim=True)))))
    return m.head((x * gate).amax((2, 3)))


@case(normal(2, 2, 2, samples=4))
def squeeze_excite() -> nn.Module:
    return Net(
        _squeeze_excite,
        stem=nn.Conv2d(2, 3, 1),
        down=nn.Conv2d(3, 2, 1),
        up=nn.Conv2d(2, 3, 1),
        head=nn.Linear(3, 2),
    )


# -- gates, parts of tensors -------------------------------------------------------------------


@case(normal(3))
def swiglu() -> nn.Module:
    return Net(
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
        gate=nn.Linear(3, 4, bias=False),
        up=nn.Linear(3, 4, bias=False),
        down=nn.Linear(4, 2, bias=False),
    )


@case(normal(3))
def bilinear_gate() -> nn.Module:
    return Net(
        lambda m, x: m.down(m.gate(x) * m.up(x)),
        gate=nn.Linear(3, 4, bias=False),
        up=nn.Linear(3, 4, bias=False),
        down=nn.Linear(4, 2, bias=False),
    )


@case(normal(3))
def chunked_gate() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        left, right = m.both(x).chunk(2, -1)
        return m.down(torch.relu(left) * right)

    return Net(forward, both=nn.Linear(3, 6), down=nn.Linear(3, 2))


@case(normal(3))
def sliced() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.relu(m.first(x)[:, 2:]) + torch.relu(m.first(x)[:, :3])),
        first=nn.Linear(3, 5),
        last=nn.Linear(3, 2),
    )


@case(normal(3))
def maxout() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.first(x).unflatten(1, (3, 2)).amax(2)),
        first=nn.Linear(3, 6),
        last=nn.Linear(3, 2),
    )


@case(normal(3))
def squared() -> nn.Module:
    return Net(
        lambda m, x: m.last(m.first(x).square() / m.other),
        first=nn.Linear(3, 4),
        other=torch.randn(4),
        last=nn.Linear(4, 2),
    )


# -- tokens ------------------------------------------------------------------------------------


def _attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (2, 2)).transpose(1, 2) for part in (m.q, m.k, m.v))
    mixed = F.scaled_dot_product_attention(q, k, v)
    return m.out(mixed.transpose(1, 2).flatten(2)).mean(1)


def _attending(key_bias: bool) -> nn.Module:
    return Net(
        _attention,
        q=nn.Linear(3, 4),
        k=nn.Linear(3, 4, bias=key_bias),
        v=nn.Linear(3, 4),
        out=nn.Linear(4, 2),
    )


@case(normal(3, 3, samples=3))
def attention() -> nn.Module:
    return _attending(key_bias=False)


@case(normal(3, 3, samples=3))
def attention_by_hand() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scores = m.q(x) @ m.k(x).transpose(-1, -2) / 2
        return m.out(scores.softmax(-1) @ m.v(x)).mean(1)

    return Net(
        forward,
        q=nn.Linear(3, 2),
        k=nn.Linear(3, 2, bias=False),
        v=nn.Linear(3, 2),
        out=nn.Linear(2, 2),
    )


@case(normal(3, 4, samples=4))
def layer_norm_then_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


@case(normal(3, 3, samples=4))
def positions() -> nn.Module:
    return Net(
        lambda m, x: m.last(torch.relu(m.first(x) + m.pos[:, : x.shape[1]])),
        first=nn.Linear(3, 4),
        pos=torch.randn(1, 3, 4),
        last=nn.Linear(4, 2),
    )


# -- what must hold ----------------------------------------------------------------------------


@pytest.fixture(params=sorted(CASES))
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, Draw]:
    build, draw = CASES[request.param]
    torch.manual_seed(0)
    return build().double(), draw


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of a bilinear map
def test_the_gauge_is_the_null_space(built):
    model, draw = built
    inputs = draw(Generator().manual_seed(1))
    gauge = fg.find_gauge(model, inputs)
    assert gauge.dim == gauge_dimension(model, draw)

    rows, names = gauge_rows(model, draw, seed=1)
    assert len(gauge.generators) == gauge.dim
    spanned = []
    for generator in gauge.generators:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        flat = [
            generator.get(name, torch.zeros_like(state[name])).reshape(-1)
            for name in dict.fromkeys(names)
        ]
        spanned.append(torch.cat(flat).detach())
    if spanned:
        directions = torch.stack(spanned)
        assert (rows @ directions.T).abs().max() < 1e-11 * directions.abs().max()
        assert torch.linalg.matrix_rank(directions) == gauge.dim

    move = gauge.sample(generator=Generator().manual_seed(2))
    twin = gauge.rescale(model, move)
    model.eval(), twin.eval()
    for again in (inputs, draw(Generator().manual_seed(3))):
        assert torch.equal(model(*again), twin(*again))


def test_every_layer_of_a_plain_net_has_its_width_of_scales():
    by_hand = {
        "mlp": 4 + 3,
        "mlp_without_bias": 4 + 3,
        "sigmoid_then_linear": 3,
        "conv_pool_flatten": 2 + 3,
        "batch_norm_residual": 3 + 2 + (3 + 2 + 3),  # the streams; what enters each batch-norm
        "swiglu": 4,
        "bilinear_gate": 4 + 4,
        "attention": 4 + 4,  # q·k and v·out
        "layer_norm_then_linear": 3,
    }
    for name, dim in by_hand.items():
        build, draw = CASES[name]
        assert fg.find_gauge(build().double(), draw(Generator())).dim == dim, name


def test_the_key_bias_is_left_alone_by_design():
    """A softmax does not see it at all, so every entry is free; that is no scale of a unit."""
    model, (_, draw) = _attending(key_bias=True).double(), CASES["attention"]
    gauge = fg.find_gauge(model, draw(Generator()))
    rows, names = gauge_rows(model, draw)
    unseen = torch.tensor([name == "k.bias" for name in names])
    assert rows[:, unseen].abs().max() < 1e-11
    assert gauge.dim == nullity(rows) - 4 == nullity(rows[:, ~unseen])


def test_zero_padded_channels_are_one_scale_each_by_design():
    """Every weight that reads them is free by itself; the gauge has one scale per channel."""
    model = Net(
        lambda m, x: m.last(F.pad(torch.relu(m.first(x)), (0, 2))),
        first=nn.Linear(3, 3),
        last=nn.Linear(5, 2),
    ).double()
    draw = normal(3)
    rows, _ = gauge_rows(model, draw)
    read = rows.abs().amax(0) > 1e-12
    assert int((~read).sum()) == 2 * 2  # Columns of `last` for padded channels.
    assert nullity(rows[:, read]) == 3
    assert fg.find_gauge(model, draw(Generator())).dim == 3 + 2
