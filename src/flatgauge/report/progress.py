"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flatgauge.surface import LossSurface


@contextmanager
def bar(surface: LossSurface) -> Iterator[Callable[[str, int, int], None]]:
    """Show which measure runs, how many are done, and that the data are being read.

    Args:
        surface: Whose passes over the data to count.

    Yields:
        What to give `fg.measure` as `progress`.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[passes]:.1f} passes over the data"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=None, passes=0.0)
        seen = 0

        def count(samples: int) -> None:
            nonlocal seen
            seen += samples
            progress.update(task, passes=seen / surface.samples)

        def start(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        with surface.watched(count):
            yield start
