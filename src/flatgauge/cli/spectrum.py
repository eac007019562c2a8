"""`flatgauge spectrum`: how the eigenvalues are spread, of one model or several."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

from flatgauge.cli.options import (
    OUTPUT,
    WHAT,
    Json,
    Models,
    MoreWeights,
    SurfaceOptions,
    option,
    surface_command,
)
from flatgauge.cli.output import print_result, shows_progress
from flatgauge.cli.saving import check_outputs, check_picture, write_files
from flatgauge.cli.torchrun import rank

GeometryName = Literal["weights", "per tensor", "per weight", "basis paths", "balanced"]


@surface_command(
    "flatgauge spectrum nets.py:lenet lenet.pt --data mnist:data --limit 1000 --png a.png",
    "flatgauge spectrum nets.py:lenet a.pt b.pt --data mnist:data --geometry 'per weight'",
    "flatgauge spectrum nets.py:lenet a.pt --data mnist:data --rescaled --html spectrum.html",
)
def spectrum(
    options: SurfaceOptions,
    models: Models,
    weights: MoreWeights = None,
    geometry: Annotated[GeometryName, option("What a unit of length is.", WHAT)] = "weights",
    rescaled: Annotated[
        bool, option("Draw a randomly rescaled copy of each as well.", WHAT, "--rescaled")
    ] = False,
    probes: Annotated[int, option("Random starts.", WHAT, min=2)] = 8,
    steps: Annotated[int, option("Hessian products per start.", WHAT, min=1)] = 64,
    top: Annotated[int, option("How many of the largest to find.", WHAT, min=0)] = 10,
    png: Annotated[Path | None, option("Draw it to this file (.png, .pdf, .svg).", OUTPUT)] = None,
    html: Annotated[Path | None, option("Write a page to this file.", OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Show how the eigenvalues of the Hessian are spread, in a geometry that you choose."""
    words = [*models, *(weights or [])]
    check_outputs([*words, options.data, options.loss], png=png, html=html)
    check_picture(png)
    import flatgauge as fg
    from flatgauge.cli.session import open_surfaces, rescaled_surface
    from flatgauge.report.plots.style import write_picture

    with redirect_stdout(sys.stderr):
        surfaces, notes = open_surfaces(words, options)
        if rescaled:
            pairs = [
                {name: one, f"{name}, rescaled": rescaled_surface(one, seed=options.seed)}
                for name, one in surfaces.items()
            ]
            surfaces = {name: one for pair in pairs for name, one in pair.items()}
        chosen: Any = surfaces if len(surfaces) > 1 else next(iter(surfaces.values()))
        found = fg.spectrum(
            chosen,
            geometry=geometry,
            probes=probes,
            steps=steps,
            top=top,
            seed=options.seed,
            progress=shows_progress(),
        )
    if rank():
        return
    print_result(found, json, notes)
    write_files(
        {
            png: lambda path: write_picture(path, found.plot().figure, dpi=200),
            html: found.to_html,
        }
    )
