"""From one number per layer to one number for the network, with its errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from flatgauge.estimators import Estimate

#: How many layers a note names before it counts the others.
_NAMED = 3


@dataclass(frozen=True)
class LayerValue:
    """A layer's number and how far it may be off.

    Attributes:
        value: The number.
        stderr: From the estimator's own randomness.
        bound: What an iterative solver left.
        data_stderr: From the choice of samples, None if not known.
        samples: Every sample's share (N,): their mean is the value; None if not known.
        draws: What every random vector says (probes,): their mean is the value (to first order,
            where it is no mean); None where none were drawn, or the vectors are not shared with
            other layers.
        exact: Whether it is the definition itself, up to rounding.
        converged: Whether the solver met its tolerance.
    """

    value: float
    stderr: float = 0.0
    bound: float = 0.0
    data_stderr: float | None = None
    samples: Tensor | None = None
    draws: Tensor | None = None
    exact: bool = True
    converged: bool = True


def select(names: Iterable[str], layers: str | Sequence[str] | None) -> list[str]:
    """The layers that patterns name.

    Args:
        names: All layers.
        layers: Glob patterns, None for all.

    Returns:
        The names, in their order.

    Raises:
        ValueError: If there are no layers, or a pattern matches none.
    """
    names = list(names)
    if not names:
        raise ValueError(
            "the model has no layers: no trainable parameter is contracted with an activation by "
            "a linear map, a matrix product or a convolution. Measures that need no layers are "
            "`hessian_trace`, `hessian_max_eigenvalue`, `epsilon_sharpness`, `expected_sharpness`."
        )
    if layers is None:
        return names
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, (list, tuple, set, frozenset)) or not patterns:
        raise ValueError(
            f"`layers={layers!r}` must be a glob pattern or a list of them, or None for all layers."
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"`layers={pattern!r}` matches no layer; the layers are {', '.join(names)}."
            )
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def combined(
    values: Mapping[str, LayerValue],
    how: str,
    *,
    units: Mapping[str, Tensor] | None = None,
    notes: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    details: Mapping[str, float] | None = None,
) -> Estimate:
    """Join the layers' numbers.

    Args:
        values: By layer.
        how: ``"sum"``, ``"max"``, or ``"last"``.
        units: The values of every layer's units.
        notes: What the reader must know.
        options: The settings the values depend on.
        details: Further numbers.

    Returns:
        The estimate. The error of a sum is that of the random vectors' own sums, which all layers
        share; where there are none (mixtures of columns), errors are added up.
    """
    layers = {name: item.value for name, item in values.items()}
    if how == "sum":
        parts = list(values.values())
        value, samples = math.fsum(layers.values()), _shares_in_sum(parts)
        data_stderr = spread(samples)
    else:
        chosen = max(layers, key=lambda n: layers[n]) if how == "max" else list(layers)[-1]
        parts = [values[chosen]]
        value, samples = layers[chosen], values[chosen].samples
        data_stderr = values[chosen].data_stderr
        notes = [*notes, f"the {'largest' if how == 'max' else 'last'} layer is `{chosen}`"]
    everywhere = parts if how == "last" else list(values.values())
    bound = sum(part.bound for part in parts)
    return Estimate(
        value,
        stderr=_stderr(parts),
        data_stderr=data_stderr,
        bound=bound or None,
        exact=all(part.exact for part in everywhere),
        converged=all(part.converged for part in everywhere),
        layers=layers,
        units=units or {},
        details=details or {},
        options=options or {},
        notes=tuple(notes),
        samples=samples,
    )


def _stderr(parts: Sequence[LayerValue]) -> float:
    """The standard error of the sum of some layers' numbers."""
    drawn = [part.draws for part in parts if part.draws is not None]
    together = spread(sum(drawn[1:], drawn[0])) if drawn else None
    return math.hypot(together or 0.0, sum(part.stderr for part in parts if part.draws is None))


def _shares_in_sum(parts: Sequence[LayerValue]) -> Tensor | None:
    """Every sample's share in all layers together, None where that of a layer is not known."""
    known = [part.samples for part in parts if part.samples is not None]
    complete = known and len(known) == len(parts)
    return sum(known[1:], known[0]) if complete else None


def as_shares(totals: Tensor, counts: Tensor) -> Tensor:
    """Every sample's share in a ratio: their mean is the ratio, and their spread its error.

    Args:
        totals: What every sample adds above the line (N,).
        counts: What it adds below (N,).

    Returns:
        The shares: the ratio plus the residual totals − ratio · counts over the mean count.
    """
    ratio = totals.sum() / counts.sum()
    return ratio + (totals - ratio * counts) / counts.mean()


def rows_of(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers of single samples that came chunk by chunk, joined; none where there are no data."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat(list(pieces)) if pieces else empty


def spread(shares: Tensor | None) -> float | None:
    """The standard error of the mean of shares; None where there are none, or one only."""
    if shares is None or len(shares) < 2:
        return None
    return float(shares.std() / math.sqrt(len(shares)))


def told(reasons: Mapping[str, str]) -> list[str]:
    """Notes on what could not be swept.

    Args:
        reasons: Why, by parameter.

    Returns:
        One note per reason.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    notes = []
    for reason, names in by_reason.items():
        shown = ", ".join(names[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        notes.append(f"{shown}{more} estimated: {reason}")
    return notes
