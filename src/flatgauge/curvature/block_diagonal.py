"""The diagonal blocks of the Hessian, one per parameter: traces, diagonals, forms of units.

What enters: a surface, and which parts of the blocks are requested. What leaves: `Blocks`, a
`Block` per parameter with every part, its errors, and every sample's share in it.

How it works: the parameters in which the output is linear are swept (`sweep.backprop`), chunk by
chunk and, across processes, rank by rank; sums over the samples are divided by the denominator of
the loss, and the penalty of a weight decay is added. All other parameters are estimated by Hessian
products with random vectors. Results stay in the surface's cache: a part that is requested again is
not computed again, and others are swept without those that are known.

A random vector v with E[v vᵀ] = A on every block, and zero mean between blocks, gives
E[v_l · (Hv)_l] = tr(A H_ll). With ε random signs and W the block's weights, A is for

    trace, diagonal       the identity (times a squared length)
    weighted_diagonal     the squared weights, on the diagonal
    incoming, outgoing    the outer products of units' weights
    relative              (W Wᵀ) ⊗ 1
    normalized            (W σ² Wᵀ) ⊗ σ⁻², with σ the standard deviation of input units

Random vectors are as long as the weights of each block: what one block's noise adds to another's
does not grow when a network is rescaled layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import Block, Blocks, join_samples, ratio_influence
from flatgauge.curvature.sweep.accumulate import (
    LAYER_PARTS,
    PARTS,
    ParameterTotals,
    reciprocal_or_zero,
)
from flatgauge.curvature.sweep.backprop import (
    MOST_FACTORS,
    FactorStore,
    Sweep,
    stored_factors,
    sweep_of,
)
from flatgauge.estimators.linalg import child_generator, random_signs, root_seed, to_float64
from flatgauge.graph.layers import Layer
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import IGNORED
from flatgauge.surface.losses import NormalizedCrossEntropy, prediction

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: Hessian products per part, for parameters that cannot be swept.
DEFAULT_PROBES = 48

#: The losses that measures may take in place of the surface's own.
SURROGATES = {"normalized_cross_entropy": NormalizedCrossEntropy}

#: Why a surrogate loss may not exist at all.
NO_LOSS = "the logits of every sample are constant: none has a normalized loss."

#: What rounding may leave of terms that cancel, relative to their size.
_CANCELLED = {torch.float32: 1e-5, torch.float64: 1e-11}

#: Why a swept block is not exact.
_SAMPLED = (
    "by the largest factors and random combinations of the rest (`all_columns=True` sweeps all)"
)

#: Products that are computed together, where there is room.
_TOGETHER = 4

#: Most random signs that mix the rows of a layer at a time.
_MIXED = 2**22

#: Which parts one random vector serves.
_KINDS = (
    ("trace", "diagonal"),
    ("weighted_diagonal",),
    ("incoming",),
    ("outgoing",),
    ("relative",),
    ("normalized",),
)

#: From a purpose to the source of randomness that belongs to it.
_Random = Callable[[str], Generator]

#: What a block has by part.
_BY_PART = ("values", "stderr", "data_stderr", "samples", "draws", "sum_stderr")

#: How large random vectors are, by parameter: one number, or one per weight.
ProbeSizes: TypeAlias = "Callable[[LossSurface, Sequence[str]], Mapping[str, Tensor] | None]"


#: By part: means over random vectors, their standard errors, and (not of the diagonal) the estimate
#: by every random vector, units added up (probes,): one vector serves all parameters.
_PartEstimates: TypeAlias = "tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]"


@dataclass(frozen=True)
class _BlocksKey:
    """What blocks depend on, apart from model, loss and data."""

    seed: int | None  # None if nothing was random.
    all_columns: bool
    probes: int
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
    key = _BlocksKey(seed, all_columns, probes, probe_sizes)
    found = _swept_blocks(sweep, wanted, key, keep_factors, random)
    if not reasons:
        return found
    if not estimate or seed is None or random is None:
        return replace(found, missing=reasons)
    estimated = _estimated_blocks(sweep, wanted, key, random)
    together = {**found, **estimated}
    ordered = {name: together[name] for name in surface.names}
    return Blocks(ordered, found.parts & estimated.parts, left_out=estimated.left_out)


def _swept_blocks(
    sweep: Sweep,
    wanted: frozenset[str],
    key: _BlocksKey,
    keep_factors: bool,
    random: _Random | None,
) -> Blocks:
    """The blocks of all exact parameters, from the cache or by a sweep of the missing parts."""
    surface = sweep.surface
    if not sweep.plan.exact:
        return Blocks({}, wanted)
    held: dict[_BlocksKey, Blocks] = surface.cache.get(("blocks", "swept"), dict)
    key = replace(key, probes=0, sizes=None)
    not_random = replace(key, seed=None)
    known = held.get(not_random) or held.get(key) or Blocks({}, frozenset())
    missing = wanted - known.parts
    if not missing:
        return known
    store = _factor_store(sweep, key.all_columns) if keep_factors else None
    whole = _merge(known, _sweep_blocks(sweep, missing, key.all_columns, store, random))
    if store is not None:  # Only now is it complete.
        stored_factors(surface)[store.names] = store
    held[not_random if all(block.exact for block in whole.values()) else key] = whole
    return whole


def _estimated_blocks(
    sweep: Sweep, wanted: frozenset[str], key: _BlocksKey, random: _Random
) -> Blocks:
    """The blocks of all other parameters, from the cache or by products for the missing parts."""
    surface, plan = sweep.surface, sweep.plan
    held: dict[_BlocksKey, Blocks] = surface.cache.get(("blocks", "estimated"), dict)
    key = replace(key, all_columns=False)
    known = held.get(key, Blocks({}, frozenset()))
    missing = wanted - known.parts
    if not missing:
        return known
    names = [name for name in surface.names if name not in plan.exact]
    layers = {name: plan.layers[name] for name in names if name in plan.layers}
    spreads = sweep.input_std() if "normalized" in missing else {}
    left_out = samples_without_loss(surface)
    # Products are of the mean over all samples that count; those left out are not among them.
    scale = surface.risk.count / (surface.risk.count - left_out)
    sizes = None if key.sizes is None else key.sizes(surface, names)
    estimates = estimate_blocks(surface, names, layers, missing, spreads, key.probes, random, sizes)
    values, blocks = surface.functional_model.state, dict[str, Block]()
    for name, found in estimates.items():
        # The estimates themselves where nothing was left out: copies are twice the model each.
        means, errors, draws = (
            {k: v if scale == 1 else scale * v for k, v in part.items()} for part in found
        )
        facts = name, False, plan.reasons[name], values[name]
        blocks[name] = Block(*facts, means, errors, draws=draws, layer=layers.get(name))
    held[key] = whole = _merge(known, Blocks(blocks, missing, left_out=left_out))
    return whole


def _merge(known: Blocks, found: Blocks) -> Blocks:
    """Blocks with the parts of both."""
    blocks = dict(found)
    for name, block in known.items():
        new = found[name]
        parts: dict[str, Any] = {
            kind: {**getattr(block, kind), **getattr(new, kind)} for kind in _BY_PART
        }
        rounding = block.rounding if new.rounding is None else new.rounding
        blocks[name] = replace(new, **parts, rounding=rounding)
    return replace(found, blocks=blocks, parts=known.parts | found.parts)


def _factor_store(sweep: Sweep, all_columns: bool) -> FactorStore | None:
    """A store for the factors of all layers; None if they do not all fit, or are not all swept."""
    plan = sweep.plan
    if plan.outputs_per_sample() > MOST_FACTORS and not all_columns:
        return None
    names = [name for name in plan.layers if name in plan.sites or name not in plan.exact]
    groups, rest = sweep.group_layers(names)
    return None if rest or len(groups) != 1 else FactorStore(groups[0])


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
    spreads = sweep.input_std() if "normalized" in parts else {}
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
        blocks[name] = _finish(name, values[name], layer, totals.pop(name), counts, penalties)
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
    rounding = sums.get(("magnitude", "diagonal"))
    return Block(
        name,
        not totals.sampled,
        _SAMPLED if totals.sampled else "",
        value,
        values,
        stderr,
        data_stderr,
        samples,
        sum_stderr=sum_stderr,
        layer=layer,
        rounding=None if rounding is None else _CANCELLED[value.dtype] * rounding / counts.sum(),
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


def estimate_blocks(
    surface: LossSurface,
    names: Sequence[str],
    layers: Mapping[str, Layer],
    wanted: frozenset[str],
    input_std: Mapping[str, Tensor],
    probes: int,
    random: Callable[[str], Generator],
    sizes: Mapping[str, Tensor] | None = None,
) -> dict[str, _PartEstimates]:
    """Estimate the blocks of some parameters, all with the same products; needs two probes."""
    if probes < 2:
        raise ValueError(f"`probes={probes}` gives no standard error; use at least 2.")
    params = surface.params
    if sizes is None:
        norms = {name: to_float64(params[name]).norm() for name in names}
        sizes = {name: norm if norm else torch.ones_like(norm) for name, norm in norms.items()}
    found: dict[str, _PartEstimates] = {name: ({}, {}, {}) for name in names}
    for kind in _KINDS:
        parts = [part for part in kind if part in wanted]
        taking = [n for n in names if n in layers or kind[0] in ("trace", "weighted_diagonal")]
        if kind[0] == "normalized":
            taking = [name for name in taking if name in input_std]
        if not parts or not taking:
            continue
        sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        draws_of: dict[tuple[str, str], list[Tensor]] = {}
        draws = {
            name: _draw(params[name], kind[0], layers.get(name), input_std.get(name), sizes[name])
            for name in taking
        }
        products = _multiply_draws(surface, draws, probes, random(kind[0]))
        for vector, product in products:
            for name in taking:
                values = to_float64(vector[name])  # Not needed again: overwritten where it can be.
                values.mul_(product[name].to(values.device))
                if kind[0] == "trace":
                    values.div_(sizes[name].square())
                for part in parts:
                    drawn, key = _reduce(values, part, layers.get(name)), (name, part)
                    if key not in sums:
                        sums[key] = torch.zeros_like(drawn), torch.zeros_like(drawn)
                    sums[key][0].add_(drawn)
                    sums[key][1].addcmul_(drawn, drawn)
                    draws_of.setdefault(key, []).append(drawn.sum())
        for (name, part), (total, squares) in sums.items():
            mean = total.div_(probes)
            squares.div_(probes).addcmul_(mean, mean, value=-1)
            spread = squares.clamp_min_(0).div_(probes - 1)
            means, errors, singles = found[name]
            means[part], errors[part] = mean, spread.sqrt_()
            if part != "diagonal":
                singles[part] = torch.stack(draws_of[name, part])
    return found


def _multiply_draws(
    surface: LossSurface,
    draws: Mapping[str, Callable[[Generator], Tensor]],
    probes: int,
    generator: Generator,
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Random vectors and their products with the Hessian."""
    together = surface.budget.hvp_columns(_TOGETHER)
    for start in range(0, probes, together):
        count = min(together, probes - start)
        rows = torch.zeros(count, surface.size, dtype=surface.dtype, device=surface.device)
        for row in rows:
            parts = surface.split(row)
            for name, draw in draws.items():
                parts[name].copy_(draw(generator))
        products = surface.hvp(rows.T)
        for row, product in zip(rows, products.T, strict=True):
            yield surface.split(row), surface.split(product)


def _draw(
    weight: Tensor, kind: str, layer: Layer | None, std: Tensor | None, size: Tensor
) -> Callable[[Generator], Tensor]:
    """How to draw a random vector on one block."""
    if kind == "weighted_diagonal":
        return lambda generator: weight * random_signs(weight.shape, generator).to(weight)
    if kind == "trace" or layer is None:

        def draw_signs(generator: Generator) -> Tensor:
            return (size * random_signs(weight.shape, generator).to(weight)).to(weight)

        return draw_signs
    canonical = layer.canonical(weight)
    groups, out, inner, taps = canonical.shape
    if kind in ("incoming", "outgoing"):
        shape = (groups, out, 1, 1) if kind == "incoming" else (groups, 1, inner, 1)
        return lambda generator: layer.original(
            canonical * random_signs(shape, generator).to(weight)
        ).contiguous()
    back = torch.ones_like(canonical[:, :1])
    if kind == "normalized" and std is not None:
        spread = std.to(weight).reshape(groups, 1, inner, 1)
        canonical, back = canonical * spread, reciprocal_or_zero(spread)
    rows = canonical.flatten(2)  # (groups, out, in * taps)

    def draw_mixture(generator: Generator) -> Tensor:
        # The signs that mix inputs may be many times the weights: a few rows of them at a time.
        length = inner * taps
        vector = torch.zeros_like(rows)
        for group in range(groups):
            for piece in rows[group].split(max(_MIXED // length, 1), dim=1):
                signs = random_signs((piece.shape[1], length), generator).to(weight)
                vector[group].addmm_(piece, signs)
        return layer.original(vector.reshape(canonical.shape) * back).contiguous()

    return draw_mixture


def _reduce(values: Tensor, part: str, layer: Layer | None) -> Tensor:
    """The estimate of a part by one random vector times its product with the Hessian."""
    if part == "diagonal":
        return values
    if part in ("trace", "weighted_diagonal", "relative", "normalized") or layer is None:
        return values.sum()
    canonical = layer.canonical(values)
    return layer.incoming(canonical) if part == "incoming" else layer.outgoing(canonical)


def with_surrogate(surface: LossSurface, surrogate: str | None) -> LossSurface:
    """The same model and data under a surrogate loss; None for the surface's own loss."""
    if surrogate is None:
        return surface
    if surrogate not in SURROGATES:
        known = ", ".join(map(repr, SURROGATES))
        raise ValueError(
            f"`surrogate={surrogate!r}` is unknown; use {known}, or None for the surface's own "
            "loss."
        )
    ignored = surface.risk.loss.ignored
    return surface.with_loss(SURROGATES[surrogate](IGNORED if ignored is None else ignored))


def surrogate_notes(surface: LossSurface, surrogate: str | None) -> list[str]:
    """Notes on what the surface's own loss has and its surrogate does not."""
    if surrogate is None:
        return []
    notes = []
    if surface.weight_decay:
        notes.append("the weight decay of the surface is not part of the surrogate loss")
    if with_surrogate(surface, surrogate).risk.count != surface.risk.count:
        notes.append("every label counts once in the surrogate loss, whatever weights it has else")
    return notes


def samples_without_loss(surface: LossSurface) -> int:
    """How many samples would count but have no loss; a `ValueError` if that is all of them."""
    chunk, gather_sum = surface.chunk, surface.processes.gather_sum

    def count() -> int:
        return int(gather_sum("outputs", lambda: _count_without_loss(surface, chunk)))

    found: int = surface.cache.get(("samples without loss",), count)
    if found >= surface.risk.count:
        raise ValueError(NO_LOSS)
    return found


def _count_without_loss(surface: LossSurface, chunk: int) -> int:
    """One pass over the data, where outputs may have no loss."""
    objective, subject = surface.risk, surface.functional_model
    if not objective.loss.may_be_undefined:
        return 0
    found = 0
    with isolate(surface.model, surface.device), torch.no_grad():
        for batch in objective.chunks(chunk):
            outputs = prediction(subject(subject.leaves, batch, with_labels=False))
            without = (~objective.loss.is_defined(outputs)).nonzero()[:, 0].tolist()
            found += sum(objective.denominator(batch.rows([place])) > 0 for place in without)
    return found
