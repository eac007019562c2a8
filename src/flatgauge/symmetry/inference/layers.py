"""Rules of the layers of a network: linear maps, activations, norms, attention, embeddings.

Scales of two factors add up, and must be constant along the axes that are summed; paths go on
through every weight that their unit meets, and only one factor may be an activation. What is
positively homogeneous passes scales on, other curves pin what they read; paths are worth the most
that a slope can pass on. Stored statistics are a linear map, others pin what they read.
"""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING

import torch

from flatgauge.graph.ops import op_record
from flatgauge.symmetry.inference.equations import Ids, Scale, constant, product
from flatgauge.symmetry.inference.scales import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.path_sums import PathContext, PathSums

_CURVED = "not positively homogeneous"


# -- products that are summed ---------------------------------------------------------------------


class ContractionRule(Rule):
    """A sum of products. Paths: the op itself, on sums of paths and sizes of weights."""

    def path_sum(self, at: PathContext) -> PathSums:
        """Every path goes on through every weight that its unit meets; a bias starts new ones."""
        at.require_one_activation()
        return at.run_op()


class LinearRule(ContractionRule, family="linear"):
    """A linear map of the last axis: y = x Wᵀ + b."""

    def scale(self, at: ScaleContext) -> Result:
        """Columns of W share the scale of x inversely, rows that of y."""
        x, weight = at["input"], at["weight"]
        if len(weight.shape) == 1:
            return _contract(at, x, weight)
        wide = x.apply((*x.shape[:-1], 1, x.shape[-1]), lambda ids: ids.unsqueeze(-2))
        return _add_bias(at, _contract(at, wide, weight))


class MatmulRule(ContractionRule, family="matmul"):
    """Products of matrices, vectors and stacks of them."""

    def scale(self, at: ScaleContext) -> Result:
        return _matmul(at, *map(at.scale, at.factors))


class TensordotRule(ContractionRule, family="tensordot"):
    """Every entry of the one with every entry of the other, summed along some axes."""

    def scale(self, at: ScaleContext) -> Result:
        left, right = map(at.scale, at.factors)
        ours, theirs = at.arguments.get("dims_self"), at.arguments.get("dims_other")
        if at.op == "inner":
            ours, theirs = [-1], [-1]
        if not left.shape or not right.shape:
            return at.name_sums(product(left, right))
        names = iter(string.ascii_letters)
        mine = [next(names) for _ in left.shape]
        yours = [next(names) for _ in right.shape]
        for one, other in zip(ours or (), theirs or (), strict=True):
            yours[other] = mine[one]
        target = [a for a in mine if a not in yours] + [a for a in yours if a not in mine]
        return _sum_labelled(at, [left, right], ["".join(mine), "".join(yours)], "".join(target))


class AddMatmulRule(ContractionRule, family="addmm"):
    """A product of matrices plus a tensor, each with a factor."""

    def scale(self, at: ScaleContext) -> Result:
        result = _matmul(at, *map(at.scale, at.factors))
        if at.arguments.get("beta", 1) != 0:
            at.match(result, at.scale_against(at.arguments["self"], result))
        return result

    def path_sum(self, at: PathContext) -> PathSums:
        at.require_one_activation()
        product = torch.matmul(*map(at.tensor, at.factors))
        return product * at["alpha"] + at["self"] * at["beta"]


class EinsumRule(ContractionRule, family="einsum"):
    """Any sum of products of tensors along named axes."""

    def scale(self, at: ScaleContext) -> Result:
        """Scales are constant along the axes that are summed."""
        parts = list(map(at.scale, at.factors))
        labels, target = _labels(at.arguments["equation"], [len(part.shape) for part in parts])
        if any(len(set(label)) < len(label) for label in labels):
            return at.pin_everything("an einsum with repeated axes")
        return _sum_labelled(at, parts, labels, target)


class ConvolutionRule(ContractionRule, family="convolution"):
    """A linear map of channels, the same at every place."""

    def scale(self, at: ScaleContext) -> Result:
        """As a linear map, group by group; scales are constant over places."""
        arguments, equations = at.arguments, at.equations
        transposed = "transpose" in at.op or bool(arguments.get("transposed"))
        groups = arguments["groups"]
        x, weight = at["input"], at["weight"]
        spatial = len(weight.shape) - 2
        x = equations.constant_along(x, range(len(x.shape) - spatial, len(x.shape)))
        weight = equations.constant_along(weight, range(2, len(weight.shape)))
        batch = len(x.shape) - spatial - 1
        x = x.apply(x.shape[: batch + 1], lambda ids: ids.reshape(ids.shape[: batch + 1]))
        weight = weight.apply(weight.shape[:2], lambda ids: ids.reshape(ids.shape[:2]))
        inputs, outputs = x.shape[-1] // groups, at.shape[batch] // groups
        if transposed:
            kernel = _split_groups(weight, groups, inputs).apply(
                (groups, outputs, inputs), lambda ids: ids.transpose(1, 2)
            )
        else:
            kernel = _split_groups(weight, groups, outputs)
        split = (*x.shape[:-1], groups, 1, inputs)
        result = _contract(at, x.move(split, lambda ids: ids.reshape(split)), kernel)
        merged = (*x.shape[:-1], groups * outputs)
        flat = _add_bias(at, result.move(merged, lambda ids: ids.reshape(merged)))
        if inputs == outputs == 1:
            equations.same_units(x, flat)  # Depthwise: every channel stays itself.
        return flat.apply(at.shape, lambda ids: ids.reshape(*ids.shape, *(1,) * spatial))


class AttentionRule(Rule, family="attention"):
    """softmax(q kᵀ) v."""

    path_refusal = "it multiplies activations with each other"

    def scale(self, at: ScaleContext) -> Result:
        """Scales of q and k cancel, those of v pass."""
        dims = len(at.shape)
        query, key, value = (at[name].lift(dims) for name in ("query", "key", "value"))
        heads = query.shape[-3] if len(query.shape) > 3 else 1
        if len(key.shape) > 3 and 1 < key.shape[-3] < heads:  # Several queries share a key.
            key, value = (_repeat_heads(scale, heads) for scale in (key, value))
        left = query.apply((*query.shape[:-1], 1, query.shape[-1]), lambda ids: ids.unsqueeze(-2))
        right = key.apply((*key.shape[:-2], 1, *key.shape[-2:]), lambda ids: ids.unsqueeze(-3))
        at.equations.sum_to_zero(product(left, right).terms)
        if at.has("attn_mask"):
            at.pin(at["attn_mask"], reason="it is added to what a softmax reads")
        return Scale(at.shape, at.equations.constant_along(value, [-2]).terms)


class BilinearRule(ContractionRule, family="bilinear"):
    """A form in two inputs: y_o = Σ x_i W_oij z_j + b_o."""

    def scale(self, at: ScaleContext) -> Result:
        one, other, weight = at["input1"], at["input2"], at["weight"]
        lead = at.shape[:-1]
        left = one.apply((*lead, 1, one.shape[-1], 1), lambda ids: ids.unsqueeze(-2).unsqueeze(-1))
        right = other.apply(
            (*lead, 1, 1, other.shape[-1]), lambda ids: ids.unsqueeze(-2).unsqueeze(-2)
        )
        whole = product(left, right)
        return _add_bias(at, _contract(at, whole, weight.lift(len(at.shape) + 2), 2))


class EmbeddingRule(Rule, family="embedding"):
    """Rows that are read by number."""

    def scale(self, at: ScaleContext) -> Result:
        weight = at.equations.constant_along(at["weight"], [0])
        dims = len(at.shape)
        return at.name_sums(
            weight.apply(at.shape, lambda ids: ids.reshape(*(1,) * (dims - 1), ids.shape[1]))
        )


class EmbeddingBagRule(Rule, family="embedding_bag"):
    """Sums, means or maxima of rows."""

    def scale(self, at: ScaleContext) -> Result:
        if at.has("per_sample_weights"):
            return at.pin_everything("its rows have weights")
        rows = at.equations.constant_along(at["weight"], [0])
        whole = at.name_sums(Scale(at.shape, rows.terms))
        return [whole, *(constant(shape) for shape in at.shapes[1:])]


def _contract(at: ScaleContext, left: Scale, right: Scale, axes: int = 1) -> Scale:
    """Multiply activations and weights of aligned axes, and sum along the last ones."""
    whole = product(left, right)
    dims = len(whole.shape)
    # Columns belong to input units.
    at.equations.same_units(left.lift(dims), right.lift(dims))
    tied = at.equations.constant_along(whole, range(dims - axes, dims))
    shape = whole.shape[: dims - axes]
    summed = tied.apply(shape, lambda ids: ids.reshape(ids.shape[: dims - axes]))
    result = at.name_sums(summed)
    for scale in (left, right):  # Rows belong to output units.
        rows = [t for t in scale.lift(dims).terms if all(s == 1 for s in t[1].shape[-axes:])]
        outer = Scale(shape, tuple((c, ids.reshape(ids.shape[: dims - axes])) for c, ids in rows))
        at.equations.same_units(outer, result)
    return result


def _add_bias(at: ScaleContext, result: Scale) -> Scale:
    """Add a bias along the last axis, if there is one."""
    bias = at.arguments["bias"]
    if bias is not None:
        at.match(result, at.scale_against(bias, result))
    return result


def _matmul(at: ScaleContext, left: Scale, right: Scale) -> Scale:
    """Rows of the one with columns of the other."""
    if len(right.shape) == 1:
        return _contract(at, left, right)
    turned = (*right.shape[:-2], right.shape[-1], right.shape[-2])
    columns = right.apply(turned, lambda ids: ids.transpose(-1, -2))
    if len(left.shape) == 1:
        return _contract(at, columns, left)
    wide = left.apply((*left.shape[:-1], 1, left.shape[-1]), lambda ids: ids.unsqueeze(-2))
    tall = columns.apply(
        (*columns.shape[:-2], 1, *columns.shape[-2:]), lambda ids: ids.unsqueeze(-3)
    )
    return _contract(at, wide, tall)


def _sum_labelled(at: ScaleContext, parts: list[Scale], labels: list[str], target: str) -> Scale:
    """A product of tensors of labelled axes, summed along those not in the target."""
    summed = sorted(set("".join(labels)) - set(target))
    order = [*target, *summed]
    aligned = [
        _order_by_labels(part, label, order) for part, label in zip(parts, labels, strict=True)
    ]
    first, *others = aligned
    if not others or not summed:
        tied = at.equations.constant_along(product(*aligned), range(len(target), len(order)))
        return at.name_sums(tied.apply(at.shape, lambda ids: ids.reshape(ids.shape[: len(target)])))
    return _contract(at, product(first, *others[:-1]), others[-1], len(summed))


def _split_groups(weight: Scale, groups: int, size: int) -> Scale:
    """A matrix (groups · size, n) as (groups, size, n)."""
    shape = (groups, size, weight.shape[1])
    if groups == 1:
        return weight.apply(shape, lambda ids: ids.unsqueeze(0))
    return weight.move(shape, lambda ids: ids.reshape(shape))


def _repeat_heads(scale: Scale, heads: int) -> Scale:
    """Every head as often as there are queries for it."""
    times = heads // scale.shape[-3]
    shape = (*scale.shape[:-3], heads, *scale.shape[-2:])

    def change(ids: Ids) -> Ids:
        return ids if ids.shape[-3] == 1 else ids.repeat_interleave(times, -3)

    return scale.apply(shape, change)


def _labels(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """The axes of the operands and of the result of an einsum, dots spelled out."""
    sources, arrow, target = equation.replace(" ", "").partition("->")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    parts = sources.split(",")
    widths = [d - len(p.replace("...", "")) for p, d in zip(parts, dims, strict=True)]
    letters = "".join(spare[: max(widths)])
    labels = [
        part.replace("...", letters[len(letters) - width :])
        for part, width in zip(parts, widths, strict=True)
    ]
    if not arrow:
        once = [n for n in sorted(set(sources) - set(".,")) if sources.count(n) == 1]
        target = letters + "".join(once)
    return labels, target.replace("...", letters)


def _order_by_labels(scale: Scale, label: str, order: list[str]) -> Scale:
    """A tensor of labelled axes with its axes in a given order, size one where it has none."""
    places = [label.index(name) for name in order if name in label]
    shape = [scale.shape[label.index(name)] if name in label else 1 for name in order]

    def change(ids: Ids) -> Ids:
        sizes = iter(ids.permute(places).shape)
        return ids.permute(places).reshape([next(sizes) if n in label else 1 for n in order])

    assert math.prod(shape) == math.prod(scale.shape)
    return scale.apply(shape, change)


# -- activations ----------------------------------------------------------------------------------


class HomogeneousRule(Rule, family="homogeneous"):
    """f(c x) = c f(x) for c > 0, with slopes of size 0 or 1."""

    def scale(self, at: ScaleContext) -> Result:
        return at.first

    def path_sum(self, at: PathContext) -> PathSums:
        return at.first


class LeakyRule(Rule, family="leaky"):
    """One slope for positive numbers, another for negative ones."""

    def scale(self, at: ScaleContext) -> Result:
        if at.arguments.get("training"):
            return at.pin_everything("it draws random slopes", keep_units=True)
        return at.first

    def path_sum(self, at: PathContext) -> PathSums:
        """The steeper of two slopes: a path is worth the most it can pass on."""
        arguments = at.arguments
        slope = arguments.get("negative_slope")
        if slope is None:
            slope = (arguments["lower"] + arguments["upper"]) / 2  # In eval mode, their mean.
        return at["self"] * at.tensor(slope).clamp(min=1)


class PreluRule(Rule, family="prelu"):
    """A learned slope for negative numbers."""

    def scale(self, at: ScaleContext) -> Result:
        """As the input; the slope cannot be scaled."""
        slope, x = at["weight"], at["self"]
        at.pin(slope, reason="a slope has no scale of its own")
        if at.op == "prelu" and slope.shape[0] > 1:  # One per channel: it belongs to that unit.
            shape = (1, slope.shape[0], *(1,) * (len(x.shape) - 2))
            at.equations.same_units(x, slope.apply(shape, lambda ids: ids.reshape(shape)))
        return x

    def path_sum(self, at: PathContext) -> PathSums:
        """The steeper of two slopes, per channel."""
        x, slope = at["self"], at.value(at.arguments["weight"])
        steepest = at.power(slope).clamp(min=1)
        if at.op == "prelu" and slope.numel() > 1:
            steepest = steepest.reshape(1, -1, *(1,) * (x.dim() - 2))
        return x * steepest


class DropoutRule(Rule, family="dropout"):
    """Nothing in eval mode."""

    def scale(self, at: ScaleContext) -> Result:
        if at.arguments["train"] and at.arguments["p"] > 0:
            return at.pin_everything("it is random", keep_units=True)
        return at.with_constants(at.first)

    def path_sum(self, at: PathContext) -> PathSums:
        if at.arguments["train"] and at.arguments["p"] > 0:
            at.refuse("it is random")
        return at.with_nothing(at["input"])


class GluRule(Rule, family="glu"):
    """The first half, times the sigmoid of the second."""

    def scale(self, at: ScaleContext) -> Result:
        scale, axis = at["self"], at.arguments["dim"] % len(at.shape)
        half = at.shape[axis]
        at.pin(scale.take(axis, slice(half, None)), reason=_CURVED)
        return scale.take(axis, slice(0, half))


class CurveRule(Rule, family="curve"):
    """Not homogeneous: the input is pinned, its units pass."""

    path_refusal = "it is not piecewise linear"

    def scale(self, at: ScaleContext) -> Result:
        return at.pin_everything(_CURVED, keep_units=True)

    def path_sum(self, at: PathContext) -> PathSums:
        """Refuse: even of piecewise linear curves (hardshrink) the slopes are not known here."""
        at.refuse(Rule.path_refusal if op_record(at.node).linear else self.path_refusal)


class HardSigmoidRule(CurveRule, family="hardsigmoid"):
    """Half of one plus a sixth of x, cut off at 0 and 1."""

    def path_sum(self, at: PathContext) -> PathSums:
        return at["self"] * at.tensor(1 / 6) + at.tensor(1 / 2)


class SoftmaxRule(Rule, family="softmax"):
    """Exponentials over their sum."""

    path_refusal = "it is not piecewise linear"

    def scale(self, at: ScaleContext) -> Result:
        scales = at.tensors()
        at.pin(*scales, reason="not positively homogeneous")
        return at.equations.pinned_units(scales[0], at.site) if scales else at.fixed_outputs()


# -- norms ----------------------------------------------------------------------------------------


class SampleNormRule(Rule, family="layer_norm"):
    """Statistics of the sample itself, with an ε that fixes the scale of the input."""

    path_refusal = "it divides by statistics of the sample itself"
    axis: int | None = None

    def scale(self, at: ScaleContext) -> Result:
        """The input is pinned, scale and shift are free."""
        x = at["input"]
        at.pin(x, reason="its ε fixes the scale of what it reads")
        return at.with_constants(_affine(at, constant(x.shape), self.axis, units=x))


class GroupNormRule(SampleNormRule, family="group_norm"):
    """As a layer norm, with scale and shift per channel."""

    axis = 1


class BatchNormRule(GroupNormRule, family="batch_norm"):
    """With stored statistics: γ (x - mean) / √(var + ε) + β, a diagonal linear layer."""

    def scale(self, at: ScaleContext) -> Result:
        """The stored mean scales with the input, the stored variance stays."""
        arguments, x = at.arguments, at["input"]
        if arguments.get("training"):
            return super().scale(at)
        mean = _channels(at["running_mean"], x)
        if mean.terms:
            at.equations.equal(x, mean)
        else:
            at.pin(x, reason="its stored mean is read elsewhere, too")
        var = _channels(at["running_var"], x)
        at.equations.pin(var)
        at.equations.same_units(x, var)
        return at.with_constants(_affine(at, x, self.axis))

    def path_sum(self, at: PathContext) -> PathSums:
        """One factor and one bias per channel."""
        arguments = at.arguments
        if arguments.get("training") or arguments["running_mean"] is None:
            at.refuse(self.path_refusal)
        x = at["input"]
        mean, var = (at.value(arguments[f"running_{name}"]) for name in ("mean", "var"))
        weight, bias = at.value(arguments["weight"]), at.value(arguments["bias"])
        factor = (var + arguments["eps"]).rsqrt()
        factor = factor if weight is None else factor * weight
        # What rescaling does to the mean and the factor cancels in their product, bit for bit.
        shift = -mean * factor if bias is None else bias - mean * factor
        channels = (1, -1, *(1,) * (x.dim() - 2))
        factor, shift = at.power(factor), at.power(shift)
        return at.with_nothing(x * factor.reshape(channels) + shift.reshape(channels))


class WeightNormRule(Rule, family="weight_norm"):
    """A weight g v / ‖v‖."""

    def scale(self, at: ScaleContext) -> Result:
        """Every slice of v has a scale that does not matter."""
        direction, size = at["v"], at["g"]
        axis, dims = at.arguments["dim"], len(direction.shape)
        others = [a for a in range(dims) if a != axis % dims]
        at.equations.constant_along(direction, others if axis != -1 else range(dims))
        return at.with_constants(Scale(at.shape, size.lift(len(at.shape)).terms))


def _affine(at: ScaleContext, x: Scale, axis: int | None, units: Scale | None = None) -> Scale:
    """Multiply by γ and add β, along an axis or (None) along the last ones."""
    result = x
    for name in ("weight", "bias"):
        if not at.has(name):
            continue
        given = at[name] if axis is None else _channels(at[name], x)
        if name == "weight":
            result = at.name_sums(product(x, given))
            dims = len(result.shape)
            for source in (given, x, *([] if units is None else [units])):
                at.equations.same_units(source.lift(dims), result)
        else:
            at.match(result, given)
    return result


def _channels(scale: Scale, x: Scale) -> Scale:
    """A vector of channels lined up with axis one of a tensor."""
    rest = (1,) * (len(x.shape) - 2)
    return scale.apply((1, scale.shape[0], *rest), lambda ids: ids.reshape(1, -1, *rest))
