"""The diagonal blocks of the Hessian, one per parameter: traces, diagonals, forms of units."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from flatgauge.curvature.columns import Columns, groups_of, left_behind
from flatgauge.curvature.estimated import Found, estimated_blocks
from flatgauge.curvature.relative import inverse
from flatgauge.curvature.spreads import input_spreads
from flatgauge.curvature.summary import LayerValue, as_shares, rows_of, spread
from flatgauge.curvature.surrogate import NO_LOSS, samples_without_loss
from flatgauge.curvature.sweep import Sweeper, sweeper_of
from flatgauge.curvature.tally import Tally, collect
from flatgauge.curvature.taps import PARTS
from flatgauge.estimators.probes import branches, digest
from flatgauge.layers import Layer
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

#: Marks a result without randomness, which holds for every generator.
_EXACT = -1

#: What rounding may leave of terms that cancel, beside their size.
_CANCELLED = {torch.float32: 1e-5, torch.float64: 1e-11}

#: The parts that only layers have.
_OF_LAYERS = frozenset({"incoming", "outgoing", "relative", "normalized"})

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
            mixtures of columns took part in, it is not known.
        data_stderr: How far other samples of the same kind would move it, by part; of the
            diagonal it is not known.
        samples: Every sample's share in a part, units added up (N,): their mean is the value, and
            their spread over √N its data error.
        draws: What every random vector says of a part, units added up (probes,), where the block
            is estimated; of the diagonal it is not kept.
        sum_stderr: The standard error of the sum over the units, where mixtures took part.
        layer: How the parameter is contracted, None for parameters that are no layers.
        rounding: Up to what size the entries of a layer's diagonal may be zeros that rounding
            left, where columns of both signs cancel; None where none do.
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
        return wide(self.value)

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
            data_stderr=spread(scaled),
            samples=scaled,
            draws=None if draws is None else scale * draws,
            exact=self.exact,
        )

    def unit_value(self, part: str, how: str) -> LayerValue:
        """The sum of a part over the units, or the largest, with its errors."""
        values, stderr = self.values[part], self.stderr[part]
        if how == "sum":
            samples, draws = self.samples.get(part), self.draws.get(part)
            error = spread(draws)
            if error is None:
                error = float(self.sum_stderr.get(part, stderr.new_zeros(())))
            return LayerValue(
                float(values.sum()),
                stderr=error,
                data_stderr=spread(samples),
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
    """

    blocks: Mapping[str, Block]
    parts: frozenset[str]
    missing: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0

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


def block_curvature(
    surface: LossSurface,
    parts: Iterable[str] = PARTS,
    *,
    all_columns: bool = False,
    estimate: bool = True,
    probes: int = DEFAULT_PROBES,
    keep_columns: bool = False,
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
        keep_columns: Whether to keep, where they fit the memory budget, the columns that
            `block_eigenvalues` of all layers would need another sweep for.
        generator: Source of randomness, required where not everything is exact.

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
    sweeper = sweeper_of(surface)
    held: dict[Hashable, Blocks] = surface.recall(("blocks", all_columns, probes), dict)
    drawn = digest(generator)
    swept = f"{drawn} without estimates"
    for key in (_EXACT, drawn) if estimate else (_EXACT, drawn, swept):
        if key in held and wanted <= held[key].parts:
            blocks = held[key]
            return blocks if estimate else _without_estimates(blocks, sweeper.plan.reasons)
        wanted |= held[key].parts if key in held else frozenset()
    kept = _columns(sweeper) if keep_columns else None
    blocks = _measured(sweeper, wanted, all_columns, probes if estimate else 0, kept, generator)
    complete = not blocks.missing and all(block.exact for block in blocks.values())
    held[_EXACT if complete else (drawn if estimate else swept)] = blocks
    return blocks


def _columns(sweeper: Sweeper) -> Columns | None:
    """Where to keep the columns of all layers, None if they do not fit together."""
    plan = sweeper.plan
    moved = [name for name in plan.layers if name in plan.sites or name not in plan.exact]
    groups, rest = groups_of(sweeper, moved)
    if rest or len(groups) != 1:
        return None
    columns = left_behind(sweeper)[tuple(groups[0])] = Columns(groups[0])
    return columns


def _without_estimates(blocks: Blocks, reasons: Mapping[str, str]) -> Blocks:
    """Leave out what was not swept."""
    swept = {name: block for name, block in blocks.items() if name not in reasons}
    return replace(blocks, blocks=swept, missing=reasons)


def _measured(
    sweeper: Sweeper,
    wanted: frozenset[str],
    all_columns: bool,
    probes: int,
    columns: Columns | None,
    generator: Generator | None,
) -> Blocks:
    """Sweep what is exact; estimate the rest, if with any probes."""
    surface, plan = sweeper.surface, sweeper.plan
    values = surface.subject.state
    scales = input_spreads(sweeper) if "normalized" in wanted else {}
    sources = None if generator is None else branches(generator)
    found: dict[str, Block] = {}
    left_out = 0
    if plan.exact:
        names = frozenset(plan.exact)
        rank = surface.processes.rank  # Every rank mixes the columns of its own samples.
        mixing = None if sources is None else sources(f"mixtures {rank}" if rank else "mixtures")
        swept, shares, left_out = _swept(
            sweeper, names, wanted, scales, columns, all_columns, mixing
        )
        decay = surface.weight_decay
        for name in names:
            layer, tally = plan.layers.get(name), swept.pop(name)
            penalties = _penalties(values[name], layer, scales.get(name), decay, wanted)
            block = _finished(name, values[name], layer, tally, shares, penalties)
            size = tally.size
            if size is not None:
                rounding = _CANCELLED[surface.dtype] * size / shares.sum()
                block = replace(block, rounding=rounding)
            found[name] = block
    rest = [name for name in surface.names if name not in found]
    missing = {} if probes else {name: plan.reasons[name] for name in rest}
    if rest and probes:
        layers = {name: plan.layers[name] for name in rest if name in plan.layers}
        if sources is None:
            raise ValueError(
                f"`{rest[0]}` cannot be swept ({plan.reasons[rest[0]]}); estimating it draws "
                "random vectors and needs a generator; pass "
                "`generator=torch.Generator().manual_seed(0)`."
            )
        left_out = samples_without_loss(surface)
        # Products are of the mean over all samples that count; those left out are none of them.
        scale = surface.objective.count / (surface.objective.count - left_out)
        estimates = estimated_blocks(surface, rest, layers, wanted, scales, probes, sources)
        for name, parts in estimates.items():
            found[name] = estimated_block(
                name, plan.reasons[name], values[name], parts, scale, layers.get(name)
            )
    ordered = {name: found[name] for name in surface.names if name in found}
    return Blocks(ordered, wanted, missing, left_out)


def estimated_block(
    name: str, reason: str, value: Tensor, found: Found, scale: float, layer: Layer | None
) -> Block:
    """A block of what random vectors say, times a factor.

    Args:
        name: The parameter.
        reason: Why it is estimated.
        value: The parameter's value.
        found: What random vectors say.
        scale: The factor.
        layer: How the parameter is contracted.

    Returns:
        The block.
    """
    # The estimates themselves where nothing was left out: copies are twice the model each.
    means, errors, draws = (
        {k: v if scale == 1 else scale * v for k, v in part.items()} for part in found
    )
    return Block(name, False, reason, value, means, errors, draws=draws, layer=layer)


def _swept(
    sweeper: Sweeper,
    names: frozenset[str],
    wanted: frozenset[str],
    scales: Mapping[str, Tensor],
    columns: Columns | None,
    all_columns: bool,
    generator: Generator | None,
) -> tuple[dict[str, Tally], Tensor, int]:
    """Sweep all data; what every parameter gathered, and the samples' shares in the count."""
    tallies = {name: Tally() for name in names}
    shares: list[Tensor] = []
    if columns is not None:
        wanted |= {"columns"}
    passes = sweeper.passes(
        names, wanted, all_columns=all_columns, generator=generator, scales=scales
    )

    def sweep() -> int:
        left_out = 0
        for chunk in passes:
            chunk.pass_back(chunk.columns)
            if columns is not None:
                columns.add(chunk)
            parts, mixtures = collect(chunk.taps), []
            for column in chunk.mixtures:
                chunk.pass_back([column])
                mixtures.append(collect(chunk.taps))
            for name, found in parts.items():
                tallies[name].add(found, [mixture[name] for mixture in mixtures], chunk.shares)
            for tap in chunk.taps:
                for name, diagonal in tap.diagonals().items():
                    tallies[name].add_diagonal(diagonal)
                for name, size in tap.sizes().items():
                    tallies[name].add_size(size)
            shares.append(chunk.shares)
            left_out += chunk.left_out
        return left_out

    surface = sweeper.surface
    without = surface.processes.sum("the sweep", sweep, same=surface.subject.and_state())
    together = rows_of(shares, surface.device)
    if surface.processes.size > 1:
        together = _joined(tallies, together, surface)
    if not together.any():
        raise ValueError(NO_LOSS)
    return tallies, together, int(without)


def _joined(tallies: Mapping[str, Tally], shares: Tensor, surface: LossSurface) -> Tensor:
    """Bring what all processes have gathered into the tallies; the shares of all samples."""
    processes = surface.processes
    own = {
        (name, part): value
        for name, tally in tallies.items()
        for part, value in tally.numbers().items()
    }
    sums = processes.added(own, surface.device)
    rows = {
        (name, part): torch.cat(pieces)
        for name, tally in tallies.items()
        for part, pieces in tally.samples.items()
    }
    together = processes.joined(rows | {("", "shares"): shares}, surface.device)
    mixed = processes.gathered([name for name, tally in tallies.items() if tally.mixed])
    for name, tally in tallies.items():
        tally.take(
            {part: value for (owner, part), value in sums.items() if owner == name},
            {part: value for (owner, part), value in together.items() if owner == name},
        )
        tally.mixed = any(name in names for names in mixed)
    return together["", "shares"]


def _finished(
    name: str,
    value: Tensor,
    layer: Layer | None,
    tally: Tally,
    shares: Tensor,
    penalties: Mapping[str, Tensor],
) -> Block:
    """Divide by the denominator, and add what weight decay adds."""
    count = float(shares.sum())
    values: dict[str, Tensor] = {}
    stderr, data_stderr, samples, sum_stderr = {}, {}, {}, {}
    for part, added in penalties.items():
        if part == "diagonal":
            found = tally.diagonal
            whole = torch.zeros_like(wide(value)) if found is None else found.div_(count)
            values[part] = whole.add_(added)
            continue
        total = tally.sums.get(part, torch.zeros_like(added))
        values[part] = total / count + added
        stderr[part] = tally.variances.get(part, torch.zeros_like(added)).sqrt() / count
        if part in tally.sum_variances:
            sum_stderr[part] = tally.sum_variances[part].sqrt() / count
        data_stderr[part] = tally.data_error(part, shares)
        own = tally.samples.get(part)
        if own is not None:
            samples[part] = as_shares(torch.cat(own), shares) + added.sum()
    reason = "by the heaviest columns and mixtures of the rest (`all_columns=True` sweeps all)"
    reason = reason if tally.mixed else ""
    return Block(
        name,
        not tally.mixed,
        reason,
        value,
        values,
        stderr,
        data_stderr,
        samples,
        sum_stderr=sum_stderr,
        layer=layer,
    )


def _penalties(
    value: Tensor,
    layer: Layer | None,
    scales: Tensor | None,
    decay: float,
    wanted: frozenset[str],
) -> dict[str, Tensor]:
    """What a penalty of ½ · decay · ‖θ‖² adds to every part that is wanted."""
    number = torch.tensor(decay, dtype=torch.float64, device=wide(value.reshape(-1)[:0]).device)
    found = {"trace": number * value.numel(), "diagonal": number}
    if "own" in wanted:
        found["own"] = decay * wide(value).square().sum()
    if layer is not None and wanted & _OF_LAYERS:
        squares = decay * layer.canonical(wide(value)).square()
        inputs = squares[0, 0].numel()
        found["incoming"] = layer.incoming(squares)
        found["outgoing"] = layer.outgoing(squares)
        found["relative"] = inputs * squares.sum()
        if scales is not None:  # In weights times σ, the penalty curves by decay over σ².
            groups, _, inner, taps = squares.shape
            spread = scales.square().reshape(groups, inner)
            sums = (squares * spread[:, None, :, None]).sum((1, 2, 3))
            found["normalized"] = (sums * taps * inverse(spread).sum(1)).sum()
    return {part: added for part, added in found.items() if part in wanted}
