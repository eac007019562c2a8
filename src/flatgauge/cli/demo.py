"""`flatgauge demo`: three networks and a disguise, measured, certified, drawn and reported.

Three recipes train networks of one shape to the same loss on the digits; one network is rescaled
unit by unit, which changes no output. The report shows what each measure makes of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flatgauge.cli.application import app
from flatgauge.cli.options import OUTPUT, Debug, Seed, Threads, examples, option
from flatgauge.cli.streams import show

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate
    from flatgauge.analysis.measurement import Report
    from flatgauge.surface.surface import LossSurface

#: Training stops at the end of the epoch that reaches this loss on all training data.
GOAL = 0.02

#: What differs between the networks.
RECIPES: dict[str, dict[str, Any]] = {
    "small batch": {"batch": 8},
    "large batch": {"batch": 1442},
    "10% random labels": {"batch": 16, "random_labels": 0.1},
}

#: The network that is written differently, and what it is called then.
CHOSEN = "small batch"
DISGUISED = f"{CHOSEN}, rescaled"

#: Every hidden unit gets one of these factors in turn; powers of two lose no bit.
FACTORS = (1.0, 256.0, 0.25, 16.0)

#: Samples on which the measures are certified: invariance does not depend on how many.
CERTIFIED = 300

#: The measure by which the networks are put in order, and the classical one beside it.
OURS, CLASSICAL = "rho_sum", "hessian_trace"

#: Measures of several families that must not move.
NAMED = ("rho_sum", "normalized_sharpness", "adaptive_trace", "psi_trace", "path_norm")


@app.command(epilog=examples("flatgauge demo", "flatgauge demo --html demo.html --seed 1"))
def demo(
    html: Annotated[Path, option("The report.", OUTPUT, metavar="FILE")] = Path("report.html"),
    threads: Threads = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Train three networks on digits, measure them, disguise one, and write a report."""
    from flatgauge.analysis.files import check_writable

    check_writable(html)
    import flatgauge as fg
    from flatgauge.report.page import write_page
    from flatgauge.runtime.resources import set_threads
    from flatgauge.studies.data import load_data
    from flatgauge.studies.recipe import Recipe
    from flatgauge.studies.training import REACHED, train

    set_threads(threads or 1)  # For networks this small one thread is the fastest.
    same = Recipe(loss_goal=GOAL, epochs=4000, standardise=False, seed=seed)
    show(
        "Training three networks 64-64-64-10 on 1,442 images of digits, each until its loss is "
        f"{GOAL} ..."
    )
    surfaces, accuracies = {}, {}
    for name, different in RECIPES.items():
        recipe = same.but(**different)
        data = load_data(recipe, None)
        trained = train(recipe, data)
        if trained.state != REACHED:
            raise RuntimeError(
                f"the network `{name}` did not reach a loss of {GOAL} in {recipe.epochs} epochs "
                f"with seed {seed}; try another one."
            )
        surfaces[name] = fg.LossSurface(trained.model, "cross_entropy", (data.inputs, data.targets))
        accuracies[name] = trained.scores.test_accuracy
        if name == CHOSEN:
            show(f"Rescaling `{CHOSEN}`, unit by unit: the same function, written differently ...")
            gauge = fg.find_gauge(trained.model, data.inputs[:2])
            factors = [FACTORS[k % len(FACTORS)] for k in range(gauge.dim)]
            twin = gauge.rescale(trained.model, gauge.move(factors))
            outputs = [model(data.test_inputs).detach() for model in (trained.model, twin)]
            change = float((outputs[0] - outputs[1]).abs().max())
            rescaled = fg.LossSurface(twin, "cross_entropy", (data.inputs, data.targets))
    surfaces[DISGUISED] = rescaled
    show("Measuring all four in every way ...")
    reports = dict(fg.compare(surfaces, seed=seed))  # With one radius for all four.
    show("Certifying what does not see the difference ...")
    certificate = fg.certify(surfaces[CHOSEN].subset(CERTIFIED), seed=seed)
    show("Drawing spectra and landscapes ...")
    spectra, landscapes = _pictures(surfaces, seed=seed)
    lines = _summary(reports, accuracies, change, certificate)
    write_page(
        html,
        reports,
        title="Three networks and a disguise",
        rewritten={DISGUISED: CHOSEN},
        certificates={CHOSEN: certificate},
        gauges={CHOSEN: gauge},
        spectra=spectra,
        landscapes=landscapes,
        command=f"flatgauge demo --seed {seed}",
        remarks=lines,
    )
    show("\n" + "\n".join(lines))
    show(f"\nreport: {html.resolve()}")


def _pictures(surfaces: Mapping[str, LossSurface], *, seed: int) -> tuple[list[Any], list[Any]]:
    """The spectra and landscapes of the report."""
    import flatgauge as fg

    trained = {name: surface for name, surface in surfaces.items() if name != DISGUISED}
    same = {name: surfaces[name] for name in (CHOSEN, DISGUISED)}
    spectra = [
        fg.spectrum(same, geometry=geometry, probes=4, steps=48, seed=seed)
        for geometry in ("weights", "per weight")
    ]
    landscapes = [
        fg.landscape(chosen, space=space, dims=dims, points=points, seed=seed)
        for chosen, space, dims, points in (
            (same, "weights", 1, 41),
            (same, "basis_paths", 1, 41),
            (trained, "layers", 1, 41),
            (trained, "filters", 2, 21),
            (trained, "basis_paths", 2, 21),
        )
    ]
    return spectra, landscapes


def _summary(
    reports: Mapping[str, Report],
    accuracies: Mapping[str, float],
    change: float,
    certificate: Certificate,
) -> list[str]:
    """What the demonstration found, in five lines."""
    from flatgauge.measures import registry

    symbols = {item.name: item.symbol for item in registry}
    before, after = reports[CHOSEN], reports[DISGUISED]

    def order_text(measure: str) -> str:
        order = sorted(RECIPES, key=lambda name: reports[name][measure].value)
        return " < ".join(f"{name} {reports[name][measure]}" for name in order)

    still = [name for name in before if before[name].value == after[name].value]
    claims = [row for row in certificate.rows if row.claimed and row.verdict != "absent"]
    held = sum(row.verdict == "holds" for row in claims)
    return [
        f"Test accuracy: {', '.join(f'{name} {share:.1%}' for name, share in accuracies.items())}.",
        f"Flattest first by {symbols[OURS]} ({OURS}): {order_text(OURS)}.",
        f"By {symbols[CLASSICAL]} ({CLASSICAL}): {order_text(CLASSICAL)}. "
        f"With {CHOSEN} rescaled (largest change of any output: {change:g}) it is "
        f"{after[CLASSICAL].value:,.0f}, "
        f"{after[CLASSICAL].value / before[CLASSICAL].value:,.0f} times as much.",
        f"Not moved by one bit: {len(still)} of {len(before)} measures, among them "
        f"{', '.join(name for name in NAMED if name in still)}.",
        f"Certificate: {'passed' if certificate.passed else 'FAILED'}, {held} of {len(claims)} "
        "claims of invariance hold under random rewriting.",
    ]
