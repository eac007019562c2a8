"""`flatgauge compare`: several models, one ranking."""

from __future__ import annotations

import shlex
import sys
from contextlib import redirect_stdout
from typing import Annotated

from flatgauge.cli.options import (
    MODEL,
    Gauge,
    Html,
    Json,
    Measures,
    Models,
    Save,
    SurfaceOptions,
    Without,
    option,
    surface_command,
)
from flatgauge.cli.output import print_result, shows_progress
from flatgauge.cli.saving import check_outputs, saving_results


@surface_command(
    "flatgauge compare nets.py:lenet small.pt large.pt --data mnist:data",
    "flatgauge compare nets.py:net a.pt b.pt nets.py:resnet c.pt --data digits",
    "flatgauge compare nets.py:net a.pt b.pt --data digits --html ranks.html",
)
def compare(
    options: SurfaceOptions,
    models: Models,
    names: Annotated[
        str | None,
        option(
            "What to call the models; the names of their files if not given.",
            MODEL,
            metavar="A,B,…",
        ),
    ] = None,
    measures: Measures = None,
    gauge: Gauge = None,
    json: Json = False,
    save: Save = None,
    html: Html = None,
    without: Without = None,
) -> None:
    """Rank several models or checkpoints on the same data: which is flattest, do measures agree?

    The verdict counts only measures that no rescaling of the networks can move.
    """
    check_outputs([*models, options.data, options.loss], save=save, html=html)
    import flatgauge as fg
    from flatgauge.cli.session import open_surfaces, read_measures, read_models
    from flatgauge.measures import registry

    _check_several(models, len(read_models(models)))
    wanted = read_measures(measures or [])
    with saving_results(save, html, json=json) as writer:
        with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
            surfaces, notes = open_surfaces(models, options, names)
            writer.notes, writer.total = notes, len(wanted or registry) * len(surfaces)
            comparison = fg.compare(
                surfaces,
                measures=wanted,
                gauge=gauge,
                seed=options.seed,
                progress=shows_progress(),
                save=writer,
            )
            writer.add_extras(surfaces, without or (), options.seed)
        print_result(comparison, json, notes)


def _check_several(models: list[str], count: int) -> None:
    """Refuse a comparison of one."""
    if count < 2:
        raise ValueError(
            f"`compare {shlex.join(models)}` has 1 model, and a comparison needs two; give another "
            "checkpoint or model, or use `flatgauge measure`."
        )
