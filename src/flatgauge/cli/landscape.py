"""`flatgauge landscape`: the loss around one or several models, drawn."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

from flatgauge.cli.application import end
from flatgauge.cli.interrupts import INTERRUPTED
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
from flatgauge.cli.streams import log
from flatgauge.cli.torchrun import rank
from flatgauge.loading.files import expand

SpaceName = Literal["basis_paths", "weights", "filters", "layers", "eigenvectors"]


@surface_command(
    "flatgauge landscape nets.py:lenet small.pt large.pt --data mnist:data --html planes.html",
    "flatgauge landscape nets.py:lenet a.pt --data mnist:data --space layers --png line.png",
    "flatgauge landscape nets.py:lenet a.pt --to b.pt --data mnist:data --save line.npz",
)
def landscape(
    options: SurfaceOptions,
    models: Models,
    weights: MoreWeights = None,
    space: Annotated[
        SpaceName | None, option("Directions; basis_paths if not given.", WHAT)
    ] = None,
    dims: Annotated[int | None, option("1 for a line, 2 for a plane.", WHAT)] = None,
    points: Annotated[int, option("How many along every direction.", WHAT)] = 25,
    extent: Annotated[float | None, option("The grid goes from -this to this.", WHAT)] = None,
    sigma: Annotated[
        float | None, option("Size of directions, for weights and basis_paths.", WHAT)
    ] = None,
    skeleton: Annotated[
        Literal["strongest", "diagonal"] | None, option("Of basis paths.", WHAT)
    ] = None,
    to: Annotated[
        list[str] | None,
        option("Checkpoint at the other end of a line; twice for a plane.", WHAT),
    ] = None,
    what: Annotated[Literal["loss", "accuracy"], option("What is drawn.", WHAT)] = "loss",
    kind: Annotated[
        Literal["curve", "contour", "surface"] | None, option("Drawn as this.", WHAT)
    ] = None,
    log_scale: Annotated[bool, option("Draw on a logarithmic scale.", WHAT, "--log")] = False,
    png: Annotated[Path | None, option("Draw into this file.", OUTPUT)] = None,
    html: Annotated[Path | None, option("Write this page, to be turned about.", OUTPUT)] = None,
    save: Annotated[
        Path | None,
        option("Keep finished points in this .npz; called again, the rest is computed.", OUTPUT),
    ] = None,
    json: Json = False,
) -> None:
    """Compute the loss on a line or plane around a model, or between models, and draw it."""
    words = [*models, *(weights or [])]
    read = [*words, *(to or []), options.data, options.loss]
    check_outputs(read, png=png, html=html, save=save)
    check_picture(png)
    import flatgauge as fg
    from flatgauge.analysis.landscapes.grid import dims_of
    from flatgauge.analysis.landscapes.result import check_kind
    from flatgauge.cli.session import open_surfaces

    if kind is not None:
        check_kind(kind, dims_of(dims, to or []))
    try:
        with redirect_stdout(sys.stderr):  # What the user's code prints is no result.
            surfaces, notes = open_surfaces(words, options)
            chosen: Any = surfaces if len(surfaces) > 1 else next(iter(surfaces.values()))
            found = fg.landscape(
                chosen,
                space=space,
                dims=dims,
                points=points,
                extent=extent,
                sigma=sigma,
                skeleton=skeleton,
                to=[_other(words[0], path, options.seed) for path in to] if to else None,
                seed=options.seed,
                progress=shows_progress(),
                save=save,
            )
    except KeyboardInterrupt:
        if save is not None and expand(save).exists():
            where = f"finished points are in {save}; the same command computes the rest"
        else:
            where = "nothing is kept without --save FILE"
        log(f"interrupted: {where}")
        end(INTERRUPTED)
    if rank():
        return
    if json or (png is None and html is None):
        print_result(found, json, notes)
    look: Any = {"what": what, "kind": kind, "log": log_scale}
    try:
        write_files(
            {
                png: lambda path: found.to_png(path, **look),
                html: lambda path: found.to_html(path, **look),
            }
        )
    except OSError:
        if not json:
            print_result(found, json, notes)
        raise


def _other(model: str, path: str, seed: int) -> Any:
    """The model with other weights."""
    from flatgauge.cli.session import open_model

    module, notes = open_model(model, path, seed)
    for note in notes:
        log(f"note: --to {path}: {note}")
    return module
