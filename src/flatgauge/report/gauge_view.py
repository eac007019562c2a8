"""A gauge group in a page: which channels share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatgauge.report.caveats import shortened
from flatgauge.symmetry.gauge import GaugeGroup, ScaledTensor, ScalePattern

#: More patterns than this are counted, not listed.
MOST_PATTERNS = 200

#: More tensors than this are counted in a cell.
_MOST_TENSORS = 6


@dataclass(frozen=True)
class GaugeView:
    """A gauge group, ready to be shown.

    Attributes:
        name: Of the model.
        told: How many scales there are.
        lines: What a scale belongs to, how many there are, what they multiply and divide.
        left_out: How many lines are not shown.
        pinned: Ops that allow no scaling, with the reason.
    """

    name: str
    told: str
    lines: list[tuple[str, int, str, str]]
    left_out: int
    pinned: list[str]


def gauge_view(name: str, gauge: GaugeGroup) -> GaugeView:
    """Prepare a gauge group.

    Args:
        name: Of the model.
        gauge: The group.

    Returns:
        What to show.
    """
    patterns = gauge.patterns()
    told = f"{gauge.dim:,} independent scales, moving {len(gauge.names)} tensors."
    if not gauge.dim:
        told = "No scale is free: as far as scales go, this model can be written in one way only."
    return GaugeView(
        name=name,
        told=told,
        lines=[_line(pattern) for pattern in patterns[:MOST_PATTERNS]],
        left_out=max(len(patterns) - MOST_PATTERNS, 0),
        pinned=[str(pin) for pin in gauge.pinned],
    )


def gauge_contents(gauge: GaugeGroup) -> dict[str, Any]:
    """A gauge group as plain contents: dim, patterns of scales, what is pinned."""
    patterns = gauge.patterns()
    return {
        "dim": gauge.dim,
        "patterns": [
            {
                "site": pattern.site,
                "scales": pattern.scales,
                "moved": [vars(moved) for moved in pattern.moved],
            }
            for pattern in patterns
        ],
        "pinned": [str(pin) for pin in gauge.pinned],
    }


def _line(pattern: ScalePattern) -> tuple[str, int, str, str]:
    times = [_tensor(moved) for moved in pattern.moved if moved.power > 0]
    over = [_tensor(moved) for moved in pattern.moved if moved.power < 0]
    return (
        pattern.site,
        pattern.scales,
        shortened(times, _MOST_TENSORS),
        shortened(over, _MOST_TENSORS),
    )


def _tensor(moved: ScaledTensor) -> str:
    """A tensor and its axis, with the exponent where it is not one."""
    axis = "" if moved.axis is None else f" [axis {moved.axis}]"
    power = "" if abs(moved.power) == 1 else f"^{abs(moved.power):g}"
    return f"{moved.name}{axis}{power}"
