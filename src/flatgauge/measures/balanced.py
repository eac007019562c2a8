"""Measures of the balanced form of a model: of all ways to write it, the one of smallest norm.

In: a measure. Out: its variant `balanced:NAME`, which is invariant to rescaling whatever the
measure was before, because every way to scale the network has the same balanced form.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.registry import BALANCED, RESCALINGS, Measure, registry
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.balance import balanced_surface

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
