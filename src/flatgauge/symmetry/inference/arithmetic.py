"""Rules of ops that compute with entries: one by one, in pairs, or many into one.

Scales are equal where entries are added or compared, and add up in products; where many entries
become one, they have one scale, and all their paths go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from flatgauge.symmetry.inference.equations import Scale, product
from flatgauge.symmetry.inference.scales import Result, Rule, ScaleContext, masked_form

if TYPE_CHECKING:
    from flatgauge.symmetry.path_sums import PathContext, PathSums


# -- entry by entry -------------------------------------------------------------------------------


class CastRule(Rule, family="cast"):
    """Another precision."""

    def scale(self, at: ScaleContext) -> Result:
        """Between floating kinds a cast changes nothing; to whole numbers it rounds."""
        kind = at.node.meta["val"].dtype
        if kind.is_floating_point:
            return self.source(at)
        if kind == torch.bool:  # Whether it is zero, which no scale changes.
            return _mark_read(at)
        return at.pin_everything("a cast to whole numbers rounds", keep_units=True)

    def source(self, at: ScaleContext) -> Scale:
        return at.first

    def path_sum(self, at: PathContext) -> PathSums:
        if not at.node.meta["val"].is_floating_point():
            at.refuse("a cast to whole numbers rounds")
        return at["self"]


class CopyRule(CastRule, family="copy"):
    """What a slice is assigned."""

    def source(self, at: ScaleContext) -> Scale:
        return Scale(at.shape, at["src"].lift(len(at.shape)).terms)

    def path_sum(self, at: PathContext) -> PathSums:
        return at["src"].expand(at.shape)


class ClampRule(Rule, family="clamp"):
    """Bounds below and above."""

    def scale(self, at: ScaleContext) -> Result:
        """Homogeneous if every bound is zero or infinite."""
        arguments = at.arguments
        bounds = [arguments.get(name) for name in ("min", "max", "min_val", "max_val", "threshold")]
        bounds += [arguments["value"]] if at.op == "threshold" else []
        bounds += [6] if at.op == "relu6" else []
        scale = at.first
        for bound in bounds:
            if bound is not None:
                limit = at.scale_against(bound, scale)
                if scale.terms and not limit.terms:
                    reason = "its bounds are fixed numbers other than zero"
                    return at.pin_everything(reason, keep_units=True)
                scale = _match(at, scale, limit)
        return scale

    def path_sum(self, at: PathContext) -> PathSums:
        """Slopes 0 and 1; a bound on the far side of zero is what zero becomes: a bias."""
        arguments, x = at.arguments, at["self"]
        if at.op == "threshold":
            return x + at["value"]
        lower = arguments.get("min", arguments.get("min_val"))
        upper = arguments.get("max", arguments.get("max_val"))
        for bound, side in ((lower, 1), (upper, -1)):
            if at.is_activation(bound):
                x = x + at.tensor(bound)
            elif bound is not None:
                value = torch.as_tensor(at.value(bound), dtype=torch.float64)
                x = x + at.power((side * value).clamp(min=0))
        return x


class SumRule(Rule, family="sum"):
    """Two terms, or two numbers that are compared: both have equal scales."""

    def scale(self, at: ScaleContext) -> Result:
        return equal_scales(at, at.arguments["self"], at.arguments["other"])

    def path_sum(self, at: PathContext) -> PathSums:
        """The paths of both: signs do not count, and either may be the larger."""
        if at.op == "hypot":
            at.refuse(self.path_refusal)
        if at.op == "rsub":
            return at["other"] + at["self"] * at["alpha"]
        if "alpha" in at.arguments:
            return at["self"] + at["other"] * at["alpha"]
        return at["self"] + at["other"]


class LerpRule(Rule, family="lerp"):
    """A weighted mean of two tensors of equal scales."""

    def scale(self, at: ScaleContext) -> Result:
        """Both have equal scales; the weights cannot be scaled."""
        if isinstance(at.arguments["weight"], fx.Node):
            at.pin(at["weight"], reason="the weights of a mean have no scale of their own")
        return equal_scales(at, at.arguments["self"], at.arguments["end"])


class WhereRule(Rule, family="where"):
    """Entries of one tensor or of another, which have equal scales."""

    def scale(self, at: ScaleContext) -> Result:
        if "other" not in at.arguments:
            return at.pin_everything("it gives indices", keep_units=True)
        return equal_scales(at, at.arguments["self"], at.arguments["other"])

    def path_sum(self, at: PathContext) -> PathSums:
        """Fixed places of one tensor, the others of another."""
        if "other" not in at.arguments:
            at.refuse("it gives places")
        places = at.value(at.arguments["condition"])
        return torch.where(places, at["self"], at["other"])


class MaskedFillRule(Rule, family="masked_fill"):
    """A number at some places."""

    def scale(self, at: ScaleContext) -> Result:
        """Zero and infinity take the scale of what they replace, other numbers pin it."""
        return equal_scales(at, at.arguments["self"], at.arguments["value"])

    def path_sum(self, at: PathContext) -> PathSums:
        return torch.where(at.value(at.arguments["mask"]), at["value"], at["self"])


class FillRule(Rule, family="fill"):
    """One number everywhere."""

    def scale(self, at: ScaleContext) -> Result:
        return at["value"].lift(len(at.shape)).apply(at.shape, lambda ids: ids)


class ComparisonRule(Rule, family="comparison"):
    """Which of two numbers is larger."""

    def scale(self, at: ScaleContext) -> Result:
        """Both have equal scales; the result is a truth value."""
        equal_scales(at, at.arguments["self"], at.arguments["other"])
        return at.fixed_outputs()


class SignRule(Rule, family="sign"):
    """What no positive factor changes."""

    def scale(self, at: ScaleContext) -> Result:
        """Every entry has its own scale."""
        return _mark_read(at)


class ShapeRule(Rule, family="shape"):
    """Reads shapes or truth values only."""

    def scale(self, at: ScaleContext) -> Result:
        return at.fixed_outputs()


class MulRule(Rule, family="mul"):
    """An elementwise product: log scales add up, and a factor is a weight of its own."""

    def scale(self, at: ScaleContext) -> Result:
        return _product(at, 1)

    def path_sum(self, at: PathContext) -> PathSums:
        at.require_one_activation()
        return at["self"] * at["other"]


class DivRule(Rule, family="div"):
    """An elementwise quotient: log scales are subtracted."""

    def scale(self, at: ScaleContext) -> Result:
        if at.arguments.get("rounding_mode") is not None:
            return at.pin_everything("it rounds", keep_units=True)
        return _product(at, -1)

    def path_sum(self, at: PathContext) -> PathSums:
        if at.arguments.get("rounding_mode") is not None:
            at.refuse("it rounds")
        if at.is_activation(at.arguments["other"]):
            at.refuse("it divides by an activation")
        return at["self"] / at["other"]


class AddcmulRule(Rule, family="addcmul"):
    """A sum with a product or a quotient."""

    def scale(self, at: ScaleContext) -> Result:
        sign = 1 if at.op == "addcmul" else -1
        term = at.name_sums(product(at["tensor1"], at["tensor2"].times(sign)))
        return _match(at, at.scale_against(at.arguments["self"], term), term)


class PowerRule(Rule, family="power"):
    """Roots, squares and other fixed powers."""

    _fixed: ClassVar[dict[str, Fraction]] = {
        "square": Fraction(2),
        "sqrt": Fraction(1, 2),
        "rsqrt": Fraction(-1, 2),
        "reciprocal": Fraction(-1),
    }

    def scale(self, at: ScaleContext) -> Result:
        if at.op in self._fixed:
            return at.name_sums(at.first.times(self._fixed[at.op]))
        base, exponent = at.arguments["self"], at.arguments["exponent"]
        if isinstance(exponent, (int, float)) and not isinstance(base, (int, float)):
            power = Fraction(exponent).limit_denominator(64)
            if abs(float(power) - exponent) < 1e-12:
                return at.name_sums(at.scale(base).times(power))
        return at.pin_everything("an exponent that is not a fixed fraction", keep_units=True)


def equal_scales(at: ScaleContext, one: Any, other: Any) -> Scale:
    """State that two arguments have equal scales, and give the scale of the result."""
    if at.is_fixed(one):
        right = at.scale(other)
        return _match(at, at.scale_against(one, right), right)
    left = at.scale(one)
    return _match(at, left, at.scale_against(other, left))


def _match(at: ScaleContext, left: Scale, right: Scale) -> Scale:
    """State that two tensors have equal scales, and give the scale of the result."""
    at.match(left, right)
    larger, smaller = (left, right) if len(left.shape) >= len(right.shape) else (right, left)
    dims = len(at.shape)
    larger, smaller = larger.lift(dims), smaller.lift(dims)
    # Along an axis that only one of them has, the other is repeated: take the one that varies.
    terms = larger.terms or smaller.terms
    varied = [s for s in (larger, smaller) if s.single is not None]
    if len(varied) == 2:
        sizes = [sum(size > 1 for size in s.terms[0][1].shape) for s in varied]
        terms = varied[sizes.index(max(sizes))].terms
    return Scale(at.shape, terms)


def _product(at: ScaleContext, power: int) -> Scale:
    """The scale of a product or quotient; plain numbers change nothing."""
    left, right = at.arguments["self"], at.arguments["other"]
    scales = []
    for value, other, sign in ((left, right, 1), (right, left, power)):
        if not isinstance(value, (int, float)) and not _is_mask(at, value, other):
            scales.append(at.scale(value).times(sign))
    result = at.name_sums(product(*scales))
    for scale in scales:
        if result.single is not None and scale.terms:
            at.equations.same_units(scale.lift(len(result.shape)), result)
    return result


def _is_mask(at: ScaleContext, value: object, weight: object) -> bool:
    """Whether a constant masks a parameter: the entries that it hides scale as the others do."""
    if value not in at.constants or not isinstance(weight, fx.Node):
        return False
    return weight in at.names and masked_form(weight, at.constants) is at.node


def _mark_read(at: ScaleContext) -> Result:
    """State that every entry has its own scale."""
    for scale in at.tensors():
        at.equations.mark_read(scale)
    return at.fixed_outputs()


# -- many entries into one -------------------------------------------------------------------------


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

    path_by_op = True


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

    path_by_op = True


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
