"""Small and large batches (Rangamani et al. 2019, Table 4; Yi et al. 2019, Figure 3)."""

from __future__ import annotations

from flatgauge.studies.figure import Figure
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

_QUESTION = "Do large batches end in sharper minima that generalize worse?"
_TABLE, _FIGURE = "Rangamani et al. 2019, Table 4", "Yi et al. 2019, Figure 3"
_MEASURES = (
    *("riemannian_max_eigenvalue", "hessian_max_eigenvalue", "hessian_trace"),
    *("kappa_trace_sum", "rho_sum", "normalized_sharpness", "psi_trace"),
)

#: Test accuracy and (where there is one) spectral norm, at the small and at the large batch.
_PUBLISHED = {
    "mnist-fc": (("98.6 ± 0.1 %", "0.096 ± 0.063"), ("96.8 ± 0.2 %", "73805 ± 28984")),
    "mnist-lenet": (("98.4 ± 0.05 %", "6e-5 ± 4e-5"), ("97.8 ± 0.1 %", "4.03 ± 1.95")),
    "cifar10-alexnet": (
        ("73.16 ± 0.53 %", "1790.34 ± 221.47"),
        ("71.47 ± 0.33 %", "28533.22 ± 2005.78"),
    ),
    "cifar10-plainnet": (("87.78 %",), ("86.3 %",)),
    "cifar10-vgg": (("75.85 ± 0.41 %", "68.68 ± 10.69"), ("68.55 ± 0.1 %", "25395.22 ± 4025.52")),
}

#: Losses "in the order of 1e-4", with every training sample right.
_CONVERGED = Recipe(loss_goal=3e-4, accuracy_goal=1.0, rescaling="layers 5..25")


def parts(preset: str) -> dict[str, Study]:
    """The pools of networks.

    Args:
        preset: How large.

    Returns:
        Studies by name.
    """
    return {"quick": _quick, "medium": _medium, "paper": _paper}[preset]()


def _quick() -> dict[str, Study]:
    """On the digits: a batch of 16 and one of all."""
    recipe = _CONVERGED.but(
        data="digits", network="mlp-3x64", optimizer="adam", epochs=2000, loss_goal=1e-3
    )
    study = _study("digits-mlp", recipe, ((16, 1e-4), (1000, 1e-3)), 3)
    return {"digits-mlp": study}


def _medium() -> dict[str, Study]:
    """Subsets of MNIST and CIFAR-10."""
    mnist = _CONVERGED.but(data="mnist", samples=10_000, optimizer="adam", epochs=400)
    cifar = _CONVERGED.but(
        data="cifar10",
        samples=4_000,
        network="alexnet",
        width=0.25,
        epochs=400,
        momentum=0.9,
        loss_goal=1e-3,
    )
    rates = ((256, 1e-4), (5000, 1e-3))
    fc = mnist.but(network="mlp-5x512")
    # A convolution takes longer: fewer images, larger steps, and a loss that is reached sooner.
    lenet = mnist.but(network="lenet5", samples=4_000, loss_goal=1e-3)
    # Equally long instead of equally well: how much of the difference is that of the losses?
    long = fc.but(epochs=100, early=False, loss_goal=None)
    return {
        "mnist-fc": _study("mnist-fc", fc, rates, 5, 2_000),
        "mnist-fc-epochs": _study("mnist-fc-epochs", long, rates, 2, 2_000),
        "mnist-lenet": _study("mnist-lenet", lenet, ((64, 5e-4), (2000, 2e-3)), 5, 2_000),
        "cifar10-alexnet": _study("cifar10-alexnet", cifar, ((64, 0.01), (1000, 0.04)), 3),
    }


def _paper() -> dict[str, Study]:
    """As published; the number of epochs is open there, and bounded here."""
    mnist = _CONVERGED.but(data="mnist", optimizer="adam", epochs=1000)
    # The deep ones do not leave their first loss from torch's own initialisation.
    cifar = _CONVERGED.but(data="cifar10", epochs=1000, init="kaiming_uniform")
    # PlainNet-18 follows the training of the paper before (SGD with momentum and weight decay).
    plain = cifar.but(
        network="plainnet18",
        momentum=0.9,
        weight_decay=5e-4,
        loss_goal=1e-3,
        accuracy_goal=None,
        epochs=200,
    )
    small = ((256, 1e-4), (5000, 1e-3))
    images = ((256, 1e-4), (2000, 1e-3))
    pools = {
        "mnist-fc": (mnist.but(network="mlp-5x512"), small),
        "mnist-lenet": (mnist.but(network="lenet5"), small),
        "cifar10-alexnet": (cifar.but(network="alexnet"), images),
        "cifar10-vgg": (cifar.but(network="vgg16"), images),
    }
    found = {
        name: _study(name, recipe, rates, 5, measured=10_000 if "cifar" in name else None)
        for name, (recipe, rates) in pools.items()
    }
    found["cifar10-plainnet"] = _study(
        "cifar10-plainnet", plain, ((128, 0.1), (2048, 0.1)), 1, measured=10_000
    )
    return found


def _study(
    name: str,
    recipe: Recipe,
    rates: tuple[tuple[int, float], tuple[int, float]],
    seeds: int,
    measured: int | None = None,
) -> Study:
    """One pool: two batch sizes with their learning rates."""
    return Study(
        name=f"batch-size/{name}",
        recipe=recipe,
        factors={"batch, rate": rates},
        seeds=seeds,
        measures=_MEASURES,
        measured=measured,
        target="accuracy_gap",
        question=_QUESTION,
        published=_figures(name, rates),
        landscapes=("layers", "basis_paths"),
    )


def _figures(name: str, rates: tuple[tuple[int, float], ...]) -> tuple[Figure, ...]:
    """The rows of the published table, with the batch sizes of this study."""
    found = []
    table = _PUBLISHED.get(name.removesuffix("-epochs"), ())
    for (batch, _), row in zip(rates, table, strict=False):
        for (what, column), published in zip(
            (("test accuracy", "test_accuracy"), ("spectral norm", "riemannian_max_eigenvalue")),
            row,
            strict=False,
        ):
            size = "small" if batch == rates[0][0] else "large"
            found.append(
                Figure(
                    source=_FIGURE if name == "cifar10-plainnet" else _TABLE,
                    what=f"{what}, {size} batch (here {batch})",
                    published=published,
                    statistic="mean",
                    column=column,
                    where={"batch": batch},
                )
            )
    return tuple(found)
