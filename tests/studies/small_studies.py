"""Studies that take a second."""

from __future__ import annotations

from flatgauge import Recipe, Study

#: No goal: every network counts after its epochs.
TINY = Recipe(samples=60, test_samples=40, network="mlp-6", epochs=3, batch=16, rate=0.1)

#: Measured without reading the network's graph, which takes most of the time.
CHEAP = ("hessian_max_eigenvalue", "expected_sharpness")


def tiny_study(**changes) -> Study:
    settings = {
        "name": "tiny",
        "recipe": TINY,
        "factors": {"batch": [8, 32], "rate": [0.05, 0.2]},
        "seeds": 2,
        "measures": CHEAP,
    } | changes
    return Study(**settings)
