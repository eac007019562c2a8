"""Curvature of units along their own weights: ρ (Petzka et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatgauge.curvature.blocks import Blocks
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import RESCALINGS, Family, Needs


def swept_side(options: Mapping[str, Any]) -> Needs:
    """Units have two sides, of which one is swept."""
    side = options["side"]
    if side not in ("outgoing", "incoming"):
        raise ValueError(f"`side={side!r}` must be 'outgoing' (columns) or 'incoming' (rows).")
    return Needs(frozenset({side}), estimates=True)


RHO = Family(
    paper="Petzka et al. 2019, Table 1",
    reference="[petzka2019reparameterization]",
    geometry="one scale per unit",
    functional="second derivative along the unit's own weights",
    invariant_to=RESCALINGS | {"permutation", "output_shift"},
    cost="one sweep: about classes gradients, shared with all measures of the sweep",
    requires=swept_side,
    docs=r"""
    Definition:
        .. math:: \<join>_l \<join>_j \rho^l(j), \qquad \rho^l(j) = w_l(j)^\top H \, w_l(j)

        with :math:`w_l(j)` the weights of layer l that leave its input unit j (a column; for
        convolutions, all weights that read channel j), or with ``side="incoming"`` those that
        enter its output unit j (a row). A layer's value is the <join> over its units.
    Invariance:
        A unit's weights times c have second derivatives over c².
    Args:
        side: ``"outgoing"`` (columns) or ``"incoming"`` (rows).
    Returns:
        The estimate with every layer's and every unit's value.
    Example:
        >>> from flatgauge.surface.examples import linear_regression
        >>> round(<name>(linear_regression(2.0)).value, 6)
        72.0
    """,
)


def rho(blocks: Blocks, *, join: str, side: str = "outgoing") -> Estimate:
    """Second derivatives along the units' own weights, joined over units and layers."""
    values = {name: block.unit_value(side, join) for name, block in blocks.layers.items()}
    units = {name: block.values[side] for name, block in blocks.layers.items()}
    return blocks.aggregate(values, join, units=units, options={"side": side})


rho_max = declare(
    rho,
    RHO,
    name="rho_max",
    symbol="ρ_max",
    summary="Largest over all units of the curvature along the unit's own weights.",
    join="max",
)

rho_sum = declare(
    rho,
    RHO,
    name="rho_sum",
    symbol="ρ_Σ",
    summary="Sum over all units of the curvature along the unit's own weights.",
    join="sum",
)
