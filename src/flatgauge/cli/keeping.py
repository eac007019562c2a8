"""What is finished is kept: on Ctrl-C and on errors, results so far are told and written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flatgauge.cli.application import end
from flatgauge.cli.interrupts import INTERRUPTED
from flatgauge.cli.ranks import rank
from flatgauge.cli.streams import tell

if TYPE_CHECKING:
    from flatgauge.analysis.comparison import Comparison
    from flatgauge.analysis.measurement import Report
    from flatgauge.surface.surface import LossSurface


class Keeper:
    """Takes every result so far; give it as `save`.

    Attributes:
        result: The latest one, None before the first measure is finished.
        illustrations: What the page shows beside the result, by keyword of `to_html`.
        notes: On the models, told with the result.
        total: How many measures there are of all models together.
    """

    def __init__(self, save: str | None, html: str | None) -> None:
        self.result: Report | Comparison | None = None
        self.illustrations: dict[str, Any] = {}
        self.notes: list[str] = []
        self.total = 0
        self._save, self._html = (None, None) if rank() else (save, html)
        self._unsaved: OSError | None = None

    def __call__(self, result: Report | Comparison) -> None:
        """Take a result, and write it if it is to be saved.

        A file that cannot be written ends nothing: it is tried again with the next result.
        """
        self.result = result
        if self._save is not None:
            from flatgauge.analysis.files import json_text
            from flatgauge.cli.output import with_command

            before, self._unsaved = self._unsaved, None
            try:
                json_text(with_command(result, self.notes), self._save)
            except OSError as error:
                self._unsaved = error
                if before is None:
                    tell(f"note: {error} The measures go on; saving is tried after each of them.")

    def illustrate(
        self, surfaces: Mapping[str, LossSurface], without: list[str] | None, seed: int
    ) -> None:
        """Compute what the page shows beside the result, if there is to be a page.

        Args:
            surfaces: What was measured, by name.
            without: What to leave out.
            seed: Of everything random.
        """
        from flatgauge.analysis.request import show_progress
        from flatgauge.cli.extras import Illustrations, illustrate
        from flatgauge.cli.output import watched

        if self._html is None:
            return
        parts = parts_without(without or [])
        found = Illustrations()
        # Filled piece by piece: Ctrl-C leaves what is finished.
        self.illustrations |= vars(found)
        with show_progress(watched(), *surfaces.values()) as tell:
            illustrate(surfaces, parts=parts, seed=seed, progress=tell, found=found)

    @property
    def finished(self) -> int:
        """How many measures are in the result."""
        from flatgauge.analysis.comparison import Comparison

        if isinstance(self.result, Comparison):
            return sum(len(report) for report in self.result.values())
        return 0 if self.result is None else len(self.result)

    def publish(self) -> tuple[list[str], list[OSError]]:
        """Write the page.

        Returns:
            The files that hold the result, and why others do not.
        """
        if self.result is None:
            return [], []
        places, errors = [], []
        if self._unsaved is not None:
            errors.append(self._unsaved)
        elif self._save is not None:
            places.append(self._save)
        if self._html is not None:
            command = shlex.join(["flatgauge", *sys.argv[1:]])
            shown = dict(self.illustrations)
            remarks = [*self.notes, *shown.pop("remarks", ())]
            try:
                self.result.to_html(self._html, command=command, remarks=remarks, **shown)
                places.append(self._html)
            except OSError as error:
                errors.append(error)
        return places, errors


def parts_without(words: list[str]) -> list[str]:
    """The parts of a page but for some.

    Args:
        words: Those that are left out.

    Returns:
        The others.

    Raises:
        ValueError: If there is no such part.
    """
    from flatgauge.cli.extras import PARTS

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

    Raises:
        SystemExit: What ended the measures, as every error.
    """
    keeper = Keeper(save, html)
    try:
        yield keeper
    except KeyboardInterrupt:
        _tell_unfinished(keeper, "interrupted", json=json)
        end(INTERRUPTED)
    except (Exception, SystemExit):
        if keeper.result is not None:
            _tell_unfinished(keeper, "finished before the error", json=json)
        raise
    places, errors = keeper.publish()
    for place in places:
        tell(f"wrote {place}")
    if errors:
        raise errors[0]


def _tell_unfinished(keeper: Keeper, why: str, *, json: bool) -> None:
    """Say what is finished and where it is; print it if it is nowhere else."""
    from flatgauge.cli.output import print_result

    if keeper.result is None:
        tell(f"{why} before the first measure was finished")
        return
    places, errors = keeper.publish()
    for error in errors:
        tell(f"error: {error}")
    if not places and not rank():
        print_result(keeper.result, json, keeper.notes)
    of = f" of {keeper.total}" if keeper.total else ""
    where = f"in {' and '.join(places)}" if places else "printed above; --save FILE keeps them"
    tell(f"{why}: {keeper.finished}{of} measures are finished, {where}")
