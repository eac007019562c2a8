"""What to bear in mind with a measure, read from what it declares about itself."""

from __future__ import annotations

from flatgauge.measures import GROUPS, Measure

#: By functional, where it brings something along.
_FUNCTIONALS = {
    "top eigenvalue": "Only the sharpest direction counts. `details` also has the smallest "
    "eigenvalue, or between which numbers it lies: far below zero, the point is not a minimum.",
    "trace": "Where a weight tensor lies before a smooth activation (GELU, tanh), its part is "
    "estimated, with a standard error; the notes say which.",
    "worst case in a ball": "The search can miss the worst point, so the value is a lower bound. "
    "It depends on the radius: compare models at one and the same.",
    "expectation": "It is estimated from random draws, with a standard error, and depends on the "
    "size of the noise: compare models at one and the same.",
    "top eigenvalue of a block": "Blocks are taken one layer at a time; how layers act together "
    "is not seen.",
    "trace of a block": "It is a sum over layers, so deeper networks have larger values: compare "
    "networks of one architecture.",
    "second derivative along the unit's own weights": "It is taken over all units of all layers, "
    "so wider and deeper networks have larger values: compare networks of one architecture.",
    "squared gradient of every sample": "It is made of first derivatives: where every sample is "
    "fitted it goes to zero, whatever the curvature.",
    "norm of the paths": "It says how large the function can become, nothing about the minimum.",
    "ratio": "It says how uneven the paths are, nothing about the minimum; the smallest path "
    "decides.",
}

#: By geometry, where it brings something along.
_GEOMETRIES = {
    "weights": "Rescaling hidden units changes the value at will while no output changes. Use it "
    "for one network during training, or put `balanced:` before its name.",
    "per tensor": "Rescaling *single units* changes the value: tensors have one unit of length "
    "each. A tensor of zeros has none, and does not move.",
    "one scale per layer": "Rescaling *single units* changes the value, as each layer has one "
    "unit of length.",
    "per weight": "A weight of zero has no unit of length and does not move. Shifting all outputs "
    "changes biases and with them the value.",
    "basis paths": "The network must have paths: attention and gates, which multiply "
    "activations, are refused. The loss has poles in these coordinates; radii stay below the "
    "nearest one (`paths.smallest`), so pass one radius for all models that are compared.",
}


def caveats(item: Measure) -> list[str]:
    """What to bear in mind.

    Args:
        item: The measure.

    Returns:
        One sentence or two for each point.
    """
    found = [_GEOMETRIES.get(item.geometry), _FUNCTIONALS.get(item.functional), _moving(item)]
    for (option, value), groups in item.not_with.items():
        lost = ", ".join(group for group in GROUPS if group in groups)
        found.append(f"With `{option}={value!r}` it is not invariant to {lost}.")
    if item.draws:
        found.append(
            "It may draw random numbers: `fg.measure(..., seed=)` fixes them, and the function "
            "itself takes a `generator=`."
        )
    return [point for point in found if point]


def _moving(item: Measure) -> str | None:
    """What it does not claim, of what can be said of any network."""
    moved = [group for group in GROUPS if group not in item.invariant_to]
    if not moved:
        return None
    return (
        "It makes no claim under "
        + ", ".join(f"*{group}* ({GROUPS[group]})" for group in moved)
        + "."
    )
