"""Whether a surface's point is a minimum, as far as small changes of its weights show.

Every weight is changed by the same fraction t of its own size, against its slope:
θ − t |θ| sign(g). To first order the loss then falls by t Σ |θ g|; the loss at the changed
weights says how much it really falls. Rescaling the network changes neither number. A gradient
alone cannot be judged: it depends on the scale of the weights, and that of the cross-entropy of
a network that fits its data is never zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flatgauge.estimators.linalg import float64_pieces, vector_norm
from flatgauge.runtime.distributed import GroupError

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: A fall of the loss by more than this share of its scale marks the point.
FALL = 0.01

#: The fractions by which weights are changed, largest first.
_FRACTIONS = tuple(2.0**-k for k in range(2, 13))


def descent_note(surface: LossSurface) -> str | None:
    """Say that a point is not a minimum, if a small change of its weights lowers the loss."""
    # The fall is compared with the smaller of 1 + L and the loss of the same model with all its
    # trainable parameters at zero, so that neither the unit of the loss nor a loss close to zero
    # decides.
    try:
        return surface.cache.get(("descent note",), lambda: _find_descent(surface))
    except GroupError:
        raise
    except Exception:  # Whatever the user's model raises there.
        return None


def _find_descent(surface: LossSurface) -> str | None:
    loss, gradient = surface.value_and_gradient()
    pairs = float64_pieces(surface.point, gradient)
    slope = sum(float((point * part).abs().sum()) for point, part in pairs)
    if not slope:
        return None
    threshold = FALL * _scale(surface, loss)
    direction = surface.point.abs() * gradient.sign()
    for fraction in _FRACTIONS:
        # Along a convex line the loss falls by less than its slope says.
        if fraction * slope <= threshold:
            return None
        lower = surface.value(surface.point - fraction * direction)
        if loss - lower > threshold:
            return (
                f"not at a minimum: changing every weight by {fraction:.2g} of its size against "
                f"the gradient lowers the loss from {loss:.3g} to {lower:.3g} (gradient norm "
                f"{vector_norm(gradient):.2g}); train longer, or read the values as curvature at a "
                "point"
            )
    return None


def _scale(surface: LossSurface, loss: float) -> float:
    """What the loss is compared with: see `descent_note`."""
    scale = 1 + abs(loss)
    try:
        at_zero = surface.value(torch.zeros_like(surface.point))
    except GroupError:
        raise
    except Exception:  # The model cannot be computed there.
        return scale
    return min(scale, at_zero) if 0 < at_zero < math.inf else scale
