"""Whom to tell what runs: a function of the caller's, or a bar with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from flatgauge.analysis.formatting import one_line
from flatgauge.surface.surface import LossSurface

#: Called with the name of what begins, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]

#: Columns of a terminal below which only the name, the count and the time left are shown.
_WIDE = 90


@contextmanager
def show_progress(progress: Progress | bool, *surfaces: LossSurface) -> Iterator[Progress]:
    """Whom to tell of progress.

    Args:
        progress: True for a bar on stderr, False for nothing, or a function.
        *surfaces: Whose passes over the data a bar counts.

    Yields:
        The function.
    """
    if callable(progress):
        yield progress
    elif progress and not any(surface.processes.rank for surface in surfaces):
        with bar(*surfaces) as tell:
            yield tell
    else:
        yield lambda name, done, total: None


@contextmanager
def bar(*surfaces: LossSurface) -> Iterator[Progress]:
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
