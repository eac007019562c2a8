"""Networks that fit random labels (Tsuzuku, Sato, Sugiyama 2019, §6 and Appendix E)."""

from __future__ import annotations

from flatgauge.studies.figure import Figure
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

_QUESTION = "Are networks sharper that had to fit random labels?"
_SOURCE = "Tsuzuku et al. 2019, Figures 1, 3 and 4"
_MEASURES = (
    *("normalized_sharpness", "matrix_normalized_sharpness", "hessian_trace"),
    *("hessian_max_eigenvalue", "kappa_trace_sum", "rho_sum", "adaptive_trace"),
    *("fisher_rao_norm", "path_norm"),
)
_TENTHS = [k / 10 for k in range(11)]

#: Published correlations are given for the last pair of network and data alone.
_FIGURES = (
    Figure(
        source=_SOURCE,
        what="Pearson correlation of normalized sharpness with the accuracy gap",
        published="0.911 (Wide ResNet, CIFAR-10)",
        statistic="pearson",
        column="normalized_sharpness",
    ),
    Figure(
        source=_SOURCE,
        what="Pearson correlation of the Hessian's trace with the accuracy gap",
        published="0.708 (Wide ResNet, CIFAR-10)",
        statistic="pearson",
        column="hessian_trace",
    ),
)


def parts(preset: str) -> dict[str, Study]:
    """The pools of networks.

    Args:
        preset: How large.

    Returns:
        Studies by name. The paper draws the share of random labels anew for each of 100 networks;
        here every share is taken equally often.
    """
    adam = Recipe(
        optimizer="adam", rate=1e-3, batch=128, rescaling="units 1/100..100", loss_goal=0.01
    )
    if preset == "quick":
        recipe = adam.but(data="digits", network="mlp-3x64", batch=32, epochs=400, loss_goal=0.02)
        return {"digits-mlp": _study("digits-mlp", recipe, [0.0, 0.25, 0.5, 0.75, 1.0], 3)}
    if preset == "medium":
        mnist = adam.but(data="mnist", samples=10_000)
        mlp = mnist.but(network="mlp-3x512", width=0.5, epochs=200)
        lenet = mnist.but(samples=5_000, network="lenet5", epochs=400)
        return {
            "mnist-mlp": _study("mnist-mlp", mlp, _TENTHS, 3),
            "mnist-lenet": _study("mnist-lenet", lenet, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 5),
        }
    # The paper trains for a number of epochs, whatever is reached.
    adam = adam.but(loss_goal=None)
    pools = {
        "mnist-mlp": adam.but(data="mnist", network="mlp-3x512", epochs=50),
        "mnist-lenet": adam.but(data="mnist", network="lenet5", epochs=50),
        "cifar10-lenet": adam.but(data="cifar10", network="lenet5", epochs=100),
        "cifar10-wrn": adam.but(data="cifar10", network="wrn16-4", epochs=200),
    }
    return {name: _study(name, recipe, _TENTHS, 9) for name, recipe in pools.items()}


def _study(name: str, recipe: Recipe, shares: list[float], seeds: int) -> Study:
    """One pool."""
    return Study(
        name=f"random-labels/{name}",
        recipe=recipe,
        factors={"random_labels": shares},
        seeds=seeds,
        measures=_MEASURES,
        target="accuracy_gap",
        question=_QUESTION,
        published=_FIGURES,
    )
