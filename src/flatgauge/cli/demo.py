"""`flatgauge demo`: the tool at work on data of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.options import OUTPUT, Debug, Seed, Threads, examples
from flatgauge.cli.streams import show


@app.command(epilog=examples("flatgauge demo", "flatgauge demo --html demo.html --seed 1"))
def demo(
    html: Annotated[
        Path, typer.Option(metavar="FILE", help="The report.", rich_help_panel=OUTPUT)
    ] = Path("report.html"),
    threads: Threads = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Train three networks on digits, measure them, disguise one, and write a report."""
    from flatgauge.analysis.files import check_writable
    from flatgauge.cli.demonstration import demonstrate
    from flatgauge.cli.session import set_threads

    check_writable(html)
    set_threads(threads or 1)  # For networks this small one thread is the fastest.
    demonstrate(show, html, seed=seed)
