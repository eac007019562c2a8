"""The loss on a line or plane of weights: the public function.

What is asked for is checked, directions are drawn (`directions`), missing points of the grid are
evaluated in groups (`evaluate`) and saved (`checkpoint`); a `Landscape` leaves (`result`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator

from flatgauge.analysis.landscapes.checkpoint import (
    LandscapeCheckpoint,
    PartialGrid,
    fingerprint,
)
from flatgauge.analysis.landscapes.directions import SPACES, Between, Space, positive
from flatgauge.analysis.landscapes.evaluate import Evaluator
from flatgauge.analysis.landscapes.result import Landscape, Landscapes
from flatgauge.analysis.request import Progress, show_progress
from flatgauge.estimators.linalg import check_seed
from flatgauge.runtime.distributed import ProcessGroup
from flatgauge.runtime.resources import format_bytes
from flatgauge.surface.arguments import shared_processes
from flatgauge.surface.model import digest
from flatgauge.surface.surface import LossSurface

#: Bytes that every point of a grid takes while it is filled, and those of its results for every
#: model. Measured.
_FILLED, _RESULT = 450, 24


@overload
def landscape(surface: LossSurface, **settings: Any) -> Landscape: ...


@overload
def landscape(surface: Mapping[str, LossSurface], **settings: Any) -> Landscapes: ...


def landscape(  # type: ignore[misc]  # The overloads leave the settings to this one.
    surface: LossSurface | Mapping[str, LossSurface],
    *,
    space: str | None = None,
    dims: int | None = None,
    points: int = 25,
    extent: float | None = None,
    sigma: float | None = None,
    skeleton: str | None = None,
    to: Any = None,
    seed: int = 0,
    progress: Progress | bool = False,
    save: str | Path | None = None,
) -> Landscape | Landscapes:
    r"""Compute loss and accuracy on a line or plane of weights around the surface's point.

    Definition:
        .. math:: f(t_1, t_2) = L(\theta + t_1 \xi + t_2 \eta)

        with the directions ξ, η of a space. ``"weights"``: every component normal with standard
        deviation `sigma`. ``"filters"``: normal, every filter (row) scaled to the length of the
        model's own; biases and norms stay [li2018visualizing]. ``"layers"``: normal, every tensor,
        biases too, scaled to the length of the model's own [rangamani2019scale].
        ``"eigenvectors"``: unit eigenvectors of the largest eigenvalues of the Hessian.
        ``"basis_paths"``: normal of size `sigma` among the values of basis paths, whose weights
        follow from `BasisPaths.to_weights` (Yi et al. 2019, eq. 18 to 21).

        With `to`, the straight line (1 - t) θ + t θ', or the plane through three points.

    Cost:
        One forward pass over the data per point. Points share passes, and for small models calls,
        by a rule of sizes and memory budget; that changes results by rounding only.

    Args:
        surface: Where to look; or several surfaces by name, to be seen on the same axes.
        space: Where directions are drawn: ``"basis_paths"`` (the default), ``"weights"``,
            ``"filters"``, ``"layers"`` or ``"eigenvectors"``.
        dims: 1 for a line, 2 for a plane; by default 2, or as many as there are in `to`.
        points: How many along every direction; an odd number has the point itself among them.
        extent: The grid goes from -extent to extent; by default 1, for eigenvectors 0.5, among
            basis paths no further than the nearest pole of any of the surfaces. With `to`, from
            -extent to 1 + extent, by default 0.25.
        sigma: The size of the directions' components, for weights and basis paths; 0.05.
        skeleton: Of basis paths: ``"strongest"`` (the default) or ``"diagonal"``.
        to: A model, surface or state dict at the other end of the line, or a list of two.
        seed: Of the directions.
        progress: True for a bar on stderr; or a function called with a name, how many points are
            done, and how many there are.
        save: A file (.npz) for finished points. Called again with the same settings after an
            interruption, the rest is computed.

    Returns:
        The landscape; for several surfaces, all of them by name.

    Raises:
        TypeError: If `surface` or `to` is of the wrong kind.
        ValueError: If there is no such space, a setting is out of range, the models do not fit
            each other, or the file belongs to other settings.
        MemoryError: If the grid has more points than fit the memory budget.

    Example:
        The loss ``(b relu(a))²`` is v² in the value v = ab = 6 of its only path:

        >>> from flatgauge.surface.examples import two_weights
        >>> found = landscape(two_weights(2.0, 3.0), dims=1, points=3)
        >>> (step,) = found.directions[0].tolist()
        >>> np.allclose(found.loss, [(6 - step) ** 2, 36, (6 + step) ** 2])
        True
    """
    surfaces = _surfaces_of(surface)
    ends = _ends_of(to)
    dims = dims_of(dims, ends)
    kind = Between if ends else _space_of(space)
    if ends and space is not None:
        raise ValueError(
            f"`to` leads straight through the weights, whatever `space={space!r}`; leave one out."
        )
    options = _options_of(kind, {"sigma": sigma, "skeleton": skeleton})
    check_points(points, dims, surfaces)
    check_seed(seed)
    given = None if extent is None else positive("extent", extent)
    processes = shared_processes(surfaces.values())
    with processes.scope("landscape"):
        spaces = {
            name: Between(one, ends)
            if ends
            else kind(one, dims, Generator().manual_seed(seed), **options)
            for name, one in surfaces.items()
        }
        reach = given or min(one.reach() for one in spaces.values())  # The same for all.
        ticks = kind.ticks(points, reach)
        common = {"dims": dims, "points": points, "extent": reach} | (
            {} if ends else {"seed": seed}
        )
        settings = {} if save is None else _settings(spaces, common | options)
        found = {}
        with (
            _open_checkpoint(
                processes, save, settings, (points,) * dims, len(spaces)
            ) as checkpoint,
            show_progress(
                progress if callable(progress) or not processes.rank else False
            ) as report,
        ):
            total = len(spaces) * points**dims
            for (name, one), part in zip(spaces.items(), checkpoint.parts, strict=True):
                label = name or "landscape"
                report(label, checkpoint.points_done, total)
                for _ in _fill_grid(one, ticks, part):
                    checkpoint.save()
                    report(label, checkpoint.points_done, total)
                found[name] = _result(one, ticks, part, common)
    return found[""] if isinstance(surface, LossSurface) else Landscapes(found)


def _open_checkpoint(
    processes: ProcessGroup, save: str | Path | None, settings: dict[str, Any], *sizes: Any
) -> LandscapeCheckpoint:
    """What is known so far: by the file, which the first process reads and writes for all."""
    path = None if processes.rank else save
    checkpoint = processes.run("the file", lambda: LandscapeCheckpoint(path, settings, *sizes))
    checkpoint.parts = processes.all_gather(checkpoint.parts)[0]
    return checkpoint


def _settings(spaces: Mapping[str, Space], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the numbers depend on, for the file that they are kept in."""
    found = {"space": next(iter(spaces.values())).name, **options}
    for name, one in spaces.items():
        facts = fingerprint(one.surface)
        if isinstance(one, Between):
            facts["to"] = digest([one.directions])
        found |= {f"{fact} of {name or 'the model'}": value for fact, value in facts.items()}
    return found


def _fill_grid(space: Space, ticks: NDArray[np.float64], part: PartialGrid) -> Iterator[None]:
    """Compute what is missing; control comes back after every group of points."""
    evaluator = Evaluator(space.surface, part.stack or None)
    part.stack = evaluator.stack
    grid = list(itertools.product(range(len(ticks)), repeat=part.loss.ndim))
    steps = {index: tuple(ticks[list(index)].tolist()) for index in grid}
    # The points that have a name come first, each to the last bit as the surface itself has it.
    marked = [index for index in grid if steps[index] in space.marks.values()]
    rest = [index for index in grid if index not in marked and not part.done[index]]
    groups = [[index] for index in marked if not part.done[index]]
    alone = len(groups)
    groups += [rest[i : i + evaluator.group] for i in range(0, len(rest), evaluator.group)]
    for number, group in enumerate(groups):
        placed = {index: space.place(torch.tensor(steps[index]).double()) for index in group}
        known = {index: point for index, point in placed.items() if point is not None}
        for index in group:
            part.loss[index] = math.inf
        if known:
            found = evaluator(list(known.values()), alone=number < alone)
            for index, loss in zip(known, found.loss, strict=True):
                part.loss[index] = loss
            for index, accuracy in zip(known, found.accuracy or (), strict=False):
                part.accuracy[index] = accuracy
        for index in group:
            part.done[index] = True
        yield


def _result(
    space: Space, ticks: NDArray[np.float64], part: PartialGrid, common: Mapping[str, Any]
) -> Landscape:
    """What was computed, with what is to be said about it."""
    beyond = np.zeros(part.loss.shape, bool)
    for index in np.ndindex(beyond.shape):
        beyond[index] = not space.reaches(torch.tensor(ticks[list(index)]))
    notes = list(space.notes)
    if beyond.any():
        notes.append(
            f"{int(beyond.sum())} of {beyond.size} points lie beyond a pole of the loss; a smaller "
            "`sigma` or `extent` stays on this side"
        )
    surface = space.surface
    options = {**common, **space.settings, "loss": surface.loss_name, "samples": surface.samples}
    return Landscape(
        space=space.name,
        ticks=ticks,
        loss=part.loss,
        accuracy=None if np.isnan(part.accuracy).all() else part.accuracy,
        beyond=beyond,
        directions=space.directions,
        title=space.title,
        words=space.words,
        marks=dict(space.marks),
        options=options,
        details=dict(space.details),
        notes=tuple(notes),
    )


def _surfaces_of(given: Any) -> dict[str, LossSurface]:
    """The surfaces by name; one alone has no name."""
    named = dict(given) if isinstance(given, Mapping) else {"": given}
    if not named:
        raise ValueError("`landscape` got an empty mapping; give at least one surface by name.")
    for name, one in named.items():
        if not isinstance(one, LossSurface):
            where = f"{type(one).__name__} as {name!r}" if name else type(one).__name__
            raise TypeError(
                f"`landscape` needs a LossSurface, but got a {where}; make one with "
                "LossSurface(model, loss, data)."
            )
        if not isinstance(name, str):
            raise TypeError(f"`landscape` names surfaces by texts, but got the name {name!r}.")
    return named


def _ends_of(to: Any) -> list[Any]:
    """The other ends of lines."""
    if to is None:
        return []
    ends = list(to) if isinstance(to, (list, tuple)) else [to]
    if len(ends) not in (1, 2):
        raise ValueError(
            f"`to` is a list of {len(ends)}; give one model for a line, or two for the plane "
            "through three points."
        )
    return ends


def dims_of(dims: int | None, ends: list[Any]) -> int:
    """How many directions there are."""
    if dims is None:
        return len(ends) or 2
    if isinstance(dims, bool) or dims not in (1, 2):
        raise ValueError(f"`dims={dims!r}` must be 1 or 2: a line or a plane.")
    if ends and dims != len(ends):
        raise ValueError(
            f"`dims={dims}` does not fit `to`: one model gives a line, two give a plane; leave "
            "`dims` out."
        )
    return dims


def check_points(points: Any, dims: int, surfaces: Mapping[str, LossSurface]) -> None:
    """Refuse a grid of no points, or of more than there is memory for."""
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise ValueError(f"`points={points!r}` must be a whole number, at least 2.")
    room = min(surface.memory for surface in surfaces.values())
    each = _FILLED + _RESULT * len(surfaces)
    if points**dims * each > room:
        fitting = int((room / each) ** (1 / dims))
        raise MemoryError(
            f"`points={points}` with `dims={dims}` is a grid of {points**dims:,} points, which "
            f"takes about {format_bytes(points**dims * each)}, but the budget is "
            f"{format_bytes(room)}; give `points={fitting}` or fewer, or a larger `memory=` to the "
            "surface."
        )


def _space_of(space: str | None) -> type[Space]:
    """The space of a name; by default that of basis paths."""
    if space is None:
        space = "basis_paths"
    if space not in SPACES:
        raise ValueError(f"there is no space {space!r}; the spaces are {', '.join(SPACES)}.")
    return SPACES[space]


def _options_of(kind: type[Space], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a space, with its defaults for those that were not given."""
    for name, value in given.items():
        if value is not None and name not in kind.options:
            having = [space for space, other in SPACES.items() if name in other.options]
            raise ValueError(
                f"`{name}={value!r}` means nothing here; it is an option of the spaces "
                f"{' and '.join(having)}."
            )
    return {n: default if given.get(n) is None else given[n] for n, default in kind.options.items()}
