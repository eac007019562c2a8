"""What every measurement returns: a number that carries its own error.

`Estimate` holds the value, its errors by source, its cost, and what it was computed from;
`format_with_error` keeps the digits that the error leaves standing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

#: An error below this part of the value is not shown: nobody reads that many digits.
_UNSEEN = 1e-7


@dataclass(frozen=True)
class Estimate:
    """A measured number, how far it may be off, and what it cost.

    Attributes:
        value: The number. Lower is flatter.
        stderr: Standard error from the estimator's own randomness; 0 if it drew nothing.
        data_stderr: Standard error from the choice of samples, where it is known.
        bound: Bound on the error left by an iterative solver, where one ran.
        exact: Whether the value is the definition itself, up to rounding, on the given data.
        lower_bound: Whether the true value may lie above, by an amount that is not known.
        converged: Whether the stopping rule was met.
        matvecs: Matrix-vector products spent.
        layers: The value of each layer, by parameter name.
        units: The values of each layer's units, by parameter name.
        details: Further numbers, by name (the other end of the spectrum, a residual, ...).
        options: The settings the value depends on, by name (a radius, a noise level, ...).
        notes: What the reader must know to use the number well.
        seconds: Wall-clock time.
        samples: Every sample's share (N,), in the order of the data: their mean is the value (to
            first order, where it is not a mean), so that values on the same samples can be compared
            pair by pair; None if not known. Not written to files.

    Example:
        >>> print(Estimate(12.3456, stderr=0.0521, matvecs=64))
        12.35 ± 0.05
        >>> print(Estimate(12.3456, exact=True))
        12.3456
    """

    value: float
    stderr: float = 0.0
    data_stderr: float | None = None
    bound: float | None = None
    exact: bool = False
    lower_bound: bool = False
    converged: bool = True
    matvecs: int = 0
    layers: Mapping[str, float] = field(default_factory=dict)
    units: Mapping[str, Tensor] = field(default_factory=dict)
    details: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    samples: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> float:
        """Standard error and solver bound together: how far the value may be off."""
        return self.stderr + (self.bound or 0.0)

    def __str__(self) -> str:
        if not self.error > _UNSEEN * abs(self.value):
            return f"{self.value:.6g}"
        return format_with_error(self.value, self.error)


def format_with_error(value: float, error: float) -> str:
    """Write a value with its error, keeping only the digits the error leaves standing.

    Returns:
        Both, in one line.

    Example:
        >>> format_with_error(12345.678, 42.0)
        '12350 ± 40'
        >>> format_with_error(1.23e-7, 2.2e-9)
        '1.23e-07 ± 2e-09'
    """
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return f"{value:.6g} ± {error:.1g}"
    place = math.floor(math.log10(error))
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        top = math.floor(math.log10(abs(value))) if value else place
        return f"{value:.{min(max(top - place, 0), 6)}e} ± {error:.0e}"
    shown = f"{round(value, -place):.{max(-place, 0)}f}"
    return f"{shown} ± {round(error, -place):.{max(-place, 0)}f}"
