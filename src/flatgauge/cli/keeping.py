"""What is finished is kept: on Ctrl-C and on errors, results so far are told and written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flatgauge.cli.ranks import rank

if TYPE_CHECKING:
    from flatgauge.report import Comparison, Report
    from flatgauge.surface import LossSurface

#: What shells report for a program that Ctrl-C ended.
INTERRUPTED = 130


class Keeper:
    """Takes every result so far; give it as `save`.

    Attributes:
        result: The latest one, None before the first measure is finished.
        illustrations: What the page shows beside the result, by keyword of `to_html`.
        notes: On the models, told with the result.
        total: How many measures there are of all models together.
    """

    def __init__(self, save: str | None, html: str | None) -> None:
        from flatgauge.writing import check_place

        self._writes = not rank()
        for place in filter(None, (save, html) if self._writes else ()):
            check_place(place)
        if save is not None and html is not None and _same_file(save, html):
            raise ValueError(
                f"`--save {save}` and `--html {html}` are the same file, and the page would "
                "replace the results; give two names."
            )
        self.result: Report | Comparison | None = None
        self.illustrations: dict[str, Any] = {}
        self.notes: list[str] = []
        self.total = 0
        self._save, self._html = save, html

    def __call__(self, result: Report | Comparison) -> None:
        """Take a result, and write it if it is to be saved."""
        self.result = result
        if self._save is not None and self._writes:
            from flatgauge.cli.output import with_command
            from flatgauge.report.json_text import json_text

            json_text(with_command(result, self.notes), self._save)

    def illustrate(
        self, surfaces: Mapping[str, LossSurface], without: list[str] | None, seed: int
    ) -> None:
        """Compute what the page shows beside the result, if there is to be a page.

        Args:
            surfaces: What was measured, by name.
            without: What to leave out.
            seed: Of everything random.
        """
        from flatgauge.cli.output import watched
        from flatgauge.illustrating import Illustrations, illustrate
        from flatgauge.progress import shown

        if self._html is None:
            return
        parts = parts_without(without or [])
        found = Illustrations()
        # Filled piece by piece: Ctrl-C leaves what is finished.
        self.illustrations |= vars(found)
        with shown(watched(), *surfaces.values()) as tell:
            illustrate(surfaces, parts=parts, seed=seed, progress=tell, found=found)

    @property
    def finished(self) -> int:
        """How many measures are in the result."""
        from flatgauge.report import Comparison

        if isinstance(self.result, Comparison):
            return sum(len(report) for report in self.result.values())
        return 0 if self.result is None else len(self.result)

    def publish(self) -> list[str]:
        """Write the page, and say which files hold the result."""
        if not self._writes:
            return []
        places = [self._save] if self._save is not None else []
        if self._html is not None and self.result is not None:
            command = shlex.join(["flatgauge", *sys.argv[1:]])
            shown = dict(self.illustrations)
            remarks = [*self.notes, *shown.pop("remarks", ())]
            self.result.to_html(self._html, command=command, remarks=remarks, **shown)
            places.append(self._html)
        return places


def _same_file(one: str, other: str) -> bool:
    """Whether two paths lead to the same file (not to a device that swallows both)."""
    place = Path(one).expanduser()
    if place.exists() and not place.is_file():
        return False
    return place.resolve() == Path(other).expanduser().resolve()


def parts_without(words: list[str]) -> list[str]:
    """The parts of a page but for some.

    Args:
        words: Those that are left out.

    Returns:
        The others.

    Raises:
        ValueError: If there is no such part.
    """
    from flatgauge.illustrating import PARTS

    for word in words:
        if word not in PARTS:
            raise ValueError(f"`--without {word}` is no part of a page; use {', '.join(PARTS)}.")
    return [part for part in PARTS if part not in words]


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
