"""What `fg.landscape` is asked for, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatgauge.analysis.landscapes.space import Space
from flatgauge.analysis.landscapes.spaces import SPACES
from flatgauge.runtime.resources import format_bytes
from flatgauge.surface.surface import LossSurface

#: Bytes that every point of a grid takes while it is filled, and those of its results for every
#: model. Measured.
_FILLED, _RESULT = 450, 24


def surfaces_of(given: Any) -> dict[str, LossSurface]:
    """The surfaces by name; one alone has no name.

    Args:
        given: A surface, or several by name.

    Returns:
        At least one surface.

    Raises:
        TypeError: If it is something else.
        ValueError: If there is none.
    """
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


def ends_of(to: Any) -> list[Any]:
    """The other ends of lines.

    Args:
        to: One, a list of two, or None.

    Returns:
        None, one or two of them.

    Raises:
        ValueError: If there are more.
    """
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
    """How many directions there are.

    Args:
        dims: What was given.
        ends: The other ends of lines.

    Returns:
        1 or 2.

    Raises:
        ValueError: If it is something else, or does not fit the ends.
    """
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
    """Refuse a grid of no points, or of more than there is memory for.

    Args:
        points: How many along every direction.
        dims: How many directions.
        surfaces: Whose landscapes there are to be.

    Raises:
        ValueError: If it is not a number of points.
        MemoryError: If the grid does not fit the memory budget.
    """
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


def space_of(space: str | None) -> type[Space]:
    """The space of a name; by default that of basis paths.

    Args:
        space: The name.

    Returns:
        The space.

    Raises:
        ValueError: If there is none of that name.
    """
    if space is None:
        space = "basis_paths"
    if space not in SPACES:
        raise ValueError(f"there is no space {space!r}; the spaces are {', '.join(SPACES)}.")
    return SPACES[space]


def options_of(kind: type[Space], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a space, with its defaults for those that were not given.

    Args:
        kind: The space.
        given: By name; None where not given.

    Returns:
        The options.

    Raises:
        ValueError: If one was given that the space does not have.
    """
    for name, value in given.items():
        if value is not None and name not in kind.options:
            having = [space for space, other in SPACES.items() if name in other.options]
            raise ValueError(
                f"`{name}={value!r}` means nothing here; it is an option of the spaces "
                f"{' and '.join(having)}."
            )
    return {n: default if given.get(n) is None else given[n] for n, default in kind.options.items()}
