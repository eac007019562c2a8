"""A page with one picture: one file, with nothing from outside, for light and dark screens."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

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
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; color: #1a1a1a; background: #fff; }}
h1 {{ font-size: 1.3rem; }}
p {{ color: #555; max-width: 45rem; }}
pre {{ font-size: 0.85rem; overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e6e6e6; background: #16181c; }}
  p {{ color: #a0a4ab; }}
  .main-svg text {{ fill: #d0d3d8 !important; }}
  .hoverlayer text {{ fill: #fff !important; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{picture}
<p>{caption}</p>
<pre>{text}</pre>
</body>
</html>
"""


def write_figure(path: str | Path, figure: Figure, *, title: str, caption: str, text: str) -> Path:
    """Write a page with one picture.

    Args:
        path: Where.
        figure: The picture.
        title: Over it.
        caption: Below it.
        text: The numbers, as lines of text.

    Returns:
        The path.
    """
    picture = figure.to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}
    )
    page = _PAGE.format(
        title=escape(title), picture=picture, caption=escape(caption), text=escape(text)
    )
    place = Path(path)
    place.write_text(page, encoding="utf-8")
    return place
