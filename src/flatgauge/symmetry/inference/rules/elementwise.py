"""Rules of ops that act on every entry by itself.

Scales pass through what is positively homogeneous, add up in products, and are equal where entries
are added or compared; everything else pins. Paths are worth the most that a slope can pass on.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx

from flatgauge.graph.ops import arguments_of, op_name, op_record, shape_of
from flatgauge.symmetry.inference.equations import Scale, product
from flatgauge.symmetry.inference.rules.rule import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.path_sums import PathContext, PathSums

_CURVED = "not positively homogeneous"


class HomogeneousRule(Rule, family="homogeneous"):
    """f(c x) = c f(x) for c > 0, with slopes of size 0 or 1."""

    def scale(self, at: ScaleContext) -> Result:
        return at.first

    def path_sum(self, at: PathContext) -> PathSums:
        return at.first


class TriangleRule(HomogeneousRule, family="triangle"):
    """The entries on one side of a diagonal."""

    def path_sum(self, at: PathContext) -> PathSums:
        return at.run_op()


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
        left, right = at.arguments["self"], at.arguments["other"]
        at.require_one_activation(left, right)
        return at.tensor(left) * at.tensor(right)


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


def _mark_read(at: ScaleContext) -> Result:
    """State that every entry has its own scale."""
    for scale in at.tensors():
        at.equations.mark_read(scale)
    return at.fixed_outputs()


# -- constant masks on parameters, as those of pruned layers --------------------------------------


def masked_form(weight: fx.Node, constants: Mapping[fx.Node, Any]) -> fx.Node:
    """The one product with a constant that reads a parameter, else the parameter itself."""
    if len(weight.users) == 1:
        (user,) = weight.users
        if _mask_of(user, weight, constants) is not None:
            return user
    return weight


def hidden_entries(
    names: Mapping[fx.Node, str], constants: Mapping[fx.Node, Any]
) -> dict[str, Tensor]:
    """For every parameter by name, the entries that every op reads times a constant zero."""
    masks: dict[str, list[Tensor]] = {}
    for node, name in names.items():
        for user in node.users:
            mask = _mask_of(user, node, constants)
            masks.setdefault(name, []).append(
                torch.zeros((), dtype=torch.bool) if mask is None else mask
            )
    found = {}
    for name, parts in masks.items():
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part
        if bool(whole.any()):
            found[name] = whole
    return found


def _is_mask(at: ScaleContext, value: object, weight: object) -> bool:
    """Whether a constant masks a parameter: the entries that it hides scale as the others do."""
    if value not in at.constants or not isinstance(weight, fx.Node):
        return False
    return weight in at.names and masked_form(weight, at.constants) is at.node


def _mask_of(node: fx.Node, weight: fx.Node, constants: Mapping[fx.Node, Any]) -> Tensor | None:
    """Where an op multiplies a tensor by a constant zero; None if it is not such a product."""
    if op_name(node) not in ("mul", "multiply") or shape_of(node) != shape_of(weight):
        return None
    factors = list(arguments_of(node).values())[:2]
    others = [factor for factor in factors if factor is not weight]
    value = constants.get(others[0]) if len(others) == 1 else None
    if not isinstance(value, Tensor):
        return None
    return (value == 0).expand(shape_of(weight))
