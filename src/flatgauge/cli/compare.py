"""`flatgauge compare`: several models, one ranking."""

from __future__ import annotations

import shlex
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.keeping import keeping, parts_without
from flatgauge.cli.model_words import read_models
from flatgauge.cli.options import (
    MODEL,
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
    Models,
    Save,
    Seed,
    Split,
    Std,
    Threads,
    WeightDecay,
    Without,
    examples,
)
from flatgauge.cli.output import all_opened, print_result, watched
from flatgauge.cli.places import check_places

Names = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,…",
        help="What to call the models; the names of their files if not given.",
        rich_help_panel=MODEL,
    ),
]


@app.command(
    epilog=examples(
        "flatgauge compare nets.py:lenet small.pt large.pt --data mnist:data",
        "flatgauge compare nets.py:net a.pt b.pt nets.py:resnet c.pt --data digits",
        "flatgauge compare nets.py:net a.pt b.pt --data digits --html ranks.html",
    )
)
def compare(
    ctx: typer.Context,
    *,
    models: Models,
    names: Names = None,
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
    """Rank several models or checkpoints on the same data: which is flattest, do measures agree?

    The verdict counts only measures that no rescaling of the networks can move.
    """
    check_places(ctx.params, "save", "html")
    _check_several(models)
    import flatgauge as fg
    from flatgauge.cli.session import read_measures, set_threads
    from flatgauge.measures import registry

    set_threads(threads)
    wanted = read_measures(measures or [])
    parts_without(without or [])
    with keeping(save, html, json=json) as keeper:
        with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
            surfaces, notes = all_opened(ctx, models, names)
            keeper.notes, keeper.total = notes, len(wanted or registry) * len(surfaces)
            comparison = fg.compare(
                surfaces, measures=wanted, gauge=gauge, seed=seed, progress=watched(), save=keeper
            )
            keeper.illustrate(surfaces, without, seed)
        print_result(comparison, json, notes)


def _check_several(models: list[str]) -> None:
    """Refuse a comparison of one."""
    if len(read_models(models)) < 2:
        raise ValueError(
            f"`compare {shlex.join(models)}` has 1 model, and a comparison needs two; give another "
            "checkpoint or model, or use `flatgauge measure`."
        )
