"""How commands print results: for a program, for a person at a terminal, or into a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from flatgauge.cli.streams import show, writes_unicode

if TYPE_CHECKING:
    from flatgauge.analysis.result import Result


def is_styled() -> bool:
    """Whether stdout wants colours and frames: a terminal, or FORCE_COLOR."""
    from rich.console import Console

    return Console().is_terminal


def shows_progress() -> bool:
    """Whether somebody sees a progress bar on stderr."""
    from rich.console import Console

    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def with_command(result: Any, notes: list[str]) -> dict[str, Any]:
    """A result for a program, with the command that it came from."""
    contents: dict[str, Any] = result.to_dict()
    notes = [*notes, *contents.pop("notes", [])]
    return {"command": sys.argv[1:], "notes": notes} | contents


def print_json(contents: dict[str, Any]) -> None:
    """Print contents for a program."""
    import json

    show(json.dumps(contents, indent=2, ensure_ascii=not writes_unicode()))


def print_result(result: Result, json: bool, notes: list[str]) -> None:
    """Print a result for a program, a person at a terminal, or a file."""
    if json:
        print_json(with_command(result, notes))
    elif not is_styled():
        show(repr(result))
    else:
        from rich.console import Console

        from flatgauge.report.tables import print_tables

        print_tables(result.tables(), Console())
