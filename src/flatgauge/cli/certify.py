"""`flatgauge certify`: one model, rewritten in every way it allows."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

from flatgauge.cli.application import end
from flatgauge.cli.options import (
    WHAT,
    Json,
    Model,
    SurfaceOptions,
    Weights,
    measures_option,
    option,
    surface_command,
)
from flatgauge.cli.output import print_result, shows_progress


@surface_command(
    "flatgauge certify nets.py:lenet --weights a.pt --data mnist:data --limit 200",
    "flatgauge certify nets.py:lenet --data digits -m rho_sum -m psi_trace",
    "flatgauge certify nets.py:lenet --data digits --limit 50 --all --json",
)
def certify(
    options: SurfaceOptions,
    model: Model,
    weights: Weights = None,
    measures: Annotated[list[str] | None, measures_option("those of the shared sweep")] = None,
    every: Annotated[bool, option("Certify every measure.", WHAT, "--all")] = False,
    trials: Annotated[
        int, option("Moves per group and kind of factor.", WHAT, metavar="N", min=1)
    ] = 3,
    log2_range: Annotated[
        float, option("How far scales are moved, in powers of two.", WHAT, metavar="X")
    ] = 6.0,
    json: Json = False,
) -> None:
    """Rewrite a model in every way it allows and see which measures move; exit 1 if a claim fails.

    Without -m and --all, the measures that are read from the shared sweep are certified. What is
    proved does not depend on the number of samples: a few hundred (--limit) are enough.
    """
    _check_exclusive(every, measures)
    import flatgauge as fg
    from flatgauge.cli.session import open_surface, read_measures

    wanted = "all" if every else read_measures(measures or [])
    with redirect_stdout(sys.stderr):
        surface, notes = open_surface(model, weights, options)
        certificate = fg.certify(
            surface,
            measures=wanted,
            trials=trials,
            log2_range=log2_range,
            seed=options.seed,
            progress=shows_progress(),
        )
    print_result(certificate, json, notes)
    end(0 if certificate.passed else 1)


def _check_exclusive(every: bool, measures: list[str] | None) -> None:
    """Refuse all measures and some of them."""
    if every and measures:
        raise ValueError("`--all` and `-m` exclude each other; give one of them.")
