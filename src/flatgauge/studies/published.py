"""The experiments of the four papers as declarations: recipes, factors, seeds, published numbers.

In: the name of an experiment and a preset (`quick`: minutes on the digits; `medium`: about an hour
on two cores; `paper`: the published setting). Out: its pools of networks, `Study` by name of part.
Where a setting is not the paper's, or the paper leaves it open, a comment says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flatgauge.studies.recipe import Recipe
from flatgauge.studies.result import PublishedNumber
from flatgauge.studies.study import Study

#: Minutes on the digits, an hour on two cores, the published setting.
PRESETS = ("quick", "medium", "paper")


@dataclass(frozen=True)
class Published:
    """An experiment of a paper.

    Attributes:
        name: On the command line.
        about: What it asks, in one line.
        paper: Where it is from.
        parts: Its pools of networks by name, at the size of a preset.
    """

    name: str
    about: str
    paper: str
    parts: Callable[[str], dict[str, Study]]


def published_study(name: str, preset: str = "quick") -> dict[str, Study]:
    """The pools of networks of a published experiment.

    Args:
        name: Of the experiment: see `STUDIES`.
        preset: ``"quick"``, ``"medium"`` or ``"paper"``.

    Returns:
        Studies by the name of the part.

    Raises:
        ValueError: If there is no such experiment or preset.
    """
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else "."
        raise ValueError(f"`{name}` is no study; there are {', '.join(STUDIES)}{hint}")
    if preset not in PRESETS:
        raise ValueError(f"`preset={preset!r}` is unknown; use one of {', '.join(PRESETS)}.")
    return STUDIES[name].parts(preset)


# -- random labels (Tsuzuku, Sato, Sugiyama 2019, §6 and Appendix E) ----------------------------

_FITS_NOISE = "Are networks sharper that had to fit random labels?"
_NORMALIZED = (
    *("normalized_sharpness", "matrix_normalized_sharpness", "hessian_trace"),
    *("hessian_max_eigenvalue", "kappa_trace_sum", "rho_sum", "adaptive_trace"),
    *("fisher_rao_norm", "path_norm"),
)

#: Published correlations are given for the last pair of network and data alone.
_NOISE_NUMBERS = tuple(
    PublishedNumber(
        source="Tsuzuku et al. 2019, Figures 1, 3 and 4",
        what=f"Pearson correlation of {what} with the accuracy gap",
        published=f"{value} (Wide ResNet, CIFAR-10)",
        statistic="pearson",
        column=column,
    )
    for what, value, column in (
        ("normalized sharpness", "0.911", "normalized_sharpness"),
        ("the Hessian's trace", "0.708", "hessian_trace"),
    )
)


def _random_labels(preset: str) -> dict[str, Study]:
    """The paper draws the share of random labels for each of 100 networks; here all are even."""
    adam = Recipe(
        optimizer="adam", rate=1e-3, batch=128, rescaling="units 1/100..100", loss_goal=0.01
    )
    if preset == "quick":
        recipe = adam.but(data="digits", network="mlp-3x64", batch=32, epochs=400, loss_goal=0.02)
        pools = {"digits-mlp": (recipe, [0.0, 0.25, 0.5, 0.75, 1.0], 3)}
    elif preset == "medium":
        mnist, tenths = adam.but(data="mnist", samples=10_000), [k / 10 for k in range(11)]
        lenet = mnist.but(samples=5_000, network="lenet5", epochs=400)
        pools = {
            "mnist-mlp": (mnist.but(network="mlp-3x512", width=0.5, epochs=200), tenths, 3),
            "mnist-lenet": (lenet, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 5),
        }
    else:
        # The paper trains for a number of epochs, whatever is reached.
        adam, tenths = adam.but(loss_goal=None), [k / 10 for k in range(11)]
        settings = {
            "mnist-mlp": ("mnist", "mlp-3x512", 50),
            "mnist-lenet": ("mnist", "lenet5", 50),
            "cifar10-lenet": ("cifar10", "lenet5", 100),
            "cifar10-wrn": ("cifar10", "wrn16-4", 200),
        }
        pools = {
            part: (adam.but(data=data, network=network, epochs=epochs), tenths, 9)
            for part, (data, network, epochs) in settings.items()
        }
    return {
        part: Study(
            name=f"random-labels/{part}",
            recipe=recipe,
            factors={"random_labels": shares},
            seeds=seeds,
            measures=_NORMALIZED,
            target="accuracy_gap",
            question=_FITS_NOISE,
            published=_NOISE_NUMBERS,
        )
        for part, (recipe, shares, seeds) in pools.items()
    }


# -- batch size (Rangamani et al. 2019, Table 4; Yi et al. 2019, Figure 3) ----------------------

_LARGE_BATCHES = "Do large batches end in sharper minima that generalize worse?"
_TABLE_4, _FIGURE_3 = "Rangamani et al. 2019, Table 4", "Yi et al. 2019, Figure 3"

#: Test accuracy and (where there is one) spectral norm, at the small and at the large batch.
_BATCH_NUMBERS = {
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

#: A recipe, small and large batch with their learning rates, seeds, samples that are measured.
_Batches = tuple[Recipe, tuple[tuple[int, float], ...], int, int | None]


def _batch_size(preset: str) -> dict[str, Study]:
    pools = {"quick": _quick_batches, "medium": _medium_batches, "paper": _paper_batches}[preset]()
    return {
        part: Study(
            name=f"batch-size/{part}",
            recipe=recipe,
            factors={"batch, rate": rates},
            seeds=seeds,
            measures=(
                *("riemannian_max_eigenvalue", "hessian_max_eigenvalue", "hessian_trace"),
                *("kappa_trace_sum", "rho_sum", "normalized_sharpness", "psi_trace"),
            ),
            measured=measured,
            target="accuracy_gap",
            question=_LARGE_BATCHES,
            published=_batch_numbers(part, rates),
            landscapes=("layers", "basis_paths"),
        )
        for part, (recipe, rates, seeds, measured) in pools.items()
    }


def _quick_batches() -> dict[str, _Batches]:
    """On the digits: a batch of 16 and one of all."""
    recipe = _CONVERGED.but(
        data="digits", network="mlp-3x64", optimizer="adam", epochs=2000, loss_goal=1e-3
    )
    return {"digits-mlp": (recipe, ((16, 1e-4), (1000, 1e-3)), 3, None)}


def _medium_batches() -> dict[str, _Batches]:
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
        "mnist-fc": (fc, rates, 5, 2_000),
        "mnist-fc-epochs": (long, rates, 2, 2_000),
        "mnist-lenet": (lenet, ((64, 5e-4), (2000, 2e-3)), 5, 2_000),
        "cifar10-alexnet": (cifar, ((64, 0.01), (1000, 0.04)), 3, None),
    }


def _paper_batches() -> dict[str, _Batches]:
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
    found: dict[str, _Batches] = {
        part: (recipe, rates, 5, 10_000 if "cifar" in part else None)
        for part, (recipe, rates) in pools.items()
    }
    found["cifar10-plainnet"] = (plain, ((128, 0.1), (2048, 0.1)), 1, 10_000)
    return found


def _batch_numbers(part: str, rates: Sequence[tuple[int, float]]) -> tuple[PublishedNumber, ...]:
    """The rows of the published table, with the batch sizes of this study."""
    columns = (("test accuracy", "test_accuracy"), ("spectral norm", "riemannian_max_eigenvalue"))
    table = _BATCH_NUMBERS.get(part.removesuffix("-epochs"), ())
    return tuple(
        PublishedNumber(
            source=_FIGURE_3 if part == "cifar10-plainnet" else _TABLE_4,
            what=f"{what}, {size} batch (here {batch})",
            published=published,
            statistic="mean",
            column=column,
            where={"batch": batch},
        )
        for (batch, _), size, row in zip(rates, ("small", "large"), table, strict=False)
        for (what, column), published in zip(columns, row, strict=False)
    )


# -- initialisation and batch size (Petzka et al. 2019, Figures 1 and 2) ------------------------

_INITIALISATIONS = ["xavier_normal", "kaiming_uniform", "uniform", "normal"]
_FOLLOWS = "Does flatness follow the generalization gap over initialisations and batch sizes?"


def _init_batch(preset: str) -> dict[str, Study]:
    """Factors of the rescaling are those of the paper: every layer by one between 5 and 25."""
    # Batch size and learning rate, their ratio (nearly) the same.
    batches = [(4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)]
    sgd = Recipe(network="lenet5", rescaling="layers 5..25", loss_goal=0.1)
    part, seeds = "cifar10-lenet", {"quick": 2, "medium": 2, "paper": 9}[preset]
    if preset == "quick":
        recipe = sgd.but(data="digits", samples=500, epochs=1500, network="mlp-2x32")
        part, batches = "digits-mlp", [(16, 0.05), (250, 0.3)]
    elif preset == "medium":
        recipe = sgd.but(data="cifar10", samples=2_000, test_samples=5_000, epochs=200)
    else:
        recipe = sgd.but(data="cifar10", epochs=1000)
    number = PublishedNumber(
        source="Petzka et al. 2019, Figure 1",
        what="Pearson correlation of κ_τ of the last layer with the loss gap",
        published="0.91",
        statistic="pearson",
        # 001's "last hidden layer" is in its code the weight of the output layer.
        column="kappa_trace_sum[fc3.weight]",
    )
    study = Study(
        name=f"init-batch/{part}",
        recipe=recipe,
        factors={"init": _INITIALISATIONS, "batch, rate": batches},
        seeds=seeds,
        measures=(
            *("kappa_trace_sum", "kappa_sum", "kappa_trace_max", "kappa_max", "rho_sum"),
            *("rho_max", "hessian_trace", "hessian_max_eigenvalue", "relative_flatness"),
            "normalized_sharpness",
        ),
        target="loss_gap",
        question=_FOLLOWS,
        published=(number,),
    )
    return {part: study}


# -- one measure per layer (Petzka et al. 2019, Appendix C) -------------------------------------

_WHICH_LAYER = (
    "Which layer's flatness follows the generalization gap, and do sums follow it better?"
)


def _mnist_layers(preset: str) -> dict[str, Study]:
    """As in the paper, networks that end above a loss of 0.07 are left out."""
    recipe = Recipe(
        network="mlp-50-50-50-30",
        init="xavier_normal",
        loss_goal=0.07,
        early=False,
        rescaling="layers 5..25",
    )
    # The learning rate is printed as "0.02 to 1.6"; the ratio to the batch is to be constant, and
    # at 1.6 this network does not train, so the last one is read as 0.16.
    batches, part = [(1000, 0.02), (2000, 0.04), (4000, 0.08), (8000, 0.16)], "mnist-mlp"
    seeds = {"quick": 4, "medium": 4, "paper": 6}[preset]
    if preset == "quick":
        recipe, part = recipe.but(data="digits", epochs=150), "digits-mlp"
        batches = [(50, 0.02), (100, 0.04), (200, 0.08)]
    elif preset == "medium":
        recipe = recipe.but(data="mnist", samples=20_000, epochs=150)
    else:
        recipe = recipe.but(data="mnist", epochs=120)
    sums = ("kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max")
    asked = [
        (f"κ_τ of layer {number}", "≥ 0.7", f"kappa_trace_sum[fc{number}.weight]")
        for number in range(1, 5)
    ] + [(measure, "above those of layers", measure) for measure in sums]
    study = Study(
        name=f"mnist-layers/{part}",
        recipe=recipe,
        factors={"batch, rate": batches},
        seeds=seeds,
        measures=(*sums, "hessian_trace", "relative_flatness"),
        target="loss_gap",
        question=_WHICH_LAYER,
        published=[
            PublishedNumber(
                source="Petzka et al. 2019, Appendix C",
                what=f"Pearson correlation of {what} with the loss gap",
                published=published,
                statistic="pearson",
                column=column,
            )
            for what, published, column in asked
        ],
    )
    return {part: study}


# -- rescaling (Rangamani et al. 2019, Tables 2 and 3) ------------------------------------------

_UNDER_RESCALING = "Does the Riemannian spectral norm move when layers are rescaled?"

#: Table, factors of the layers, and the published relative difference.
_RESCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "f1": (
        "Rangamani et al. 2019, Table 2",
        {"5, 4, 1/20": "1.7e-7", "100, 30, 1/3000": "7.17e-7"},
    ),
    "c1": (
        "Rangamani et al. 2019, Table 3",
        {"5, 4, 3, 2, 1/120": "1.28e-7", "50, 24, 30, 1/6, 1/6000": "5.1e-6"},
    ),
}


def _rescaling(preset: str) -> dict[str, Study]:
    """500 random samples, untrained networks, in single and double precision."""
    precisions = ["float32", "float64"]

    def number(source: str, factors: str, published: str, dtype: str) -> PublishedNumber:
        return PublishedNumber(
            source=source,
            what=f"relative difference at λ = ({factors}), {dtype}",
            published=published,
            statistic="change",
            column="riemannian_max_eigenvalue",
            where={"rescaling": factors, "dtype": dtype},
        )

    return {
        part: Study(
            name=f"rescaling/{part}",
            recipe=Recipe(data="noise", samples=500, network=part, epochs=0, standardise=False),
            factors={"rescaling": list(rows), "dtype": precisions},
            seeds={"quick": 3, "medium": 5, "paper": 10}[preset],
            measures=("riemannian_max_eigenvalue", "hessian_max_eigenvalue", "hessian_trace"),
            target="accuracy_gap",
            question=_UNDER_RESCALING,
            published=[
                number(source, factors, published, dtype)
                for factors, published in rows.items()
                for dtype in precisions
            ],
        )
        for part, (source, rows) in _RESCALINGS.items()
    }


STUDIES: Mapping[str, Published] = {
    one.name: one
    for one in (
        Published("random-labels", _FITS_NOISE, "Tsuzuku et al. 2019, §6", _random_labels),
        Published("batch-size", _LARGE_BATCHES, f"{_TABLE_4}; {_FIGURE_3}", _batch_size),
        Published("init-batch", _FOLLOWS, "Petzka et al. 2019, Figures 1 and 2", _init_batch),
        Published("mnist-layers", _WHICH_LAYER, "Petzka et al. 2019, Appendix C", _mnist_layers),
        Published(
            "rescaling", _UNDER_RESCALING, "Rangamani et al. 2019, Tables 2 and 3", _rescaling
        ),
    )
}
