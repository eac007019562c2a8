"""The path norm against paths that are written out, and by hand."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
import zoo
from cases import LAYER_CASES, Residual, build
from torch import Tensor, nn
from torch.nn import functional as F

import flatgauge as fg
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.measures import path_norm

ORDERS = (1.0, 1.5, 2.0)

#: The cases through which no paths run, and what is said of them.
REFUSED = {
    "gelu": r"through `gelu`: it is not piecewise linear",
    "attention": r"through `scaled_dot_product_attention` \(cases.py:\d+\): it multiplies activat",
    "squared": r"through `mul` \(cases.py:\d+\): it multiplies two activations",
    "gated": r"through `mul` \(cases.py:\d+\): it multiplies two activations",
    "sequence": r"through `layer_norm` \(cases.py:\d+\): it divides by statistics of the sample",
    "sigmoid in the middle": r"through `sigmoid`: it is not piecewise linear",
}
LINEAR = [name for name in LAYER_CASES if name not in REFUSED]


def norm(model: nn.Module, *shape: int, order: float = 1.0) -> float:
    return path_norm(surface_of(model, *shape), order=order).value


def norms(surface: fg.LossSurface) -> list[float]:
    return [path_norm(surface, order=order).value for order in ORDERS]


def surface_of(model: nn.Module, *shape: int) -> fg.LossSurface:
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        zeros = torch.zeros_like(model.eval()(x.to(next(model.parameters()))))
    return fg.LossSurface(model, "mse", (x, zeros))


def seeded(seed: int, build) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


# -- every path by itself ----------------------------------------------------------------------


def paths_of(layers: list[nn.Linear]) -> list[float]:
    """The value of every path of a multi-layer perceptron, one after the other."""
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    found = []
    for start in range(len(layers) + 1):  # The first layer's inputs, then every layer's biases.
        for units in product(*(range(width) for width in widths[start:])):
            value = layers[start - 1].bias[units[0]].item() if start else 1.0
            for layer, (source, target) in zip(layers[start:], pairwise(units), strict=True):
                value *= layer.weight[target, source].item()
            found.append(value)
    return found


@pytest.mark.parametrize("widths", [(3, 2), (2, 3, 2), (3, 4, 2, 3), (1, 2, 3, 2, 1)])
def test_all_paths_of_a_perceptron_one_by_one(widths):
    layers = seeded(0, lambda: nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths)))
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])
    values = paths_of(list(layers))
    expected = [sum(abs(value) ** order for value in values) ** (1 / order) for order in ORDERS]
    assert norms(surface_of(model, widths[0])) == pytest.approx(expected, rel=1e-12)


def test_by_hand():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        model[0].bias.copy_(torch.tensor([0.5, -1.0]))
        model[2].weight.copy_(torch.tensor([[-2.0, 3.0]]))
        model[2].bias.fill_(7.0)
    assert norm(model, 2) == 2 * (1 + 2 + 0.5) + 3 * (3 + 4 + 1) + 7 == 38.0
    squares = 4 * (1 + 4 + 0.25) + 9 * (9 + 16 + 1) + 49
    assert norm(model, 2, order=2) == math.sqrt(squares)
    estimate = path_norm(surface_of(model, 2))
    assert estimate.exact
    assert (estimate.matvecs, estimate.stderr, estimate.options) == (0, 0.0, {"order": 1.0})


# -- convolutions and pools, unrolled into matrices --------------------------------------------


def unrolled(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The matrix and the bias of a layer, by what it does to unit vectors.

    For a max-pool: a one where an entry lies in a window.
    """
    units = torch.eye(math.prod(shape)).double().reshape(-1, *shape)
    with torch.no_grad():
        bias = module(torch.zeros(1, *shape).double())
        columns = module(units) - bias
    return columns.reshape(len(units), -1).T, bias.reshape(-1)


def through(module: nn.Module, sums: Tensor, order: float) -> Tensor:
    """Sums over paths behind a layer."""
    if isinstance(module, (nn.ReLU, nn.ReLU6, nn.LeakyReLU)):
        return sums
    matrix, bias = unrolled(module, tuple(sums.shape))
    with torch.no_grad():
        shape = module(sums[None]).shape[1:]
    flat = matrix.abs() ** order @ sums.reshape(-1) + bias.abs() ** order
    return flat.reshape(shape)


def literal(model: nn.Sequential, *shape: int) -> list[float]:
    found = []
    for order in ORDERS:
        sums = torch.ones(shape).double()
        for module in model.eval():
            sums = through(module, sums, order)
        found.append(float(sums.sum()) ** (1 / order))
    return found


CHAINS = [name for name in LINEAR if isinstance(build(name).model, nn.Sequential)]


@pytest.mark.parametrize("name", CHAINS)
def test_chains_agree_with_their_unrolled_matrices(name):
    case = build(name)
    expected = literal(case.model, *case.inputs.shape[1:])
    assert norms(case.surface()) == pytest.approx(expected, rel=1e-12)


def test_the_chains_are_many():
    assert len(CHAINS) >= 9


POOLS = {
    "max": lambda: nn.MaxPool2d(3, 2, padding=1),
    "max, ceil": lambda: nn.MaxPool2d((2, 3), ceil_mode=True),
    "max, dilated": lambda: nn.MaxPool2d(2, 1, dilation=(3, 2)),
    "max with places": lambda: nn.AdaptiveMaxPool2d((3, 2)),
    "mean": lambda: nn.AvgPool2d(3, 2, padding=1),
    "mean, ceil": lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "mean, own pixels": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
    "mean, ceil, own pixels": lambda: nn.AvgPool2d(
        (2, 3), ceil_mode=True, padding=1, count_include_pad=False
    ),
    "mean, own divisor": lambda: nn.AvgPool2d(2, divisor_override=3),
    "windows of several sizes": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "nearest, odd": lambda: nn.Upsample((7, 11)),
    "shuffled": lambda: nn.Sequential(nn.Conv2d(2, 4, 1).double(), nn.PixelShuffle(2)),
    "channels shuffled": lambda: nn.ChannelShuffle(2),
    "patches": lambda: nn.Unfold(2, stride=2),
    "reflected": lambda: nn.ReflectionPad2d(2),
    "replicated": lambda: nn.ReplicationPad2d((1, 0, 2, 1)),
    "zeros around": lambda: nn.ZeroPad2d((1, 0, 2, -1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_pools_agree_with_their_unrolled_matrices(pool):
    model = seeded(
        1,
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), POOLS[pool](), nn.Flatten()),
            *(nn.LazyLinear(3, dtype=torch.float64),),
        ),
    )
    model.eval()(torch.zeros(2, 1, 7, 6).double())
    nn.init.normal_(model[1].running_mean)
    expected = literal(model, 1, 7, 6)
    assert norms(surface_of(model, 1, 7, 6)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_a_residual_block_adds_the_paths_of_its_branches(order):
    model = build("residual with batch-norm").model.eval()
    assert isinstance(model, Residual)
    sums = through(model.norm0, through(model.stem, torch.ones(2, 4, 4).double(), order), order)
    sums = sums + through(model.norm, through(model.conv, sums, order), order)
    pooled = sums.sum((1, 2)) / 16**order
    expected = float(through(model.head, pooled, order).sum()) ** (1 / order)
    assert norm(model, 2, 4, 4, order=order) == pytest.approx(expected, rel=1e-12)


# -- single ops, by hand: they read sums of 3.5 and 8 ------------------------------------------


class After(nn.Module):
    """An op behind a linear map whose two outputs have paths that add up to 3.5 and 8."""

    def __init__(self, op, *extra: nn.Module) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)
        self.extra = nn.ModuleList(extra)
        self.op = op
        with torch.no_grad():
            self.map.weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
            self.map.bias.copy_(torch.tensor([0.5, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.map(x), *self.extra)


def prelu(*slopes: float) -> nn.PReLU:
    module = nn.PReLU(len(slopes))
    nn.init.zeros_(module.weight)
    with torch.no_grad():
        module.weight.add_(torch.tensor(slopes))
    return module


FIXED = torch.tensor([[True, False]])
OPS = {
    "abs": (torch.abs, 11.5),
    "minus": (lambda x: -x, 11.5),
    "plus a number": (lambda x: x - 2, 11.5 + 4),
    "from a number": (lambda x: 3 - x, 11.5 + 6),
    "plus a multiple": (lambda x: torch.add(x, x.flip(1), alpha=-3), 4 * 11.5),
    "minus the other way round": (lambda x: torch.rsub(x, x, alpha=-2), 3 * 11.5),
    "times a number": (lambda x: -2 * x / 4, 11.5 / 2),
    "times whole numbers": (lambda x: x * torch.tensor([-2, 3]), 7 + 24),
    "times truth values": (lambda x: x * FIXED, 3.5),
    "a constant": (lambda x: x + torch.tensor([[-1.0, 2.0]]).double(), 11.5 + 3),
    "relu6": (F.relu6, 11.5),
    "hardtanh": (F.hardtanh, 11.5),
    "between bounds above zero": (lambda x: x.clamp(2, 5), 11.5 + 4),
    "between bounds below zero": (lambda x: x.clamp(max=-1), 11.5 + 2),
    "threshold": (lambda x: F.threshold(x, 0.1, -3.0), 11.5 + 6),
    "hard sigmoid": (F.hardsigmoid, 11.5 / 6 + 1),
    "leaky relu": (F.leaky_relu, 11.5),
    "steep relu": (lambda x: F.leaky_relu(x, -3.0), 3 * 11.5),
    "rrelu": (lambda x: F.rrelu(x, 2.0, 4.0), 3 * 11.5),
    "prelu": (lambda x, f: f(x), 3.5 + 2 * 8, prelu(0.5, -2.0)),
    "prelu of one slope": (lambda x, f: f(x), 4 * 11.5, prelu(4.0)),
    "sum": (lambda x: x.sum(1), 11.5),
    "mean": (lambda x: x.mean(1, keepdim=True), 11.5 / 2),
    "largest": (lambda x: x.amax(1), 11.5),
    "smallest": (lambda x: x.min(dim=1).values, 11.5),
    "larger": (lambda x: torch.maximum(x, x.flip(1)), 2 * 11.5),
    "larger than a number": (lambda x: torch.maximum(x, torch.tensor(-1.0).double()), 11.5 + 2),
    "fixed places": (lambda x: torch.where(FIXED, x, -1.0), 3.5 + 1),
    "masked": (lambda x: x.masked_fill(FIXED, 2.0), 2 + 8),
    "joined": (lambda x: torch.cat([x, x[:, :1], torch.ones_like(x)], 1), 11.5 + 3.5 + 2),
    "one of a split": (lambda x: x.split(1, 1)[1], 8.0),
    "padded with a number": (lambda x: F.pad(x, (0, 3), value=-2.0), 11.5 + 6),
    "assigned": (lambda x: _assigned(x), 3.5 + 2 * 3.5),
    "chosen by a list": (lambda x: x[:, [1, 1, 0]], 8 + 8 + 3.5),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), 11.5),
    "cast": (lambda x: x.float().double(), 11.5),
    "matrix": (lambda x, f: x @ f.weight, 8.0 + 3.5, nn.Linear(2, 2)),
    "matrix on the left": (lambda x, f: (f.weight @ x.T).T, 8.0 + 3.5, nn.Linear(2, 2)),
    "addmm": (lambda x, f: torch.addmm(x, x, f.weight, beta=-2, alpha=3), 57.5, nn.Linear(2, 2)),
    "einsum": (lambda x, f: torch.einsum("ni,ji->nj", x, f.weight), 11.5, nn.Linear(2, 2)),
    "bilinear": (lambda x, f: f(x, torch.ones_like(x)), 23.0, nn.Bilinear(2, 2, 1, bias=False)),
    "interpolated": (lambda x: F.interpolate(x[:, None], 4, mode="linear"), 2 * 11.5),
}  # fmt: skip


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = 2 * x[:, 0]
    return y


def _filled(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """Matrices that swap the two with a sign; a form of ones."""
    for module in modules:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
        elif isinstance(module, nn.Bilinear):
            nn.init.ones_(module.weight)
    return modules


@pytest.mark.parametrize("name", OPS)
def test_ops_by_hand(name):
    op, expected, *extra = OPS[name]
    model = After(op, *_filled(tuple(extra))).double()
    assert norm(model, 2) == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():  # And it bounds what the network can give to inputs of size one.
        x = torch.tensor(list(product((-1.0, -0.3, 0.0, 0.5, 1.0), repeat=2))).double()
        assert model.eval()(x).reshape(len(x), -1).abs().sum(1).max() <= expected + 1e-12


@pytest.mark.parametrize("name", LINEAR)
def test_it_bounds_what_the_network_gives_to_inputs_of_size_one(name):
    case = build(name)
    inputs = case.inputs / case.inputs.abs().max()
    with torch.no_grad():
        largest = case.model.eval()(inputs).reshape(len(inputs), -1).abs().sum(1).max()
    assert largest <= path_norm(case.surface()).value


# -- what counts as a weight, and what as an output --------------------------------------------


def test_what_is_computed_from_weights_alone_is_one_weight():
    plain = seeded(0, lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    normed = seeded(0, lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    nn.utils.parametrizations.weight_norm(normed[0])
    assert norm(normed, 3) == pytest.approx(norm(plain, 3), rel=1e-12)


def test_weights_that_are_not_trained_count():
    model = build("mlp").model
    before = norm(model, 4)
    model[0].weight.requires_grad_(False)
    assert norm(model, 4) == before


def test_only_the_prediction_counts_and_only_what_it_is_made_of():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.other = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"curved": torch.tanh(self.other(x)), "logits": self.map(x)}

    model = seeded(0, Several)
    data = torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    value = path_norm(fg.LossSurface(model, "cross_entropy", data)).value
    weight, bias = (p.detach().abs().sum() for p in model.map.parameters())
    assert value == pytest.approx(float(weight + bias), rel=1e-12)


def test_single_precision_is_summed_in_double():
    model = build("residual with batch-norm").model.float()
    coarse = norm(model, 2, 4, 4)
    assert coarse == norm(model.double(), 2, 4, 4)


def test_the_numbers_and_the_count_of_the_samples_do_not_matter():
    case = build("conv and max-pool")
    whole = path_norm(case.surface()).value
    one = case.inputs[:1] * 100, case.targets[:1]
    assert path_norm(fg.LossSurface(case.model, case.loss, one)).value == whole


# -- the gauge ---------------------------------------------------------------------------------


def rescaled(model: nn.Module, inputs: Tensor, count: int) -> list[nn.Module]:
    """The same network in other weights, by powers of two."""
    gauge = fg.find_gauge(model, inputs)
    assert gauge.dim
    generator = torch.Generator().manual_seed(0)
    moves = [
        gauge.sample(generator=generator, log2_range=6, powers_of_two=True) for _ in range(count)
    ]
    return [gauge.rescale(model, move) for move in moves]


# One square matrix used twice cannot be rescaled.
@pytest.mark.parametrize("name", [name for name in LINEAR if name != "tied weights"])
def test_rescaling_units_does_not_change_a_bit(name):
    case = build(name)
    surface = case.surface()
    before = [path_norm(surface, order=order).value for order in (1, 2)]
    for twin in rescaled(case.model, case.inputs, 3):
        surface.model.load_state_dict(twin.state_dict())
        assert [path_norm(surface, order=order).value for order in (1, 2)] == before


def test_moving_weight_between_branches_is_seen_by_other_orders():
    surface = build("proportional branches").surface()
    before = [path_norm(surface, order=order).value for order in (1, 2)]
    with torch.no_grad():
        for part in ("weight", "bias"):  # A third and two thirds become one half each.
            left, right = (getattr(getattr(surface.model, s), part) for s in ("left", "right"))
            left.copy_(1.5 * left)
            right.copy_(left)
    after = [path_norm(surface, order=order).value for order in (1, 2)]
    assert after[0] == pytest.approx(before[0], rel=1e-12)
    assert abs(after[1] - before[1]) > 0.03 * before[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet20", "resnet4b", "eran_9_200"])
def test_published_networks_have_the_same_norm_after_rescaling(name):
    model, samples = zoo.trained(name), zoo.images(name, 2)
    shape = tuple(samples.inputs.shape[1:])
    before = norm(model, *shape)
    assert 1 < before < 1e40
    (twin,) = rescaled(model, samples.inputs, 1)
    assert norm(twin, *shape) == before


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_are_not_piecewise_linear_are_refused(name):
    with pytest.raises(UnsupportedGraphError, match=REFUSED[name]):
        path_norm(build(name).surface())


BAD_OPS = {
    "division": (lambda x: x / (1 + x.abs()), r"`div` \(test_path_norm.py:\d+\): it divides by an"),
    "rounding": (lambda x: torch.div(x, 2, rounding_mode="floor"), r"`div` .*: it rounds"),
    "products": (
        lambda x: x[:, :, None] @ x[:, None],
        r"`\w+m\w*` .*: it multiplies two activations",
    ),
    "data as places": (lambda x: torch.where(x > 0, x, 0.1 * x), r"`gt` .*: it is not known to be"),
    "squares": (lambda x: x**2, r"`pow` .*: it is not known to be piecewise linear"),
    "whole numbers": (lambda x: x * x.argmax(1)[:, None], r"`argmax` .*not known"),
    "places of a maximum": (
        lambda x: x.gather(1, x.max(1, keepdim=True).indices),
        r"`gather` .*: it reads whole numbers or truth values",
    ),
    "casts": (lambda x: x + x.int(), r"`_to_copy` .*: a cast to whole numbers rounds"),
    "padding": (lambda x: F.pad(x, (1, 1), value=-math.inf).amax(1), r"it pads with infinity"),
    "slopes": (
        lambda x: F.prelu(x, 0 * x.mean(0)),
        r"`\w*prelu\w*` .*: it takes an activation where only weig",
    ),
}


@pytest.mark.parametrize("name", BAD_OPS)
def test_ops_without_paths_are_refused_with_their_place(name):
    op, message = BAD_OPS[name]
    with pytest.raises(UnsupportedGraphError, match=message + r".*leave `path_norm` out by nam"):
        norm(After(op).double(), 2)


def test_interpolation_has_paths_of_order_one_only():
    model = After(lambda x: F.interpolate(x[:, None], 3, mode="linear")).double()
    with pytest.raises(UnsupportedGraphError, match=r"`upsample_linear1d` .* only known for order"):
        norm(model, 2, order=2)


def test_tokens_have_no_paths():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3))
    data = torch.randint(0, 5, (4, 3)), torch.tensor([0, 1, 2, 0])
    with pytest.raises(UnsupportedGraphError, match=r"`embedding`.*whole numbers or truth values"):
        path_norm(fg.LossSurface(model, "cross_entropy", data))


@pytest.mark.parametrize("order", [0.5, 0, -1, math.inf, math.nan])
def test_orders_that_make_no_norm_are_refused(order):
    with pytest.raises(
        ValueError, match=rf"`order={order!r}` is not an order of a norm; use a number"
    ):
        path_norm(build("mlp").surface(), order=order)


def test_a_sum_too_large_is_an_error_and_no_number():
    layers = [part for _ in range(6) for part in (nn.Linear(2, 2), nn.ReLU())]
    model = nn.Sequential(*layers).double()
    surface = surface_of(model, 2)
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.copy_(1e60 * torch.tensor([[1.0, -1.0], [0.0, 0.0]]).double())
            layer.bias.zero_()
    with pytest.raises(ValueError, match=r"larger than any number in double precision \(1.8e308\)"):
        path_norm(surface)
