"""Four initialisations and four batch sizes (Petzka et al. 2019, Figures 1 and 2)."""

from __future__ import annotations

from flatgauge.studies.figure import Figure
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

_QUESTION = "Does flatness follow the generalization gap over initialisations and batch sizes?"
_MEASURES = (
    *("kappa_trace_sum", "kappa_sum", "kappa_trace_max", "kappa_max", "rho_sum", "rho_max"),
    *("hessian_trace", "hessian_max_eigenvalue", "relative_flatness", "normalized_sharpness"),
)
_INITIALISATIONS = ["xavier_normal", "kaiming_uniform", "uniform", "normal"]

#: Batch size and learning rate, their ratio (nearly) the same.
_BATCHES = [(4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)]

#: 001's "last hidden layer" is in its code the weight of the output layer.
_LAST = "kappa_trace_sum[fc3.weight]"


def parts(preset: str) -> dict[str, Study]:
    """The pools of networks.

    Args:
        preset: How large.

    Returns:
        Studies by name. Factors are those of the paper: every layer by one between 5 and 25.
    """
    sgd = Recipe(network="lenet5", rescaling="layers 5..25", loss_goal=0.1)
    if preset == "quick":
        recipe = sgd.but(data="digits", samples=500, epochs=1500, network="mlp-2x32")
        study = _study("digits-mlp", recipe, [(16, 0.05), (250, 0.3)], 2)
        return {"digits-mlp": study}
    if preset == "medium":
        recipe = sgd.but(data="cifar10", samples=2_000, test_samples=5_000, epochs=200)
        return {"cifar10-lenet": _study("cifar10-lenet", recipe, _BATCHES, 2)}
    recipe = sgd.but(data="cifar10", epochs=1000)
    return {"cifar10-lenet": _study("cifar10-lenet", recipe, _BATCHES, 9)}


def _study(name: str, recipe: Recipe, batches: list[tuple[int, float]], seeds: int) -> Study:
    """One pool."""
    return Study(
        name=f"init-batch/{name}",
        recipe=recipe,
        factors={"init": _INITIALISATIONS, "batch, rate": batches},
        seeds=seeds,
        measures=_MEASURES,
        target="loss_gap",
        question=_QUESTION,
        published=(
            Figure(
                source="Petzka et al. 2019, Figure 1",
                what="Pearson correlation of κ_τ of the last layer with the loss gap",
                published="0.91",
                statistic="pearson",
                column=_LAST,
            ),
        ),
    )
