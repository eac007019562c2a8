"""The forms of pictures that can be written."""

from __future__ import annotations


def picture_forms() -> list[str]:
    """The endings of files that matplotlib can write: png, pdf, svg, ..."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())
