"""What is finished is kept: on Ctrl-C and on errors, results so far are told and written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flatgauge.report import Comparison, Report

#: What shells report for a program that Ctrl-C ended.
INTERRUPTED = 130


class Keeper:
    """Takes every result so far; give it as `save`.

    Attributes:
        result: The latest one, None before the first measure is finished.
        notes: On the models, told with the result.
        total: How many measures there are of all models together.
    """

    def __init__(self, save: str | None, html: str | None) -> None:
        from flatgauge.writing import check_place

        for place in filter(None, (save, html)):
            check_place(place)
        self.result: Report | Comparison | None = None
        self.notes: list[str] = []
        self.total = 0
        self._save, self._html = save, html

    def __call__(self, result: Report | Comparison) -> None:
        """Take a result, and write it if it is to be saved."""
        self.result = result
        if self._save is not None:
            from flatgauge.cli.output import with_command
            from flatgauge.report.json_text import json_text

            json_text(with_command(result, self.notes), self._save)

    @property
    def finished(self) -> int:
        """How many measures are in the result."""
        from flatgauge.report import Comparison

        if isinstance(self.result, Comparison):
            return sum(len(report) for report in self.result.values())
        return 0 if self.result is None else len(self.result)

    def publish(self) -> list[str]:
        """Write the page, and say which files hold the result."""
        places = [self._save] if self._save is not None else []
        if self._html is not None and self.result is not None:
            command = shlex.join(["flatgauge", *sys.argv[1:]])
            self.result.to_html(self._html, command=command, remarks=self.notes)
            places.append(self._html)
        return places


@contextmanager
def keeping(save: str | None, html: str | None, *, json: bool) -> Iterator[Keeper]:
    """Measure within this: nothing that is finished is lost.

    Args:
        save: Where results are kept as JSON.
        html: Where the page is written.
        json: Whether results are printed as JSON.

    Yields:
        What to give as `save`, to be filled with notes and the number of measures.
    """
    keeper = Keeper(save, html)
    try:
        yield keeper
        for place in keeper.publish():
            typer.echo(f"wrote {place}", err=True)
    except KeyboardInterrupt:
        _tell_interrupted(keeper, json=json)
        sys.exit(INTERRUPTED)
    except Exception:
        if keeper.result is not None and (places := keeper.publish()):
            typer.echo(f"finished before the error: {_told(keeper, places)}", err=True)
        raise


def _tell_interrupted(keeper: Keeper, *, json: bool) -> None:
    """Say what is finished and where it is; print it if it is nowhere else."""
    from flatgauge.cli.output import print_result

    if keeper.result is None:
        typer.echo("interrupted before the first measure was finished", err=True)
        return
    places = keeper.publish()
    if not places:
        print_result(keeper.result, json, keeper.notes)
    typer.echo(f"interrupted: {_told(keeper, places)}", err=True)


def _told(keeper: Keeper, places: list[str]) -> str:
    of = f" of {keeper.total}" if keeper.total else ""
    where = f"in {' and '.join(places)}" if places else "printed above; --save FILE keeps them"
    return f"{keeper.finished}{of} measures are finished, {where}"
