"""What commands read and print in the same way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from flatgauge.analysis.formatting import one_line
from flatgauge.cli.ranks import device_of, processes
from flatgauge.cli.streams import show, tell, writes_unicode

if TYPE_CHECKING:
    from pathlib import Path

    from flatgauge.analysis.result import Result
    from flatgauge.surface.surface import LossSurface


def opened(ctx: typer.Context) -> tuple[LossSurface, list[str]]:
    """The surface that the options of a command describe; notes on it are told, and given back."""
    from flatgauge.cli.session import open_surface

    words = words_for(open_surface, ctx) | {"device": device_of(ctx.params["device"])}
    surface, notes = open_surface(**words, processes=processes())
    for note in notes:
        tell(f"note: {note}")
    return surface, notes


def all_opened(
    ctx: typer.Context, words: list[str], names: str | None = None
) -> tuple[dict[str, LossSurface], list[str]]:
    """The surfaces of several models, by name; notes on them are told, and given back.

    Args:
        ctx: The command, with the options of data and loss.
        words: Models, each with the checkpoints that follow it.
        names: What to call them, with commas; None for the names of their files.

    Returns:
        The surfaces and the notes.
    """
    from flatgauge.cli.model_words import names_of, read_models
    from flatgauge.cli.session import open_surfaces

    entries = read_models(words)
    labels = _labels(names, len(entries)) or names_of(entries)
    named = dict(zip(labels, entries, strict=True))
    chosen = words_for(open_surfaces, ctx) | {"device": device_of(ctx.params["device"])}
    surfaces, notes = open_surfaces(named, **chosen, processes=processes())
    for note in notes:
        tell(f"note: {note}")
    return surfaces, notes


def check_form(png: Path | None) -> None:
    """Refuse a picture in a form that cannot be drawn, before anything is computed.

    Args:
        png: A picture, in the form that its ending names.

    Raises:
        ValueError: If there is no such form.
    """
    from flatgauge.report.plots.forms import picture_forms

    if png is not None and png.suffix[1:].lower() not in (forms := picture_forms()):
        raise ValueError(
            f"`--png {png}` does not end in a form of picture; use one of {', '.join(forms)}."
        )


def write_files(writers: dict[Path | None, Callable[[Path], Any]]) -> None:
    """Write files and say so; one that fails does not keep others from being written.

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
            tell(f"wrote {path}")
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def words_for(function: Any, ctx: typer.Context) -> dict[str, Any]:
    """Those options of a command that a function takes, by name."""
    import inspect

    return {
        name: ctx.params[name]
        for name in inspect.signature(function).parameters
        if name in ctx.params
    }


def styled() -> bool:
    """Whether stdout wants colours and frames: a terminal, or FORCE_COLOR."""
    from rich.console import Console

    return Console().is_terminal


def watched() -> bool:
    """Whether somebody sees a progress bar on stderr."""
    from rich.console import Console

    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def with_command(result: Any, notes: list[str]) -> dict[str, Any]:
    """A result for a program, with the command that it came from."""
    told: dict[str, Any] = result.to_dict()
    notes = [*notes, *told.pop("notes", [])]
    return {"command": sys.argv[1:], "notes": notes} | told


def print_json(contents: dict[str, Any]) -> None:
    """Print contents for a program."""
    import json

    show(json.dumps(contents, indent=2, ensure_ascii=not writes_unicode()))


def print_result(result: Result, json: bool, notes: list[str]) -> None:
    """Print a result for a program, a person at a terminal, or a file."""
    if json:
        print_json(with_command(result, notes))
    elif not styled():
        show(repr(result))
    else:
        from rich.console import Console

        from flatgauge.report.tables import print_tables

        print_tables(result.tables(), Console())


def _labels(names: str | None, count: int) -> list[str] | None:
    """The names that were given, if they fit."""
    if names is None:
        return None
    labels = [one_line(name.strip()) for name in names.split(",")]
    if len(set(labels)) != count or len(labels) != count or not all(labels):
        raise ValueError(
            f"`--names {names}` has {len(set(filter(None, labels)))} different names, and there "
            f"are {count} models; give one for each, with commas between them."
        )
    return labels
