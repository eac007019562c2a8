"""The files of a command: checked before it starts, and nothing that is finished is lost.

`check_outputs` refuses to write over what the command reads. Within `saving_results` every finished
measure is saved; on Ctrl-C and on errors the results so far are written, or else printed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.cli.application import end
from flatgauge.cli.interrupts import INTERRUPTED
from flatgauge.cli.options import PagePart
from flatgauge.cli.streams import log
from flatgauge.cli.torchrun import rank
from flatgauge.loading.files import expand

if TYPE_CHECKING:
    from flatgauge.analysis.comparison import Comparison
    from flatgauge.analysis.measurement import Report
    from flatgauge.surface.surface import LossSurface


# -- files that must not be touched ---------------------------------------------------------------


def check_outputs(read: Iterable[str | None], **outputs: str | Path | None) -> None:
    """Refuse outputs before anything is computed for them.

    Args:
        read: The words that name what the command reads: models, checkpoints, data, losses.
        **outputs: The files to write, by option; None is left out.

    Raises:
        ValueError: If a file is read by the command, or is to hold two outputs.
        OSError: If it cannot be written.
    """
    if rank():  # The first one writes.
        return
    from flatgauge.analysis.files import check_writable

    files = {f"--{name}": Path(path) for name, path in outputs.items() if path is not None}
    words = [word for word in read if word is not None]
    for option, file in files.items():
        for word in words:
            if _reads(word, file):
                raise ValueError(
                    f"`{option} {file}` would overwrite what this command reads (`{word}`); name "
                    "another file."
                )
        check_writable(file)
    for (one, file), (other, second) in combinations(files.items(), 2):
        if _same_file(file, second):
            raise ValueError(
                f"`{one} {file}` and `{other} {second}` are the same file, and the second would "
                "replace the first; give two names."
            )


def _reads(word: str, file: Path) -> bool:
    """Whether a word (`file`, `file.py:name`, `module:name`, `name:folder`) means a file."""
    start = word.rpartition(":")[0]
    module = start.replace(".", "/")
    paths = (word, start, f"{module}.py", f"{module}/__init__.py")
    if any(path and _same_file(file, Path(path)) for path in paths):
        return True
    folders = [expand(name) for name in (word, word.partition(":")[2]) if name]
    target = Path(os.path.realpath(expand(file)))
    if not any(folder.resolve() in target.parents for folder in folders if os.path.isdir(folder)):
        return False
    from flatgauge.loading.files import is_data_file

    return target.exists() and is_data_file(target)


def _same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file (not to a device that swallows both)."""
    one, other = expand(one), expand(other)
    try:
        if one.exists() and not one.is_file():
            return False
        return os.path.realpath(one) == os.path.realpath(other) or (
            one.exists() and other.exists() and one.samefile(other)
        )
    except OSError:  # A name that no file can have.
        return False


def check_picture(png: Path | None) -> None:
    """Refuse a picture whose ending names no format that can be drawn."""
    from flatgauge.report.plots.style import picture_forms

    if png is not None and png.suffix[1:].lower() not in (forms := picture_forms()):
        raise ValueError(
            f"`--png {png}` does not end in a form of picture; use one of {', '.join(forms)}."
        )


def write_files(writers: dict[Path | None, Callable[[Path], Any]]) -> None:
    """Write files; one that fails does not keep others from being written.

    Args:
        writers: What writes each of them; None is left out.

    Raises:
        OSError: The first that could not be written, after all others are.
    """
    errors = []
    for path, write in writers.items():
        if path is None:
            continue
        try:
            write(path)
            log(f"wrote {path}")
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# -- results so far -------------------------------------------------------------------------------


class ResultWriter:
    """Takes every result so far; give it as `save`.

    Attributes:
        result: The latest one, None before the first measure is finished.
        extras: What the page shows beside the result, by keyword of `to_html`.
        notes: On the models, written with the result.
        total: How many measures there are of all models together.
    """

    def __init__(self, save: str | None, html: str | None) -> None:
        self.result: Report | Comparison | None = None
        self.extras: dict[str, Any] = {}
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
                    log(f"note: {error} The measures go on; saving is tried after each of them.")

    def add_extras(
        self, surfaces: Mapping[str, LossSurface], without: Iterable[str], seed: int
    ) -> None:
        """Compute what the page shows beside the result, but for some parts, if there is a page."""
        from flatgauge.analysis.request import show_progress
        from flatgauge.cli.extras import PageExtras, compute_extras
        from flatgauge.cli.output import shows_progress

        if self._html is None:
            return
        parts = [part for part in PagePart if part not in without]
        found = PageExtras()
        # Filled piece by piece: Ctrl-C leaves what is finished.
        self.extras |= vars(found)
        with show_progress(shows_progress(), *surfaces.values()) as progress:
            compute_extras(surfaces, parts=parts, seed=seed, progress=progress, found=found)

    @property
    def finished_count(self) -> int:
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
        files, errors = [], []
        if self._unsaved is not None:
            errors.append(self._unsaved)
        elif self._save is not None:
            files.append(self._save)
        if self._html is not None:
            command = shlex.join(["flatgauge", *sys.argv[1:]])
            extras = dict(self.extras)
            remarks = [*self.notes, *extras.pop("remarks", ())]
            try:
                self.result.to_html(self._html, command=command, remarks=remarks, **extras)
                files.append(self._html)
            except OSError as error:
                errors.append(error)
        return files, errors


@contextmanager
def saving_results(save: str | None, html: str | None, *, json: bool) -> Iterator[ResultWriter]:
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
    writer = ResultWriter(save, html)
    try:
        yield writer
    except KeyboardInterrupt:
        _rescue(writer, "interrupted", json=json)
        end(INTERRUPTED)
    except (Exception, SystemExit):
        if writer.result is not None:
            _rescue(writer, "finished before the error", json=json)
        raise
    files, errors = writer.publish()
    for file in files:
        log(f"wrote {file}")
    if errors:
        raise errors[0]


def _rescue(writer: ResultWriter, why: str, *, json: bool) -> None:
    """Write what is finished and log where it is; print it if it is nowhere else."""
    from flatgauge.cli.output import print_result

    if writer.result is None:
        log(f"{why} before the first measure was finished")
        return
    files, errors = writer.publish()
    for error in errors:
        log(f"error: {error}")
    if not files and not rank():
        print_result(writer.result, json, writer.notes)
    of = f" of {writer.total}" if writer.total else ""
    where = f"in {' and '.join(files)}" if files else "printed above; --save FILE keeps them"
    log(f"{why}: {writer.finished_count}{of} measures are finished, {where}")
