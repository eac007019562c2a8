"""`flatgauge certify`: one model, rewritten in every way it allows."""

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
from flatgauge.cli.output import opened, print_json


@app.command(
    epilog="Example: flatgauge certify nets.py:lenet --weights lenet.pt --data mnist:data "
    "--limit 200"
)
def certify(
    ctx: typer.Context,
    model: Model,
    data: Data,
    weights: Weights = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    every: Annotated[bool, typer.Option("--all", help="Certify every measure.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Moves per group and kind of factor.")] = 3,
    log2_range: Annotated[
        float, typer.Option(help="How far scales are moved, in powers of two.")
    ] = 6.0,
    split: Split = "train",
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    weight_decay: WeightDecay = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Rewrite a model in every way it allows and see which measures move; exit 1 if a claim fails.

    Without -m, the measures that share the sweep are certified. What is proved does not depend on
    the number of samples: a few hundred (--limit) are enough.
    """
    import flatgauge as fg
    from flatgauge.command import read_certified, set_threads

    set_threads(threads)
    wanted = read_certified(measures or [], every=every)
    with redirect_stdout(sys.stderr):
        surface, notes = opened(ctx)
        certificate = fg.certify(
            surface,
            measures=wanted,
            trials=trials,
            log2_range=log2_range,
            seed=seed,
            progress=sys.stderr.isatty(),
        )
    if json:
        print_json({"notes": notes} | certificate.to_dict())
    elif sys.stdout.isatty():
        from flatgauge.report.certificate_table import rich_print

        rich_print(certificate)
    else:
        typer.echo(repr(certificate))
    sys.exit(0 if certificate.passed else 1)
