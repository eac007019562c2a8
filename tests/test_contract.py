"""What every measure promises, checked for every measure on every case."""

from __future__ import annotations

import copy
import inspect
import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from cases import CASES, Case, build
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.estimators import Estimate
from flatgauge.measures import GROUPS, registry

MEASURES = [item.name for item in registry]
SECTIONS = ["Definition:", "Invariance:", "Cost:", "Reference:", "Args:", "Returns:", "Example:"]


def run(name: str, surface: LossSurface, *, seed: int = 0, **options) -> Estimate:
    item = registry[name]
    if item.draws:
        options["generator"] = Generator().manual_seed(seed)
    return item.function(surface, **options)


@cache
def shared(case: str, twin: int) -> LossSurface:
    """One surface for all measures: reading the graph anew for each would take long."""
    return build(case).surface()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MEASURES)
def test_deterministic_finite_counted_and_clean(name, case):
    surface = shared(case, 0)
    before = state_of(surface.model)
    spent = surface.matvecs
    estimate = run(name, surface)
    assert math.isfinite(estimate.value)
    assert estimate.converged
    assert estimate.matvecs == surface.matvecs - spent
    assert run(name, shared(case, 1)).value == estimate.value
    torch.testing.assert_close(state_of(surface.model), before, rtol=0, atol=0)


def state_of(model: nn.Module) -> dict[str, object]:
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
    }


@pytest.mark.parametrize("name", MEASURES)
def test_float32_agrees_with_float64(name):
    case = build("mlp")
    single = LossSurface(copy.deepcopy(case.model).float(), case.loss, (case.inputs, case.targets))
    coarse, fine = run(name, single), run(name, case.surface())
    assert coarse.value == pytest.approx(fine.value, rel=2e-3, abs=5 * (fine.error + coarse.error))


@pytest.mark.parametrize("name", MEASURES)
def test_needs_a_surface_and_a_generator(name):
    with pytest.raises(TypeError, match=rf"`{name}` measures a LossSurface, but got a Sequential"):
        registry[name].function(nn.Sequential())
    if registry[name].draws:
        smooth = nn.Sequential(nn.Linear(200, 40), nn.GELU(), nn.Linear(40, 3))
        surface = LossSurface(smooth, "cross_entropy", (torch.randn(5, 200), torch.arange(5) % 3))
        with pytest.raises(ValueError, match=r"needs a generator; pass `generator=torch\.Gen"):
            registry[name].function(surface)


# -- invariance, both ways --------------------------------------------------------------------


def moved(case: Case, group: str) -> Case | None:
    """The case with its network rewritten by a member of a group, where that is easy by hand."""
    model = copy.deepcopy(case.model)
    if not isinstance(model, nn.Sequential) or not isinstance(model[0], nn.Linear):
        return None
    first, second, last = model[0], model[2], model[-1]
    order = torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        match group:
            case "layerwise":
                rescale(first, second, [16.0] * 5)
                rescale(second, last, [0.25] * 4)
            case "nodewise":
                rescale(first, second, [2.0**k for k in (-3, 4, 2, -1, 5)])
                rescale(second, last, [2.0**k for k in (1, -2, 6, 3)])
            case "rows":
                rescale(second, last, [2.0**k for k in (1, -2, 6, 3)])
            case "permutation":
                first.weight[:] = first.weight[order]
                if first.bias is not None:
                    first.bias[:] = first.bias[order]
                second.weight[:] = second.weight[:, order]
            case "output_shift" if last.bias is not None:
                last.bias += 3
            case _:
                return None
    return Case(model, case.loss, case.torch_loss, case.inputs, case.targets)


def rescale(layer: nn.Linear, after: nn.Linear, factors: list[float]) -> None:
    """Multiply what enters a layer's units, divide what leaves them."""
    scale = torch.tensor(factors).double()
    layer.weight *= scale[:, None]
    if layer.bias is not None:
        layer.bias *= scale
    after.weight /= scale


#: Cases whose first two layers are linear and whose activations are positively homogeneous.
REWRITABLE = ["mlp", "mlp without biases", "leaky relu with mse"]


@pytest.mark.parametrize("case", REWRITABLE)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", MEASURES)
def test_claimed_invariances_hold(name, group, case):
    if group not in registry[name].invariant_to:
        return
    if group == "output_shift" and "mse" in case:
        return  # The squared error sees a shift: it is not the same loss.
    here = build(case)
    there = moved(here, group)
    if there is None:
        return
    before, after = run(name, here.surface()), run(name, there.surface())
    # Random probes do not move with the units: a permuted network is measured with others.
    allowed = 5 * (before.error + after.error) + 1e-10 * abs(before.value)
    if name == "epsilon_sharpness":
        allowed = 0.02 * before.value  # a lower bound found from other random starts
    if group != "permutation" and group != "output_shift" and not registry[name].draws:
        allowed = 0.0  # Powers of two lose no bit.
    assert abs(after.value - before.value) <= allowed


@pytest.mark.parametrize("group", ["layerwise", "nodewise", "rows", "permutation"])
@pytest.mark.parametrize("name", MEASURES)
def test_what_is_not_claimed_moves_somewhere(name, group):
    if group in registry[name].invariant_to:
        return
    changes = []
    for case in REWRITABLE:
        here = build(case)
        there = moved(here, group)
        before, after = run(name, here.surface()), run(name, there.surface())
        changes.append(abs(after.value - before.value) / abs(before.value))
    assert max(changes) > 1e-3


@pytest.mark.parametrize("group", ["layerwise", "nodewise", "permutation", "output_shift"])
def test_the_moves_used_here_keep_the_function(group):
    here = build("mlp")
    there = moved(here, group)
    shift = 3 if group == "output_shift" else 0
    torch.testing.assert_close(there.model(here.inputs), here.model(here.inputs) + shift)


# -- what a measure declares ------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASURES)
def test_docstrings_have_their_sections_in_order(name):
    text = inspect.getdoc(registry[name].function)
    places = [text.find(section) for section in SECTIONS]
    assert -1 not in places, dict(zip(SECTIONS, places, strict=True))
    assert places == sorted(places)
    claimed = text.split("Invariance:")[1].split(".")[0]
    assert {word.strip() for word in claimed.split(",")} == registry[name].invariant_to


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_a_public_function_with_keyword_options(name):
    import flatgauge.measures

    assert getattr(flatgauge.measures, name) is registry[name].function
    assert name in flatgauge.measures.__all__
    _, *options = inspect.signature(registry[name].function).parameters.values()
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)


def test_every_file_of_measures_is_exported():
    from pathlib import Path

    import flatgauge.measures

    folder = Path(flatgauge.measures.__file__).parent
    homes = {inspect.getmodule(inspect.unwrap(item.function)).__name__ for item in registry}
    files = {f"flatgauge.measures.{path.stem}" for path in folder.glob("[a-z]*.py")}
    assert files - homes == {"flatgauge.measures.registry"}
