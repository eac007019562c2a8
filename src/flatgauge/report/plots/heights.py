"""What pictures of landscapes share: heights over ticks, and the scale they are shown on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Heights are cut off where the highest rise above the lowest is more than so many times what
#: nine of ten points stay below.
_STEEP, _MOST = 3.0, 0.9


@dataclass(frozen=True)
class Heights:
    """Heights over a line or a plane.

    Attributes:
        name: How it is called beside others; empty if it is alone.
        ticks: Along every axis (points,).
        values: Heights, one axis per direction.
        beyond: Where they belong to something else, and are shown apart.
        marks: Points with names, and where they are.
    """

    name: str
    ticks: NDArray[np.float64]
    values: NDArray[np.float64]
    beyond: NDArray[np.bool_]
    marks: Mapping[str, tuple[float, ...]]

    def shown(self, scale: ColourScale) -> NDArray[np.float64]:
        """The heights on a scale: nan where there are none, or where they lie beyond."""
        return np.where(self.beyond, np.nan, scale.height(self.values))


@dataclass(frozen=True)
class ColourScale:
    """How heights are shown, the same for all that are shown together.

    Attributes:
        label: What they are.
        low: The lowest height shown, as it was given.
        high: The highest.
        log: Whether the scale is logarithmic.
        cut: Whether there are heights above the highest.
    """

    label: str
    low: float
    high: float
    log: bool
    cut: bool

    @property
    def axis_label(self) -> str:
        """What stands at the axis of heights on the scale."""
        return f"log₁₀ {self.label}" if self.log else self.label

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest height on the scale."""
        low, high = (float(self.height(np.array(end))) for end in (self.low, self.high))
        return low, high if high > low else low + 1.0

    def height(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Heights on the scale; nan where they are not finite.

        Args:
            values: The heights.

        Returns:
            Themselves, or their logarithms.
        """
        finite: NDArray[np.float64] = np.where(np.isfinite(values), values, np.nan)
        if not self.log:
            return finite
        floored: NDArray[np.float64] = np.log10(np.maximum(finite, self.low))
        return floored

    def cut_off(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Heights on the scale, none above its end."""
        lower: NDArray[np.float64] = np.minimum(values, self.ends[1])
        return lower


def scale_of(heights: Sequence[Heights], what: str, *, log: bool = False) -> ColourScale:
    """The scale on which heights are shown together.

    Args:
        heights: All that are shown.
        what: ``"loss"`` or ``"accuracy"``, in per cent.
        log: Whether it is logarithmic.

    Returns:
        The scale. On a linear one, steep walls are cut off.
    """
    label = "accuracy (%)" if what == "accuracy" else what
    values = np.concatenate([one.values[~one.beyond].reshape(-1) for one in heights])
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
    if not values.size:
        return ColourScale(label, *((1.0, 10.0) if log else (0.0, 1.0)), log, False)
    low, high = float(values.min()), float(values.max())
    wall = low + _STEEP * (float(np.quantile(values, _MOST)) - low)
    if log or what == "accuracy" or not low < wall < high:
        return ColourScale(label, low, high, log, False)
    return ColourScale(label, low, wall, log, True)
