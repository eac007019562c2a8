"""Errors of what random vectors estimate: as large as the values scatter, for sums too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CASES, build
from reference import dense_blocks, form, rows_and_columns
from scipy.stats import t as student
from torch import nn

from flatgauge import LossSurface
from flatgauge.estimators.estimate import Estimate
from flatgauge.geometry.functionals import cell
from flatgauge.measures import (
    kappa_trace_sum,
    matrix_normalized_sharpness,
    minimum_sharpness_nodewise,
    rho_sum,
)

PROBES, SEEDS = 16, 60


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_and_blocks(name: str):
    """The weights of a case's linear layers, and the dense blocks of the Hessian."""
    case = build(name)
    blocks = dense_blocks(case)
    modules = {f"{n}.weight": m for n, m in case.model.named_modules() if isinstance(m, nn.Linear)}
    return case, {n: (m, m.weight.detach(), blocks[n]) for n, m in modules.items()}


def literal(name: str) -> dict[str, float]:
    """The three sums over all layers, from the definitions."""
    _, layers = weights_and_blocks(name)
    rho = kappa = roots = 0.0
    for module, weight, block in layers.values():
        _, columns = rows_and_columns(module, weight)
        rho += sum(form(weight, mask, block) for mask in columns)
        scaled = float(weight.square().sum() * block.trace())
        kappa += scaled
        roots += max(scaled, 0.0) ** 0.5
    return {"rho_sum": rho, "kappa_trace_sum": kappa, "matrix_normalized_sharpness": roots}


@pytest.mark.parametrize("measure", [rho_sum, kappa_trace_sum, matrix_normalized_sharpness])
def test_intervals_of_95_percent_hold_the_value_as_often(measure):
    case, _ = weights_and_blocks("gelu")
    surface, right = case.surface(), literal("gelu")[measure.__name__]
    options = {"surrogate": None} if measure is matrix_normalized_sharpness else {}
    found = [
        measure(surface, probes=PROBES, generator=seeded(seed), **options) for seed in range(SEEDS)
    ]
    values, errors = (np.array([getattr(e, key) for e in found]) for key in ("value", "stderr"))
    inside = np.abs(values - right) <= student.ppf(0.975, PROBES - 1) * errors
    assert inside.mean() >= 0.9
    # Neither too small nor added up over units and layers: as large as the values scatter, and
    # somewhat larger only where roots of traces near zero are taken.
    ratio = np.sqrt((errors**2).mean()) / values.std(ddof=1)
    assert 0.75 <= ratio <= (2.0 if options else 1.33)


@pytest.mark.parametrize("geometry", ["weights", "per weight"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_exact_and_estimated(name, geometry):
    surface = build(name).surface()
    for probes in (8, surface.size):
        found = cell(
            surface, geometry=geometry, functional="trace", probes=probes, generator=seeded(0)
        )
        assert not (found.exact and any("estimated" in note for note in found.notes))


def estimated_with_a_gauge() -> LossSurface:
    """ReLU units, which scales keep, before a curved output: all of it is estimated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs, labels = torch.randn(10, 4).double(), torch.randint(0, 2, (10,))
    return LossSurface(model.double(), "cross_entropy", (inputs, labels))


def test_the_smallest_trace_exceeds_neither_that_of_the_point_nor_its_own_error():
    surface = estimated_with_a_gauge()
    for seed in range(8):
        found: Estimate = minimum_sharpness_nodewise(surface, probes=6, generator=seeded(seed))
        assert found.value <= found.details["as it is"] * (1 + 1e-12)
        assert 0 < found.stderr < 10 * found.value
        assert any("comes out too low rather than too high" in note for note in found.notes)
