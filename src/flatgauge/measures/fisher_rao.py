"""The Fisher-Rao norm of Liang et al. 2019, and the diagonal of it of Tsuzuku et al. 2019."""

from __future__ import annotations

from dataclasses import replace

from flatgauge.curvature.gradients import squared_radial_slopes, squared_slopes
from flatgauge.curvature.summary import LayerValue, as_shares, combined, spread
from flatgauge.curvature.sweep import sweeper_of
from flatgauge.estimators import Estimate
from flatgauge.geometry.chart import taking_part
from flatgauge.graph import UnsupportedGraphError
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface


@measure(
    symbol="Σ θ² E[(∂ℓ)²]",
    paper="Tsuzuku et al. 2019, eq. 25: the diagonal part of Liang et al. 2019",
    geometry="one scale per weight",
    functional="squared gradient of every sample",
    kind="capacity",
    invariant_to={"layerwise", "nodewise", "rows", "permutation"},
    cost="one sweep with one column: about 3 gradients; where the output is curved, the gradients "
    "of single samples",
)
def fisher_rao_norm(surface: LossSurface, *, parameters: str = "all") -> Estimate:
    r"""Mean over the samples of their squared gradients, in units of the weights.

    Definition:
        .. math:: \sum_k \theta_k^2 \,
                  \mathbb{E}_n\big[(\partial \ell_n / \partial \theta_k)^2\big]

        which Tsuzuku et al. call the Fisher-Rao norm. It is the diagonal part of that of Liang et
        al., :math:`\mathbb{E}_n \langle \theta, \nabla \ell_n \rangle^2`
        (``fisher_rao_norm_liang``), and another number. Here :math:`\ell_n` is the loss of sample
        n (its own mean, where it has several labels), and the mean over samples is weighted as in
        the loss. Weight decay is no part of it.

    Invariance:
        layerwise, nodewise, rows, permutation. A weight times c has derivatives over c. Shifting
        the outputs changes the last bias and so the value; moving weight between parallel
        branches does too: two branches of W/2 have half the value of W and 0.

    Cost:
        One sweep with one column per sample, whatever the number of outputs; for parameters that
        cannot be swept, the gradient of every sample. Exact for every model.

    Reference:
        [tsuzuku2019normalized], after [liang2019fisher]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable parameters, or the weights of ``"layers"`` only.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the option is unknown, the model has no layers to restrict to, or batches
            cannot be cut into samples.

    Example:
        The loss ``(b relu(a))²`` has the gradient ``(2ab², 2a²b)``:

        >>> from flatgauge.examples import two_weights
        >>> fisher_rao_norm(two_weights(2.0, 3.0)).value  # 2² · 36² + 3² · 24²
        10368.0
        >>> round(fisher_rao_norm(two_weights(20.0, 0.3)).value, 6)  # same function
        10368.0
    """
    names = taking_part(surface, parameters)
    counts, totals = squared_slopes(surface, names)
    values = {}
    for name, total in totals.items():
        shares = as_shares(total, counts)
        value = float(total.sum() / counts.sum())
        values[name] = LayerValue(value, data_stderr=spread(shares), samples=shares)
    estimate = combined(values, "sum", options={"parameters": parameters})
    shown = {name: estimate.layers[name] for name in _layers(surface) if name in estimate.layers}
    return replace(estimate, layers=shown, notes=_notes(surface))


@measure(
    symbol="E ⟨θ, ∇ℓ⟩²",
    paper="Liang et al. 2019",
    geometry="along the weights themselves",
    functional="squared slope of every sample",
    kind="capacity",
    invariant_to={"layerwise", "nodewise", "rows", "permutation", "output_shift", "branches"},
    cost="the gradients of single samples: about 3 gradients",
)
def fisher_rao_norm_liang(surface: LossSurface, *, parameters: str = "all") -> Estimate:
    r"""Mean over the samples of the squared slope of their loss along the weights themselves.

    Definition:
        .. math:: \|\theta\|_{\mathrm{fr}}^2 = \langle \theta, I(\theta) \theta \rangle
                  = \mathbb{E}_n \langle \theta, \nabla \ell_n \rangle^2, \qquad
                  I(\theta) = \mathbb{E}_n \nabla \ell_n \nabla \ell_n^\top

        with :math:`\ell_n` the loss of sample n under its own label (its own mean, where it has
        several labels), and the mean over samples weighted as in the loss. Weight decay is no
        part of it. For a network of d layers of weights with ReLU and without biases it is
        :math:`d^2 \, \mathbb{E}_n \langle \partial \ell_n / \partial f, f \rangle^2` (a
        theorem of theirs), and so a function of the outputs alone.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift, branches. A weight times c has
        derivatives over c; moving weight between parallel branches moves their slopes along; a
        shift of all outputs moves the last bias in a direction without slope, as it leaves the
        loss as it is.

    Cost:
        The gradient of every sample, many at once. Exact for every model.

    Reference:
        [liang2019fisher]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable parameters, or the weights of ``"layers"`` only.

    Returns:
        The estimate. A square of a sum has no values per layer.

    Raises:
        ValueError: If the option is unknown, the model has no layers to restrict to, or batches
            cannot be cut into samples.

    Example:
        The loss ``(b relu(a))²`` has the gradient ``(2ab², 2a²b)``:

        >>> from flatgauge.examples import two_weights
        >>> fisher_rao_norm_liang(two_weights(2.0, 3.0)).value  # (2 · 36 + 3 · 24)²
        20736.0
    """
    names = taking_part(surface, parameters)
    counts, squares = squared_radial_slopes(surface, names)
    shares = as_shares(squares, counts)
    return Estimate(
        float(squares.sum() / counts.sum()),
        data_stderr=spread(shares),
        samples=shares,
        exact=True,
        options={"parameters": parameters},
        notes=_notes(surface),
    )


def _notes(surface: LossSurface) -> tuple[str, ...]:
    """What is left out."""
    return ("weight decay is no part of a sample's loss",) if surface.weight_decay else ()


def _layers(surface: LossSurface) -> list[str]:
    """The layers, as far as the model can be read as a graph."""
    try:
        return list(sweeper_of(surface).plan.layers)
    except UnsupportedGraphError:
        return []
