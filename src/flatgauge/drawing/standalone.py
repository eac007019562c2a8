"""A picture as a page of its own: one file, no request to anywhere, light and dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#1b1b1b, #e8e8e8); background: light-dark(#ffffff, #16181c); }}
h1 {{ font-size: 1.4rem; }}
li {{ color: light-dark(#555, #aaa); }}
</style>
</head>
<body>
<h1>{title}</h1>
{figure}
<p>{caption}</p>
{notes}
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
    path: str | Path, figure: Any, title: str, caption: str, notes: Sequence[str] = ()
) -> Path:
    """Write a plotly figure as one page that needs nothing else.

    Args:
        path: Where to.
        figure: The figure.
        title: Above it.
        caption: Below it.
        notes: Below the caption.

    Returns:
        The path.
    """
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    page = _PAGE.format(
        title=html.escape(title),
        figure=figure.to_html(
            full_html=False, include_plotlyjs=True, config={"displaylogo": False}
        ),
        caption=html.escape(caption),
        notes=f"<ul>{items}</ul>" if items else "",
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path
