"""A model is exported once for a surface and its copies; one that differs is exported again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatgauge as fg
from flatgauge.graph import export as graph

pytestmark = pytest.mark.fresh_exports

NAMES = ["rho_max", "path_norm"]
INPUTS, LABELS = torch.randn(12, 4), torch.arange(12) % 3


class Net(nn.Module):
    """A network with all kinds of settings."""

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
        return self.last(hidden) * self.settings["power"][0]


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


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def surface(model: nn.Module) -> fg.LossSurface:
    return fg.LossSurface(model, "cross_entropy", (INPUTS, LABELS))


def measured(held: fg.LossSurface) -> float:
    return fg.measure(held, measures=["rho_max"])["rho_max"].value


def test_a_surface_and_its_copies_export_once(count):
    held = surface(network())
    fg.measure(held, measures=NAMES)
    assert len(count) == 2  # With open samples, and for one sample.
    fg.measure(held, measures=NAMES)
    assert fg.measure(held.copy(), measures=NAMES).to_dict() is not None
    other = network(1)
    assert measured(held.with_weights(other.state_dict())) == measured(surface(other))
    assert len(count) == 3  # That of the surface made from nothing.
    fg.measure(held.copy(torch.float64), measures=NAMES)
    assert len(count) == 3


def test_a_certificate_and_the_balanced_form_read_a_gauge_once(count):
    held = surface(network())
    fg.measure(held, measures=["rho_max"], gauge="balanced")
    assert len(count) == 2
    fg.certify(held, measures=["rho_max"], trials=1)
    assert len(count) == 2


def test_networks_of_one_structure_are_compared_with_one_graph(count):
    fg.compare({"one": surface(network()), "other": surface(network(1))}, measures=["rho_max"])
    assert len(count) == 1


def test_trained_further_it_is_measured_on_the_graph_it_had(count):
    model = network()
    held = surface(model)
    before = measured(held)
    with torch.no_grad():
        model.first.weight.mul_(1.5)
        model.factor.mul_(0.5)
    after = measured(held)
    assert len(count) == 1
    assert after == measured(surface(model)) != before


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


def _patch(model):
    model.forward = lambda x: 2 * Net.forward(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("change", [_negate, _deepen, _fill, _replace, _close_over, _hook, _patch])
def test_a_changed_model_is_exported_again(count, change):
    model = network()
    held = surface(model)
    before = measured(held)
    twin = held.copy()
    change(model)
    change(twin.model)
    held.refresh()
    again = measured(held)
    assert again == measured(surface(model)) != before
    assert len(count) == 3
    assert measured(twin) == again  # A copy that was changed before it was measured.


def test_other_inputs_are_other_graphs(count):
    model = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4, 3))
    for inputs in (torch.randn(6, 1, 8), torch.randn(6, 1, 12)):
        held = fg.LossSurface(model, "cross_entropy", (inputs, LABELS[:6]))
        fg.measure(held, measures=["rho_max"])
    assert len(count) == 2


def test_exports_and_failed_attempts_are_logged(monkeypatch):
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(12, 4) @ torch.ones(4, 3)

    lines = []
    monkeypatch.setattr(graph.LOG, "debug", lambda *args, **_: lines.append(args[0] % args[1:]))
    graph.ModelGraph(Fixed().eval(), (INPUTS,), {}, 12)
    assert "cannot leave the number of samples open" in lines[0]
    assert lines[-1].endswith("samples fixed")
