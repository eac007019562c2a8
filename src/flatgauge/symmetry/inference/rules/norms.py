"""Rules of normalization: stored statistics are a linear map, others pin what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatgauge.symmetry.inference.equations import Scale, constant, product
from flatgauge.symmetry.inference.rules.rule import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.path_sums import PathContext, PathSums


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
