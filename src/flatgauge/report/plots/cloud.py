"""Clouds of points: what is drawn, its colours, and the line through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Level: TypeAlias = str | float

#: Numbers that take more different values than this are coloured by a scale, not one by one.
MOST_LEVELS = 6

#: Positive values that span more than this factor are shown on a logarithmic axis.
_DECADE = 10.0

#: Letters; longer labels are broken, so that panels beside each other have room.
_LONG = 24

#: Where the ends of the band lie among the lines through redrawn points: 95 % between them.
BAND = (0.025, 0.975)


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points with names, one for every run.

    Attributes:
        x: Across (runs,).
        y: Upwards (runs,).
        label: What `x` is.
        target: What `y` is.
        names: Of the runs, shown where one points at them.
        counted: Which of them the line is drawn through; the others are shown hollow and grey.
        title: Of the panel: a correlation, as text.
        groups: What every point is coloured by; empty for one colour.
        factor: What the groups are.
        left_out: What the points that are not counted are called.
    """

    x: Floats
    y: Floats
    label: str
    target: str
    names: tuple[str, ...]
    counted: NDArray[np.bool_]
    title: str = ""
    groups: tuple[Level, ...] = ()
    factor: str = ""
    left_out: str = "not counted"

    def __post_init__(self) -> None:
        lengths = {"y": len(self.y), "names": len(self.names), "counted": len(self.counted)}
        if self.groups:
            lengths["groups"] = len(self.groups)
        wrong = [f"`{key}` has {n}" for key, n in lengths.items() if n != len(self.x)]
        if wrong:
            raise ValueError(
                f"a cloud of {len(self.x)} points in `x`, but {', '.join(wrong)}; "
                "give one of each for every point."
            )

    @property
    def there(self) -> NDArray[np.bool_]:
        """Which points can be drawn: both numbers are finite."""
        found: NDArray[np.bool_] = np.isfinite(self.x) & np.isfinite(self.y)
        return found

    @property
    def log(self) -> bool:
        """Whether `x` is shown on a logarithmic axis: all positive, over more than a decade."""
        shown = self.x[self.there]
        return bool(shown.size and shown.min() > 0 and shown.max() > _DECADE * shown.min())

    @property
    def axis_label(self) -> str:
        """What stands at the axis of `x`: also its scale, and what it does not show."""
        text = _break_label(self.label)
        if self.log:
            gap = "\n" if len(text.split("\n")[-1]) > _LONG else " "
            text = f"{text}{gap}(log scale)"
        missing = int((~self.there).sum())
        return text + (f"\n{missing} of {len(self.x)} not finite, not drawn" if missing else "")


def _break_label(label: str) -> str:
    """A label in two lines if it is long, broken where its words meet, near the middle."""
    places = [at + 1 for at, letter in enumerate(label) if letter in "_ " and at + 1 < len(label)]
    if len(label) <= _LONG or not places:
        return label
    middle = min(places, key=lambda at: abs(at - len(label) / 2))
    return f"{label[:middle]}\n{label[middle:]}"


@dataclass(frozen=True)
class Key:
    """How groups are told apart, the same for all panels of a picture.

    Attributes:
        factor: What the groups are; empty where there are none.
        levels: The different groups, in order.
        smooth: Whether they are numbers on a scale of colours, and not one colour each.
        log: Whether that scale is logarithmic.
    """

    factor: str
    levels: tuple[Level, ...]
    smooth: bool
    log: bool

    def place(self, level: Level) -> float:
        """Where a number lies on the scale of colours: itself, or its logarithm."""
        return float(np.log10(float(level)) if self.log else float(level))

    def ticks(self) -> list[float]:
        """A few of the levels, for the colour bar: both ends, and between them evenly spread."""
        places = np.array([self.place(level) for level in self.levels])
        even = np.linspace(places[0], places[-1], 5)
        nearest = np.abs(places - even[:, None]).argmin(axis=1)
        return [float(self.levels[number]) for number in dict.fromkeys(nearest.tolist())]


def key_of(clouds: Sequence[Cloud]) -> Key:
    """The key of panels that are shown together.

    Args:
        clouds: Their points.

    Returns:
        The key: numbers in order of size, other groups in the order they come in.
    """
    found = dict.fromkeys(level for cloud in clouds for level in cloud.groups)
    factor = next((cloud.factor for cloud in clouds if cloud.factor), "")
    if not all(_is_number(level) for level in found):
        return Key(factor, tuple(found), smooth=False, log=False)
    levels = tuple(sorted({float(level) for level in found if np.isfinite(float(level))}))
    smooth = len(levels) > MOST_LEVELS
    log = smooth and levels[0] > 0 and levels[-1] > _DECADE * levels[0]
    return Key(factor, levels, smooth, log)


def level_text(level: Level) -> str:
    """How a group is written: numbers to six digits.

    Args:
        level: A number or a word.

    Returns:
        The text.
    """
    return f"{float(level):g}" if _is_number(level) else str(level)


def _is_number(level: Any) -> bool:
    """Also those of numpy; true and false are words."""
    return isinstance(level, Real) and not isinstance(level, bool)


@dataclass(frozen=True)
class Line:
    """A straight line on the shown scale, and the band that redrawn points leave it in.

    Attributes:
        x: Where it is drawn, as the axis is labelled (points,).
        y: Its heights.
        low: The lower end of the band.
        high: The upper end.
    """

    x: Floats
    y: Floats
    low: Floats
    high: Floats


def line_through(cloud: Cloud, *, generator: np.random.Generator, draws: int = 1000) -> Line | None:
    """The least-squares line through the points that count, on the scale they are shown on.

    Args:
        cloud: The points.
        generator: Source of randomness for the band.
        draws: How many times the points are redrawn, with repetition.

    Returns:
        The line, None where there are fewer than three points or all have the same `x`.
    """
    kept = cloud.there & cloud.counted
    x, y = cloud.x[kept].astype(np.float64), cloud.y[kept].astype(np.float64)
    x = np.log10(x) if cloud.log else x
    if len(x) < 3 or np.ptp(x) <= 1e-12 * np.abs(x).max():
        return None
    where = np.linspace(x.min(), x.max(), 40)
    # Around the middle, so that no digits are lost; and the points themselves come first.
    middle, size = x.mean(), np.ptp(x)
    drawn = np.vstack([np.arange(len(x)), generator.integers(len(x), size=(draws, len(x)))])
    heights = _lines((x[drawn] - middle) / size, y[drawn], (where - middle) / size)
    low, high = np.quantile(heights[1:], BAND, axis=0)
    return Line(10**where if cloud.log else where, heights[0], low, high)


def _lines(x: Floats, y: Floats, where: Floats) -> Floats:
    """The least-squares lines through many sets of points (sets, points), at some places."""
    across, up = x.mean(axis=1, keepdims=True), y.mean(axis=1, keepdims=True)
    spread = ((x - across) ** 2).sum(axis=1)
    together = ((x - across) * (y - up)).sum(axis=1)
    sound = spread > 1e-24  # The same point again and again has no line.
    slope = together[sound] / spread[sound]
    lines: Floats = up[sound] + slope[:, None] * (where - across[sound])
    return lines


def y_limits(clouds: Sequence[Cloud]) -> tuple[float, float]:
    """The ends of the vertical axis that panels share, with a little room.

    Args:
        clouds: Their points.

    Returns:
        Below the lowest and above the highest.
    """
    shown = np.concatenate([cloud.y[cloud.there] for cloud in clouds]) if clouds else np.array([])
    if not shown.size:
        return 0.0, 1.0
    low, high = float(shown.min()), float(shown.max())
    room = 0.08 * (high - low) or 0.5 * abs(high) or 0.5
    return low - room, high + room


def x_limits(cloud: Cloud) -> tuple[float, float]:
    """The ends of a panel's horizontal axis on the scale it shows: exponents of ten if `log`.

    Args:
        cloud: Its points.

    Returns:
        Left of the first point and right of the last.
    """
    shown = cloud.x[cloud.there]
    if not shown.size:
        return 0.0, 1.0
    shown = np.log10(shown) if cloud.log else shown
    low, high = float(shown.min()), float(shown.max())
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    return low - room, high + room
