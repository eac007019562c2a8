"""Rules of ops that multiply and add up: linear maps, convolutions, matrix products, attention."""

from __future__ import annotations

import math
import string
from typing import Any

from flatgauge.nodes import op_name
from flatgauge.symmetry.rules.table import Reading, Result, rule
from flatgauge.symmetry.scale import Ids, Scale, product


def _contract(reading: Reading, left: Scale, right: Scale, axes: int = 1) -> Scale:
    """Multiply two tensors of aligned axes and add up along the last ones.

    Args:
        reading: The op.
        left: The activations' scale.
        right: The weights' scale.
        axes: How many axes are added up.

    Returns:
        The result's scale, without these axes.
    """
    whole = product(left, right)
    dims = len(whole.shape)
    reading.system.link(left.lifted(dims), right.lifted(dims))  # Columns belong to input units.
    tied = reading.system.tied(whole, range(dims - axes, dims))
    shape = whole.shape[: dims - axes]
    summed = tied.apply(shape, lambda ids: ids.reshape(ids.shape[: dims - axes]))
    result = reading.settled(summed)
    for scale in (left, right):  # Rows belong to output units.
        rows = [t for t in scale.lifted(dims).terms if all(s == 1 for s in t[1].shape[-axes:])]
        outer = Scale(shape, tuple((c, ids.reshape(ids.shape[: dims - axes])) for c, ids in rows))
        reading.system.link(outer, result)
    return result


def _biased(reading: Reading, result: Scale, bias: Any) -> Scale:
    """Add a bias along the last axis."""
    if bias is not None:
        reading.match(result, reading.beside(bias, result))
    return result


@rule("linear")
def linear(reading: Reading) -> Result:
    """A linear map of the last axis: y = x Wᵀ + b."""
    x, weight = reading["input"], reading["weight"]
    if len(weight.shape) == 1:
        return _contract(reading, x, weight)
    wide = x.apply((*x.shape[:-1], 1, x.shape[-1]), lambda ids: ids.unsqueeze(-2))
    return _biased(reading, _contract(reading, wide, weight), reading.arguments["bias"])


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def multiplied(reading: Reading) -> Result:
    """Products of matrices, vectors and stacks of them."""
    left, right = (reading.scale(value) for value in list(reading.arguments.values())[:2])
    return _matmul(reading, left, right)


@rule("inner", "outer", "ger", "tensordot")
def crossed(reading: Reading) -> Result:
    """Every entry of the one with every entry of the other, added up along some axes."""
    left, right = (reading.scale(value) for value in list(reading.arguments.values())[:2])
    ours, theirs = reading.arguments.get("dims_self"), reading.arguments.get("dims_other")
    if op_name(reading.node) == "inner":
        ours, theirs = [-1], [-1]
    if not left.shape or not right.shape:
        return reading.settled(product(left, right))
    names = iter(string.ascii_letters)
    mine = [next(names) for _ in left.shape]
    yours = [next(names) for _ in right.shape]
    for one, other in zip(ours or (), theirs or (), strict=True):
        yours[other] = mine[one]
    target = [a for a in mine if a not in yours] + [a for a in yours if a not in mine]
    return _summed(reading, [left, right], ["".join(mine), "".join(yours)], "".join(target))


@rule("addmm", "baddbmm", "addmv")
def added(reading: Reading) -> Result:
    """A product of matrices plus a tensor."""
    names = list(reading.arguments)
    result = _matmul(reading, reading[names[1]], reading[names[2]])
    if reading.arguments.get("beta", 1) != 0:
        reading.match(result, reading.beside(reading.arguments["self"], result))
    return result


@rule("einsum")
def einsum(reading: Reading) -> Result:
    """Any sum of products of tensors along named axes."""
    parts = [reading.scale(tensor) for tensor in reading.arguments["tensors"]]
    labels, target = _labels(reading.arguments["equation"], [len(part.shape) for part in parts])
    if any(len(set(label)) < len(label) for label in labels):
        reading.pin(*reading.tensors(), reason="an einsum with repeated axes")
        return reading.fixed()
    return _summed(reading, parts, labels, target)


def _summed(reading: Reading, parts: list[Scale], labels: list[str], target: str) -> Scale:
    """A product of tensors of labelled axes, added up along those not in the target."""
    summed = sorted(set("".join(labels)) - set(target))
    order = [*target, *summed]
    aligned = [_labelled(part, label, order) for part, label in zip(parts, labels, strict=True)]
    first, *others = aligned
    if not others or not summed:
        tied = reading.system.tied(product(*aligned), range(len(target), len(order)))
        narrow = tied.apply(reading.shape, lambda ids: ids.reshape(ids.shape[: len(target)]))
        return reading.settled(narrow)
    return _contract(reading, product(first, *others[:-1]), others[-1], len(summed))


@rule(
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
def convolution(reading: Reading) -> Result:
    """A linear map of channels, the same at every place."""
    arguments = reading.arguments
    transposed = "transpose" in op_name(reading.node) or bool(arguments.get("transposed"))
    groups = arguments["groups"]
    x, weight = reading["input"], reading["weight"]
    spatial = len(weight.shape) - 2
    x = reading.system.tied(x, range(len(x.shape) - spatial, len(x.shape)))
    weight = reading.system.tied(weight, range(2, len(weight.shape)))
    batch = len(x.shape) - spatial - 1
    x = x.apply(x.shape[: batch + 1], lambda ids: ids.reshape(ids.shape[: batch + 1]))
    weight = weight.apply(weight.shape[:2], lambda ids: ids.reshape(ids.shape[:2]))
    inputs, outputs = x.shape[-1] // groups, reading.shape[batch] // groups
    if transposed:
        kernel = _split(weight, groups, inputs).apply(
            (groups, outputs, inputs), lambda ids: ids.transpose(1, 2)
        )
    else:
        kernel = _split(weight, groups, outputs)
    wide = x.move((*x.shape[:-1], groups, 1, inputs),
                  lambda ids: ids.reshape(*x.shape[:-1], groups, 1, inputs))  # fmt: skip
    result = _contract(reading, wide, kernel)
    channels = groups * outputs
    flat = result.move((*x.shape[:-1], channels), lambda ids: ids.reshape(*x.shape[:-1], channels))
    flat = _biased(reading, flat, arguments["bias"])
    if inputs == outputs == 1:
        reading.system.link(x, flat)  # Depthwise: every channel stays itself.
    return flat.apply(reading.shape, lambda ids: ids.reshape(*ids.shape, *(1,) * spatial))


@rule("scaled_dot_product_attention")
def attention(reading: Reading) -> Result:
    """softmax(q kᵀ) v: scales of q and k cancel, those of v pass."""
    dims = len(reading.shape)
    query, key, value = (reading[name].lifted(dims) for name in ("query", "key", "value"))
    heads = query.shape[-3] if len(query.shape) > 3 else 1
    if len(key.shape) > 3 and 1 < key.shape[-3] < heads:  # Several queries share a key.
        key, value = (_repeated(scale, heads) for scale in (key, value))
    left = query.apply((*query.shape[:-1], 1, query.shape[-1]), lambda ids: ids.unsqueeze(-2))
    right = key.apply((*key.shape[:-2], 1, *key.shape[-2:]), lambda ids: ids.unsqueeze(-3))
    scores = product(left, right)
    reading.system.zero(scores.terms)
    if reading.has("attn_mask"):
        reading.pin(reading["attn_mask"], reason="it is added to what a softmax reads")
    summed = reading.system.tied(value, [-2])
    return Scale(reading.shape, summed.terms)


@rule("bilinear")
def bilinear(reading: Reading) -> Result:
    """A form in two inputs: y_o = Σ x_i W_oij z_j + b_o."""
    one, other, weight = reading["input1"], reading["input2"], reading["weight"]
    dims = len(reading.shape)
    lead = reading.shape[:-1]
    left = one.apply((*lead, 1, one.shape[-1], 1), lambda ids: ids.unsqueeze(-2).unsqueeze(-1))
    right = other.apply((*lead, 1, 1, other.shape[-1]), lambda ids: ids.unsqueeze(-2).unsqueeze(-2))
    result = _contract(reading, product(left, right), weight.lifted(dims + 2), 2)
    return _biased(reading, result, reading.arguments["bias"])


def _matmul(reading: Reading, left: Scale, right: Scale) -> Scale:
    """Rows of the one with columns of the other."""
    if len(right.shape) == 1:
        return _contract(reading, left, right)
    columns = _turned(right)
    if len(left.shape) == 1:
        return _contract(reading, columns, left)
    wide = left.apply((*left.shape[:-1], 1, left.shape[-1]), lambda ids: ids.unsqueeze(-2))
    tall = columns.apply(
        (*columns.shape[:-2], 1, *columns.shape[-2:]), lambda ids: ids.unsqueeze(-3)
    )
    return _contract(reading, wide, tall)


def _turned(scale: Scale) -> Scale:
    """The last two axes exchanged."""
    shape = (*scale.shape[:-2], scale.shape[-1], scale.shape[-2])
    return scale.apply(shape, lambda ids: ids.transpose(-1, -2))


def _split(weight: Scale, groups: int, size: int) -> Scale:
    """A matrix (groups · size, n) as (groups, size, n)."""
    shape = (groups, size, weight.shape[1])
    if groups == 1:
        return weight.apply(shape, lambda ids: ids.unsqueeze(0))
    return weight.move(shape, lambda ids: ids.reshape(shape))


def _repeated(scale: Scale, heads: int) -> Scale:
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


def _labelled(scale: Scale, label: str, order: list[str]) -> Scale:
    """A tensor of labelled axes with its axes in a given order, size one where it has none."""
    places = [label.index(name) for name in order if name in label]
    shape = [scale.shape[label.index(name)] if name in label else 1 for name in order]

    def change(ids: Ids) -> Ids:
        sizes = iter(ids.permute(places).shape)
        return ids.permute(places).reshape([next(sizes) if n in label else 1 for n in order])

    assert math.prod(shape) == math.prod(scale.shape)
    return scale.apply(shape, change)
