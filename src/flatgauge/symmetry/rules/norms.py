"""Rules of normalization: stored statistics are a linear map, others pin what they read."""

from __future__ import annotations

from typing import Any

from flatgauge.symmetry.rules.table import Reading, Result, rule
from flatgauge.symmetry.scale import Ids, Scale, constant, product


@rule(
    *("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"),
    *("_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_no_update"),
)
def batch_norm(reading: Reading) -> Result:
    """With stored statistics: γ (x − mean) / √(var + ε) + β, where the mean scales with x."""
    arguments = reading.arguments
    x = reading["input"]
    if arguments.get("training"):
        return _normalized(reading, x, 1)
    mean = reading.node.args[list(arguments).index("running_mean")]
    var = reading.node.args[list(arguments).index("running_var")]
    for stored, free in ((mean, True), (var, False)):
        scale = _channels(reading.scale(stored), x)
        if free and scale.terms:
            reading.system.equal(x, scale)
        elif free:
            reading.pin(x, reason="its stored mean is read elsewhere, too")
        else:
            reading.system.pin(scale)
            reading.system.link(x, scale)
    return _several(reading, _affine(reading, x, 1))


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(reading: Reading) -> Result:
    """Statistics of the sample itself, with an ε that fixes the scale of the input."""
    x = reading["input"]
    reading.pin(x, reason="its ε fixes the scale of what it reads")
    return _several(reading, _affine(reading, constant(x.shape), None, units=x))


@rule("group_norm", "native_group_norm", "instance_norm")
def group_norm(reading: Reading) -> Result:
    """As a layer norm, with scale and shift per channel."""
    return _normalized(reading, reading["input"], 1)


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(reading: Reading) -> Result:
    """Weight g v / ‖v‖: every slice of v has a scale that does not matter."""
    direction, size = reading["v"], reading["g"]
    axis = reading.arguments["dim"]
    others = [a for a in range(len(direction.shape)) if a != axis % len(direction.shape)]
    reading.system.tied(direction, others if axis != -1 else range(len(direction.shape)))
    return _several(reading, Scale(reading.shape, size.lifted(len(reading.shape)).terms))


def _normalized(reading: Reading, x: Scale, axis: int) -> Result:
    """Statistics of the data: the input is pinned, scale and shift are free."""
    reading.pin(x, reason="its ε fixes the scale of what it reads")
    return _several(reading, _affine(reading, constant(x.shape), axis, units=x))


def _affine(reading: Reading, x: Scale, axis: int | None, units: Scale | None = None) -> Scale:
    """Multiply by γ and add β, along an axis or (None) along the last ones."""
    result = x
    for name in ("weight", "bias"):
        value: Any = reading.arguments.get(name)
        if value is None:
            continue
        given = reading.scale(value)
        given = given if axis is None else _channels(given, x)
        if name == "weight":
            result = reading.settled(product(x, given))
            dims = len(result.shape)
            for source in (given, x, *([] if units is None else [units])):
                reading.system.link(source.lifted(dims), result)
        else:
            reading.match(result, given)
    return result


def _channels(scale: Scale, x: Scale) -> Scale:
    """A vector of channels lined up with axis one of a tensor."""
    dims = len(x.shape)

    def change(ids: Ids) -> Ids:
        return ids.reshape(1, -1, *(1,) * (dims - 2))

    return scale.apply((1, scale.shape[0], *(1,) * (dims - 2)), change)


def _several(reading: Reading, scale: Scale) -> Result:
    """The scale, beside constants for statistics that an op gives as further outputs."""
    if not isinstance(reading.node.meta["val"], (list, tuple)):
        return scale
    return [scale, *(constant(shape) for shape in reading.shapes[1:])]
