"""What commands read and print in the same way."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flatgauge.report import Report
    from flatgauge.surface import LossSurface


def opened(ctx: typer.Context, **changed: Any) -> tuple[LossSurface, list[str]]:
    """The surface that the options of a command describe; notes on it are told, and given back."""
    import inspect

    from flatgauge.command import open_surface

    known = ctx.params | changed
    words = {name: known[name] for name in inspect.signature(open_surface).parameters}
    surface, notes = open_surface(**words)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return surface, notes


def print_json(contents: dict[str, Any]) -> None:
    """Print results for a program, with the command that they came from."""
    import json

    command = {"command": sys.argv[1:]}
    typer.echo(json.dumps(command | contents, indent=2, ensure_ascii=False))


def print_report(report: Report, json: bool, notes: list[str]) -> None:
    """Print a report for a program, a person at a terminal, or a file."""
    if json:
        print_json({"notes": notes} | report.to_dict())
    elif sys.stdout.isatty():
        from flatgauge.report.table import rich_print

        rich_print(report.facts, report.estimates)
    else:
        typer.echo(repr(report))
