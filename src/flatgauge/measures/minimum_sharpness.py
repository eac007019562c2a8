"""The smallest trace of the Hessian among all ways to write a network (Ibayashi et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, Block
from flatgauge.curvature.summary import told
from flatgauge.estimators import Estimate
from flatgauge.geometry.orbit_blocks import orbit_blocks, orbit_sizes
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface
from flatgauge.symmetry.of_surface import gauge_of
from flatgauge.symmetry.orbit import Infimum, smallest_trace

_COST = "one sweep (about classes + 2 gradients), shared; the model is read once for its gauge"
_NEEDS = ("trace", "diagonal")

#: A gap below this part of the value is not told from rounding.
_ROUNDING = 1e-12

#: A gap above this part of the value is not what was asked for.
_MOST = 1e-10


@measure(
    symbol="min tr H (layers)",
    paper="Ibayashi et al. 2021",
    geometry="the flattest way to scale layers",
    functional="trace",
    invariant_to={"layerwise", "permutation", "output_shift"},
    cost=_COST,
    needs=_NEEDS,
)
def minimum_sharpness(
    surface: LossSurface,
    *,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Smallest trace of the Hessian among all ways to scale layers that keep the function.

    Definition:
        .. math:: \inf_{c} \operatorname{tr} H(c \cdot \theta)
                  = \inf_{c} \sum_i c_i^{-2} \operatorname{tr} H_{ii}

        over all positive factors :math:`c_i`, one per parameter tensor, that leave the network's
        function as it is. Without biases, a chain of L layers has
        :math:`L \, (\prod_l \operatorname{tr} H_{ll})^{1/L}`. The infimum need not be attained:
        what can be driven to zero alone is left out, and told. A layer's value is its share.

    Invariance:
        layerwise, permutation, output_shift. All ways to write the network by factors of layers
        have the same infimum.

    Cost:
        One sweep, exact for parameters in which the output is linear (with 64 or more outputs:
        the heaviest columns and mixtures, unless ``all_columns``); the others take Hessian
        products. The model's gauge is read once. The infimum is convex in the logarithms
        of the factors: a few Newton steps.

    Reference:
        [ibayashi2021minimum]

    Args:
        surface: Where to measure.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for parameters that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's share. Its details hold the trace as it is, and what
        rescaling gains. The bound is left out where it is within rounding; ``details["gap"]``
        has it.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
        ValueError: If a generator is needed and missing.

    Example:
        The loss ``(b relu(a))²`` has the trace ``2b² + 2a²``, smallest where both are ``2ab``:

        >>> from flatgauge.examples import two_weights
        >>> round(minimum_sharpness(two_weights(2.0, 3.0)).value, 9)
        24.0
        >>> round(minimum_sharpness(two_weights(20.0, 0.3)).value, 9)  # same function
        24.0
    """
    return _minimum(surface, True, all_columns, probes, generator)


@measure(
    symbol="min tr H (units)",
    paper="after Ibayashi et al. 2021",
    geometry="the flattest way to scale units",
    functional="trace",
    invariant_to={"layerwise", "nodewise", "rows", "permutation", "output_shift"},
    cost=_COST,
    needs=_NEEDS,
)
def minimum_sharpness_nodewise(
    surface: LossSurface,
    *,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Smallest trace of the Hessian among all ways to scale units that keep the function.

    Definition:
        .. math:: \inf_{c} \operatorname{tr} H(c \cdot \theta)
                  = \inf_{c} \sum_k c_k^{-2} \, \partial^2 L / \partial \theta_k^2

        over all positive factors :math:`c_k`, one per parameter, that leave the network's function
        as it is: its whole gauge group, one scale per hidden unit. Otherwise as
        ``minimum_sharpness``, which it never exceeds.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. All ways to write the network have
        the same infimum.

    Cost:
        As for ``minimum_sharpness``.

    Reference:
        [ibayashi2021minimum] for the measure by layers.

    Args:
        surface: Where to measure.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for parameters that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate, as that of ``minimum_sharpness``.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
        ValueError: If a generator is needed and missing.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> round(minimum_sharpness_nodewise(two_weights(2.0, 3.0)).value, 9)
        24.0
    """
    return _minimum(surface, False, all_columns, probes, generator)


def _minimum(
    surface: LossSurface,
    layerwise: bool,
    all_columns: bool,
    probes: int,
    generator: Generator | None,
) -> Estimate:
    """The infimum over a group, with its errors."""
    blocks = orbit_blocks(
        surface, _NEEDS, all_columns=all_columns, probes=probes, generator=generator
    )
    decay = surface.weight_decay  # Its penalty has the same second derivatives everywhere.
    gauge = gauge_of(surface, layerwise=layerwise)
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
        layers={name: shares[name] for name, block in blocks.items() if block.layer is not None},
        details={
            "as it is": as_it_is,
            "gain": as_it_is / value if value else math.inf,
            "scales": gauge.dim,
            "steps": found.steps,
            "imbalance": found.imbalance,
            "gap": found.gap,
        },
        notes=(*told(reasons), *_told(found, gauge.dim)),
    )


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


def _told(found: Infimum, scales: int) -> list[str]:
    """What is special about an infimum."""
    notes = []
    if found.running:
        notes.append(
            f"the infimum is not attained: scales run off to zero or infinity ({found.running} of "
            f"{scales}), and the second derivatives that vanish with them are left out"
        )
    if found.clipped - found.noisy:
        notes.append(
            f"{found.clipped - found.noisy} sums of second derivatives that scale alike are "
            "negative and count as zero: rescaling would make them as negative as one likes"
        )
    if found.noisy:
        notes.append(
            f"{found.noisy} sums of estimated second derivatives are negative and count as zero, "
            "and the others are lowered to keep each tensor's trace; the infimum over noisy sums "
            "comes out too low rather than too high: more `probes` lessen this"
        )
    return notes
