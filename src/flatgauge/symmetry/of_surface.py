"""The gauge of a surface's model."""

from __future__ import annotations

from flatgauge.surface import LossSurface
from flatgauge.symmetry.calling import call_of
from flatgauge.symmetry.finding import group_of
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.origin import zeros_of

#: Samples with which the model is read.
_SAMPLES = 4


def gauge_of(surface: LossSurface, *, layerwise: bool = False, frozen: str = "fixed") -> GaugeGroup:
    """The gauge group of a surface's model, read once.

    Args:
        surface: The surface.
        layerwise: Whether only one scale per tensor is meant.
        frozen: Whether frozen parameters are ``"fixed"`` or ``"free"``.

    Returns:
        The group.
    """

    def read() -> GaugeGroup:
        twin = surface.twin()  # In the precision of the surface.
        return group_of(twin.model, call_of(twin, _SAMPLES), frozen)[0]

    # Zeros have every scale: where stored numbers become zero or cease to be, the group changes.
    named = surface.model.named_parameters()
    held = tuple(n for n, p in named if frozen == "fixed" and not p.requires_grad)
    key = held, zeros_of(surface.model, held)
    gauge = surface.recall(("gauge", key), read, lasting=True)
    if not layerwise:
        return gauge
    return surface.recall(("layerwise gauge", key), gauge.layerwise, lasting=True)
