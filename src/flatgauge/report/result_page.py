"""One result as a page of its own, and pages shown where the user looks.

A result enters with its tables and its picture; one HTML file leaves that asks the network for
nothing. `show_page` puts a page into the output of a notebook, or opens it in the browser.
"""

from __future__ import annotations

import webbrowser
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.analysis.files import atomic_write
from flatgauge.report.tables import tables_html

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from flatgauge.analysis.result import Result

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1b1b; background: #fff; }}
h1 {{ font-size: 1.3rem; }}
.caption {{ color: #555; max-width: 45rem; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e8e8e8; background: #16181c; }}
  .caption {{ color: #a8acb3; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
{tables}
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.querySelectorAll(".plotly-graph-div").forEach(
  (plot) => Plotly.relayout(plot, {{"font.color": dark.matches ? "#e8e8e8" : "#1b1b1b"}}));
dark.addEventListener("change", paint);
paint();
</script>
</body>
</html>
"""

#: How tall a page is in the output of a notebook, in pixels.
_HEIGHT = 720


def write_result(path: str | Path, result: Result, figure: Figure | None = None) -> Path:
    """Write a page with the picture and the tables of a result: one file, light and dark."""
    figure, picture = figure or result.figure(), ""
    if figure is not None:
        picture = figure.to_html(
            full_html=False,
            include_plotlyjs=True,
            config={"displaylogo": False, "responsive": True},
        )
        if caption := getattr(result, "caption", ""):
            picture += f'<p class="caption">{escape(caption)}</p>'
    page = _PAGE.format(
        title=escape(result.heading), picture=picture, tables=tables_html(result.tables())
    )
    return atomic_write(path, page)


def show_page(path: Path) -> None:
    """Show a page in the output of a notebook's cell if there is one, else in the browser."""
    if in_notebook():
        from IPython.display import HTML, display

        page = escape(path.read_text(encoding="utf-8"))
        frame = (
            f'<iframe srcdoc="{page}" width="100%" height="{_HEIGHT}" style="border:0"></iframe>'
        )
        display(HTML(frame))
    else:
        webbrowser.open(path.resolve().as_uri())


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel."""
    import sys

    # Nobody has a kernel without having loaded IPython.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
