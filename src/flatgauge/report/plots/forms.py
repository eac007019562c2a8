"""The forms in which pictures can be written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from flatgauge.analysis.files import atomic_write


def picture_forms() -> list[str]:
    """The endings that matplotlib knows: png, pdf, svg and others."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def write_picture(path: str | Path, figure: Any, *, dpi: int) -> Path:
    """Write a figure of matplotlib, whole or not at all.

    Args:
        path: Where to; the ending (.png, .pdf, .svg) says in which form.
        figure: The figure.
        dpi: Dots per inch.

    Returns:
        The path.
    """
    contents = io.BytesIO()
    figure.savefig(contents, format=Path(path).suffix[1:].lower() or "png", dpi=dpi)
    return atomic_write(path, contents.getvalue())
