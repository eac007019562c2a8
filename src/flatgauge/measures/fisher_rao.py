"""The Fisher-Rao norm of Liang et al. 2019, and the diagonal of it of Tsuzuku et al. 2019.

In: a surface. Out: means over the samples of squared gradients, in units of the weights; both are
exact for every model. Parameters in which the output is linear are swept, with the loss's gradient
as the one factor vector per sample; for all others the gradients of single samples are computed,
many at once where the model can be vectorised (`torch.func.vmap`), else one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flatgauge.curvature.blocks import (
    LayerValue,
    aggregate_layers,
    join_samples,
    ratio_influence,
    standard_error,
)
from flatgauge.curvature.sweep.backprop import Sweep, sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import to_float64
from flatgauge.geometry.chart import select_tensors
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import RESCALINGS, Family
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import Batch, map_tensors, tensors, why_whole
from flatgauge.surface.surface import LossSurface

_RAISES = """
Raises:
    ValueError: If the option is unknown, the model has no layers to restrict to, or batches
        cannot be cut into samples.
"""

DIAGONAL = Family(
    paper="Tsuzuku et al. 2019, eq. 25: the diagonal part of Liang et al. 2019",
    reference="[tsuzuku2019normalized], after [liang2019fisher]",
    geometry="one scale per weight",
    functional="squared gradient of every sample",
    kind="capacity",
    invariant_to=RESCALINGS | {"permutation"},
    cost="one sweep with one column: about 3 gradients; where the output is curved, the gradients "
    "of single samples",
    docs=_RAISES
    + r"""
Definition:
    .. math:: \sum_k \theta_k^2 \,
              \mathbb{E}_n\big[(\partial \ell_n / \partial \theta_k)^2\big]

    which Tsuzuku et al. call the Fisher-Rao norm. It is the diagonal part of that of Liang et
    al., :math:`\mathbb{E}_n \langle \theta, \nabla \ell_n \rangle^2`
    (``fisher_rao_norm_liang``), and another number. Here :math:`\ell_n` is the loss of sample
    n (its own mean, where it has several labels), and the mean over samples is weighted as in
    the loss. Weight decay is left out.
Invariance:
    A weight times c has derivatives over c. Shifting the outputs changes the last bias and so
    the value; moving weight between parallel branches does too: two branches of W/2 have half
    the value of W and 0.
Cost:
    One sweep with one column per sample, whatever the number of outputs; for parameters that
    cannot be swept, the gradient of every sample. Exact for every model.
Returns:
    The estimate with every layer's value.
Example:
    The loss ``(b relu(a))²`` has the gradient ``(2ab², 2a²b)``:

    >>> from flatgauge.surface.examples import two_weights
    >>> <name>(two_weights(2.0, 3.0)).value  # 2² · 36² + 3² · 24²
    10368.0
    >>> round(<name>(two_weights(20.0, 0.3)).value, 6)  # same function
    10368.0
""",
)

WHOLE = Family(
    paper="Liang et al. 2019",
    reference="[liang2019fisher]",
    geometry="along the weights themselves",
    functional="squared slope of every sample",
    kind="capacity",
    invariant_to=RESCALINGS | {"permutation", "output_shift", "branches"},
    cost="the gradients of single samples: about 3 gradients",
    docs=_RAISES
    + r"""
Definition:
    .. math:: \|\theta\|_{\mathrm{fr}}^2 = \langle \theta, I(\theta) \theta \rangle
              = \mathbb{E}_n \langle \theta, \nabla \ell_n \rangle^2, \qquad
              I(\theta) = \mathbb{E}_n \nabla \ell_n \nabla \ell_n^\top

    with :math:`\ell_n` the loss of sample n under its own label (its own mean, where it has
    several labels), and the mean over samples weighted as in the loss. Weight decay is left
    out. For a network of d layers of weights with ReLU and without biases it is
    :math:`d^2 \, \mathbb{E}_n \langle \partial \ell_n / \partial f, f \rangle^2` (a
    theorem of theirs), and so a function of the outputs alone.
Invariance:
    A weight times c has derivatives over c; moving weight between parallel branches moves their
    slopes along; a shift of all outputs moves the last bias in a direction without slope, as it
    leaves the loss as it is.
Cost:
    The gradient of every sample, many at once. Exact for every model.
Returns:
    The estimate. A square of a sum has no values per layer.
Example:
    The loss ``(b relu(a))²`` has the gradient ``(2ab², 2a²b)``:

    >>> from flatgauge.surface.examples import two_weights
    >>> <name>(two_weights(2.0, 3.0)).value  # (2 · 36 + 3 · 24)²
    20736.0
""",
)


def mean_squared_gradient(surface: LossSurface, *, parameters: str = "all") -> Estimate:
    """The mean over samples of θ² (∂ℓ)², summed over the weights."""
    counts, totals = squared_gradients(surface, select_tensors(surface, parameters))
    values = {}
    for name, total in totals.items():
        samples = ratio_influence(total, counts)
        value = float(total.sum() / counts.sum())
        values[name] = LayerValue(value, data_stderr=standard_error(samples), samples=samples)
    estimate = aggregate_layers(values, "sum", options={"parameters": parameters})
    try:
        layers = [name for name in sweep_of(surface).plan.layers if name in values]
    except UnsupportedGraphError:
        layers = []
    shown = {name: estimate.layers[name] for name in layers}
    return replace(estimate, layers=shown, notes=_notes(surface))


def mean_squared_slope(surface: LossSurface, *, parameters: str = "all") -> Estimate:
    """The mean over samples of ⟨θ, ∇ℓ⟩²."""
    counts, squares = squared_radial_gradients(surface, select_tensors(surface, parameters))
    samples = ratio_influence(squares, counts)
    return Estimate(
        float(squares.sum() / counts.sum()),
        data_stderr=standard_error(samples),
        samples=samples,
        exact=True,
        options={"parameters": parameters},
        notes=_notes(surface),
    )


def _notes(surface: LossSurface) -> tuple[str, ...]:
    """What is left out."""
    return ("weight decay is not part of a sample's loss",) if surface.weight_decay else ()


fisher_rao_norm = declare(
    mean_squared_gradient,
    DIAGONAL,
    name="fisher_rao_norm",
    symbol="Σ θ² E[(∂ℓ)²]",
    summary="Mean over the samples of their squared gradients, in units of the weights.",
)

fisher_rao_norm_liang = declare(
    mean_squared_slope,
    WHOLE,
    name="fisher_rao_norm_liang",
    symbol="E ⟨θ, ∇ℓ⟩²",
    summary="Mean over the samples of the squared slope of their loss along the weights "
    "themselves.",
)


# With ℓ_n the mean loss of sample n, and w_n what it adds to the denominator of the loss:

#: w (N,), and by parameter its share (N,) in the sum over the samples.
SampleSquares = tuple[Tensor, dict[str, Tensor]]

#: Makes one number of a parameter's value times its slope.
_Summary = Callable[[Tensor], Tensor]


def squared_gradients(surface: LossSurface, names: Sequence[str]) -> SampleSquares:
    """W (N,), and by parameter w Σ θ² (∂ℓ)² (N,)."""
    run, found = surface.processes.run, dict[str, Tensor]()
    counts: Tensor | None = None
    try:
        sweep = sweep_of(surface)
        exact = [name for name in names if name in sweep.plan.exact]
        if exact:
            counts, found = run("the sweep of gradients", lambda: _sweep_squares(sweep, exact))
    except UnsupportedGraphError:
        pass
    rest, chunk = [name for name in names if name not in found], surface.chunk

    def compute() -> SampleSquares:
        square = lambda products: products.square().sum()  # noqa: E731
        weights, scale, squares = _summarize_samples(surface, rest, chunk, square)
        return weights, dict(zip(rest, squares.T * scale.square() / weights, strict=True))

    if rest:
        counts, others = run("gradients", compute)
        found |= others
    assert counts is not None
    rows = surface.processes.concat_named({"": counts} | found, surface.device)
    return rows[""], {name: rows[name] for name in names}


def squared_radial_gradients(surface: LossSurface, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """W (N,), and w ⟨θ, ∇ℓ⟩² (N,) of all parameters together."""
    chunk = surface.chunk

    def compute() -> SampleSquares:
        weights, scale, products = _summarize_samples(surface, list(names), chunk, torch.sum)
        return weights, {"all": (scale * products.sum(1)).square() / weights}

    counts, found = surface.processes.run("gradients along the weights", compute)
    rows = surface.processes.concat_named({"": counts} | found, surface.device)
    return rows[""], rows["all"]


def _sweep_squares(sweep: Sweep, names: list[str]) -> SampleSquares:
    """`squared_gradients` of parameters that are swept, on this rank."""
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


def _summarize_samples(
    surface: LossSurface, names: list[str], chunk: int, summary: _Summary
) -> tuple[Tensor, Tensor, Tensor]:
    """w, scales from slopes to those of w ℓ (n,), and summaries of θ times slopes (n, names)."""
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
