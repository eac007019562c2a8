"""Rules of ops that act on every entry by itself."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import fx

from flatgauge.nodes import op_name
from flatgauge.symmetry.masks import masked_form
from flatgauge.symmetry.rules.table import Reading, Result, rule
from flatgauge.symmetry.scale import Scale, constant, product


def _first(reading: Reading) -> Scale:
    return reading.scale(next(iter(reading.arguments.values())))


@rule(
    *("relu", "leaky_relu", "abs", "neg", "positive", "clone", "contiguous", "alias", "detach"),
    *("lift_fresh_copy", "lift_fresh", "native_dropout", "tril", "triu", "rrelu"),
)
def passed(reading: Reading) -> Result:
    """Positively homogeneous: f(c x) = c f(x)."""
    if op_name(reading.node) == "rrelu" and reading.arguments["training"]:
        return _pinned(reading, "it draws random slopes")
    scale = _first(reading)
    return [scale, constant(scale.shape)] if len(reading.shapes) > 1 else scale


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropped(reading: Reading) -> Result:
    """Nothing in eval mode."""
    arguments = reading.arguments
    if arguments["train"] and arguments["p"] > 0:
        return _pinned(reading, "it is random")
    return _first(reading)


@rule("_to_copy", "to", "type_as", "copy")
def cast(reading: Reading) -> Result:
    """Between floating kinds a cast changes nothing; to whole numbers it rounds."""
    kind = reading.node.meta["val"].dtype
    if kind.is_floating_point and op_name(reading.node) == "copy":
        return Scale(reading.shape, reading["src"].lifted(len(reading.shape)).terms)
    if kind.is_floating_point:
        return _first(reading)
    if kind == torch.bool:  # Whether it is zero, which no scale changes.
        return unseen(reading)
    return _pinned(reading, "a cast to whole numbers rounds")


@rule("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6", "threshold")
def clamped(reading: Reading) -> Result:
    """Homogeneous where every bound is zero or infinite."""
    arguments = reading.arguments
    bounds = [arguments.get(name) for name in ("min", "max", "min_val", "max_val", "threshold")]
    if op_name(reading.node) == "threshold":
        bounds.append(arguments["value"])
    elif op_name(reading.node) == "relu6":
        bounds.append(6)
    scale = _first(reading)
    for bound in bounds:
        if bound is not None:
            limit = reading.beside(bound, scale)
            if scale.terms and not limit.terms:
                return _pinned(reading, "its bounds are fixed numbers other than zero")
            scale = _met(reading, scale, limit)
    return scale


@rule("prelu")
def sloped(reading: Reading) -> Result:
    """Homogeneous in the input; the slope cannot be scaled."""
    slope, x = reading["weight"], reading["self"]
    reading.pin(slope, reason="a slope has no scale of its own")
    if slope.shape[0] > 1:  # One per channel: it belongs to that unit.
        shape = (1, slope.shape[0], *(1,) * (len(x.shape) - 2))
        reading.system.link(x, slope.apply(shape, lambda ids: ids.reshape(shape)))
    return x


@rule("add", "sub", "rsub", "maximum", "minimum", "fmax", "fmin", "hypot")
def alike(reading: Reading) -> Result:
    """Terms of a sum, and what is compared with each other, scale alike."""
    return _alike(reading, reading.arguments["self"], reading.arguments["other"])


@rule("lerp")
def between(reading: Reading) -> Result:
    """A mean of two tensors that scale alike; its weights cannot be scaled."""
    if isinstance(reading.arguments["weight"], fx.Node):
        reading.pin(reading["weight"], reason="the weights of a mean have no scale of their own")
    return _alike(reading, reading.arguments["self"], reading.arguments["end"])


@rule("where")
def chosen(reading: Reading) -> Result:
    """Both sides scale alike."""
    if "other" not in reading.arguments:
        return _pinned(reading, "it gives indices")
    return _alike(reading, reading.arguments["self"], reading.arguments["other"])


@rule("masked_fill")
def filled(reading: Reading) -> Result:
    """The filling scales like what it replaces: zero and infinity do, other numbers do not."""
    return _alike(reading, reading.arguments["self"], reading.arguments["value"])


@rule("fill")
def overwritten(reading: Reading) -> Result:
    """One number everywhere."""
    value = reading["value"]
    return value.lifted(len(reading.shape)).apply(reading.shape, lambda ids: ids)


@rule("eq", "ne", "lt", "le", "gt", "ge")
def compared(reading: Reading) -> Result:
    """What is compared scales alike; the result is a truth value."""
    _alike(reading, reading.arguments["self"], reading.arguments["other"])
    return reading.fixed()


@rule("sign", "sgn", "isnan", "isinf", "isfinite", "logical_not", "signbit")
def unseen(reading: Reading) -> Result:
    """Scaling by a positive number does not change the result: every entry has its own scale."""
    for scale in reading.tensors():
        reading.system.see(scale)
    return reading.fixed()


@rule(
    *("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("empty_like", "rand_like", "randn_like", "_assert_tensor_metadata", "sym_size", "arange"),
    *("_assert_scalar", "_assert_async", "sym_numel", "sym_stride", "zeros", "ones", "full"),
)
def indifferent(reading: Reading) -> Result:
    """Reads shapes or truth values only."""
    return reading.fixed()


@rule("mul", "multiply")
def multiplied(reading: Reading) -> Result:
    """Log-scales of factors add up."""
    arguments = reading.arguments
    return _product(reading, arguments["self"], arguments["other"], 1)


@rule("div", "divide", "true_divide")
def divided(reading: Reading) -> Result:
    """The log-scale of a divisor is subtracted."""
    arguments = reading.arguments
    if arguments.get("rounding_mode") is not None:
        return _pinned(reading, "it rounds")
    return _product(reading, arguments["self"], arguments["other"], -1)


@rule("addcmul", "addcdiv")
def added_product(reading: Reading) -> Result:
    """A sum with a product or quotient."""
    sign = 1 if op_name(reading.node) == "addcmul" else -1
    term = reading.settled(product(reading["tensor1"], reading["tensor2"].times(sign)))
    return _met(reading, reading.beside(reading.arguments["self"], term), term)


@rule("glu")
def gated(reading: Reading) -> Result:
    """The first half, times the sigmoid of the second."""
    scale, axis = reading["self"], reading.arguments["dim"] % len(reading.shape)
    half = reading.shape[axis]
    reading.pin(scale.take(axis, slice(half, None)), reason="not positively homogeneous")
    return scale.take(axis, slice(0, half))


@rule("square", "sqrt", "rsqrt", "reciprocal")
def fixed_power(reading: Reading) -> Result:
    """Powers multiply the log-scale."""
    powers = {"square": Fraction(2), "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2)}
    power = powers.get(op_name(reading.node), Fraction(-1))
    return reading.settled(_first(reading).times(power))


@rule("pow", "float_power")
def powered(reading: Reading) -> Result:
    """A fixed power multiplies the log-scale."""
    base, exponent = reading.arguments["self"], reading.arguments["exponent"]
    if isinstance(exponent, (int, float)) and not isinstance(base, (int, float)):
        power = Fraction(exponent).limit_denominator(64)
        if abs(float(power) - exponent) < 1e-12:
            return reading.settled(reading.scale(base).times(power))
    return _pinned(reading, "an exponent that is no fixed fraction")


_CURVES = """
    acos acosh asin asinh atan atanh celu cos cosh elu erf erfc exp exp2 expm1 gelu
    hardshrink hardsigmoid hardswish log log10 log1p log2 log_sigmoid mish selu sigmoid silu
    sin sinh softplus softshrink tan tanh ceil floor round trunc frac fmod remainder
    nan_to_num logit digamma lgamma isclose
""".split()  # noqa: SIM905


@rule(*_CURVES)
def curved(reading: Reading) -> Result:
    """Not homogeneous: the input is pinned, the units pass."""
    return _pinned(reading, "not positively homogeneous")


def _pinned(reading: Reading, reason: str) -> Result:
    """Pin everything an op reads; where it is one tensor, its units pass."""
    scales = reading.tensors()
    reading.pin(*scales, reason=reason)
    if len(scales) == 1 and scales[0].shape == reading.shape:
        return reading.system.shadow(scales[0], reading.site)
    return reading.fixed()


def _alike(reading: Reading, one: Any, other: Any) -> Scale:
    """State that two arguments scale alike, and give the scale of the result."""
    if one in reading.constants or not isinstance(one, fx.Node):
        right = reading.scale(other)
        return _met(reading, reading.beside(one, right), right)
    left = reading.scale(one)
    return _met(reading, left, reading.beside(other, left))


def _met(reading: Reading, left: Scale, right: Scale) -> Scale:
    """State that two tensors scale alike, and give the scale of the result."""
    reading.match(left, right)
    larger, smaller = (left, right) if len(left.shape) >= len(right.shape) else (right, left)
    dims = len(reading.shape)
    larger, smaller = larger.lifted(dims), smaller.lifted(dims)
    # Along an axis that only one of them has, the other is repeated: take the one that varies.
    terms = larger.terms or smaller.terms
    varied = [s for s in (larger, smaller) if s.single is not None]
    if len(varied) == 2:
        sizes = [sum(size > 1 for size in s.terms[0][1].shape) for s in varied]
        terms = varied[sizes.index(max(sizes))].terms
    return Scale(reading.shape, terms)


def _masks(reading: Reading, value: object, weight: object) -> bool:
    """Whether a constant masks a parameter: the entries that it hides scale as the others do."""
    if value not in reading.constants or not isinstance(weight, fx.Node):
        return False
    return weight in reading.names and masked_form(weight, reading.constants) is reading.node


def _product(reading: Reading, left: object, right: object, power: int) -> Scale:
    """The scale of a product or quotient; plain numbers change nothing."""
    scales = []
    for value, other, sign in ((left, right, 1), (right, left, power)):
        if not isinstance(value, (int, float)) and not _masks(reading, value, other):
            scales.append(reading.scale(value).times(sign))
    whole = product(*scales)
    result = reading.settled(whole)
    for scale in scales:
        if result.single is not None and scale.terms:
            reading.system.link(scale.lifted(len(result.shape)), result)
    return result
