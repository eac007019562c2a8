"""Rules of ops that combine many entries into one: of one scale, and all their paths go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatgauge.symmetry.inference.equations import Scale
from flatgauge.symmetry.inference.rules.elementwise import SumRule, equal_scales
from flatgauge.symmetry.inference.rules.rule import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.path_sums import PathContext, PathSums


class SelectionRule(Rule, family="selection"):
    """Medians, extremes on both sides, and the smooth maximum."""

    def scale(self, at: ScaleContext) -> Result:
        arguments = at.arguments
        if "other" in arguments:  # max and min of two tensors
            return equal_scales(at, arguments["self"], arguments["other"])
        if at.op == "logsumexp":
            at.pin(at["self"], reason="not positively homogeneous")
        scale = _reduce(at, at["self"])
        return at.with_constants(*([scale, scale] if at.op == "aminmax" else [scale]))


class ReductionRule(SelectionRule, family="reduction"):
    """Sums, means and extremes."""

    def path_sum(self, at: PathContext) -> PathSums:
        """A sum over the paths of all entries: in a mean of k each has a weight 1 / k."""
        arguments = at.arguments
        if "other" in arguments:  # max and min of two tensors
            return SumRule().path_sum(at)
        x, axes = at["self"], arguments.get("dim")
        keep = bool(arguments.get("keepdim"))
        total = x.sum() if axes is None or axes == [] else x.sum(axes, keepdim=keep)
        total = total.reshape(at.shape)
        if at.op == "mean":
            total = total / at.tensor(x.numel() // max(total.numel(), 1))
        return at.with_nothing(total)


class SpreadRule(Rule, family="spread"):
    """Norms and deviations."""

    def scale(self, at: ScaleContext) -> Result:
        """As the entries; variances as their squares."""
        arguments = at.arguments
        order = arguments.get("ord", arguments.get("p", 2))
        if order == 0:
            return at.pin_everything("it counts")
        scale = _reduce(at, at["self" if "self" in arguments else "x"])
        first = at.name_sums(scale.times(2)) if at.op.startswith("var") else scale
        return [first, scale] if at.op.endswith("_mean") else first


class OrderRule(Rule, family="order"):
    """Entries along one axis are compared with or added to each other."""

    def scale(self, at: ScaleContext) -> Result:
        scale = at["self"]
        if not scale.shape:
            return at.with_constants(scale)
        axis = 0 if at.op == "msort" else at.arguments.get("dim", -1)
        axis %= len(scale.shape)
        tied = at.equations.constant_along(scale, [axis])
        if len(at.shape) < len(scale.shape):
            tied = tied.apply(at.shape, lambda ids: ids.squeeze(axis))
        return at.with_constants(Scale(at.shape, tied.terms))


class CumsumRule(OrderRule, family="cumsum"):
    """Sums of the entries up to each one."""

    def path_sum(self, at: PathContext) -> PathSums:
        return at.run_op()


class ArgmaxRule(Rule, family="argmax"):
    """The place of the largest entry, or the order of all."""

    def scale(self, at: ScaleContext) -> Result:
        """Entries that are compared have equal scales."""
        scale, axis = at["self"], at.arguments.get("dim")
        at.equations.constant_along(scale, range(len(scale.shape)) if axis is None else [axis])
        return at.fixed_outputs()


class MaxPoolRule(Rule, family="max_pool"):
    """The largest entry of every window."""

    def scale(self, at: ScaleContext) -> Result:
        """The entries of each window have equal scales."""
        count = _spatial(at.op)
        scale = at.first
        kernel, padding, dilation = (_each(at, k) for k in ("kernel_size", "padding", "dilation"))
        stride = _each(at, "stride") or kernel
        for i in range(count):
            axis = len(scale.shape) - count + i
            if scale.varies(axis):
                places = torch.arange(at.shape[axis])[:, None] * stride[i] - padding[i]
                scale = _tie_windows(
                    at, scale, axis, places + torch.arange(kernel[i])[None, :] * dilation[i]
                )
        return at.with_constants(Scale(at.shape, scale.terms))

    def path_sum(self, at: PathContext) -> PathSums:
        """Any entry of a window may be the largest: the paths of all."""
        return at.with_nothing(_sum_windows(at, at["self"], _each(at, "padding")))


class AvgPoolRule(MaxPoolRule, family="avg_pool"):
    """The mean of every window."""

    def path_sum(self, at: PathContext) -> PathSums:
        """Every entry of a window has one over its size as a weight."""
        arguments = at.arguments
        x, padding = at["self"], _each(at, "padding")
        total = _sum_windows(at, x, padding)
        if arguments.get("divisor_override"):
            return total / at["divisor_override"]
        ones = x.new_ones(x.shape[-len(padding) :])
        if arguments["count_include_pad"]:
            ones = F.pad(ones, [p for p in reversed(padding) for _ in range(2)], value=1.0)
            padding = [0] * len(padding)
        return total / at.power(_sum_windows(at, ones, padding))


class SmoothResizeRule(Rule, family="smooth_resize"):
    """Another size of an image, by means with weights of both signs or of many neighbours."""

    def scale(self, at: ScaleContext) -> Result:
        """All entries of an image have equal scales."""
        scale = at.first
        axes = [a for a, size in enumerate(scale.shape) if size != at.shape[a]]
        axes = sorted({*axes, *range(len(scale.shape) - _spatial(at.op), len(scale.shape))})
        tied = at.equations.constant_along(scale, axes)
        return at.with_constants(Scale(at.shape, tied.terms))


class InterpolationRule(SmoothResizeRule, family="interpolation"):
    """Means of neighbours."""

    def path_sum(self, at: PathContext) -> PathSums:
        """The op itself: its weights are positive."""
        if at.order != 1:
            at.refuse("the weights it interpolates with are only known for order=1")
        return at.run_op()


class ResizeRule(SmoothResizeRule, family="resize"):
    """Copies of entries, to another size."""

    def path_sum(self, at: PathContext) -> PathSums:
        return at.run_op()


class AdaptivePoolRule(SmoothResizeRule, family="adaptive_pool"):
    """Pools with windows cut so that a given number of them covers the image."""

    def path_sum(self, at: PathContext) -> PathSums:
        x, count = at["self"], _spatial(at.op)
        places = at.shape[-count:]
        sizes = torch.ones((), dtype=x.dtype, device=x.device)
        for n, m in zip(x.shape[-count:], places, strict=True):
            widths = [math.ceil((i + 1) * n / m) - i * n // m for i in range(m)]
            sizes = sizes[..., None] * torch.tensor(widths, dtype=x.dtype, device=x.device)
        mean: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count - 1]
        total: Tensor = mean(x, places) * sizes
        return at.with_nothing(total if "max" in at.op else total / at.power(sizes))


class SoftmaxRule(Rule, family="softmax"):
    """Exponentials over their sum."""

    path_refusal = "it is not piecewise linear"

    def scale(self, at: ScaleContext) -> Result:
        scales = at.tensors()
        at.pin(*scales, reason="not positively homogeneous")
        return at.equations.pinned_units(scales[0], at.site) if scales else at.fixed_outputs()


class LossRule(Rule, family="loss"):
    """A comparison with targets."""

    def scale(self, at: ScaleContext) -> Result:
        return at.pin_everything("a loss")


def _reduce(at: ScaleContext, scale: Scale) -> Scale:
    """The scale after entries along some axes became one."""
    dims, axes = len(scale.shape), at.arguments.get("dim")
    chosen = range(dims) if axes is None or axes == [] else axes
    listed = [chosen] if isinstance(chosen, int) else list(chosen)
    listed = sorted(a % dims for a in listed) if dims else []
    tied = at.equations.constant_along(scale, listed)
    if at.arguments.get("keepdim"):
        return tied
    rest = [axis for axis in range(dims) if axis not in listed]
    return tied.apply(
        [scale.shape[a] for a in rest], lambda ids: ids.reshape([ids.shape[a] for a in rest])
    )


def _tie_windows(at: ScaleContext, scale: Scale, axis: int, index: Tensor) -> Scale:
    """Tie the entries of every window along an axis; each window takes its first one's scale."""
    size, (windows, taps) = scale.shape[axis], index.shape  # Some places lie in the padding.
    inside = (index >= 0) & (index < size)
    first = index[torch.arange(windows), inside.int().argmax(1)].clamp(0, size - 1)
    other = torch.where(inside, index, first[:, None])
    heads, varying = [], []
    for coefficient, ids in scale.terms:
        if ids.shape[axis] == 1:
            heads.append((coefficient, ids))
        else:
            heads.append((coefficient, ids.index_select(axis, first)))
            varying.append((*heads[-1], ids))
    for tap in range(taps):
        terms = [(c, ids.index_select(axis, other[:, tap])) for c, _, ids in varying]
        at.equations.sum_to_zero([*terms, *((-c, head) for c, head, _ in varying)])
    return Scale((*scale.shape[:axis], windows, *scale.shape[axis + 1 :]), tuple(heads))


def _sum_windows(at: PathContext, x: Tensor, padding: list[int]) -> Tensor:
    """The sum of every window that a pool moves over the last axes."""
    kernel, dilation = _each(at, "kernel_size"), _each(at, "dilation")
    stride = _each(at, "stride") or kernel
    count = len(kernel)
    sizes, places = x.shape[-count:], at.shape[-count:]
    sides: list[int] = []
    for i in reversed(range(count)):
        reach = (places[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1
        sides += [padding[i], max(0, reach - sizes[i] - padding[i])]  # A last one may stick out.
    image = F.pad(x.reshape(-1, 1, *sizes), sides)
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    slide = (F.conv1d, F.conv2d, F.conv3d)[count - 1]
    total: Tensor = slide(image, ones, stride=stride, dilation=dilation)
    return total.reshape(*x.shape[:-count], *places)


def _spatial(op: str) -> int:
    """How many spatial axes an op has: the last of 1, 2, 3 in its name."""
    return int(next(c for c in reversed(op) if c in "123"))


def _each(at: ScaleContext | PathContext, name: str) -> list[int]:
    """An argument of a pool with one number per axis; [] for one that is left to its default."""
    given: int | Sequence[int] = at.arguments.get(name, 1)
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * _spatial(at.op) if len(numbers) == 1 else numbers
