"""Squared gradients of single samples: the empirical Fisher information, in units of the weights.

What enters: a surface and parameters θ. What leaves, by sample n with its own mean loss ℓ_n:
Σ θ² (∂ℓ_n)² of every parameter, or ⟨θ, ∇ℓ_n⟩² of all together, times the sample's weight: what it
adds to the denominator of the loss. Both are exact for every model. Weight decay is not part of
ℓ_n.

How it works: parameters in which the output is linear are swept, with the loss's gradient as the
one factor vector per sample; for all others the gradients of single samples are computed, many at
once where the model can be vectorised (`torch.func.vmap`), else one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flatgauge.curvature.blocks import join_samples
from flatgauge.curvature.sweep.backprop import Sweep, sweep_of
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import Batch, map_tensors, tensors, why_whole
from flatgauge.surface.surface import LossSurface

#: Every sample's weight in the mean (N,), and by parameter its share (N,) in the weighted sum.
SampleSquares = tuple[Tensor, dict[str, Tensor]]

#: Makes one number of a parameter's value times its slope.
_Summary = Callable[[Tensor], Tensor]


def squared_gradients(surface: LossSurface, names: Sequence[str]) -> SampleSquares:
    """Every sample's weight (N,), and by parameter that weight times Σ θ² (∂ℓ_n)² (N,)."""
    run = surface.processes.run
    counts: Tensor | None = None
    found: dict[str, Tensor] = {}
    try:
        sweep = sweep_of(surface)
        exact = [name for name in names if name in sweep.plan.exact]
        if exact:
            counts, found = run("the sweep of gradients", lambda: _sweep_squares(sweep, exact))
    except UnsupportedGraphError:
        pass
    rest = [name for name in names if name not in found]
    if rest:
        chunk = surface.chunk
        counts, others = run("gradients", lambda: _compute_squares(surface, rest, chunk))
        found |= others
    assert counts is not None
    rows = surface.processes.concat_named({"": counts} | found, surface.device)
    return rows[""], {name: rows[name] for name in names}


def squared_radial_gradients(surface: LossSurface, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Every sample's weight in the mean (N,), and that weight times ⟨θ, ∇ℓ_n⟩² (N,)."""
    chunk = surface.chunk

    def compute() -> SampleSquares:
        weights, scale, products = _per_sample(surface, list(names), chunk, torch.sum)
        return weights, {"all": (scale * products.sum(1)).square() / weights}

    counts, found = surface.processes.run("gradients along the weights", compute)
    rows = surface.processes.concat_named({"": counts} | found, surface.device)
    return rows[""], rows["all"]


def _sweep_squares(sweep: Sweep, names: list[str]) -> SampleSquares:
    """By the sweep."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    counts = []
    parts = frozenset({"weighted_diagonal"})
    for chunk in sweep.chunks(
        frozenset(names), parts, all_factors=True, generator=None, of_gradient=True
    ):
        chunk.backward(chunk.factors)
        counted = chunk.counts != 0
        counts.append(chunk.counts[counted])
        taken = chunk.take()
        for name, shares in found.items():
            share = torch.zeros_like(counts[-1])  # If the output does not depend on it.
            if name in taken:
                share = to_float64(taken[name].values["weighted_diagonal"])[counted]
            shares.append(share)
    device = sweep.surface.device
    return join_samples(counts, device), {
        name: join_samples(one, device) for name, one in found.items()
    }


def _compute_squares(surface: LossSurface, names: list[str], chunk: int) -> SampleSquares:
    """By the gradients of single samples."""
    weights, scale, squares = _per_sample(surface, names, chunk, _sum_of_squares)
    return weights, dict(zip(names, squares.T * scale.square() / weights, strict=True))


def _sum_of_squares(products: Tensor) -> Tensor:
    return products.square().sum()


def _per_sample(
    surface: LossSurface, names: list[str], chunk: int, summary: _Summary
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights w in the mean, scales from slopes to those of w ℓ_n (n,), summaries (n, names)."""
    subject, objective = surface.functional_model, surface.risk
    size = sum(subject.state[name].numel() for name in names) * surface.dtype.itemsize
    room = max(int(surface.memory // (8 * size)), 1)
    found: list[Tensor] = []  # (n, names)
    counts: list[float] = []
    together: Callable[..., Tensor] | None = _sums_of_many
    with isolate(surface.model, surface.device):
        for batch in objective.chunks(min(chunk, room)):
            if batch.samples > 1 and not batch.splittable:
                raise ValueError(
                    "the gradient of every sample is needed, but the batches cannot be cut into "
                    f"samples: {why_whole(batch)}. Give batches of one sample."
                )
            rows = [batch.rows([i]) for i in range(batch.samples)] if batch.splittable else [batch]
            each = [objective.denominator(row) for row in rows]
            counted = [i for i, count in enumerate(each) if count]
            counts += [each[i] for i in counted]
            sums: Tensor | None = None
            if together is not None and batch.splittable:
                try:
                    sums = together(surface, batch.rows(counted), names, summary)
                except (RuntimeError, ValueError, TypeError, NotImplementedError):
                    together = None  # It cannot be vectorised; a real error is raised again below.
            if sums is None:
                sums = torch.stack(
                    [_sums_of_one(surface, rows[i], names, summary) for i in counted]
                )
            found.append(sums)
    weights = torch.tensor(counts, dtype=torch.float64, device=surface.device)
    sums = torch.cat(found) if found else weights.new_zeros(0, len(names))
    # Without a count, what was differentiated is the sample's own mean.
    scale = weights if not objective.loss.knows_count else torch.ones_like(weights)
    return weights, scale, sums


def _sums_of_many(
    surface: LossSurface, batch: Batch, names: list[str], summary: _Summary
) -> Tensor:
    """A summary of θ ∂ℓ by sample and parameter (n, names), for all samples at once."""
    subject, loss = surface.functional_model, surface.risk.loss
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
        return torch.stack([summary(to_float64(v * s)) for v, s in zip(point, slopes, strict=True)])

    found: Tensor = torch.vmap(sums)(list(tensors((batch.inputs, batch.target))))
    return found.detach()


def _sums_of_one(surface: LossSurface, row: Batch, names: list[str], summary: _Summary) -> Tensor:
    """A summary of θ ∂ℓ of one sample, by parameter (names,)."""
    subject, loss = surface.functional_model, surface.risk.loss
    point = dict(zip(subject.names, subject.leaves, strict=True))

    def slopes() -> Sequence[Tensor | None]:
        output = subject(subject.leaves, row, with_labels=loss.own)
        total = loss.total(output, row.target)
        return torch.autograd.grad(total, [point[name] for name in names], allow_unused=True)

    found = []
    for name, slope in zip(names, subject.with_parameters(subject.leaves, slopes), strict=True):
        value = point[name].detach()
        product = torch.zeros_like(value) if slope is None else value * slope
        found.append(summary(to_float64(product)))
    return torch.stack(found)
