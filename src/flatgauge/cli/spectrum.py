"""`flatgauge spectrum`: how the eigenvalues are spread, of one model or several."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatgauge.cli import completion
from flatgauge.cli.application import app
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
from flatgauge.cli.streams import show

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface


@app.command(
    epilog=examples(
        "flatgauge spectrum nets.py:lenet lenet.pt --data mnist:data --limit 1000 --png a.png",
        "flatgauge spectrum nets.py:lenet a.pt b.pt --data mnist:data --geometry 'per weight'",
        "flatgauge spectrum nets.py:lenet a.pt --data mnist:data --rescaled --html spectrum.html",
    )
)
def spectrum(
    ctx: typer.Context,
    *,
    models: Models,
    weights: MoreWeights = None,
    data: Data,
    loss: LossName = "auto",
    geometry: Annotated[
        str,
        typer.Option(
            help="weights, 'per tensor', 'per weight', 'basis paths' or balanced.",
            autocompletion=completion.complete_geometry,
            rich_help_panel=WHAT,
        ),
    ] = "weights",
    rescaled: Annotated[
        bool,
        typer.Option(
            "--rescaled",
            help="Draw a randomly rescaled copy of each as well.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    probes: Annotated[int, typer.Option(min=2, help="Random starts.", rich_help_panel=WHAT)] = 8,
    steps: Annotated[
        int, typer.Option(min=1, help="Hessian products per start.", rich_help_panel=WHAT)
    ] = 64,
    top: Annotated[
        int, typer.Option(min=0, help="How many of the largest to find.", rich_help_panel=WHAT)
    ] = 10,
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
    png: Annotated[
        Path | None,
        typer.Option(help="Draw it to this file (.png, .pdf, .svg).", rich_help_panel=OUTPUT),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to this file.", rich_help_panel=OUTPUT)
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how the eigenvalues of the Hessian are spread, in a geometry that you choose."""
    check_places(ctx.params, "png", "html")
    import flatgauge as fg
    from flatgauge.cli.session import set_threads
    from flatgauge.report.plots.forms import write_picture

    set_threads(threads)
    check_form(png)
    with redirect_stdout(sys.stderr):
        surfaces, notes = all_opened(ctx, [*models, *(weights or [])])
        if rescaled:
            surfaces = _with_rescaled(surfaces, seed)
        chosen: Any = surfaces if len(surfaces) > 1 else next(iter(surfaces.values()))
        found = fg.spectrum(
            chosen,
            geometry=geometry,
            probes=probes,
            steps=steps,
            top=top,
            seed=seed,
            progress=sys.stderr.isatty(),
        )
    if rank():
        return
    if json:
        print_json(with_command(found, notes))
    else:
        show(repr(found))
    write_files(
        {
            png: lambda path: write_picture(path, found.plot().figure, dpi=200),
            html: found.to_html,
        }
    )


def _with_rescaled(surfaces: dict[str, LossSurface], seed: int) -> dict[str, LossSurface]:
    """Every model, and itself written differently."""
    from flatgauge.cli.session import rescaled_surface

    pairs = {}
    for name, surface in surfaces.items():
        pairs[name] = surface
        pairs[f"{name}, rescaled"] = rescaled_surface(surface, seed=seed)
    return pairs
