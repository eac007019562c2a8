"""From one number per layer to one number for the network, with its errors.

In: a `LayerValue` per layer, with what is known of its errors. Out: an `Estimate`, their sum, the
largest, or the last. Numbers of single samples are kept along, so that two networks can be compared
on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from flatgauge.estimators.estimate import Estimate

#: How many layers a note names before it counts the others.
_NAMED = 3


@dataclass(frozen=True)
class LayerValue:
    """A layer's number and its errors.

    Attributes:
        stderr: From the estimator's own randomness.
        bound: What an iterative solver left.
        data_stderr: From the choice of samples, None if not known.
        samples: The contribution of every sample (N,), whose mean is the value; None if not known.
        draws: The value by every random vector (probes,), whose mean is the value (to first order,
            where it is not a mean); None where none were drawn, or layers do not share them.
        exact: Whether it is the definition itself, up to rounding.
    """

    value: float
    stderr: float = 0.0
    bound: float = 0.0
    data_stderr: float | None = None
    samples: Tensor | None = None
    draws: Tensor | None = None
    exact: bool = True
    converged: bool = True


def select_layers(names: Iterable[str], layers: str | Sequence[str] | None) -> list[str]:
    """The layers that glob patterns match, in their order; None matches all."""
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


def aggregate_layers(
    values: Mapping[str, LayerValue],
    join: str,
    *,
    units: Mapping[str, Tensor] | None = None,
    notes: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    details: Mapping[str, float] | None = None,
) -> Estimate:
    """The sum of the layers' numbers, the largest, or the last, as `join` says."""
    layers = {name: item.value for name, item in values.items()}
    if join == "sum":
        parts = list(values.values())
        value, samples = math.fsum(layers.values()), _sum_samples(parts)
        data_stderr = standard_error(samples)
    else:
        chosen = max(layers, key=lambda n: layers[n]) if join == "max" else list(layers)[-1]
        parts = [values[chosen]]
        value, samples = layers[chosen], values[chosen].samples
        data_stderr = values[chosen].data_stderr
        notes = [*notes, f"the {'largest' if join == 'max' else 'last'} layer is `{chosen}`"]
    everywhere = parts if join == "last" else list(values.values())
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
    # That of the sums of random vectors, which all layers share; where there are none (random
    # combinations of factors), errors are added up.
    drawn = [part.draws for part in parts if part.draws is not None]
    together = standard_error(sum(drawn[1:], drawn[0])) if drawn else None
    return math.hypot(together or 0.0, sum(part.stderr for part in parts if part.draws is None))


def _sum_samples(parts: Sequence[LayerValue]) -> Tensor | None:
    """The contributions of samples to a sum, None where those to one of the layers are unknown."""
    known = [part.samples for part in parts if part.samples is not None]
    complete = known and len(known) == len(parts)
    return sum(known[1:], known[0]) if complete else None


def ratio_influence(totals: Tensor, counts: Tensor) -> Tensor:
    """The contribution of every sample to a ratio of sums: their mean is the ratio."""
    # The ratio plus the sample's residual over the mean count: their spread gives its error.
    ratio = totals.sum() / counts.sum()
    return ratio + (totals - ratio * counts) / counts.mean()


def join_samples(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """The numbers of single samples, from chunks of them; an empty tensor where there are none."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat(list(pieces)) if pieces else empty


def standard_error(numbers: Tensor | None) -> float | None:
    """The standard error of a mean; None where there are fewer than two numbers."""
    if numbers is None or len(numbers) < 2:
        return None
    return float(numbers.std() / math.sqrt(len(numbers)))


def estimation_notes(reasons: Mapping[str, str]) -> list[str]:
    """One note per reason on what was estimated, from reasons by parameter."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    notes = []
    for reason, names in by_reason.items():
        shown = ", ".join(names[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        notes.append(f"{shown}{more} estimated: {reason}")
    return notes
