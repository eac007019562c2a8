"""A model is exported once; a model that is not the same is exported again."""

from __future__ import annotations

import copy
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatgauge as fg
from flatgauge import exports, graph
from flatgauge.likeness import OpaqueError, known_likeness, likeness

NAMES = ["rho_max", "path_norm"]
INPUTS, LABELS = torch.randn(12, 4), torch.arange(12) % 3

#: Read by the forward pass of a network below.
LOUD = False


class Net(nn.Module):
    """A network with all kinds of settings."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("shift", torch.zeros(5))
        self.register_buffer("factor", torch.ones(5), persistent=False)
        self.negated = False
        self.settings = {"power": [1, 2]}
        self.constant = torch.ones(5)
        self.activation: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        """Use them all."""
        hidden = self.activation(self.first(x)) * self.constant * self.factor + self.shift
        hidden = -hidden if self.negated else hidden
        out = self.last(hidden) * self.settings["power"][0] * self.scale
        return out * 2 if LOUD else out


@pytest.fixture(autouse=True)
def _nothing_kept():
    exports.forget()
    yield
    exports.forget()


@pytest.fixture
def count(monkeypatch) -> list[int]:
    """How often the exporter was called."""
    calls: list[int] = []
    exported = graph._export

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return exported(*arguments)

    monkeypatch.setattr(graph, "_export", counted)
    return calls


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def surface(model: nn.Module) -> fg.LossSurface:
    return fg.LossSurface(model, "cross_entropy", (INPUTS, LABELS))


def measured(model: nn.Module) -> float:
    return fg.measure(surface(model), measures=["rho_max"])["rho_max"].value


def test_a_model_is_exported_once(count):
    model = network()
    fg.measure(surface(model), measures=NAMES)
    gauge = fg.find_gauge(model, INPUTS[:2])
    del count[:]
    assert len(exports._kept) == 3  # With open samples, for one sample, and for the gauge.
    fg.measure(surface(model), measures=NAMES)
    fg.measure(surface(copy.deepcopy(model)), measures=NAMES)
    twin = gauge.rescale(model, gauge.sample(generator=torch.Generator().manual_seed(0)))
    fg.measure(surface(twin), measures=NAMES)
    fg.find_gauge(twin, INPUTS[:2])
    fg.compare({"one": surface(model), "other": surface(network())}, measures=["rho_max"])
    assert not count


def test_a_certificate_and_the_balanced_form_read_a_gauge_once(count):
    model = network()
    fg.measure(surface(model), measures=["rho_max"], gauge="balanced")
    assert len(count) == 2
    fg.certify(surface(model), measures=["rho_max"], trials=1)
    assert len(count) == 2


def test_trained_further_it_is_measured_anew_on_the_graph_it_had(count):
    model = network()
    before = measured(model)
    with torch.no_grad():
        model.first.weight.mul_(1.5)
        model.factor.mul_(0.5)
    after = measured(model)
    assert len(count) == 1
    exports.forget()
    assert after == measured(model) != before


def _negate(model):
    model.negated = True


def _deepen(model):
    model.settings["power"][0] = 3


def _fill(model):
    model.constant[0] = 4.0


def _replace(model):
    model.activation = torch.sigmoid


def _close_over(model):
    slope = 0.3
    model.activation = lambda x: torch.where(x > 0, x, slope * x)


def _hook(model):
    model.last.register_forward_hook(lambda module, inputs, output: 3 * output)


def _submodule(model):
    torch.manual_seed(1)
    model.last = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def _patch(model):
    model.forward = lambda x: 2 * Net.forward(model, x)


def _loud(model):
    globals()["LOUD"] = True


def _scaled_class(model):
    Net.scale = 2.0


@pytest.mark.parametrize(
    "change",
    [
        _negate,
        _deepen,
        _fill,
        _replace,
        _close_over,
        _hook,
        _submodule,
        _patch,
        _loud,
        _scaled_class,
    ],
)
def test_a_changed_model_is_exported_again(count, monkeypatch, change):
    monkeypatch.setattr(Net, "scale", 1.0)
    monkeypatch.setitem(globals(), "LOUD", False)
    model = network()
    held = surface(model)
    before = fg.measure(held, measures=["rho_max"])["rho_max"].value
    key = likeness(model)
    change(model)
    assert likeness(model) != key
    new, same = measured(model), None
    if change is not _submodule:  # The surface has a layout of its own.
        same = fg.measure(held, measures=["rho_max"])["rho_max"].value
    assert len(count) == 2
    exports.forget()
    assert new == measured(model) != before
    assert same in (new, None)


class Hidden(nn.Module):
    """Reads a setting where no key can see it."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.read = place.read_text

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by what the file says."""
        return self.linear(x) * float(self.read())


class Slotted:
    """Keeps its one setting outside of a dictionary."""

    __slots__ = ("factor",)


SLOTTED = Slotted()


class Reading(nn.Module):
    """Multiplies by what it reads in some way, for inputs that are not in the example."""

    def __init__(self, way: Callable[[], float]) -> None:
        super().__init__()
        self.way, self.last = way, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Read it."""
        return self.last(torch.where(x.sum(1, keepdim=True) > 0, x * self.way(), x))


def _from_slot() -> float:
    return SLOTTED.factor


def _from_environment() -> float:
    return float(os.environ["FACTOR"])


def _from_inner_module() -> float:
    return outer.inner.factor  # noqa: F821 - put into the globals by the test


def _from_import() -> float:
    import outer.inner

    return outer.inner.factor


def _from_imported_name() -> float:
    from outer.inner import factor

    return factor


@pytest.mark.parametrize(
    "way",
    [_from_slot, _from_environment, _from_inner_module, _from_import, _from_imported_name],
)
def test_what_differs_on_other_inputs_only_is_exported_again(count, monkeypatch, way):
    outer, inner = types.ModuleType("outer"), types.ModuleType("outer.inner")
    outer.inner = inner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outer", outer)
    monkeypatch.setitem(sys.modules, "outer.inner", inner)
    monkeypatch.setitem(globals(), "outer", outer)
    few = INPUTS.abs() * torch.tensor([-1.0] * 4 + [1.0] * 8)[:, None]
    torch.manual_seed(0)
    model, found = Reading(way), []
    for factor in (1.0, 3.0):
        inner.factor = SLOTTED.factor = factor  # type: ignore[attr-defined]
        monkeypatch.setenv("FACTOR", str(factor))
        surface = fg.LossSurface(model, "cross_entropy", (few, LABELS))
        found.append(fg.measure(surface, measures=["rho_max"])["rho_max"].value)
    assert len(count) == 2
    assert found[0] != found[1]
    exports.forget()
    surface = fg.LossSurface(model, "cross_entropy", (few, LABELS))
    assert fg.measure(surface, measures=["rho_max"])["rho_max"].value == found[1]


def test_what_no_key_can_see_is_seen_in_the_outputs(count, tmp_path, monkeypatch):
    """The file's content steers the forward pass; the key is the same before and after."""
    place = tmp_path / "factor"
    place.write_text("1")
    torch.manual_seed(0)
    model = Hidden(place)
    monkeypatch.setattr(exports, "known_likeness", lambda *parts: "always the same")
    before = measured(model)
    measured(model)
    assert len(count) == 1
    place.write_text("3")
    after = measured(model)
    assert len(count) == 2
    exports.forget()
    assert after == measured(model) != before


def test_a_model_with_hidden_state_is_exported_every_time(count):
    model = network()
    model.generator = torch.Generator()
    with pytest.raises(OpaqueError, match="an object of type Generator"):
        likeness(model)
    measured(model)
    measured(model)
    assert len(count) == 2


def test_other_inputs_and_precisions_are_other_graphs(count):
    model = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4, 3))
    for inputs in (torch.randn(6, 1, 8), torch.randn(6, 1, 12)):
        held = fg.LossSurface(model, "cross_entropy", (inputs, LABELS[:6]))
        fg.measure(held, measures=["rho_max"])
    double = fg.LossSurface(model, "cross_entropy", (inputs, LABELS[:6]), dtype=torch.float64)
    fg.measure(double, measures=["rho_max"])
    assert len(count) == 3


def test_the_number_of_graphs_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(exports, "_MOST", 2)
    for width in (2, 3, 4):
        fg.find_gauge(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)), INPUTS)
    assert len(exports._kept) == 2


def test_likeness_tells_ties_freezing_and_order():
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    plain, tied, frozen = made(), made(), made()
    tied[2].weight = tied[0].weight
    frozen[0].weight.requires_grad_(False)
    shared = nn.Sequential(plain[0], plain[1], plain[0])
    keys = {known_likeness(model) for model in (plain, tied, frozen, shared, made())}
    assert len(keys) == 4
    assert known_likeness(plain) == known_likeness(made().eval())
    assert known_likeness(plain) != known_likeness(made().double())
