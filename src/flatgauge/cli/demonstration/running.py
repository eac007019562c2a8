"""The demonstration: three networks and a disguise, measured, certified, drawn and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flatgauge.analysis.certificate import Certificate, certify
from flatgauge.analysis.comparison import Comparison, compare
from flatgauge.analysis.landscapes.computing import landscape
from flatgauge.analysis.landscapes.several import Landscapes
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.spectra.computing import spectrum
from flatgauge.analysis.spectra.overlay import Spectra
from flatgauge.cli.demonstration.summary import summary
from flatgauge.cli.demonstration.training import GOAL, RECIPES, WIDTH, Trained, train
from flatgauge.loading.datasets import load_dataset
from flatgauge.report.page import write_page
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup

#: Every hidden unit gets one of these factors in turn; powers of two lose no bit.
FACTORS = (1.0, 256.0, 0.25, 16.0)

#: Samples on which the measures are certified: invariance does not depend on how many.
CERTIFIED = 300

#: The network that is written differently, and what it is called then.
CHOSEN = RECIPES[0].name
DISGUISED = f"{CHOSEN}, rescaled"


@dataclass(frozen=True)
class Demonstration:
    """What the demonstration found.

    Attributes:
        comparison: All measures of the three networks.
        disguise: All measures of the one that was rescaled.
        accuracies: On the test set, by network.
        change: The largest change of any output on the test set by rescaling.
        certificate: Of the network that was rescaled.
        path: Where the report is.
    """

    comparison: Comparison
    disguise: Report
    accuracies: Mapping[str, float]
    change: float
    certificate: Certificate
    path: Path


def demonstrate(say: Callable[[str], None], path: Path, *, seed: int = 0) -> Demonstration:
    """Train, measure, rescale, measure again, certify, draw, and write the report.

    Args:
        say: Called with every piece of text.
        path: Where to write the report.
        seed: Of everything random.

    Returns:
        What was found.
    """
    images, labels = load_dataset("digits")
    tests = load_dataset("digits", split="test")
    say(
        f"Training three networks 64-{WIDTH}-{WIDTH}-10 on {len(images):,} images of digits, each "
        f"until its loss is {GOAL} ..."
    )
    trained = {recipe.name: train(recipe, images, labels, seed=seed) for recipe in RECIPES}
    say(f"Rescaling `{CHOSEN}`, unit by unit: the same function, written differently ...")
    gauge = find_gauge(trained[CHOSEN].model, images[:2])
    twin = _disguised(trained[CHOSEN], gauge)
    with torch.no_grad():
        change = float((trained[CHOSEN].model(tests[0]) - twin.model(tests[0])).abs().max())
    networks = trained | {DISGUISED: twin}
    surfaces = {
        name: LossSurface(network.model, "cross_entropy", (images, network.labels))
        for name, network in networks.items()
    }
    say("Measuring all four in every way ...")
    everything = compare(surfaces, seed=seed)  # With one radius for all four.
    comparison = Comparison({name: everything[name] for name in trained})
    disguise = everything[DISGUISED]
    say("Certifying what does not see the difference ...")
    certificate = certify(surfaces[CHOSEN].subset(CERTIFIED), seed=seed)
    say("Drawing spectra and landscapes ...")
    spectra, landscapes = pictures(surfaces, seed=seed)
    accuracies = {name: _accuracy(network.model, *tests) for name, network in trained.items()}
    found = Demonstration(comparison, disguise, accuracies, change, certificate, path)
    write_page(
        path,
        {**comparison, DISGUISED: disguise},
        title="Three networks and a disguise",
        rewritten={DISGUISED: CHOSEN},
        certificates={CHOSEN: certificate},
        gauges={CHOSEN: gauge},
        spectra=spectra,
        landscapes=landscapes,
        command=f"flatgauge demo --seed {seed}",
        remarks=summary(found, CHOSEN),
    )
    say("\n" + "\n".join(summary(found, CHOSEN)))
    say(f"\nreport: {path.resolve()}")
    return found


def pictures(
    surfaces: Mapping[str, LossSurface], *, seed: int
) -> tuple[list[Spectra], list[Landscapes]]:
    """The pictures of the report.

    Args:
        surfaces: Of all networks, by name.
        seed: Of everything random.

    Returns:
        Spectra and landscapes.
    """
    trained = {name: surface for name, surface in surfaces.items() if name != DISGUISED}
    same = {name: surfaces[name] for name in (CHOSEN, DISGUISED)}
    spectra = [
        spectrum(same, geometry=geometry, probes=4, steps=48, seed=seed)
        for geometry in ("weights", "per weight")
    ]
    landscapes = [
        landscape(same, space="weights", dims=1, points=41, seed=seed),
        landscape(same, space="basis_paths", dims=1, points=41, seed=seed),
        landscape(trained, space="layers", dims=1, points=41, seed=seed),
        landscape(trained, space="filters", dims=2, points=21, seed=seed),
        landscape(trained, space="basis_paths", dims=2, points=21, seed=seed),
    ]
    return spectra, landscapes


def _disguised(network: Trained, gauge: GaugeGroup) -> Trained:
    """The same function, with what enters every unit multiplied and what leaves it divided."""
    factors = [FACTORS[k % len(FACTORS)] for k in range(gauge.dim)]
    model = gauge.rescale(network.model, gauge.move(factors))
    assert isinstance(model, nn.Sequential)
    return Trained(model, network.labels, network.loss, network.epochs)


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that are told right."""
    return float((model(images).argmax(1) == labels).float().mean())
