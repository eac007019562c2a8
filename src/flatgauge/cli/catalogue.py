"""`flatgauge catalogue`: what can be measured."""

from __future__ import annotations

from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.options import Debug, Json, measure_names


@app.command(epilog="Example: flatgauge catalogue hessian_trace")
def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A measure, to be explained in full.", autocompletion=lambda: measure_names()
        ),
    ] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")] = False,
    debug: Debug = False,
) -> None:
    """List every measure, what it is and what it is invariant to."""
    from flatgauge.measures import catalogue as frame
    from flatgauge.measures import registry
    from flatgauge.report.catalogue import explain, markdown_page, overview

    if json:
        rows = frame()
        chosen = rows if name is None else rows[rows["name"] == registry[name].name]
        typer.echo(chosen.to_json(orient="records", indent=2, force_ascii=False))
    elif name is not None:
        typer.echo(explain(name))
    else:
        typer.echo(markdown_page() if markdown else overview())
