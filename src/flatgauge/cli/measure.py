"""`flatgauge measure`: one model, one report."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import typer

from flatgauge.cli.application import app
from flatgauge.cli.keeping import keeping, parts_without
from flatgauge.cli.model_words import names_of
from flatgauge.cli.options import (
    Data,
    Debug,
    Device,
    Dtype,
    Gauge,
    Html,
    Json,
    Limit,
    LossName,
    Mean,
    Measures,
    Memory,
    Model,
    Save,
    Seed,
    Split,
    Std,
    Threads,
    WeightDecay,
    Weights,
    Without,
    examples,
)
from flatgauge.cli.output import opened, print_result, watched
from flatgauge.cli.places import check_places
from flatgauge.cli.ranks import several
from flatgauge.cli.streams import tell


@app.command(
    epilog=examples(
        "flatgauge measure nets.py:lenet --weights lenet.pt --data mnist:data",
        "flatgauge measure nets.py:lenet --data digits -m rho_max -m psi_trace --json",
        "flatgauge measure nets.py:lenet --data digits --save run.json --html run.html",
    )
)
def measure(
    ctx: typer.Context,
    *,
    model: Model,
    weights: Weights = None,
    dtype: Dtype = None,
    data: Data,
    loss: LossName = "auto",
    split: Split = "train",
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    weight_decay: WeightDecay = 0.0,
    measures: Measures = None,
    gauge: Gauge = None,
    json: Json = False,
    save: Save = None,
    html: Html = None,
    without: Without = None,
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    debug: Debug = False,
) -> None:
    """Measure how flat a trained model's minimum is, by every measure or by those named."""
    check_places(ctx.params, "save", "html")
    import flatgauge as fg
    from flatgauge.cli.session import read_measures, set_threads
    from flatgauge.measures import registry

    set_threads(threads)
    wanted = read_measures(measures or [])
    parts_without(without or [])
    with keeping(save, html, json=json) as keeper:
        with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
            surface, notes = opened(ctx)
            keeper.notes, keeper.total = notes, len(wanted or registry)
            (name,) = names_of([(model, weights)])
            keeper.illustrations = {"name": name}
            if several() or not watched():  # Else the bar tells it.
                tell(str(fg.memory_estimate(surface)))
            report = fg.measure(
                surface, measures=wanted, gauge=gauge, seed=seed, progress=watched(), save=keeper
            )
            keeper.illustrate({name: surface}, without, seed)
        print_result(report, json, notes)
