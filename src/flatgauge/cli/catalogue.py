"""`flatgauge catalogue`: what can be measured.

The overview is read from `catalogue.json` beside this file, written from the registry by
`python tools/write_catalogue.py`, so that it is there at once: loading torch takes seconds. Where
other packages add measures, the registry itself is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatgauge.cli.application import app
from flatgauge.cli.options import OUTPUT, Debug, Json, complete_measure, examples, option
from flatgauge.cli.output import is_styled
from flatgauge.cli.streams import show

#: The overview as `flatgauge.report.catalogue.catalogue_rows` gives it.
ROWS = Path(__file__).with_name("catalogue.json")


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
    markdown: Annotated[bool, option("Print a Markdown page.", OUTPUT, "--markdown")] = False,
    debug: Debug = False,
) -> None:
    """List every measure, what it is and what it is invariant to."""
    from flatgauge.report import catalogue as pages

    if json:
        from flatgauge.measures import catalogue as frame
        from flatgauge.measures import registry

        rows = frame()
        chosen = rows if name is None else rows[rows["name"] == registry[name].name]
        show(chosen.to_json(orient="records", indent=2, force_ascii=False))
    elif markdown:
        show(pages.markdown_page())
    elif name is not None and is_styled():
        pages.rich_explain(name)
    elif name is not None:
        show(pages.explain(name))
    elif is_styled():
        pages.rich_overview(_rows())
    else:
        show(pages.overview(_rows()))


def _rows() -> list[dict[str, str]] | None:
    """A row per measure; None where other packages may add some."""
    import json
    from importlib.metadata import entry_points

    if any(entry_points(group=f"flatgauge.{kind}") for kind in ("measures", "rules")):
        return None
    rows: list[dict[str, str]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return rows
