"""Gradients of single samples: Σ θ² (∂ℓ_n)² of every parameter, and ⟨θ, ∇ℓ_n⟩² of all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flatgauge.batch import Batch, obstacle
from flatgauge.curvature.summary import rows_of
from flatgauge.curvature.sweep import Sweeper, sweeper_of
from flatgauge.curvature.tally import collect
from flatgauge.graph import UnsupportedGraphError
from flatgauge.isolation import isolated
from flatgauge.nested import map_tensors, tensors
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

#: Every sample's weight in the mean (N,), and by parameter its share (N,) in the weighted sum.
Found = tuple[Tensor, dict[str, Tensor]]

#: Makes one number of a parameter's value times its slope.
_Summary = Callable[[Tensor], Tensor]


def squared_slopes(surface: LossSurface, names: Sequence[str]) -> Found:
    """Square the gradient of every sample, entry by entry, in units of the weights.

    Exact for every model: the parameters in which the output is linear are swept, with one column
    per sample; for the others every sample's gradient is written out.

    Args:
        surface: Where to measure. Weight decay is no part of a sample's loss.
        names: The parameters.

    Returns:
        What every sample that counts adds to the denominator of the loss (N,), and for every
        parameter the same times Σ θ² (∂ℓ_n)², with ℓ_n the sample's own mean loss (N,).

    Raises:
        ValueError: If the batches cannot be taken apart into samples.
    """
    attempt = surface.processes.attempt
    try:
        sweeper = sweeper_of(surface)
        swept = [name for name in names if name in sweeper.plan.exact]
        if swept:
            counts, found = attempt("the sweep of gradients", lambda: _swept(sweeper, swept))
        else:
            counts, found = None, {}
    except UnsupportedGraphError:
        counts, found = None, {}
    rest = [name for name in names if name not in found]
    if rest:
        chunk = surface.chunk
        counts, others = attempt("gradients", lambda: _written_out(surface, rest, chunk))
        found |= others
    assert counts is not None
    rows = surface.processes.joined({"": counts} | found, surface.device)
    return rows[""], {name: rows[name] for name in names}


def squared_radial_slopes(surface: LossSurface, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Square the slope of every sample's loss along the weights themselves.

    Exact for every model: the gradient of every sample is written out.

    Args:
        surface: Where to measure. Weight decay is no part of a sample's loss.
        names: The parameters.

    Returns:
        What every sample that counts adds to the denominator of the loss (N,), and the same times
        ⟨θ, ∇ℓ_n⟩², with ℓ_n the sample's own mean loss (N,).

    Raises:
        ValueError: If the batches cannot be taken apart into samples.
    """
    chunk = surface.chunk

    def write_out() -> Found:
        weights, scale, products = _per_sample(surface, list(names), chunk, torch.sum)
        return weights, {"all": (scale * products.sum(1)).square() / weights}

    counts, found = surface.processes.attempt("gradients along the weights", write_out)
    rows = surface.processes.joined({"": counts} | found, surface.device)
    return rows[""], rows["all"]


def _swept(sweeper: Sweeper, names: list[str]) -> Found:
    """By the sweep."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    counts = []
    for chunk in sweeper.passes(
        frozenset(names), frozenset({"own"}), all_columns=True, generator=None, gradients=True
    ):
        chunk.pass_back(chunk.columns)
        kept = chunk.shares != 0
        counts.append(chunk.shares[kept])
        parts = collect(chunk.taps)
        for name, shares in found.items():
            own = parts[name].own if name in parts else None
            none = torch.zeros_like(counts[-1])  # The output does not depend on it.
            shares.append(none if own is None else wide(own)[kept])
    device = sweeper.surface.device
    return rows_of(counts, device), {name: rows_of(one, device) for name, one in found.items()}


def _written_out(surface: LossSurface, names: list[str], chunk: int) -> Found:
    """By the gradients of single samples."""
    weights, scale, squares = _per_sample(surface, names, chunk, _sum_of_squares)
    return weights, dict(zip(names, squares.T * scale.square() / weights, strict=True))


def _sum_of_squares(products: Tensor) -> Tensor:
    return products.square().sum()


def _per_sample(
    surface: LossSurface, names: list[str], chunk: int, summary: _Summary
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample by sample: many at once where the model can be vectorised, else one by one.

    Args:
        surface: Where to measure.
        names: The parameters.
        chunk: Most samples at once.
        summary: What to keep of a parameter's values times slopes.

    Returns:
        The samples' weights in the mean (n,), what makes of a slope that of weight times own mean
        loss (n,), and the summaries (n, names).

    Raises:
        ValueError: If the batches cannot be taken apart into samples.
    """
    subject, objective = surface.subject, surface.objective
    size = sum(subject.state[name].numel() for name in names) * surface.dtype.itemsize
    room = max(int(surface.memory // (8 * size)), 1)
    found: list[Tensor] = []  # (n, names)
    counts: list[float] = []
    together: Callable[..., Tensor] | None = _sums_of_many
    with isolated(surface.model, surface.device):
        for batch in objective.chunks(min(chunk, room)):
            if batch.samples > 1 and not batch.splittable:
                raise ValueError(
                    "the gradient of every sample is needed, but the batches cannot be cut into "
                    f"samples: {obstacle(batch)}. Give batches of one sample."
                )
            rows = [batch.rows([i]) for i in range(batch.samples)] if batch.splittable else [batch]
            each = [objective.denominator(row) for row in rows]
            kept = [i for i, count in enumerate(each) if count]
            counts += [each[i] for i in kept]
            sums: Tensor | None = None
            if together is not None and batch.splittable:
                try:
                    sums = together(surface, batch.rows(kept), names, summary)
                except (RuntimeError, ValueError, TypeError, NotImplementedError):
                    together = None  # Not vectorised; what is really wrong fails again below.
            if sums is None:
                sums = torch.stack([_sums_of_one(surface, rows[i], names, summary) for i in kept])
            found.append(sums)
    weights = torch.tensor(counts, dtype=torch.float64, device=surface.device)
    sums = torch.cat(found) if found else weights.new_zeros(0, len(names))
    # Without a count, what was differentiated is the sample's own mean.
    scale = weights if objective.loss.count is None else torch.ones_like(weights)
    return weights, scale, sums


def _sums_of_many(
    surface: LossSurface, batch: Batch, names: list[str], summary: _Summary
) -> Tensor:
    """A summary of θ ∂ℓ by sample and parameter (n, names), for all samples at once."""
    subject, loss = surface.subject, surface.objective.loss
    known = dict(zip(subject.names, subject.leaves, strict=True))
    point = [known[name].detach() for name in names]

    def total(values: list[Tensor], rows: list[Tensor]) -> Tensor:
        leaves = known | dict(zip(names, values, strict=True))
        given = iter(rows)
        inputs, target = map_tensors(lambda _: next(given)[None], (batch.inputs, batch.target))
        single = replace(batch, inputs=inputs, target=target, samples=1)
        output = subject([leaves[n] for n in subject.names], single, with_labels=loss.own)
        return loss.total(output, target)

    def sums(rows: list[Tensor]) -> Tensor:
        slopes = torch.func.grad(total)(point, rows)
        return torch.stack([summary(wide(v * s)) for v, s in zip(point, slopes, strict=True)])

    found: Tensor = torch.vmap(sums)(list(tensors((batch.inputs, batch.target))))
    return found.detach()


def _sums_of_one(surface: LossSurface, row: Batch, names: list[str], summary: _Summary) -> Tensor:
    """A summary of θ ∂ℓ of one sample, by parameter (names,)."""
    subject, loss = surface.subject, surface.objective.loss
    point = dict(zip(subject.names, subject.leaves, strict=True))

    def slopes() -> Sequence[Tensor | None]:
        output = subject(subject.leaves, row, with_labels=loss.own)
        total = loss.total(output, row.target)
        return torch.autograd.grad(total, [point[name] for name in names], allow_unused=True)

    found = []
    for name, slope in zip(names, subject.holding(subject.leaves, slopes), strict=True):
        value = point[name].detach()
        product = torch.zeros_like(value) if slope is None else value * slope
        found.append(summary(wide(product)))
    return torch.stack(found)
