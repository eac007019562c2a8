"""What commands read and print in the same way."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from flatgauge.cli.ranks import device_of, processes, rank

if TYPE_CHECKING:
    from pathlib import Path

    from flatgauge.report import Comparison, Report
    from flatgauge.surface import LossSurface


def opened(ctx: typer.Context) -> tuple[LossSurface, list[str]]:
    """The surface that the options of a command describe; notes on it are told, and given back."""
    from flatgauge.command import open_surface

    words = words_for(open_surface, ctx) | {"device": device_of(ctx.params["device"])}
    surface, notes = open_surface(**words, processes=processes())
    for note in notes:
        typer.echo(f"note: {note}", err=True)
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
    from flatgauge.command import open_surfaces

    entries = read_models(words)
    labels = _labels(names, len(entries)) or names_of(entries)
    named = dict(zip(labels, entries, strict=True))
    chosen = words_for(open_surfaces, ctx) | {"device": device_of(ctx.params["device"])}
    surfaces, notes = open_surfaces(named, **chosen, processes=processes())
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return surfaces, notes


def check_pictures(png: Path | None, html: Path | None) -> None:
    """Refuse files that cannot be drawn into, before anything is computed.

    Args:
        png: A picture, in the form that its ending names.
        html: A page.

    Raises:
        ValueError: If there is no such form.
        OSError: If one cannot be written.
    """
    from flatgauge.drawing.forms import picture_forms
    from flatgauge.writing import check_place

    for place in filter(None, () if rank() else (png, html)):
        check_place(place)
    if png is not None and png.suffix[1:].lower() not in (forms := picture_forms()):
        raise ValueError(
            f"`--png {png}` does not end in a form of picture; use one of {', '.join(forms)}."
        )


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

    typer.echo(json.dumps(contents, indent=2, ensure_ascii=False))


def print_result(result: Report | Comparison, json: bool, notes: list[str]) -> None:
    """Print a result for a program, a person at a terminal, or a file."""
    from flatgauge.report import Comparison

    if json:
        print_json(with_command(result, notes))
    elif not styled():
        typer.echo(repr(result))
    elif isinstance(result, Comparison):
        from flatgauge.report.comparison_table import rich_print

        rich_print(result)
    else:
        from flatgauge.report.table import rich_print as print_report

        print_report(result.facts, result.estimates, complete=result.complete)


def _labels(names: str | None, count: int) -> list[str] | None:
    """The names that were given, if they fit."""
    if names is None:
        return None
    labels = [name.strip() for name in names.split(",")]
    if len(set(labels)) != count or len(labels) != count or not all(labels):
        raise ValueError(
            f"`--names {names}` has {len(set(filter(None, labels)))} different names, and there "
            f"are {count} models; give one for each, with commas between them."
        )
    return labels
