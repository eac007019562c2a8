"""A picture as a page of its own: one file, no request to anywhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.analysis.files import atomic_write

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
p, li {{ color: #555; max-width: 45rem; }}
pre {{ font-size: 0.85rem; overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e8e8e8; background: #16181c; }}
  p, li {{ color: #a8acb3; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
<p>{caption}</p>
{notes}
{text}
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


def write_figure(
    path: str | Path,
    figure: Figure,
    *,
    title: str,
    caption: str,
    notes: Sequence[str] = (),
    text: str = "",
) -> Path:
    """Write a plotly figure as one page that needs nothing else.

    Args:
        path: Where to.
        figure: The picture.
        title: Over it.
        caption: Below it.
        notes: Below the caption, as a list.
        text: Below the notes: numbers, as lines of text.

    Returns:
        The path.
    """
    picture = figure.to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    page = _PAGE.format(
        title=escape(title),
        picture=picture,
        caption=escape(caption),
        notes=f"<ul>{items}</ul>" if items else "",
        text=f"<pre>{escape(text)}</pre>" if text else "",
    )
    return atomic_write(path, page)
