"""What a landscape depends on, so that a file is never continued with something else."""

from __future__ import annotations

from typing import Any

from flatgauge.surface.model import digest
from flatgauge.surface.surface import LossSurface


def fingerprint(surface: LossSurface) -> dict[str, Any]:
    """What identifies a surface: weights, data, loss, precision.

    Args:
        surface: The surface; its data are read once.

    Returns:
        Short texts and numbers, by what they describe.
    """
    state = surface.functional_model.state
    return {
        "weights": digest(value for _, value in sorted(state.items())),
        "data": surface.data.digest,
        "loss": surface.loss_name,
        "value": surface.value(),
        "dtype": str(surface.dtype),
        "weight_decay": surface.weight_decay,
    }
