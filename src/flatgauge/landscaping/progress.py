"""A progress bar on stderr, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


@contextmanager
def shown(progress: Progress | bool) -> Iterator[Progress]:
    """Whom to tell how many points are done.

    Args:
        progress: True for a bar, False for nothing, or a function of a name, how many are done,
            and how many there are.

    Yields:
        The function.
    """
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("points,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("landscape", total=None)
        yield lambda name, done, total: bar.update(
            task, description=name, completed=done, total=total
        )
