"""Call a surface's model as the surface does."""

from __future__ import annotations

from flatgauge.loss import prediction
from flatgauge.surface import LossSurface
from flatgauge.symmetry.rescaling import Call


def call_of(surface: LossSurface, samples: int) -> Call:
    """What a surface calls its model with for its first samples.

    Args:
        surface: The surface.
        samples: How many, at most.

    Returns:
        The call; of the model's output it takes what the loss reads.
    """
    loss = surface.objective.loss
    batch = surface.objective.example(min(samples, surface.samples))
    arguments, keywords = surface.subject.arguments(batch, with_labels=loss.own)
    if loss.own:
        return Call(arguments, keywords, lambda output: output.loss)
    if loss.curvature is not None:
        return Call(arguments, keywords, prediction)
    return Call(arguments, keywords)
