"""The diagonal blocks of the Hessian, one per parameter: traces, diagonals, forms of units.

What enters: a surface, and which parts of the blocks are requested. What leaves: `Blocks`, a
`Block` per parameter with every part, its errors, and every sample's share in it.

How it works: the parameters in which the output is linear are swept (`sweep.backprop`), chunk by
chunk and, across processes, rank by rank; sums over the samples are divided by the denominator of
the loss, and the penalty of a weight decay is added. All other parameters are estimated by Hessian
products with random vectors (`block_estimates`). Results stay in the surface's cache: a part that
is requested again is not computed again, and others are swept without those that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Generator, Tensor

from flatgauge.curvature.aggregate import (
    LayerValue,
    aggregate_layers,
    estimation_notes,
    join_samples,
    ratio_influence,
    select_layers,
    standard_error,
)
from flatgauge.curvature.block_eigenvalues import FactorStore, group_layers, stored_factors
from flatgauge.curvature.block_estimates import BlockEstimate, estimate_blocks
from flatgauge.curvature.input_std import input_std
from flatgauge.curvature.surrogate import NO_LOSS, samples_without_loss
from flatgauge.curvature.sweep.accumulate import (
    LAYER_PARTS,
    PARTS,
    ParameterTotals,
    reciprocal_or_zero,
)
from flatgauge.curvature.sweep.backprop import MOST_FACTORS, Sweep, sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, root_seed, to_float64
from flatgauge.graph.layers import Layer

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: What rounding may leave of terms that cancel, relative to their size.
_CANCELLED = {torch.float32: 1e-5, torch.float64: 1e-11}

#: Hessian products per part, for parameters that cannot be swept.
DEFAULT_PROBES = 48


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
        samples = self.samples.get(part)
        scaled = None if samples is None else scale * samples
        draws = self.draws.get(part)
        return LayerValue(
            scale * float(self.values[part]),
            stderr=scale * float(self.stderr[part]),
            data_stderr=standard_error(scaled),
            samples=scaled,
            draws=None if draws is None else scale * draws,
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


#: From a purpose to the source of randomness that belongs to it.
_Random = Callable[[str], Generator]

#: How large random vectors are, by parameter: one number, or one per weight.
ProbeSizes: TypeAlias = "Callable[[LossSurface, Sequence[str]], Mapping[str, Tensor] | None]"


@dataclass(frozen=True)
class _SweepKey:
    """What swept blocks depend on, apart from model, loss and data."""

    all_columns: bool
    seed: int | None  # None if nothing was random.


@dataclass(frozen=True)
class _EstimateKey:
    """What estimated blocks depend on, apart from model, loss and data."""

    probes: int
    seed: int
    sizes: ProbeSizes | None


def block_curvature(
    surface: LossSurface,
    parts: Iterable[str] = PARTS,
    *,
    all_columns: bool = False,
    estimate: bool = True,
    probes: int = DEFAULT_PROBES,
    keep_factors: bool = False,
    probe_sizes: ProbeSizes | None = None,
    generator: Generator | None = None,
) -> Blocks:
    """Measure every diagonal block of the Hessian in one sweep over the data.

    Blocks in which the model's output is linear come out exactly; the others by Hessian products
    with random vectors, with a standard error. What was measured before at the same parameters
    is used again.

    Args:
        surface: Where to measure.
        parts: What to measure; see `PARTS`.
        all_columns: Whether to be exact also where a sample has more than 63 outputs.
        estimate: Whether to estimate what cannot be swept; else it is left out.
        probes: Hessian products per part for blocks that are not exact.
        keep_factors: Whether to record, where they fit the memory budget, the factors that
            `block_eigenvalues` of all layers would need another sweep for.
        probe_sizes: How large the random vectors for traces and diagonals are, for a surface and
            some of its parameters; None for the length of each parameter.
        generator: Source of randomness, required where not everything is exact. It advances by one
            number at every call.

    Returns:
        The blocks.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
        ValueError: If a part is unknown, or a generator is needed and missing.
    """
    wanted = frozenset([parts] if isinstance(parts, str) else parts)
    if probes < 2:
        raise ValueError(f"`probes={probes}` gives no standard error; use at least 2.")
    if not wanted <= set(PARTS):
        raise ValueError(
            f"the parts are {', '.join(PARTS)}, but got {sorted(wanted - set(PARTS))}."
        )
    seed, random = None, None
    if generator is not None:
        seed = root_seed(generator)
        random = partial(child_generator, seed, device=generator.device)
    sweep = sweep_of(surface)
    reasons = {n: sweep.plan.reasons[n] for n in surface.names if n not in sweep.plan.exact}
    if reasons and estimate and random is None:
        name, reason = next(iter(reasons.items()))
        raise ValueError(
            f"`{name}` cannot be swept ({reason}); estimating it draws random vectors and needs a "
            "generator; pass `generator=torch.Generator().manual_seed(0)`."
        )
    found = _swept_blocks(sweep, wanted, _SweepKey(all_columns, seed), keep_factors, random)
    if not reasons:
        return found
    if not estimate or seed is None or random is None:
        return replace(found, missing=reasons)
    estimated = _estimated_blocks(sweep, wanted, _EstimateKey(probes, seed, probe_sizes), random)
    together = {**found, **estimated}
    ordered = {name: together[name] for name in surface.names}
    return Blocks(ordered, found.parts & estimated.parts, left_out=estimated.left_out)


def _swept_blocks(
    sweep: Sweep, wanted: frozenset[str], key: _SweepKey, keep_factors: bool, random: _Random | None
) -> Blocks:
    """The blocks of all exact parameters, from the cache or by a sweep of the missing parts."""
    surface, plan = sweep.surface, sweep.plan
    if not plan.exact:
        return Blocks({}, wanted)
    held: dict[_SweepKey, Blocks] = surface.cache.get(("blocks", "swept"), dict)
    not_random = replace(key, seed=None)
    known = held.get(not_random) or held.get(key) or Blocks({}, frozenset())
    missing = wanted - known.parts
    if not missing:
        return known
    store = _factor_store(sweep, key.all_columns) if keep_factors else None
    found = _sweep_blocks(sweep, missing, key.all_columns, store, random)
    if store is not None:  # Only now is it complete.
        stored_factors(surface)[store.names] = store
    whole = _merge(known, found)
    exact = all(block.exact for block in whole.values())
    held[not_random if exact else key] = whole
    return whole


def _estimated_blocks(
    sweep: Sweep, wanted: frozenset[str], key: _EstimateKey, random: _Random
) -> Blocks:
    """The blocks of all other parameters, from the cache or by products for the missing parts."""
    surface, plan = sweep.surface, sweep.plan
    held: dict[_EstimateKey, Blocks] = surface.cache.get(("blocks", "estimated"), dict)
    known = held.get(key, Blocks({}, frozenset()))
    missing = wanted - known.parts
    if not missing:
        return known
    names = [name for name in surface.names if name not in plan.exact]
    layers = {name: plan.layers[name] for name in names if name in plan.layers}
    spreads = input_std(sweep) if "normalized" in missing else {}
    left_out = samples_without_loss(surface)
    # Products are of the mean over all samples that count; those left out are not among them.
    scale = surface.risk.count / (surface.risk.count - left_out)
    sizes = None if key.sizes is None else key.sizes(surface, names)
    estimates = estimate_blocks(surface, names, layers, missing, spreads, key.probes, random, sizes)
    values = surface.functional_model.state
    blocks = {
        name: block_from_estimate(
            name, plan.reasons[name], values[name], found, scale, layers.get(name)
        )
        for name, found in estimates.items()
    }
    held[key] = whole = _merge(known, Blocks(blocks, missing, left_out=left_out))
    return whole


def block_from_estimate(
    name: str,
    reason: str,
    value: Tensor,
    found: BlockEstimate,
    scale: float,
    layer: Layer | None,
) -> Block:
    """The block of one parameter, whose value is given, from its estimates times a factor."""
    # The estimates themselves where nothing was left out: copies are twice the model each.
    means, errors, draws = (
        {k: v if scale == 1 else scale * v for k, v in part.items()} for part in found
    )
    return Block(name, False, reason, value, means, errors, draws=draws, layer=layer)


def _merge(known: Blocks, found: Blocks) -> Blocks:
    """Blocks with the parts of both."""
    blocks = dict(found)
    for name, block in known.items():
        new = found[name]
        blocks[name] = replace(
            new,
            values={**block.values, **new.values},
            stderr={**block.stderr, **new.stderr},
            data_stderr={**block.data_stderr, **new.data_stderr},
            samples={**block.samples, **new.samples},
            draws={**block.draws, **new.draws},
            sum_stderr={**block.sum_stderr, **new.sum_stderr},
            rounding=block.rounding if new.rounding is None else new.rounding,
        )
    return replace(found, blocks=blocks, parts=known.parts | found.parts)


def _factor_store(sweep: Sweep, all_columns: bool) -> FactorStore | None:
    """A store for the factors of all layers; None if they do not all fit, or are not all swept."""
    plan = sweep.plan
    if plan.outputs_per_sample() > MOST_FACTORS and not all_columns:
        return None
    names = [name for name in plan.layers if name in plan.sites or name not in plan.exact]
    groups, rest = group_layers(sweep, names)
    if rest or len(groups) != 1:
        return None
    return FactorStore(groups[0])


def _sweep_blocks(
    sweep: Sweep,
    parts: frozenset[str],
    all_columns: bool,
    store: FactorStore | None,
    random: _Random | None,
) -> Blocks:
    """Sweep all data for some parts of the exact parameters."""
    surface, plan = sweep.surface, sweep.plan
    values = surface.functional_model.state
    spreads = input_std(sweep) if "normalized" in parts else {}
    rank = surface.processes.rank  # Every rank combines the factors of its own samples.
    generator = None if random is None else random(f"mixtures {rank}" if rank else "mixtures")
    chunks = sweep.chunks(
        frozenset(plan.exact),
        parts,
        all_factors=all_columns,
        generator=generator,
        record=store is not None,
        input_std=spreads,
    )
    totals = {name: ParameterTotals() for name in plan.exact}
    pieces: list[Tensor] = []

    def add_chunks() -> int:
        left_out = 0
        for chunk in chunks:
            chunk.backward(chunk.factors)
            if store is not None:
                store.add(chunk)
            found, drawn = chunk.take(), []
            for factor in chunk.random_factors:
                chunk.backward([factor])
                drawn.append(chunk.take())
            for name, accumulator in chunk.accumulators.items():
                total = totals[name]
                total.add(found[name], [each[name] for each in drawn], chunk.counts)
                total.add_diagonal(accumulator.diagonal(), accumulator.magnitude())
            pieces.append(chunk.counts)
            left_out += chunk.left_out
        return left_out

    processes = surface.processes
    same = surface.functional_model.with_state()
    left_out = processes.gather_sum("the sweep", add_chunks, same=same)
    counts = join_samples(pieces, surface.device)
    if processes.size > 1:
        counts = _join_ranks(totals, counts, surface)
    if not counts.any():
        raise ValueError(NO_LOSS)
    blocks: dict[str, Block] = {}
    for name in plan.exact:
        layer, decay = plan.layers.get(name), surface.weight_decay
        penalties = _penalties(values[name], layer, spreads.get(name), decay, parts)
        found = _finish(name, values[name], layer, totals.pop(name), counts, penalties)
        blocks[name] = found
    return Blocks(blocks, parts, left_out=int(left_out))


def _join_ranks(
    totals: Mapping[str, ParameterTotals], counts: Tensor, surface: LossSurface
) -> Tensor:
    """Add up what all processes have gathered, in place; the counts of all samples."""
    processes, device = surface.processes, surface.device
    here = {(n, *key): value for n, each in totals.items() for key, value in each.sums.items()}
    sums = processes.sum_named(here, device)
    shares = {
        (name, part): torch.cat(pieces)
        for name, each in totals.items()
        for part, pieces in each.samples.items()
    }
    rows = processes.concat_named(shares | {("", "counts"): counts}, device)
    sampled = processes.all_gather([name for name, each in totals.items() if each.sampled])
    for name, each in totals.items():
        each.sums = {(kind, part): v for (n, kind, part), v in sums.items() if n == name}
        each.samples = {part: [value] for (n, part), value in rows.items() if n == name}
        each.sampled = any(name in names for names in sampled)
    return rows["", "counts"]


def _finish(
    name: str,
    value: Tensor,
    layer: Layer | None,
    totals: ParameterTotals,
    counts: Tensor,
    penalties: Mapping[str, Tensor],
) -> Block:
    """Divide totals by the denominator, and add what weight decay adds."""
    count, sums = float(counts.sum()), totals.sums
    values: dict[str, Tensor] = {}
    stderr, data_stderr, samples, sum_stderr = {}, {}, {}, {}
    for part, penalty in penalties.items():
        if part == "diagonal":
            diagonal = sums.get(("total", part))
            whole = torch.zeros_like(to_float64(value)) if diagonal is None else diagonal
            values[part] = whole.div_(count).add_(penalty)
            continue
        zero = torch.zeros_like(penalty)
        values[part] = sums.get(("total", part), zero) / count + penalty
        stderr[part] = sums.get(("variance", part), zero).sqrt() / count
        if ("variance of sum", part) in sums:
            sum_stderr[part] = sums["variance of sum", part].sqrt() / count
        data_stderr[part] = totals.data_error(part, counts)
        if part in totals.samples:
            shares = torch.cat(totals.samples[part])
            samples[part] = ratio_influence(shares, counts) + penalty.sum()
    reason = (
        "by the largest factors and random combinations of the rest (`all_columns=True` sweeps all)"
    )
    magnitude = sums.get(("magnitude", "diagonal"))
    if magnitude is not None:
        magnitude = _CANCELLED[value.dtype] * magnitude / counts.sum()
    return Block(
        name,
        not totals.sampled,
        reason if totals.sampled else "",
        value,
        values,
        stderr,
        data_stderr,
        samples,
        sum_stderr=sum_stderr,
        layer=layer,
        rounding=magnitude,
    )


def _penalties(
    value: Tensor,
    layer: Layer | None,
    std: Tensor | None,
    decay: float,
    parts: frozenset[str],
) -> dict[str, Tensor]:
    """What a penalty of ½ · decay · ‖θ‖² adds to every requested part."""
    like = to_float64(value.reshape(-1)[:0])
    number = torch.tensor(decay, dtype=torch.float64, device=like.device)
    found = {"trace": number * value.numel(), "diagonal": number}
    if "weighted_diagonal" in parts:
        found["weighted_diagonal"] = decay * to_float64(value).square().sum()
    if layer is not None and parts & set(LAYER_PARTS):
        squares = decay * layer.canonical(to_float64(value)).square()
        inputs = squares[0, 0].numel()
        found["incoming"] = layer.incoming(squares)
        found["outgoing"] = layer.outgoing(squares)
        found["relative"] = inputs * squares.sum()
        if std is not None:  # In weights times σ, the penalty curves by decay over σ².
            groups, _, inner, taps = squares.shape
            variance = std.square().reshape(groups, inner)
            sums = (squares * variance[:, None, :, None]).sum((1, 2, 3))
            found["normalized"] = (sums * taps * reciprocal_or_zero(variance).sum(1)).sum()
    return {part: added for part, added in found.items() if part in parts}
