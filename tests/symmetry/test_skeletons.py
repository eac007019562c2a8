"""The strongest paths, against every path of small networks written down edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.symmetry import GaugeGroup, find_gauge
from flatgauge.symmetry.skeletons import Edge, StrongestPaths, Values, strongest_paths

#: Where every path begins and ends: the inputs (with the constant of the biases), the outputs.
END = -1


@dataclass(frozen=True)
class Wire:
    """One weight between two units."""

    tail: int
    head: int
    size: float
    edge: Edge


@dataclass(frozen=True)
class Drawn:
    """A network whose layers run in the order of their parameters, and its wires by hand."""

    model: nn.Module
    inputs: Tensor
    wires: list[Wire]

    @cached_property
    def gauge(self) -> GaugeGroup:
        return find_gauge(self.model, self.inputs)

    @cached_property
    def skeleton(self) -> StrongestPaths:
        return strongest_paths(self.gauge, dict(self.model.named_parameters()))

    @cached_property
    def units(self) -> range:
        return range(1 + max(max(wire.head, wire.tail) for wire in self.wires))

    def time(self, wire: Wire) -> int:
        """When the layer of a wire runs."""
        layers = [name.rpartition(".")[0] for name, _ in self.model.named_parameters()]
        return layers.index(wire.edge.name.rpartition(".")[0])

    def times(self, head: int = END, tail: int = END) -> list[int]:
        """When wires into a unit, or out of it, are read."""
        ends = [
            (wire, (head, wire.head) if tail == END else (tail, wire.tail)) for wire in self.wires
        ]
        return [self.time(wire) for wire, (wanted, end) in ends if wanted == end]

    def out(self, unit: int) -> tuple[float, int, Edge | None]:
        """The strongest of all paths to an output: value, length, and its first edge."""
        if unit == END:
            return 1.0, 0, None
        paths = [
            (wire.size * self.out(wire.head)[0], 1 + self.out(wire.head)[1], wire.edge)
            for wire in self.wires
            if wire.tail == unit and self.time(wire) > max(self.times(head=unit))
        ]
        return max(paths, key=lambda path: path[0])

    def into(self, unit: int) -> tuple[float, int, Edge | None]:
        """The strongest of all paths from an input or a bias: value, length, and its last edge."""
        if unit == END:
            return 1.0, 0, None
        paths = [
            (wire.size * self.into(wire.tail)[0], 1 + self.into(wire.tail)[1], wire.edge)
            for wire in self.wires
            if wire.head == unit and self.time(wire) < min(self.times(tail=unit))
        ]
        return max(paths, key=lambda path: path[0])


def wires(
    model: nn.Module, name: str, tails: list[int], heads: list[int], groups: int = 1
) -> list[Wire]:
    """The wires of a weight (out, in, taps...), one per tap."""
    weight = model.get_parameter(name)
    found = []
    for index, value in enumerate(weight.detach().flatten().tolist()):
        row, column = index // weight[0].numel(), index // weight[0, 0].numel() % weight.shape[1]
        group = row // (weight.shape[0] // groups)
        tail = tails[group * weight.shape[1] + column]
        found.append(Wire(tail, heads[row], abs(value), Edge(name, index)))
    return found


def biases(model: nn.Module, name: str, heads: list[int]) -> list[Wire]:
    values = model.get_parameter(name).detach().tolist()
    return [
        Wire(END, h, abs(v), Edge(name, i))
        for i, (h, v) in enumerate(zip(heads, values, strict=True))
    ]


def scales(model: nn.Module, name: str, tails: list[int], heads: list[int]) -> list[Wire]:
    """The wires of a batch-norm's γ."""
    values = model.get_parameter(name).detach().tolist()
    pairs = zip(tails, heads, values, strict=True)
    return [Wire(t, h, abs(v), Edge(name, i)) for i, (t, h, v) in enumerate(pairs)]


def mlp(bias: bool) -> Drawn:
    model = nn.Sequential(
        *(nn.Linear(4, 3, bias=bias), nn.ReLU(), nn.Linear(3, 3, bias=bias), nn.ReLU()),
        nn.Linear(3, 2, bias=bias),
    ).double()
    one, two, inputs, outputs = [0, 1, 2], [3, 4, 5], [END] * 4, [END] * 2
    found = wires(model, "0.weight", inputs, one) + wires(model, "2.weight", one, two)
    found += wires(model, "4.weight", two, outputs)
    if bias:
        found += biases(model, "0.bias", one) + biases(model, "2.bias", two)
    return Drawn(model, torch.randn(2, 4).double(), found)


def convolutions() -> Drawn:
    model = nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8, 2)),
    ).double()
    one, two = [0, 1, 2], [3, 4]
    found = wires(model, "0.weight", [END] * 2, one) + biases(model, "0.bias", one)
    found += wires(model, "3.weight", one, two) + biases(model, "3.bias", two)
    found += wires(model, "6.weight", [3] * 4 + [4] * 4, [END] * 2)  # four positions each
    return Drawn(model, torch.randn(2, 2, 8, 8).double(), found)


def batch_norm() -> Drawn:
    model = nn.Sequential(
        *(nn.Conv1d(1, 2, 2, bias=False), nn.BatchNorm1d(2), nn.ReLU(), nn.Conv1d(2, 2, 2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
    ).double()
    for name in ("1.weight", "1.bias"):
        nn.init.uniform_(model.get_parameter(name), 0.3, 1.5)
    conv, norm, two = [0, 1], [2, 3], [4, 5]
    found = wires(model, "0.weight", [END], conv) + scales(model, "1.weight", conv, norm)
    found += biases(model, "1.bias", norm) + wires(model, "3.weight", norm, two)
    found += biases(model, "3.bias", two) + wires(model, "6.weight", [4, 4, 5, 5], [END] * 2)
    return Drawn(model, torch.randn(2, 1, 4).double(), found)


class Stream(nn.Module):
    """A residual stream with a two-layer block and a one-layer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.up = nn.Linear(3, width), nn.Linear(width, 2)
        self.down, self.mix = nn.Linear(2, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x + self.mix(torch.relu(x)))


def residual(width: int) -> Drawn:
    model = Stream(width).double()
    stream, inner = list(range(width)), [width, width + 1]
    found = wires(model, "stem.weight", [END] * 3, stream) + biases(model, "stem.bias", stream)
    found += wires(model, "up.weight", stream, inner) + biases(model, "up.bias", inner)
    found += wires(model, "down.weight", inner, stream) + biases(model, "down.bias", stream)
    found += wires(model, "mix.weight", stream, stream) + biases(model, "mix.bias", stream)
    found += wires(model, "head.weight", stream, [END] * 2)
    return Drawn(model, torch.randn(2, 3).double(), found)


def grouped() -> Drawn:
    model = nn.Sequential(
        *(nn.Conv1d(2, 4, 2, groups=2), nn.ReLU(), nn.Conv1d(4, 4, 2, groups=4), nn.ReLU()),
        *(nn.Conv1d(4, 2, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)),
    ).double()
    one, two, three = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]
    found = wires(model, "0.weight", [END] * 2, one, 2) + biases(model, "0.bias", one)
    found += wires(model, "2.weight", one, two, 4) + biases(model, "2.bias", two)
    found += wires(model, "4.weight", two, three, 2) + biases(model, "4.bias", three)
    found += wires(model, "7.weight", [8, 8, 9, 9], [END] * 2)
    return Drawn(model, torch.randn(2, 2, 4).double(), found)


NETS: dict[str, Callable[[], Drawn]] = {
    "mlp": lambda: mlp(True),
    "mlp without biases": lambda: mlp(False),
    "convolutions": convolutions,
    "batch-norm": batch_norm,
    "residual": lambda: residual(3),
    "residual of width two": lambda: residual(2),
    "residual of width one": lambda: residual(1),
    "grouped and depthwise": grouped,
}


@pytest.fixture(scope="module", params=NETS)
def drawn(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return NETS[request.param]()


def numbers(values: Values) -> list[float]:
    return [
        float(m) * 2.0 ** int(e) for m, e in zip(values.mantissas, values.exponents, strict=True)
    ]


def test_strongest_paths_are_the_largest_of_all(drawn):
    skeleton = drawn.skeleton
    assert drawn.gauge.dim == len(drawn.units)
    assert (skeleton.ties, skeleton.irregular) == ((), ())
    for values, edges, search in (
        (skeleton.outward, skeleton.leaving, drawn.out),
        (skeleton.inward, skeleton.entering, drawn.into),
    ):
        best = [search(unit) for unit in drawn.units]
        assert numbers(values) == pytest.approx([value for value, _, _ in best], rel=1e-14)
        assert values.lengths.tolist() == [length for _, length, _ in best]
        assert edges == [edge for _, _, edge in best]
        assert ((values.mantissas >= 0.5) & (values.mantissas < 1)).all()


@pytest.mark.parametrize("exact", [True, False])
def test_choice_does_not_depend_on_how_the_network_is_written(drawn, exact):
    before, gauge = drawn.skeleton, drawn.gauge
    move = gauge.sample(generator=torch.Generator().manual_seed(1), powers_of_two=exact)
    after = strongest_paths(gauge, dict(gauge.rescale(drawn.model, move).named_parameters()))
    assert (after.leaving, after.entering) == (before.leaving, before.entering)
    if exact:  # What leaves is divided, what enters is multiplied: no bit but the exponent's.
        shifts = move.log2.long().numpy()
        assert (after.outward.mantissas == before.outward.mantissas).all()
        assert (after.outward.exponents == before.outward.exponents - shifts).all()
        assert (after.inward.mantissas == before.inward.mantissas).all()
        assert (after.inward.exponents == before.inward.exponents + shifts).all()


def test_ties_are_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0], [1.0, 0.5], [0.25, 0.5]]))
        model[0].bias.copy_(torch.tensor([0.0, 0.0, -0.5]))  # ties with a weight: another tensor
        model[2].weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.5, -2.0, 1.0]]))
    gauge = find_gauge(model, torch.ones(2, 2).double())
    skeleton = strongest_paths(gauge, dict(model.named_parameters()))
    assert skeleton.ties == (0, 1, 2)
    with torch.no_grad():
        model[0].weight[0, 0], model[2].weight[0, 1], model[0].bias[2] = 2.0, 3.0, 0.0
    assert strongest_paths(gauge, dict(model.named_parameters())).ties == ()


def test_a_kernel_with_equal_taps_ties():
    model = nn.Sequential(nn.Conv1d(1, 1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 1))
    nn.init.constant_(model[0].weight, 0.5)
    nn.init.constant_(model[3].weight, 0.5)
    nn.init.zeros_(model[0].bias)
    gauge = find_gauge(model, torch.ones(2, 1, 3))
    assert strongest_paths(gauge, dict(model.named_parameters())).ties == (0,)


def test_units_without_a_path_have_none():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0.0, 0.0
        model[2].weight[:, 1] = 0.0
    gauge = find_gauge(model, torch.ones(2, 2).double())
    skeleton = strongest_paths(gauge, dict(model.named_parameters()))
    assert skeleton.inward.zero.tolist() == [True, False, False]
    assert skeleton.outward.zero.tolist() == [False, True, False]
    assert (skeleton.entering[0], skeleton.leaving[1]) == (None, None)


def test_products_of_activations_are_irregular():
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.first(x)).square())

    model = Squared()
    gauge = find_gauge(model, torch.ones(2, 2))
    skeleton = strongest_paths(gauge, dict(model.named_parameters()))
    assert skeleton.irregular == ("head.weight",)
    assert skeleton.outward.zero.all()


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_a_deep_network_leaves_the_range_of_floating_point(size):
    """Forty layers: values to 1e±720, against exact fractions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(40))).double()
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(size * (0.5 + torch.rand(2, 2).double()))
    gauge = find_gauge(model, torch.ones(2, 2).double())
    skeleton = strongest_paths(gauge, dict(model.named_parameters()))
    assert gauge.dim == 2 * 39
    exact = [Fraction(1), Fraction(1)]
    for number in range(39, 0, -1):
        rows = [[Fraction(w) for w in row] for row in model[number].weight.tolist()]
        exact = [max(abs(rows[o][i]) * exact[o] for o in range(2)) for i in range(2)]
        for i in range(2):
            unit = 2 * (number - 1) + i
            mantissa, exponent = skeleton.outward.mantissas[unit], skeleton.outward.exponents[unit]
            found = Fraction(float(mantissa)) * Fraction(2) ** int(exponent)
            assert abs(found / exact[i] - 1) < Fraction(1, 10**13)
    assert not skeleton.inward.zero.any()
    assert abs(int(skeleton.outward.exponents[0])) > 2000
