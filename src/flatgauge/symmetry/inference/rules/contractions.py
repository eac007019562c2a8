"""Rules of ops that multiply and add up: linear maps, convolutions, matrix products, attention.

Scales of two factors add up, and must be constant along the axes that are summed. Paths go on
through every weight that their unit meets; only one factor may be an activation.
"""

from __future__ import annotations

import math
import string
from typing import TYPE_CHECKING, Any

import torch

from flatgauge.symmetry.inference.equations import Ids, Scale, product
from flatgauge.symmetry.inference.rules.rule import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.path_sums import PathContext, PathSums


class ContractionRule(Rule):
    """A sum of products. Paths: the op itself, on sums of paths and sizes of weights."""

    def factors(self, arguments: dict[str, Any]) -> list[Any]:
        """The arguments of which at most one may be an activation."""
        return list(arguments.values())[:2]

    def path_sum(self, at: PathContext) -> PathSums:
        """Every path goes on through every weight that its unit meets; a bias starts new ones."""
        at.require_one_activation(*self.factors(at.arguments))
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
        return _matmul(at, *(at.scale(value) for value in self.factors(at.arguments)))


class TensordotRule(ContractionRule, family="tensordot"):
    """Every entry of the one with every entry of the other, summed along some axes."""

    def scale(self, at: ScaleContext) -> Result:
        left, right = (at.scale(value) for value in self.factors(at.arguments))
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
        names = list(at.arguments)
        result = _matmul(at, at[names[1]], at[names[2]])
        if at.arguments.get("beta", 1) != 0:
            at.match(result, at.scale_against(at.arguments["self"], result))
        return result

    def path_sum(self, at: PathContext) -> PathSums:
        start, left, right = list(at.arguments.values())[:3]
        at.require_one_activation(left, right)
        product = torch.matmul(at.tensor(left), at.tensor(right))
        return product * at["alpha"] + at.tensor(start) * at["beta"]


class EinsumRule(ContractionRule, family="einsum"):
    """Any sum of products of tensors along named axes."""

    def factors(self, arguments: dict[str, Any]) -> list[Any]:
        return list(arguments["tensors"])

    def scale(self, at: ScaleContext) -> Result:
        """Scales are constant along the axes that are summed."""
        parts = [at.scale(tensor) for tensor in at.arguments["tensors"]]
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

    def factors(self, arguments: dict[str, Any]) -> list[Any]:
        return [arguments[name] for name in ("input1", "input2", "weight")]

    def scale(self, at: ScaleContext) -> Result:
        one, other, weight = at["input1"], at["input2"], at["weight"]
        lead = at.shape[:-1]
        left = one.apply((*lead, 1, one.shape[-1], 1), lambda ids: ids.unsqueeze(-2).unsqueeze(-1))
        right = other.apply(
            (*lead, 1, 1, other.shape[-1]), lambda ids: ids.unsqueeze(-2).unsqueeze(-2)
        )
        whole = product(left, right)
        return _add_bias(at, _contract(at, whole, weight.lift(len(at.shape) + 2), 2))


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
