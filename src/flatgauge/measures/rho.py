"""Curvature of units along their own weights: ρ (Petzka et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, block_curvature
from flatgauge.curvature.summary import combined, select, told
from flatgauge.estimators import Estimate
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

_PAPER = "Petzka et al. 2019, Table 1"
_CLAIMS = {"layerwise", "nodewise", "rows", "permutation", "output_shift"}
_COST = "one sweep: about classes gradients, shared with all measures of the sweep"


@measure(
    symbol="ρ_max",
    paper=_PAPER,
    geometry="one scale per unit",
    functional="second derivative along the unit's own weights",
    invariant_to=_CLAIMS,
    cost=_COST,
    needs=("incoming", "outgoing", "estimates"),
)
def rho_max(
    surface: LossSurface,
    *,
    side: str = "outgoing",
    layers: str | Sequence[str] | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest over all units of the curvature along the unit's own weights.

    Definition:
        .. math:: \rho^{\max} = \max_l \max_j \rho^l(j), \qquad
                  \rho^l(j) = w_l(j)^\top H \, w_l(j)

        with :math:`w_l(j)` the weights of layer l that leave its input unit j (a column; for
        convolutions, all weights that read channel j), or with ``side="incoming"`` those that
        enter its output unit j (a row). A layer's value is the largest of its units'.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. A unit's weights times c have second
        derivatives over c².

    Cost:
        One sweep, exact for layers in which the output is linear (with 64 or more outputs: the
        heaviest columns and mixtures, unless ``all_columns``). The others take Hessian products.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        side: ``"outgoing"`` or ``"incoming"``.
        layers: Glob patterns of the layers to take; None for all.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's and every unit's value.

    Raises:
        ValueError: If an option is unknown, the model has no layers, or a generator is needed.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> round(rho_max(linear_regression(2.0)).value, 6)
        72.0
    """
    return _rho(surface, "max", side, layers, all_columns, probes, generator)


@measure(
    symbol="ρ_Σ",
    paper=_PAPER,
    geometry="one scale per unit",
    functional="second derivative along the unit's own weights",
    invariant_to=_CLAIMS,
    cost=_COST,
    needs=("incoming", "outgoing", "estimates"),
)
def rho_sum(
    surface: LossSurface,
    *,
    side: str = "outgoing",
    layers: str | Sequence[str] | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum over all units of the curvature along the unit's own weights.

    Definition:
        .. math:: \rho^{\Sigma} = \sum_l \rho_\sigma^l, \qquad
                  \rho_\sigma^l = \sum_j w_l(j)^\top H \, w_l(j)

        with units as in ``rho_max``. A layer's value is the sum of its units'.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. As for ``rho_max``.

    Cost:
        As for ``rho_max``.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        side: ``"outgoing"`` or ``"incoming"``.
        layers: Glob patterns of the layers to take; None for all.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's and every unit's value.

    Raises:
        ValueError: If an option is unknown, the model has no layers, or a generator is needed.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> round(rho_sum(linear_regression(2.0)).value, 6)
        72.0
    """
    return _rho(surface, "sum", side, layers, all_columns, probes, generator)


def _rho(
    surface: LossSurface,
    how: str,
    side: str,
    layers: str | Sequence[str] | None,
    all_columns: bool,
    probes: int,
    generator: Generator | None,
) -> Estimate:
    """Every unit's form, joined."""
    if side not in ("outgoing", "incoming"):
        raise ValueError(f"`side={side!r}` must be 'outgoing' (columns) or 'incoming' (rows).")
    blocks = block_curvature(
        surface, (side,), all_columns=all_columns, probes=probes, generator=generator
    )
    names = select(blocks.layers, layers)
    values = {name: blocks[name].unit_value(side, how) for name in names}
    units = {name: blocks[name].values[side] for name in names}
    reasons = {name: blocks[name].reason for name in names if not blocks[name].exact}
    options = {"side": side} | ({} if layers is None else {"layers": layers})
    notes = told(reasons)
    if how == "max" and reasons:
        notes.append("the largest of estimated values is biased upwards; more `probes` lessen it")
    return combined(values, how, units=units, notes=notes, options=options)
