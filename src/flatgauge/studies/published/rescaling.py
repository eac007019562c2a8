"""The Riemannian spectral norm under rescaling (Rangamani et al. 2019, Tables 2 and 3)."""

from __future__ import annotations

from flatgauge.studies.figure import Figure
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

_QUESTION = "Does the Riemannian spectral norm move when layers are rescaled?"

#: Table, factors of the layers, and the published relative difference.
_TABLES = {
    "f1": (
        "Rangamani et al. 2019, Table 2",
        (("5, 4, 1/20", "1.7e-7"), ("100, 30, 1/3000", "7.17e-7")),
    ),
    "c1": (
        "Rangamani et al. 2019, Table 3",
        (("5, 4, 3, 2, 1/120", "1.28e-7"), ("50, 24, 30, 1/6, 1/6000", "5.1e-6")),
    ),
}


def parts(preset: str) -> dict[str, Study]:
    """The pools of networks.

    Args:
        preset: How many networks; their size is always the published one.

    Returns:
        Studies by name: 500 random samples, untrained networks, in single and double precision.
    """
    seeds = {"quick": 3, "medium": 5, "paper": 10}[preset]
    return {name: _study(name, seeds) for name in _TABLES}


def _study(name: str, seeds: int) -> Study:
    """One network of the paper."""
    source, rows = _TABLES[name]
    return Study(
        name=f"rescaling/{name}",
        recipe=Recipe(data="noise", samples=500, network=name, epochs=0, standardise=False),
        factors={"rescaling": [factors for factors, _ in rows], "dtype": ["float32", "float64"]},
        seeds=seeds,
        measures=("riemannian_max_eigenvalue", "hessian_max_eigenvalue", "hessian_trace"),
        target="accuracy_gap",
        question=_QUESTION,
        published=[
            Figure(
                source=source,
                what=f"relative difference at λ = ({factors}), {dtype}",
                published=published,
                statistic="change",
                column="riemannian_max_eigenvalue",
                where={"rescaling": factors, "dtype": dtype},
            )
            for factors, published in rows
            for dtype in ("float32", "float64")
        ],
    )
