"""`flatgauge catalogue`: what can be measured."""

from __future__ import annotations

from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.completion import complete_measure
from flatgauge.cli.options import OUTPUT, Debug, Json, examples
from flatgauge.cli.output import styled
from flatgauge.cli.streams import show


@app.command(
    epilog=examples(
        "flatgauge catalogue",
        "flatgauge catalogue normalized_sharpness",
        "flatgauge catalogue --json",
    )
)
def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A measure, to be explained in full.",
            show_default=False,
            autocompletion=complete_measure,
        ),
    ] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown page.", rich_help_panel=OUTPUT)
    ] = False,
    debug: Debug = False,
) -> None:
    """List every measure, what it is and what it is invariant to."""
    from flatgauge.measures import catalogue as frame
    from flatgauge.measures import registry
    from flatgauge.report import catalogue as pages

    if json:
        rows = frame()
        chosen = rows if name is None else rows[rows["name"] == registry[name].name]
        show(chosen.to_json(orient="records", indent=2, force_ascii=False))
    elif markdown:
        show(pages.markdown_page())
    elif name is not None and styled():
        pages.rich_explain(name)
    elif name is not None:
        show(pages.explain(name))
    elif styled():
        pages.rich_overview()
    else:
        show(pages.overview())
