"""`flatgauge measure`: one model, one report."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.options import (
    Data,
    Debug,
    Device,
    Dtype,
    Json,
    Limit,
    LossName,
    Mean,
    Measures,
    Memory,
    Model,
    Seed,
    Split,
    Std,
    Threads,
    WeightDecay,
    Weights,
)
from flatgauge.cli.output import opened, print_report


@app.command(epilog="Example: flatgauge measure nets.py:lenet --weights lenet.pt --data mnist:data")
def measure(
    ctx: typer.Context,
    model: Model,
    data: Data,
    weights: Weights = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    split: Split = "train",
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    weight_decay: WeightDecay = 0.0,
    gauge: Annotated[
        str | None, typer.Option(help="balanced: measure the way to write it of smallest norm.")
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how flat a trained model's minimum is, by every measure or by those named."""
    import flatgauge as fg
    from flatgauge.command import read_measures, set_threads

    set_threads(threads)
    wanted = read_measures(measures or [])
    with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
        surface, notes = opened(ctx)
        watched = sys.stderr.isatty()
        report = fg.measure(surface, measures=wanted, gauge=gauge, seed=seed, progress=watched)
    print_report(report, json, notes)
