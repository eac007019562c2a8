"""What is asked of a run, checked before it starts, and what is called while it runs.

Names of measures with their options enter, `Request` records leave; everything that a user may have
got wrong is refused here. `show_progress` and `result_callback` make of `progress=` and `save=`
what is called when a part begins and when a result is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatgauge.analysis.files import check_writable
from flatgauge.analysis.formatting import one_line
from flatgauge.estimators.linalg import check_seed
from flatgauge.measures.registry import BALANCED, Measure, Needs, registry
from flatgauge.runtime.distributed import ProcessGroup
from flatgauge.surface.surface import LossSurface

#: Called with the name of what begins, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]

#: Columns of a terminal below which only the name, the count and the time left are shown.
_WIDE = 90


@dataclass(frozen=True)
class Request:
    """A measure with the options that were given for it."""

    measure: Measure
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the measure."""
        return self.measure.name

    @property
    def claims(self) -> frozenset[str]:
        """What it claims to be invariant to."""
        return self.measure.claims(self.options)

    @property
    def needs(self) -> Needs:
        """What it can share with other measures of the same loss."""
        return self.measure.needs(self.options)

    def with_options(self, **options: Any) -> Request:
        """The same with further options."""
        return replace(self, options={**self.options, **options})


def validate_request(
    surface: Any,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None,
    gauge: str | None,
    seed: int,
) -> list[Request]:
    """Check the arguments of `fg.measure` before anything runs, and return its requests."""
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
    return resolve_measures(measures, balanced=gauge is not None)


def resolve_measures(
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None, *, balanced: bool = False
) -> list[Request]:
    """Look up the measures asked for (all for None or ``"all"``), and check their options."""
    if isinstance(measures, str) and measures != "all":
        raise TypeError(f"`measures={measures!r}` is one string; pass a list: [{measures!r}].")
    if measures is None or measures == "all":
        measures = [item.name for item in registry]
    if not isinstance(measures, Iterable):
        raise TypeError(f"`measures={measures!r}` must be a list of names, or None for all.")
    named = list(measures.items() if isinstance(measures, Mapping) else ((n, {}) for n in measures))
    if not named:
        raise ValueError("`measures` is empty; name at least one, or pass None for all.")
    requests: dict[str, Request] = {}
    for name, options in named:
        prefix = BALANCED if balanced and not str(name).startswith(BALANCED) else ""
        item = registry[prefix + name if prefix else name]
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
        if item.name in requests:
            raise ValueError(f"`{item.name}` is asked for twice; a report has one number of each.")
        requests[item.name] = Request(item, dict(options))
    return list(requests.values())


def result_callback(save: Any, processes: ProcessGroup) -> Callable[[Any], object] | None:
    """What to call with each result: `save`, a writer of JSON (on the first process), or None."""
    if save is None or callable(save):
        keep: Callable[[Any], object] | None = save
        return keep
    if not isinstance(save, (str, Path)):
        raise TypeError(f"`save={save!r}` must be the path of a file, or a function.")
    if processes.rank:
        return None
    place = check_writable(save)
    return lambda result: result.to_json(place)


# -- progress ----------------------------------------------------------------------------------


@contextmanager
def show_progress(progress: Progress | bool, *surfaces: LossSurface) -> Iterator[Progress]:
    """What to call when a part begins.

    Args:
        progress: True for a bar on stderr, False for nothing, or a function.
        *surfaces: Whose passes over the data a bar counts.

    Yields:
        The function.
    """
    if callable(progress):
        yield progress
    elif progress and not any(surface.processes.rank for surface in surfaces):
        with progress_bar(*surfaces) as notify:
            yield notify
    else:
        yield lambda name, done, total: None


@contextmanager
def progress_bar(*surfaces: LossSurface) -> Iterator[Progress]:
    """Show what runs, how much is done, how often the data were read, and the time left.

    Args:
        *surfaces: Whose passes over the data to count.

    Yields:
        What to give as `progress`: called with a name, how many are done, and how many there are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    wide = console.width >= _WIDE
    columns = (
        TextColumn("{task.description}", markup=False),
        *((BarColumn(bar_width=16),) if wide else ()),
        MofNCompleteColumn(),
        *((TextColumn("{task.fields[passes]:.0f} passes"),) if wide and surfaces else ()),
        *((TimeElapsedColumn(),) if wide else ()),
        TextColumn("{task.fields[left]}", style="dim"),
    )
    with (
        Bar(*columns, console=console, transient=True) as progress,
        ExitStack() as watched,
    ):
        task = progress.add_task("starting", total=None, passes=0.0, left="")
        seen = 0.0

        def start(name: str, done: int, total: int) -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            left = time_left(elapsed, done, total)
            progress.update(
                task, description=one_line(name), completed=done, total=total, left=left
            )

        for surface in surfaces:

            def count(samples: int, all_samples: int = max(surface.data.shares)) -> None:
                nonlocal seen
                seen += samples / all_samples
                progress.update(task, passes=seen)

            watched.enter_context(surface.on_progress(count))
        yield start


def time_left(elapsed: float, done: int, total: int) -> str:
    """Guess how long the rest takes, if it is like what is done.

    Args:
        elapsed: Seconds so far.
        done: How many parts these took.
        total: How many parts there are.

    Returns:
        "about 3 min left"; nothing before two parts are done, as one says little of the others.

    Example:
        >>> time_left(8.0, 4, 32), time_left(600.0, 10, 25), time_left(5.0, 1, 9)
        ('about 1 min left', 'about 15 min left', '')
    """
    if done < 2:
        return ""
    rest = elapsed / done * (total - done)
    if rest < 50:
        return f"about {max(5, round(rest / 5) * 5)} s left"
    if rest < 5400:
        return f"about {max(1, round(rest / 60))} min left"
    return f"about {rest / 3600:.1f} h left"
