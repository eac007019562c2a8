"""The Fisher-Rao norm of Liang et al. 2019, and the diagonal of it of Tsuzuku et al. 2019."""

from __future__ import annotations

from dataclasses import replace

from flatgauge.curvature.blocks import (
    LayerValue,
    aggregate_layers,
    ratio_influence,
    standard_error,
)
from flatgauge.curvature.fisher import squared_gradients, squared_radial_gradients
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.geometry.chart import select_tensors
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.measures.registry import RESCALINGS, Family, declare
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
