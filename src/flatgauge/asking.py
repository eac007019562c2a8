"""What is asked of a run, checked before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flatgauge.measures import BALANCED, Measure, registry
from flatgauge.processes import Processes
from flatgauge.randomness import check_seed
from flatgauge.surface import LossSurface
from flatgauge.writing import check_place


def checked_request(
    surface: Any,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None,
    gauge: str | None,
    seed: int,
) -> list[tuple[Measure, dict[str, Any]]]:
    """What is wanted, checked before anything runs.

    Args:
        surface: Where to measure.
        measures: Names, or a mapping from names to options; None or ``"all"`` for all.
        gauge: ``"balanced"`` or None.
        seed: Of everything random.

    Returns:
        Measures with their options.

    Raises:
        TypeError: If `surface` or `measures` is of the wrong kind.
        ValueError: If a measure, an option, the gauge or the seed does not exist.
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`surface` is a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    check_seed(seed)
    if gauge not in (None, "balanced"):
        raise ValueError(
            f"`gauge={gauge!r}` is unknown; use 'balanced', or None for the model as it is."
        )
    return wanted_of(measures, prefix=BALANCED if gauge else "")


def as_keeper(save: Any, processes: Processes) -> Callable[[Any], object] | None:
    """What to call with every result so far.

    Args:
        save: A file, a function, or None.
        processes: Who measures; a file is written by the first of them.

    Returns:
        The function; for a file one that writes the result as JSON. None for None.

    Raises:
        TypeError: If it is something else.
    """
    if save is None or callable(save):
        keep: Callable[[Any], object] | None = save
        return keep
    if not isinstance(save, (str, Path)):
        raise TypeError(f"`save={save!r}` must be the path of a file, or a function.")
    if processes.rank:
        return None
    place = check_place(save)
    return lambda result: result.to_json(place)


def wanted_of(
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None, *, prefix: str = ""
) -> list[tuple[Measure, dict[str, Any]]]:
    """Look up what was asked for, and check the options before anything runs.

    Args:
        measures: Names, or a mapping from names to options; None or ``"all"`` for all.
        prefix: To be put before every name that does not have it.

    Returns:
        Measures with their options.

    Raises:
        TypeError: If it is one string.
        ValueError: If a measure or an option does not exist.
    """
    if isinstance(measures, str) and measures != "all":
        raise TypeError(f"`measures={measures!r}` is one string; pass a list: [{measures!r}].")
    if measures is None or measures == "all":
        measures = [item.name for item in registry]
    if not isinstance(measures, Iterable):
        raise TypeError(f"`measures={measures!r}` must be a list of names, or None for all.")
    named = list(measures.items() if isinstance(measures, Mapping) else ((n, {}) for n in measures))
    if not named:
        raise ValueError("`measures` is empty; name at least one, or pass None for all.")
    wanted: list[tuple[Measure, dict[str, Any]]] = []
    for name, options in named:
        item = registry[name if not prefix or str(name).startswith(prefix) else prefix + name]
        if not isinstance(options, Mapping):
            raise TypeError(f"the options of `{name}` are {options!r}; pass a dict, or {{}}.")
        unknown = sorted(set(options) - set(item.options))
        if unknown:
            raise ValueError(
                f"`{name}` has no option {', '.join(map(repr, unknown))}; its options are "
                f"{', '.join(item.options)}."
            )
        for key, value in options.items():
            item.check_option(key, value)
        if any(item.name == other.name for other, _ in wanted):
            raise ValueError(f"`{item.name}` is asked for twice; a report has one number of each.")
        wanted.append((item, dict(options)))
    return wanted
