"""One measure per layer (Petzka et al. 2019, Appendix C)."""

from __future__ import annotations

from flatgauge.studies.figure import Figure
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

_QUESTION = "Which layer's flatness follows the generalization gap, and do sums follow it better?"
_SOURCE = "Petzka et al. 2019, Appendix C"
_MEASURES = (
    *("kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max"),
    *("hessian_trace", "relative_flatness"),
)

#: The learning rate is printed as "0.02 to 1.6"; the ratio to the batch is to be constant, and at
#: 1.6 this network does not train, so the last one is read as 0.16.
_BATCHES = [(1000, 0.02), (2000, 0.04), (4000, 0.08), (8000, 0.16)]


def parts(preset: str) -> dict[str, Study]:
    """The pools of networks.

    Args:
        preset: How large.

    Returns:
        Studies by name. As in the paper, networks that end above a loss of 0.07 are left out.
    """
    sgd = Recipe(
        network="mlp-50-50-50-30",
        init="xavier_normal",
        loss_goal=0.07,
        early=False,
        rescaling="layers 5..25",
    )
    if preset == "quick":
        recipe = sgd.but(data="digits", epochs=150)
        return {
            "digits-mlp": _study(recipe, [(50, 0.02), (100, 0.04), (200, 0.08)], 4, "digits-mlp")
        }
    if preset == "medium":
        recipe = sgd.but(data="mnist", samples=20_000, epochs=150)
        return {"mnist-mlp": _study(recipe, _BATCHES, 4, "mnist-mlp")}
    recipe = sgd.but(data="mnist", epochs=120)
    return {"mnist-mlp": _study(recipe, _BATCHES, 6, "mnist-mlp")}


def _study(recipe: Recipe, batches: list[tuple[int, float]], seeds: int, name: str) -> Study:
    """One pool."""
    layers = [*range(1, 6)]
    figures = [
        Figure(
            source=_SOURCE,
            what=f"Pearson correlation of κ_τ of layer {number} with the loss gap",
            published="≥ 0.7",
            statistic="pearson",
            column=f"kappa_trace_sum[fc{number}.weight]",
        )
        for number in layers[:4]
    ]
    sums = ("kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max")
    figures += [
        Figure(
            source=_SOURCE,
            what=f"Pearson correlation of {measure} with the loss gap",
            published="above those of layers",
            statistic="pearson",
            column=measure,
        )
        for measure in sums
    ]
    return Study(
        name=f"mnist-layers/{name}",
        recipe=recipe,
        factors={"batch, rate": batches},
        seeds=seeds,
        measures=_MEASURES,
        target="loss_gap",
        question=_QUESTION,
        published=figures,
    )
