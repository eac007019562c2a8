"""The gauge of a surface's model."""

from __future__ import annotations

import zlib

from flatgauge.surface import LossSurface
from flatgauge.symmetry.calling import call_of
from flatgauge.symmetry.finding import check, read_scales
from flatgauge.symmetry.gauge import GaugeGroup, closed

#: Samples with which the model is read.
_SAMPLES = 4


def gauge_of(surface: LossSurface, *, layerwise: bool = False) -> GaugeGroup:
    """The gauge group of a surface's model, read once.

    Args:
        surface: The surface.
        layerwise: Whether only one scale per tensor is meant.

    Returns:
        The group.
    """

    def read() -> GaugeGroup:
        twin = surface.twin()  # In the precision of the surface.
        inference, few = read_scales(twin.model, call_of(twin, _SAMPLES))
        gauge = closed(inference)
        check(twin.model, gauge, few)
        return gauge

    # Zeros have every scale: where stored numbers become zero or cease to be, the group changes.
    zeros = tuple(
        zlib.crc32((buffer == 0).cpu().numpy().tobytes()) for buffer in surface.model.buffers()
    )
    gauge = surface.recall(("gauge", zeros), read, lasting=True)
    if not layerwise:
        return gauge
    return surface.recall(("layerwise gauge", zeros), gauge.layerwise, lasting=True)
