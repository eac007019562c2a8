"""Rules of ops that multiply with weights, add up, or bend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatgauge.nodes import op_name
from flatgauge.path_sums.table import Step, Sums, rule


def _one_activation(step: Step, *factors: Any) -> None:
    """Refuse products of activations."""
    if sum(step.is_activation(factor) for factor in factors) > 1:
        step.refuse("it multiplies two activations")


@rule(
    *("linear", "conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger", "tensordot"),
)
def contracted(step: Step) -> Sums:
    """Every path goes on through every weight that its unit meets; a bias starts new ones."""
    _one_activation(step, *list(step.arguments.values())[:2])
    sums: Tensor = step.run()
    return sums


@rule("bilinear")
def bilinear(step: Step) -> Sums:
    """A form in two inputs, of which one must be a weight."""
    arguments = step.arguments
    _one_activation(step, arguments["input1"], arguments["input2"], arguments["weight"])
    sums: Tensor = step.run()
    return sums


@rule("einsum")
def einsum(step: Step) -> Sums:
    """Any sum of products with one activation."""
    _one_activation(step, *step.arguments["tensors"])
    sums: Tensor = step.run()
    return sums


@rule("addmm", "addmv", "baddbmm")
def added_product(step: Step) -> Sums:
    """A product and a sum, each with a factor."""
    start, left, right = list(step.arguments.values())[:3]
    _one_activation(step, left, right)
    product = torch.matmul(step.tensor(left), step.tensor(right))
    return product * step["alpha"] + step.tensor(start) * step["beta"]


@rule("mul", "multiply")
def multiplied(step: Step) -> Sums:
    """A factor is a weight of its own."""
    left, right = step.arguments["self"], step.arguments["other"]
    _one_activation(step, left, right)
    return step.tensor(left) * step.tensor(right)


@rule("div", "divide", "true_divide")
def divided(step: Step) -> Sums:
    """A divisor is a factor."""
    arguments = step.arguments
    if arguments.get("rounding_mode") is not None:
        step.refuse("it rounds")
    if step.is_activation(arguments["other"]):
        step.refuse("it divides by an activation")
    return step["self"] / step["other"]


@rule("add", "sub", "subtract")
def added(step: Step) -> Sums:
    """The paths of both: signs do not count."""
    return step["self"] + step["other"] * step["alpha"]


@rule("rsub")
def subtracted(step: Step) -> Sums:
    """The same the other way round, where the factor is that of `self`."""
    return step["other"] + step["self"] * step["alpha"]


@rule("maximum", "minimum", "fmax", "fmin")
def compared(step: Step) -> Sums:
    """Any of the two may be the one: the paths of both."""
    return step["self"] + step["other"]


@rule(
    *("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm"),
    *("_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_no_update"),
)
def batch_norm(step: Step) -> Sums:
    """With stored statistics: one factor and one bias per channel."""
    arguments = step.arguments
    if arguments.get("training") or arguments["running_mean"] is None:
        step.refuse("it divides by statistics of the sample itself")
    x, mean, var = step["input"], *(step.value(arguments[f"running_{k}"]) for k in ("mean", "var"))
    weight, bias = step.value(arguments["weight"]), step.value(arguments["bias"])
    factor = (var + arguments["eps"]).rsqrt()
    factor = factor if weight is None else factor * weight
    # What rescaling does to the mean and the factor cancels in their product, bit for bit.
    shift = -mean * factor if bias is None else bias - mean * factor
    channels = (1, -1, *(1,) * (x.dim() - 2))
    factor, shift = step.power(factor), step.power(shift)
    return step.several(x * factor.reshape(channels) + shift.reshape(channels))


@rule("leaky_relu", "rrelu")
def leaky(step: Step) -> Sums:
    """The steeper of two slopes: a path is worth the most it can pass on."""
    arguments = step.arguments
    slope = arguments.get("negative_slope")
    if op_name(step.node) == "rrelu":
        slope = (arguments["lower"] + arguments["upper"]) / 2  # In eval mode it is their mean.
    return step["self"] * step.tensor(slope).clamp(min=1)


@rule("prelu", "_prelu_kernel")
def sloped(step: Step) -> Sums:
    """As a leaky ReLU, with a slope per channel."""
    x, slope = step["self"], step.value(step.arguments["weight"])
    steepest = step.power(slope).clamp(min=1)
    if op_name(step.node) == "prelu" and slope.numel() > 1:
        steepest = steepest.reshape(1, -1, *(1,) * (x.dim() - 2))
    return x * steepest


@rule("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6", "threshold")
def clamped(step: Step) -> Sums:
    """Slopes 0 and 1; a bound on the far side of zero is what it gives to nothing: a bias."""
    arguments = step.arguments
    x = step["self"]
    if op_name(step.node) == "threshold":
        return x + step["value"]
    lower = arguments.get("min", arguments.get("min_val"))
    upper = arguments.get("max", arguments.get("max_val"))
    for bound, side in ((lower, 1), (upper, -1)):
        if step.is_activation(bound):
            x = x + step.tensor(bound)
        elif bound is not None:
            value = torch.as_tensor(step.value(bound), dtype=torch.float64)
            x = x + step.power((side * value).clamp(min=0))
    return x


@rule("hardsigmoid")
def ramp(step: Step) -> Sums:
    """Half of one plus a sixth of x, cut off at 0 and 1."""
    return step["self"] * step.tensor(1 / 6) + step.tensor(1 / 2)
