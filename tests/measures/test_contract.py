"""What every measure promises, checked for every measure on every case."""

from __future__ import annotations

import copy
import fcntl
import inspect
import math
import os
import pickle
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from cases import CASES, build
from torch import Generator, nn

from flatgauge import LossSurface, certify
from flatgauge.analysis.certificate import CertificateRow
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import GROUPS, registry

MEASURES = [item.name for item in registry]
#: Where a measure does not apply, and what it says there.
NO_LABELS = {
    "leaky relu with mse": "loss of outputs .N, classes. and class labels .* `surrogate=None`"
}
INAPPLICABLE: dict[str, dict[str, str]] = {
    "matrix_normalized_sharpness": NO_LABELS,
    "normalized_sharpness": NO_LABELS,
    "normalized_sharpness_direct": NO_LABELS,
    "relative_flatness_normalized": {"tied weights": "its weight is read more than once"},
    **{
        name: {"attention": r"the scale of `key.weight` depends on several units at once"}
        for name in (
            *("psi_max_eigenvalue", "psi_trace", "psi_epsilon_sharpness"),
            *("psi_expected_sharpness", "basis_path_ratio"),
        )
    },
    "path_norm": {
        "gelu": r"paths cannot be summed through `gelu`: it is not piecewise linear",
        "attention": r"through `scaled_dot_product_attention` \(cases.py:\d+\): it multiplies act",
    },
}
#: What stands still on all cases by chance: a seed of the branches where it moves.
STILL = {("basis_path_ratio", "branches"): 3}
#: Searches cut short: what is promised does not depend on how long they are.
SHORT = {"normalized_sharpness_direct": {"steps": 10, "pairs": 8}}
SECTIONS = ["Definition:", "Invariance:", "Cost:", "Reference:", "Args:", "Returns:", "Example:"]


def run(name: str, surface: LossSurface, *, seed: int = 0, **options) -> Estimate:
    item = registry[name]
    options = SHORT.get(name, {}) | options
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
    if case in INAPPLICABLE.get(name, {}):
        with pytest.raises(ValueError, match=INAPPLICABLE[name][case]):
            run(name, surface)
        torch.testing.assert_close(state_of(surface.model), before, rtol=0, atol=0)
        return
    estimate = run(name, surface)
    assert math.isfinite(estimate.value)
    assert estimate.converged or name in SHORT
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


Certified = Callable[[str], dict[tuple[str, str], CertificateRow]]


@pytest.fixture(scope="session")
def certified(tmp_path_factory) -> Certified:
    """Every measure under every group of rewritings that a case has, computed once per run."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # Workers share it.

    @cache
    def rows(case: str) -> dict[tuple[str, str], CertificateRow]:
        path = root / f"certificate of {case}.pickle"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                fit = [name for name in MEASURES if case not in INAPPLICABLE.get(name, {})]
                wanted = {name: SHORT.get(name, {}) for name in fit}
                certificate = certify(shared(case, 0), measures=wanted, trials=1)
                assert all(kept.held for kept in certificate.kept)
                path.write_bytes(pickle.dumps(certificate.rows))
        return {(row.measure, row.group): row for row in pickle.loads(path.read_bytes())}

    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MEASURES)
def test_claimed_invariances_hold(name, case, certified):
    if case in INAPPLICABLE.get(name, {}):  # Refused: see the test of what is finite.
        return
    rows = [certified(case)[name, group] for group in registry[name].invariant_to]
    assert all(row.claimed for row in rows)
    # What is estimated, not swept, may be too noisy to tell.
    noisy = ["unproven"] if build(case).curved else []
    assert not [row for row in rows if row.verdict not in ("holds", "absent", *noisy)]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", MEASURES)
def test_what_is_not_claimed_moves_somewhere(name, group, certified):
    # And what is claimed is really tried somewhere.
    expected = "holds" if group in registry[name].invariant_to else "moves"
    rows = [certified(case).get((name, group)) for case in CASES]
    found = [row.verdict for row in rows if row is not None]
    if (name, group) in STILL:
        other = build("proportional branches", seed=STILL[name, group]).surface()
        again = certify(other, measures=[name], trials=1).rows
        found += [row.verdict for row in again if row.group == group]
    assert expected in found


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
    assert name in vars(flatgauge.measures)
    _, *options = inspect.signature(registry[name].function).parameters.values()
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)


def test_every_file_of_measures_is_exported():
    from pathlib import Path

    import flatgauge.measures

    folder = Path(flatgauge.measures.__file__).parent
    homes = {inspect.getmodule(inspect.unwrap(item.function)).__name__ for item in registry}
    files = {f"flatgauge.measures.{path.stem}" for path in folder.glob("[a-z]*.py")}
    mechanism = {"registry", "declaration"}
    assert files - homes == {f"flatgauge.measures.{name}" for name in mechanism}
