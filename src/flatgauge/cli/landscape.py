"""`flatgauge landscape`: the loss around one or several models, drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from flatgauge.cli import completion
from flatgauge.cli.application import app, end
from flatgauge.cli.interrupts import INTERRUPTED
from flatgauge.cli.options import (
    OUTPUT,
    WHAT,
    Data,
    Debug,
    Device,
    Dtype,
    Json,
    Limit,
    LossName,
    Mean,
    Memory,
    Models,
    MoreWeights,
    Seed,
    Split,
    Std,
    Threads,
    WeightDecay,
    examples,
)
from flatgauge.cli.output import all_opened, check_form, print_json, with_command, write_files
from flatgauge.cli.places import check_places
from flatgauge.cli.ranks import rank
from flatgauge.cli.streams import show, tell
from flatgauge.loading.files import expand


@app.command(
    epilog=examples(
        "flatgauge landscape nets.py:lenet small.pt large.pt --data mnist:data --html planes.html",
        "flatgauge landscape nets.py:lenet a.pt --data mnist:data --space layers --png line.png",
        "flatgauge landscape nets.py:lenet a.pt --to b.pt --data mnist:data --save line.npz",
    )
)
def landscape(
    ctx: typer.Context,
    *,
    models: Models,
    weights: MoreWeights = None,
    data: Data,
    loss: LossName = "auto",
    space: Annotated[
        str | None,
        typer.Option(
            help="basis_paths (the default), weights, filters, layers or eigenvectors.",
            autocompletion=completion.complete_space,
            rich_help_panel=WHAT,
        ),
    ] = None,
    dims: Annotated[
        int | None, typer.Option(help="1 for a line, 2 for a plane.", rich_help_panel=WHAT)
    ] = None,
    points: Annotated[
        int, typer.Option(help="How many along every direction.", rich_help_panel=WHAT)
    ] = 25,
    extent: Annotated[
        float | None, typer.Option(help="The grid goes from -this to this.", rich_help_panel=WHAT)
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(help="Size of directions, for weights and basis_paths.", rich_help_panel=WHAT),
    ] = None,
    skeleton: Annotated[
        str | None,
        typer.Option(help="Of basis paths: strongest or diagonal.", rich_help_panel=WHAT),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="Checkpoint at the other end of a line; twice for a plane.", rich_help_panel=WHAT
        ),
    ] = None,
    what: Annotated[
        str, typer.Option(help="Drawn: loss or accuracy.", rich_help_panel=WHAT)
    ] = "loss",
    kind: Annotated[
        str | None, typer.Option(help="Drawn as: curve, contour or surface.", rich_help_panel=WHAT)
    ] = None,
    log: Annotated[
        bool, typer.Option("--log", help="Draw on a logarithmic scale.", rich_help_panel=WHAT)
    ] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw into this file.", rich_help_panel=OUTPUT)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write this page, to be turned about.", rich_help_panel=OUTPUT),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Keep finished points in this .npz; called again, the rest is computed.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
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
    """Compute the loss on a line or plane around a model, or between models, and draw it."""
    check_places(ctx.params, "png", "html", "save")
    import flatgauge as fg
    from flatgauge.analysis.landscapes.arguments import dims_of
    from flatgauge.analysis.landscapes.picture import check_kind, check_what
    from flatgauge.cli.session import set_threads

    set_threads(threads)
    check_form(png)
    check_what(what)
    if kind is not None:
        check_kind(kind, dims_of(dims, to or []))
    with redirect_stdout(sys.stderr), _kept(save):  # What the user's code prints is no result.
        words = [*models, *(weights or [])]
        surfaces, notes = all_opened(ctx, words)
        chosen: Any = surfaces if len(surfaces) > 1 else next(iter(surfaces.values()))
        found = fg.landscape(
            chosen,
            space=space,
            dims=dims,
            points=points,
            extent=extent,
            sigma=sigma,
            skeleton=skeleton,
            to=[_other(words[0], path, seed) for path in to] if to else None,
            seed=seed,
            progress=sys.stderr.isatty(),
            save=save,
        )
    if rank():
        return
    if json:
        print_json(with_command(found, notes))
    elif png is None and html is None:
        show(repr(found))
    look: Any = {"what": what, "kind": kind, "log": log}
    try:
        write_files(
            {
                png: lambda path: found.to_png(path, **look),
                html: lambda path: found.to_html(path, **look),
            }
        )
    except OSError:
        if not json:
            show(repr(found))
        raise


@contextmanager
def _kept(save: Path | None) -> Iterator[None]:
    """Say on Ctrl-C where finished points are."""
    try:
        yield
    except KeyboardInterrupt:
        there = save is not None and expand(save).exists()
        how = f"finished points are in {save}" if there else "nothing is kept without --save FILE"
        more = "; the same command computes the rest" if there else ""
        tell(f"interrupted: {how}{more}")
        end(INTERRUPTED)


def _other(model: str, path: str, seed: int) -> Any:
    """The model with other weights."""
    from flatgauge.cli.session import open_model

    module, notes = open_model(model, path, seed)
    for note in notes:
        tell(f"note: --to {path}: {note}")
    return module
