"""What is known of the Hessian's diagonal blocks, and how numbers of layers become one.

`Blocks` hold, for every parameter, a `Block`: its parts with their errors. A measure makes a
`LayerValue` of each layer's block; `Blocks.aggregate` (or `aggregate_layers`, where values come
from elsewhere) makes an `Estimate` of these: their sum, the largest, or the last. Numbers of single
samples are kept along, so that two networks can be compared on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from flatgauge.curvature.sweep.accumulate import PARTS
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.layers import Layer

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


@dataclass(frozen=True)
class Block:
    """What is known of the Hessian's block of one parameter.

    Attributes:
        name: The parameter.
        exact: Whether everything here is the definition itself, up to rounding.
        reason: Why it is not.
        value: The parameter's value.
        values: By part: one number, one per unit, or (the diagonal) one per weight.
        stderr: How far the estimator may be off, by part; zero where exact. Of a diagonal that
            random factors took part in, it is not known.
        data_stderr: How far other samples of the same kind would move it, by part; of the
            diagonal it is not known.
        samples: Every sample's share in a part, units added up (N,): their mean is the value, and
            their spread over √N its data error.
        draws: A part by every random vector, units added up (probes,), where the block is
            estimated; not of the diagonal.
        sum_stderr: The standard error of the sum over the units, where random factors took part.
        layer: How the parameter is contracted, None for parameters that are not layers.
        rounding: Up to what size the entries of a layer's diagonal may be zeros that rounding
            left, where factors of both signs cancel; None where none do.
    """

    name: str
    exact: bool
    reason: str
    value: Tensor
    values: Mapping[str, Tensor]
    stderr: Mapping[str, Tensor] = field(default_factory=dict)
    data_stderr: Mapping[str, Tensor] = field(default_factory=dict)
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    draws: Mapping[str, Tensor] = field(default_factory=dict)
    sum_stderr: Mapping[str, Tensor] = field(default_factory=dict)
    layer: Layer | None = None
    rounding: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The parameter's value in double precision."""
        return to_float64(self.value)

    @property
    def squared_norm(self) -> float:
        """The squared Frobenius norm of the parameter."""
        return float(self.weight.square().sum())

    def layer_value(self, part: str, scale: float) -> LayerValue:
        """A part of one number, times a factor, with its errors."""
        samples, draws = (
            None if numbers is None else scale * numbers
            for numbers in (self.samples.get(part), self.draws.get(part))
        )
        return LayerValue(
            scale * float(self.values[part]),
            stderr=scale * float(self.stderr[part]),
            data_stderr=standard_error(samples),
            samples=samples,
            draws=draws,
            exact=self.exact,
        )

    def unit_value(self, part: str, how: str) -> LayerValue:
        """The sum of a part over the units, or the largest, with its errors."""
        values, stderr = self.values[part], self.stderr[part]
        if how == "sum":
            samples, draws = self.samples.get(part), self.draws.get(part)
            error = standard_error(draws)
            if error is None:
                error = float(self.sum_stderr.get(part, stderr.new_zeros(())))
            return LayerValue(
                float(values.sum()),
                stderr=error,
                data_stderr=standard_error(samples),
                samples=samples,
                draws=draws,
                exact=self.exact,
            )
        unit = int(values.argmax())
        known = self.data_stderr.get(part)
        return LayerValue(
            float(values[unit]),
            float(stderr[unit]),
            0.0,
            None if known is None or known.isnan().any() else float(known[unit]),
            exact=self.exact,
        )


@dataclass(frozen=True, repr=False)
class Blocks(Mapping[str, Block]):
    """The blocks of the trainable parameters, by name, in the model's order.

    Attributes:
        blocks: By name.
        parts: What is known of each.
        missing: The parameters that were left out because they cannot be swept, and why.
        left_out: Samples that would count, but whose outputs have no loss.
        selection: The patterns that chose the layers, None for all.
        notes: What must be noted with every number that is computed from them.
    """

    blocks: Mapping[str, Block]
    parts: frozenset[str]
    missing: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0
    selection: str | Sequence[str] | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Block:
        return self.blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        exact = sum(block.exact for block in self.values())
        parts = ", ".join(part for part in PARTS if part in self.parts)
        return f"Blocks({len(self)} parameters, {len(self.layers)} layers, {exact} exact; {parts})"

    @property
    def layers(self) -> dict[str, Block]:
        """The blocks of layers."""
        return {name: block for name, block in self.items() if block.layer is not None}

    def select(self, layers: str | Sequence[str] | None) -> Blocks:
        """Leave out the layers that no glob pattern matches; what is not a layer stays."""
        chosen = set(select_layers(self.layers, layers))
        blocks = {n: block for n, block in self.items() if block.layer is None or n in chosen}
        return replace(self, blocks=blocks, selection=layers)

    def aggregate(
        self,
        values: Mapping[str, LayerValue],
        join: str,
        *,
        units: Mapping[str, Tensor] | None = None,
        options: Mapping[str, object] | None = None,
        details: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
    ) -> Estimate:
        """One number of some blocks' numbers, with its errors and notes on what was estimated.

        Args:
            values: By parameter.
            join: ``"sum"``, ``"max"``, or ``"last"``.
            units: The values of every layer's units.
            options: The settings that the numbers depend on, but for the choice of layers.
            details: Further numbers.
            notes: What else must be noted.

        Returns:
            The estimate.
        """
        counted = list(values)[-1:] if join == "last" else values
        reasons = {name: self[name].reason for name in counted if not self[name].exact}
        said = [*estimation_notes(reasons), *notes, *self.notes]
        if join == "max" and reasons:
            said.append(
                "the largest of estimated values is biased upwards; more `probes` lessen it"
            )
        if self.left_out:
            samples = f"{self.left_out} sample{'s' * (self.left_out > 1)}"
            said.append(f"{samples} left out: constant logits have no normalized loss")
        chosen = {} if self.selection is None else {"layers": self.selection}
        return aggregate_layers(
            values,
            join,
            units=units,
            notes=said,
            options={**(options or {}), **chosen},
            details=details,
        )


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
