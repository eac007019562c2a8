"""A gauge group in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from flatgauge.symmetry.gauge import GaugeGroup

#: More names than this are counted, not listed.
_MOST_NAMES = 4


def description(gauge: GaugeGroup) -> str:
    """Describe a gauge group.

    Args:
        gauge: The group.

    Returns:
        A table: for every site its number of scales, what they multiply and what they divide;
        then what is pinned, and by what, and what was assumed about the model.
    """
    lines = [f"{gauge.dim} independent scales, moving {len(gauge.names)} tensors"]
    if not gauge.dim:
        lines = ["no scale is free: this model can be written in one way only, as far as scales go"]
    rows = [("scales of the output of", "number", "times", "divided")]
    signs = {name: _signs(gauge, name) for name in gauge.names}
    for site in dict.fromkeys(gauge.sites):
        mine = np.array([s == site for s in gauge.sites])
        up = [name for name, (plus, _) in signs.items() if plus[mine].any()]
        down = [name for name, (_, minus) in signs.items() if minus[mine].any()]
        rows.append((site, str(int(mine.sum())), _listed(up), _listed(down)))
    if gauge.dim:
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    unknown = [pin for pin in gauge.pinned if not pin.known]
    known = [pin for pin in gauge.pinned if pin.known]
    for title, pins in (("without a rule, so pinned:", unknown), ("pinned:", known)):
        if pins:
            lines += [title, *(f"  {pin}" for pin in pins)]
    lines += gauge.notes
    return "\n".join(lines)


def _signs(gauge: GaugeGroup, name: str) -> tuple[np.ndarray, np.ndarray]:
    """For every coordinate, whether it multiplies and whether it divides entries of a tensor."""
    rows = gauge.rows(name).tocoo()
    plus, minus = np.zeros(gauge.dim, bool), np.zeros(gauge.dim, bool)
    plus[rows.col[rows.data > 1e-9]] = True
    minus[rows.col[rows.data < -1e-9]] = True
    return plus, minus


def _listed(names: list[str]) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
