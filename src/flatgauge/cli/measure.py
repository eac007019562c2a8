"""`flatgauge measure`: one model, one report."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from flatgauge.cli.options import (
    Gauge,
    Html,
    Json,
    Measures,
    Model,
    Save,
    SurfaceOptions,
    Weights,
    Without,
    surface_command,
)
from flatgauge.cli.output import print_result, shows_progress
from flatgauge.cli.saving import check_outputs, saving_results
from flatgauge.cli.streams import log
from flatgauge.cli.torchrun import under_torchrun


@surface_command(
    "flatgauge measure nets.py:lenet --weights lenet.pt --data mnist:data",
    "flatgauge measure nets.py:lenet --data digits -m rho_max -m psi_trace --json",
    "flatgauge measure nets.py:lenet --data digits --save run.json --html run.html",
)
def measure(
    options: SurfaceOptions,
    model: Model,
    weights: Weights = None,
    measures: Measures = None,
    gauge: Gauge = None,
    json: Json = False,
    save: Save = None,
    html: Html = None,
    without: Without = None,
) -> None:
    """Measure how flat a trained model's minimum is, by every measure or by those named."""
    check_outputs([model, weights, options.data, options.loss], save=save, html=html)
    import flatgauge as fg
    from flatgauge.cli.session import names_of, open_surface, read_measures
    from flatgauge.measures import registry

    wanted = read_measures(measures or [])
    with saving_results(save, html, json=json) as writer:
        with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
            surface, notes = open_surface(model, weights, options)
            writer.notes, writer.total = notes, len(wanted or registry)
            (name,) = names_of([(model, weights)])
            writer.extras = {"name": name}
            progress = shows_progress()
            if under_torchrun() or not progress:  # Else the bar shows it.
                log(str(fg.memory_estimate(surface)))
            report = fg.measure(
                surface,
                measures=wanted,
                gauge=gauge,
                seed=options.seed,
                progress=progress,
                save=writer,
            )
            writer.add_extras({name: surface}, without or (), options.seed)
        print_result(report, json, notes)
