"""The gallery runs, and says what it says it says."""

from __future__ import annotations

import runpy
from functools import cache

import pytest


@cache
def script(request_root, name):
    return runpy.run_path(str(request_root / "docs" / "gallery" / name))


@pytest.mark.slow
def test_published_rescalings_move_us_less_than_published(request):
    """Rangamani et al. 2019, Tables 2 and 3."""
    rows = script(request.config.rootpath, "07_published_rescalings.py")["tables_2_and_3"]()
    assert [(row[0], row[2]) for row in rows] == [
        ("F₁", 1.7e-7),
        ("F₁", 7.17e-7),
        ("C₁", 1.28e-7),
        ("C₁", 5.1e-6),
    ]
    for _, _, published, single, double in rows:
        assert single < published
        assert double < 1e-12


@pytest.mark.slow
def test_random_rescaling_keeps_the_order_of_invariant_measures_only(request):
    """Petzka et al. 2019, Figure 2: factors between 5 and 25."""
    pytest.importorskip("sklearn")
    found = script(request.config.rootpath, "07_published_rescalings.py")["figure_2"](6)
    assert found["kappa_trace_sum"] == found["rho_sum"] == pytest.approx(1.0)
    assert found["hessian_trace"] < 0.8
