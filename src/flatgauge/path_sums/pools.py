"""Rules of ops that gather many entries into one: all their paths go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatgauge.nodes import op_name
from flatgauge.path_sums.maps import compared
from flatgauge.path_sums.table import Step, Sums, rule


@rule("sum", "mean", "amax", "amin", "max", "min")
def reduced(step: Step) -> Sums:
    """A sum over the paths of all entries: in a mean of k each has a weight 1 / k."""
    arguments = step.arguments
    if "other" in arguments:  # max and min of two tensors
        return compared(step)
    x, axes = step["self"], arguments.get("dim")
    keep = bool(arguments.get("keepdim"))
    total = x.sum() if axes is None or axes == [] else x.sum(axes, keepdim=keep)
    total = total.reshape(step.shape)
    if op_name(step.node) == "mean":
        total = total / step.tensor(x.numel() // max(total.numel(), 1))
    return step.several(total)


@rule(
    *("max_pool1d", "max_pool2d", "max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def largest(step: Step) -> Sums:
    """Any entry of a window may be the largest: the paths of all."""
    return step.several(_windows(step, step["self"], _each(step, "padding")))


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def averaged(step: Step) -> Sums:
    """Every entry of a window has one over its size as a weight."""
    arguments = step.arguments
    x, padding = step["self"], _each(step, "padding")
    total = _windows(step, x, padding)
    if arguments.get("divisor_override"):
        return total / step["divisor_override"]
    ones = x.new_ones(x.shape[-len(padding) :])
    if arguments["count_include_pad"]:
        ones = F.pad(ones, [p for p in reversed(padding) for _ in range(2)], value=1.0)
        padding = [0] * len(padding)
    return total / step.power(_windows(step, ones, padding))


@rule(
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
)
def adapted(step: Step) -> Sums:
    """As the pools above, with windows cut so that a given number of them covers the image."""
    x = step["self"]
    count = int(op_name(step.node).removesuffix("d")[-1])
    places = step.shape[-count:]
    sizes = torch.ones((), dtype=x.dtype, device=x.device)
    for n, m in zip(x.shape[-count:], places, strict=True):
        widths = [math.ceil((i + 1) * n / m) - i * n // m for i in range(m)]
        sizes = sizes[..., None] * torch.tensor(widths, dtype=x.dtype, device=x.device)
    mean: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count - 1]
    total: Tensor = mean(x, places) * sizes
    return step.several(total if "max" in op_name(step.node) else total / step.power(sizes))


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def interpolated(step: Step) -> Sums:
    """Means of neighbours, whose weights are those of the op itself."""
    if step.order != 1:
        step.refuse("the weights it interpolates with are only known for order=1")
    sums: Tensor = step.run()
    return sums


def _windows(step: Step, x: Tensor, padding: list[int]) -> Tensor:
    """The sum of every window that a pool moves over the last axes."""
    kernel, dilation = _each(step, "kernel_size"), _each(step, "dilation")
    stride = _each(step, "stride") or kernel
    count = len(kernel)
    sizes, places = x.shape[-count:], step.shape[-count:]
    sides: list[int] = []
    for i in reversed(range(count)):
        reach = (places[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1
        sides += [padding[i], max(0, reach - sizes[i] - padding[i])]  # A last one may stick out.
    image = F.pad(x.reshape(-1, 1, *sizes), sides)
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    slide = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    total: Tensor = slide(image, ones, stride=stride, dilation=dilation)
    return total.reshape(*x.shape[:-count], *places)


def _each(step: Step, name: str) -> list[int]:
    """An argument of a pool with one number per axis; [] for one that is left to its default."""
    given: int | Sequence[int] = step.arguments.get(name, 1)
    numbers = [given] if isinstance(given, int) else list(given)
    count = int(op_name(step.node).split("pool")[1][0])
    return numbers * count if len(numbers) == 1 else numbers
