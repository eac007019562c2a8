"""`flatgauge certify`: one model, rewritten in every way it allows."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from flatgauge.cli.application import app, end
from flatgauge.cli.options import (
    WHAT,
    CertifiedMeasures,
    Data,
    Debug,
    Device,
    Dtype,
    Json,
    Limit,
    LossName,
    Mean,
    Memory,
    Model,
    Seed,
    Split,
    Std,
    Threads,
    WeightDecay,
    Weights,
    examples,
)
from flatgauge.cli.output import opened, print_result, watched


@app.command(
    epilog=examples(
        "flatgauge certify nets.py:lenet --weights a.pt --data mnist:data --limit 200",
        "flatgauge certify nets.py:lenet --data digits -m rho_sum -m psi_trace",
        "flatgauge certify nets.py:lenet --data digits --limit 50 --all --json",
    )
)
def certify(
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
    measures: CertifiedMeasures = None,
    every: Annotated[
        bool, typer.Option("--all", help="Certify every measure.", rich_help_panel=WHAT)
    ] = False,
    trials: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Moves per group and kind of factor.", rich_help_panel=WHAT
        ),
    ] = 3,
    log2_range: Annotated[
        float,
        typer.Option(
            metavar="X", help="How far scales are moved, in powers of two.", rich_help_panel=WHAT
        ),
    ] = 6.0,
    json: Json = False,
    seed: Seed = 0,
    threads: Threads = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    debug: Debug = False,
) -> None:
    """Rewrite a model in every way it allows and see which measures move; exit 1 if a claim fails.

    Without -m and --all, the measures that are read from the shared sweep are certified. What is
    proved does not depend on the number of samples: a few hundred (--limit) are enough.
    """
    import flatgauge as fg
    from flatgauge.cli.session import read_certified, set_threads

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
            progress=watched(),
        )
    print_result(certificate, json, notes)
    end(0 if certificate.passed else 1)
