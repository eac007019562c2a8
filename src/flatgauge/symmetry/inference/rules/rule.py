"""The base class of rules, and the context in which a rule infers scales.

What enters: one op of a graph, with the scales of everything before it. What leaves: the scales of
its outputs; demands on scales go into the equations. There is one rule class per family of ops
(see `graph/ops.py`), with one method per analysis: `scale` here, `path_sum` in
`symmetry/paths/path_sums.py`. What a class does not define refuses: scales are pinned and listed,
path sums raise. To add an op, add its record to `OPS`, and a class if its family is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx

from flatgauge.graph.ops import arguments_of, is_floating, op_name, op_record, shape_of, source_line
from flatgauge.symmetry.inference.equations import (
    ZERO,
    Scale,
    ScaleEquations,
    TooManyScalesError,
    constant,
    squeeze,
)

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.path_sums import PathContext, PathSums

#: The scale of an op's output, or of each of several.
Result = Scale | list[Scale]

#: Above this many entries, a constant is not searched for zeros.
_LARGEST_CONSTANT = 2**20


@dataclass(frozen=True)
class Pin:
    """An op that allows no scaling of what it reads.

    Attributes:
        op: Its name.
        reason: Why.
        source: Where in the user's code it stands, "" where unknown.
        sites: The layers whose outputs it pins.
        known: Whether there is a rule that says so; False for an op without a rule.
    """

    op: str
    reason: str
    source: str
    sites: tuple[str, ...]
    known: bool

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        what = f" pins {', '.join(f'`{site}`' for site in self.sites)}" if self.sites else ""
        return f"{self.op}{where}{what}: {self.reason}"


@dataclass(frozen=True)
class OpContext:
    """One op of a graph, `node`, in the course of an analysis."""

    node: fx.Node

    @property
    def op(self) -> str:
        """The name of the op."""
        return op_name(self.node)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        return arguments_of(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) output."""
        return shape_of(self.node)

    @property
    def has_several_outputs(self) -> bool:
        """Whether the op returns a tuple or a list."""
        return isinstance(self.node.meta.get("val"), (list, tuple))


@dataclass(frozen=True)
class ScaleContext(OpContext):
    """One op while its scales are inferred.

    Attributes:
        found: The scales of all earlier nodes.
        constants: The values of the nodes that depend on no input and no parameter.
        names: The parameters' and stored means' names, by node.
    """

    equations: ScaleEquations
    found: dict[fx.Node, Result]
    constants: dict[fx.Node, Any]
    names: dict[fx.Node, str]
    pins: list[Pin]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all outputs."""
        value = self.node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        return [tuple(v.shape) if isinstance(v, Tensor) else () for v in values]

    @property
    def site(self) -> str:
        """The name of new unknowns of this op: its parameter, or its place in the code."""
        first, *others = self.node.all_input_nodes
        for source in (*others, first):  # The first is the activation, as a rule.
            while source not in self.names and len(source.all_input_nodes) == 1:
                (source,) = source.all_input_nodes
            if source in self.names:
                return self.names[source]
        line = source_line(self.node)
        return self.op + (f" ({line})" if line else "")

    @property
    def first(self) -> Scale:
        """The scale of the first argument."""
        return self.scale(next(iter(self.arguments.values())))

    def __getitem__(self, name: str) -> Scale:
        """The scale of the argument of that name."""
        return self.scale(self.arguments[name])

    def has(self, name: str) -> bool:
        """Whether an argument is given."""
        return self.arguments.get(name) is not None

    def is_fixed(self, value: Any) -> bool:
        """Whether an argument is a number or a constant."""
        return not isinstance(value, fx.Node) or value in self.constants

    def scale(self, value: Any) -> Scale:
        """The scale of an argument: of a tensor, or of a number."""
        if not self.is_fixed(value):
            found = self.found[value]
            assert isinstance(found, Scale)
            return found
        values = self._values(value)  # Zero and infinite entries have every scale, others one.
        free = _free_entries(values).expand(values.shape)
        if values.numel() > _LARGEST_CONSTANT or not bool(free.any()):
            return constant(values.shape)
        ids = torch.zeros(values.shape, dtype=torch.long)
        ids[free] = self.equations.fresh((int(free.sum()),), "")
        return Scale(tuple(values.shape), ((Fraction(1), squeeze(ids)),))

    def scale_against(self, value: Any, other: Scale) -> Scale:
        """The scale of what meets a tensor entry by entry: zeros and infinities take its scale."""
        if not self.is_fixed(value):
            return self.scale(value)
        free = _free_entries(self._values(value))
        shape = torch.broadcast_shapes(free.shape, other.shape)
        if not bool(free.any()):
            return constant(shape)
        return other.lift(len(shape)).apply(shape, lambda ids: torch.where(free, ids, ZERO))

    def has_every_scale(self, value: Any) -> bool:
        """Whether an argument is a constant of zeros and infinities."""
        return self.is_fixed(value) and bool(_free_entries(self._values(value)).all())

    def tensors(self) -> list[Scale]:
        """The scales of everything the op reads that can be scaled."""
        found: list[Scale] = []
        for source in self.node.all_input_nodes:
            if source in self.found and source not in self.constants:  # Not a branch of `cond`.
                scales = self.found[source]
                found += scales if isinstance(scales, list) else [scales]
        return found

    def name_sums(self, scale: Scale) -> Scale:
        """Name the sums in a scale after this op."""
        return self.equations.name_sums(scale, self.site)

    def fixed_outputs(self) -> Result:
        """The outputs' scales if none can be scaled."""
        scales = [constant(shape) for shape in self.shapes]
        return scales if self.has_several_outputs else scales[0]

    def with_constants(self, *scales: Scale) -> Result:
        """The scales of the first outputs; further ones (places, statistics) are constant."""
        if not self.has_several_outputs:
            return scales[0]
        return [*scales, *(constant(shape) for shape in self.shapes[len(scales) :])]

    def match(self, left: Scale, right: Scale) -> None:
        """State that two tensors have equal scales; if one is pinned, so is the other."""
        if bool(left.terms) == bool(right.terms):
            self.equations.equal(left, right)
            return
        self.pin(left, right, reason="what it is added to or compared with cannot be scaled")

    def pin(self, *scales: Scale, reason: str, known: bool = True) -> None:
        """State that tensors cannot be scaled, and record why; `known` if a rule says so."""
        sites: dict[str, None] = {}
        for scale in scales:
            self.equations.pin(scale)
            for _, ids in scale.terms:
                starts = torch.tensor(self.equations.starts)
                for place in torch.searchsorted(starts, ids.unique(), right=True).unique():
                    sites[self.equations.sites[int(place) - 1]] = None
        sites.pop("", None)
        if sites or not known:
            line = source_line(self.node)
            self.pins.append(Pin(self.op, reason, line, tuple(sites), known))

    def pin_everything(
        self, reason: str, *, known: bool = True, keep_units: bool = False
    ) -> Result:
        """Pin all that the op reads; with `keep_units`, a single tensor's units pass."""
        scales = self.tensors()
        self.pin(*scales, reason=reason, known=known)
        if keep_units and len(scales) == 1 and scales[0].shape == self.shape:
            return self.equations.pinned_units(scales[0], self.site)
        return self.fixed_outputs()

    def _values(self, value: Any) -> Tensor:
        """A constant, or a number, as a tensor."""
        known = self.constants[value] if isinstance(value, fx.Node) else value
        return known if isinstance(known, Tensor) else torch.as_tensor(float(known))


class Rule:
    """How one family of ops acts. Every analysis is a method; the defaults refuse.

    Attributes:
        path_refusal: Why paths cannot be summed through such an op.
    """

    path_refusal: ClassVar[str] = "it is not known to be piecewise linear"

    def __init_subclass__(cls, *, family: str = "") -> None:
        """Register the class for a family of ops."""
        if family:
            RULES[family] = cls()

    def scale(self, at: ScaleContext) -> Result:
        """The scales of the outputs; demands go into `at.equations`."""
        if any(scale.terms for scale in at.tensors()) and is_floating(at.node):
            return at.pin_everything(
                "there is no rule for it, so symmetries through it are not claimed; "
                "add its record to `OPS` in `graph/ops.py`",
                known=False,
            )
        return at.pin_everything("its result is not a scalable tensor")

    def path_sum(self, at: PathContext) -> PathSums:
        """The sums over paths of the outputs."""
        at.refuse(self.path_refusal)


#: The rules by family.
RULES: dict[str, Rule] = {}

_NO_RULE = Rule()


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node's op."""
    return RULES.get(op_record(node).family, _NO_RULE)


def infer_op(at: ScaleContext) -> Result:
    """The scales of one op's outputs by its rule; without one, everything it reads is pinned."""
    if not hasattr(at.node.target, "_schema") and at.op != "getitem":  # It computes sizes.
        return _NO_RULE.scale(at)
    try:
        return rule_of(at.node).scale(at)
    except TooManyScalesError as error:
        return at.pin_everything(f"too many scales ({error.count:,}) to track")


def _free_entries(values: Tensor) -> Tensor:
    """Where a constant is zero or infinite; of size one along axes that it is expanded along."""
    once = [
        slice(0, 1) if stride == 0 else slice(None)
        for stride, size in zip(values.stride(), values.shape, strict=True)
    ]
    values = values[tuple(once)]
    if values.is_complex() or values.numel() > _LARGEST_CONSTANT:
        return torch.zeros((1,) * values.dim(), dtype=torch.bool)
    return ((values == 0) | values.isinf()).cpu()
