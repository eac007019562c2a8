"""A logarithmic axis that has room for zero and for both signs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

#: Most labels on one axis.
_LABELS = 9


@dataclass(frozen=True)
class SignedLog:
    r"""The axis :math:`s = \operatorname{asinh}(x / 2c) / \ln 10`.

    Far from zero it counts decades, ``log10(|x| / c)`` with the sign of x; within c of zero it
    is linear. Unlike an axis glued together of two logarithms and a line it has no kink, so that
    a density along it has none either.

    Attributes:
        unit: The c, where the axis goes over from linear to logarithmic.

    Example:
        >>> axis = SignedLog(1e-3)
        >>> axis.place([-1.0, 0.0, 1e-3, 10.0]).round(4).tolist()
        [-3.0, 0.0, 0.209, 4.0]
        >>> axis.ticks(-1.0, 10.0)
        [-1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0, 10.0]
    """

    unit: float

    def __post_init__(self) -> None:
        if not 0 < self.unit < math.inf:
            raise ValueError(f"`unit={self.unit!r}` must be a positive finite number.")

    def place(self, values: ArrayLike) -> Array:
        """Where values stand on the axis.

        Args:
            values: The values.

        Returns:
            Their places, in decades.
        """
        found: Array = np.arcsinh(np.asarray(values, dtype=np.float64) / (2 * self.unit))
        return found / math.log(10)

    def value(self, places: ArrayLike) -> Array:
        """What stands at a place: the inverse of `place`.

        Args:
            places: The places, in decades.

        Returns:
            The values.
        """
        decades: Any = np.asarray(places, dtype=np.float64) * math.log(10)
        found: Array = 2 * self.unit * np.sinh(decades)
        return found

    def ticks(self, low: float, high: float) -> list[float]:
        """Values to label: zero and powers of ten, at even distances and not too many.

        Args:
            low: The smallest value on the axis.
            high: The largest value on the axis.

        Returns:
            The values, rising; powers of ten only where they stand clear of zero.
        """
        first = math.floor(math.log10(self.unit) + 1e-9) + 1

        def reached(end: float) -> int:
            """The last power of ten on one side, as its exponent."""
            return math.floor(math.log10(end) + 1e-9) if end > 0 else first - 1

        up, down = reached(high), reached(-low)
        step = 1
        while (max(up - first + 1, 0) + max(down - first + 1, 0)) / step > _LABELS:
            step += 1
        # Aligned to the far end of the longer side, the labels there are the ones that are read.
        start = first + (max(up, down) - first) % step
        above = [10.0**k for k in range(start, up + 1, step)]
        below = [-(10.0**k) for k in range(start, down + 1, step)]
        return [*reversed(below), *([0.0] if low <= 0 <= high else []), *above]
