"""What held-out data say of a network beside the same network under noise."""

from __future__ import annotations

import math

from torch import Tensor

from flatgauge.guarantees.confidence import lower_mean, upper_mean
from flatgauge.guarantees.terms import Term
from flatgauge.guarantees.zero_one import ZeroOne
from flatgauge.surface import LossSurface

_NAME = "(A) L_D(f) - L_D(Q)"


def heldout_terms(
    heldout: ZeroOne | None,
    surface: LossSurface,
    seen: Tensor | None,
    bound: float,
    delta: float,
) -> list[Term]:
    """Estimate how much worse than its noisy draws the network itself is.

    Args:
        heldout: The 0-1 loss on data that the model has not seen; None if there are none.
        surface: The surface.
        seen: Which of the held-out samples every draw gets wrong (draws, samples).
        bound: On L_D(Q).
        delta: The probability with which each interval here may fail.

    Returns:
        The terms.
    """
    if heldout is None or seen is None:
        unknown = (
            "unknown without held-out data; the bound is one on the network under noise, not on "
            "the network itself. Pass `holdout=`."
        )
        return [Term(_NAME, math.nan, note=unknown)]
    wrong = heldout.wrong(surface.subject.leaves).double()
    draws, samples = seen.shape
    difference = float((wrong - seen.mean(0)).mean())
    # Samples: numbers in [-1, 1]. Draws: errors in [0, 1]. Hoeffding for both, δ / 2 each.
    width = math.sqrt(2 * math.log(4 / delta) / samples) + math.sqrt(
        math.log(4 / delta) / (2 * draws)
    )
    error, half = float(wrong.mean()), delta / 2
    sure = f"confidence {1 - delta:g} of its own"
    return [
        Term(
            *(_NAME, difference, difference - width, difference + width),
            note=f"on {samples} held-out samples and {draws} draws; lower and upper with {sure}",
        ),
        Term(
            *("L_D(f) at most", bound + difference + width),
            note=f"the bound plus the upper end of (A): confidence {max(0.0, 1 - 2 * delta):g}",
        ),
        Term(
            *("L_D(f) on held-out data", error),
            lower_mean(error, samples, half),
            upper_mean(error, samples, half),
            note=f"what these {samples} samples say without any bound, with {sure}",
        ),
    ]
