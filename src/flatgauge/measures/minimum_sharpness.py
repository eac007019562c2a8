"""The smallest trace of the Hessian among all ways to write a network (Ibayashi et al. 2021).

In: a surface. Out: the infimum of the trace over all rescalings that keep the function. The second
derivatives come from the sweep; where they are estimated, the random vectors are those of the
balanced form of the network, rescaled (`orbit_sizes`), so that an estimate is as invariant as what
it estimates. `symmetry.balance` finds the infimum.

The variant `balanced:NAME` of a measure also chooses one of all ways to write the model, that of
the smallest norm (`balanced_variant`): it is invariant to rescaling whatever the measure was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import DEFAULT_PROBES
from flatgauge.curvature.blocks import Block, estimation_notes
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import (
    BALANCED,
    RESCALINGS,
    Family,
    Measure,
    Needs,
    registry,
    sweep_blocks,
)
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.balance import Infimum, balanced_surface, compute_balance, smallest_trace
from flatgauge.symmetry.find import surface_gauge

#: Gaps below this part of the value are rounding.
_ROUNDING = 1e-12

#: Gaps above this part of the value mean that the solver has not converged.
_MOST = 1e-10

_NEEDS = Needs(frozenset({"trace", "diagonal"}))

BY_LAYERS = Family(
    paper="Ibayashi et al. 2021",
    reference="[ibayashi2021minimum]",
    geometry="the flattest way to scale layers",
    functional="trace",
    invariant_to=frozenset({"layerwise", "permutation", "output_shift"}),
    cost="one sweep (about classes + 2 gradients), shared; the model is read once for its gauge",
    requires=_NEEDS,
    docs=r"""
    Definition:
        .. math:: \inf_{c} \operatorname{tr} H(c \cdot \theta)
                  = \inf_{c} \sum_i c_i^{-2} \operatorname{tr} H_{ii}

        over all positive factors :math:`c_i`, one per parameter tensor, that leave the network's
        function as it is. Without biases, a chain of L layers has
        :math:`L \, (\prod_l \operatorname{tr} H_{ll})^{1/L}`. The infimum need not be attained:
        what can be driven to zero alone is left out, and noted. A layer's value is its share.
    Invariance:
        All ways to write the network by factors of layers have the same infimum.
    Cost:
        One sweep, exact for parameters in which the output is linear (with 64 or more outputs:
        the largest factors and random combinations, unless ``all_columns``); the others take
        Hessian products. The model's gauge is read once. The infimum is convex in the logarithms
        of the factors: a few Newton steps.
    Returns:
        The estimate with every layer's share. Its details hold the trace as it is, and what
        rescaling gains. The bound is left out where it is within rounding; ``details["gap"]``
        has it.
    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
        ValueError: If a generator is needed and missing.
    Example:
        The loss ``(b relu(a))²`` has the trace ``2b² + 2a²``, smallest where both are ``2ab``:

        >>> from flatgauge.surface.examples import two_weights
        >>> round(<name>(two_weights(2.0, 3.0)).value, 9)
        24.0
        >>> round(<name>(two_weights(20.0, 0.3)).value, 9)  # same function
        24.0
    """,
)

BY_UNITS = replace(
    BY_LAYERS,
    paper="after Ibayashi et al. 2021",
    reference="[ibayashi2021minimum] for the measure by layers.",
    geometry="the flattest way to scale units",
    invariant_to=RESCALINGS | BY_LAYERS.invariant_to,
    docs=BY_LAYERS.docs
    + r"""
    Definition:
        .. math:: \inf_{c} \operatorname{tr} H(c \cdot \theta)
                  = \inf_{c} \sum_k c_k^{-2} \, \partial^2 L / \partial \theta_k^2

        over all positive factors :math:`c_k`, one per parameter, that leave the network's function
        as it is: its whole gauge group, one scale per hidden unit. Otherwise as
        ``minimum_sharpness``, which it never exceeds.
    Invariance:
        All ways to write the network have the same infimum.
    """,
)


def smallest_hessian_trace(
    surface: LossSurface,
    *,
    layerwise: bool,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    """The infimum of the trace over a group of rescalings, with its errors."""
    blocks = sweep_blocks(
        surface,
        _NEEDS,
        probe_sizes=orbit_sizes,
        all_columns=all_columns,
        probes=probes,
        generator=generator,
    )
    decay = surface.weight_decay  # Its penalty has the same second derivatives everywhere.
    gauge = surface_gauge(surface, layerwise=layerwise)
    reasons = {name: block.reason for name, block in blocks.items() if not block.exact}
    drawn = [name for name in reasons if "diagonal" in blocks[name].stderr]
    sizes = (orbit_sizes(surface, drawn) if drawn else None) or {}
    found = smallest_trace(
        gauge,
        {name: block.values["diagonal"] - decay for name, block in blocks.items()},
        {name: size.square() for name, size in sizes.items()},
    )
    penalties = {name: decay * block.weight.numel() for name, block in blocks.items()}
    shares = {name: found.shares[name] + penalties[name] for name in blocks}
    value = math.fsum(shares.values())
    as_it_is = math.fsum(
        found.start[name] + penalties[name] if name in sizes else float(block.values["trace"])
        for name, block in blocks.items()
    )
    return Estimate(
        value,
        stderr=_stderr(blocks, found),
        bound=found.gap if found.gap > _ROUNDING * abs(value) else None,
        exact=not reasons and not found.clipped,
        converged=found.gap <= _MOST * abs(value),
        layers={name: shares[name] for name in blocks.layers},
        details={
            "as it is": as_it_is,
            "gain": as_it_is / value if value else math.inf,
            "scales": gauge.dim,
            "steps": found.steps,
            "imbalance": found.imbalance,
            "gap": found.gap,
        },
        notes=(*estimation_notes(reasons), *_infimum_notes(found, gauge.dim)),
    )


minimum_sharpness = declare(
    smallest_hessian_trace,
    BY_LAYERS,
    name="minimum_sharpness",
    symbol="min tr H (layers)",
    summary="Smallest trace of the Hessian among all ways to scale layers that keep the function.",
    layerwise=True,
)

minimum_sharpness_nodewise = declare(
    smallest_hessian_trace,
    BY_UNITS,
    name="minimum_sharpness_nodewise",
    symbol="min tr H (units)",
    summary="Smallest trace of the Hessian among all ways to scale units that keep the function.",
    layerwise=False,
)


def orbit_sizes(surface: LossSurface, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Sizes of random vectors that follow the weights; None where the model cannot be read."""
    # One number per weight: the length of its tensor in the balanced form, over its factor there.
    state = dict(surface.model.named_parameters())
    try:
        factors = compute_balance(surface_gauge(surface.origin), state).factors
    except UnsupportedGraphError:
        return None  # Nobody knows how else it could be written.
    sizes, params = {}, surface.params
    for name in names:
        weight = to_float64(params[name])
        factor = torch.ones_like(weight)
        for part in factors.get(name, []):
            factor = factor * part.to(factor)
        sizes[name] = (float((weight * factor).norm()) or 1.0) / factor
    return sizes


def _stderr(blocks: Mapping[str, Block], found: Infimum) -> float:
    """The standard error at the factors of the infimum, which first-order changes do not move."""
    squares, added = 0.0, 0.0
    for name, block in blocks.items():
        if block.exact:
            continue
        factors = torch.from_numpy(found.factors[name])
        if "diagonal" in block.stderr:
            errors = factors * block.stderr["diagonal"].cpu()
            whole = float(block.stderr["trace"])
            # Of random signs, the errors of two weights have at most their pair in common.
            squares += 2 * float(errors.square().sum()) if factors.dim() else whole**2
        else:  # Mixtures of columns: the trace alone has an error, and the share one like it.
            trace = float(block.values["trace"])
            share = found.shares[name] / trace if trace else 1.0
            added += abs(share) * float(block.stderr["trace"])
    return math.sqrt(squares) + added


def _infimum_notes(found: Infimum, scales: int) -> list[str]:
    """What must be noted of an infimum."""
    notes = []
    if found.running:
        notes.append(
            f"the infimum is not attained: scales run off to zero or infinity ({found.running} of "
            f"{scales}), and the second derivatives that vanish with them are left out"
        )
    if found.clipped - found.noisy:
        notes.append(
            f"{found.clipped - found.noisy} sums of second derivatives with one scale are "
            "negative and count as zero: rescaling would make them as negative as one likes"
        )
    if found.noisy:
        notes.append(
            f"{found.noisy} sums of estimated second derivatives are negative and count as zero, "
            "and the others are lowered to keep each tensor's trace; the infimum over noisy sums "
            "comes out too low rather than too high: more `probes` lessen this"
        )
    return notes


#: What balancing leaves as it is.
_UNTOUCHED = frozenset({"permutation", "output_shift"})


def balanced_variant(item: Measure) -> Measure:
    """The measure of the balanced form."""

    @functools.wraps(item.function)
    def measure_balanced(surface: LossSurface, /, **options: Any) -> Estimate:
        balanced, notes = balanced_surface(surface)
        estimate = item.function(balanced, **options)
        surface.matvecs += estimate.matvecs
        return replace(estimate, notes=(*notes, *estimate.notes))

    # An output's scale or merged branches leave another gauge behind, so that only what does not
    # see rescaling anyway stays invariant to these.
    blind = "nodewise" in item.invariant_to
    claims = item.invariant_to if blind else item.invariant_to & _UNTOUCHED
    claims -= {"output_scale"}  # To rounding only: the balance moves by roots of the factor.
    return replace(
        item,
        name=BALANCED + item.name,
        definition=f"{item.definition.rstrip('.')}, of the balanced form of the model.",
        invariant_to=claims | RESCALINGS,
        function=measure_balanced,
        gauge="balanced",
    )


registry.variants[BALANCED] = balanced_variant
