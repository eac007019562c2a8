"""The table of rules: for every op family, what its output's scale is and what it demands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.nodes import arguments_of, is_floating, op_name, source_line
from flatgauge.symmetry.scale import ZERO, Scale, constant, squeezed
from flatgauge.symmetry.system import System, TooManyScalesError

Result = Scale | list[Scale]
Rule = Callable[["Reading"], Result]

#: The rules by the name of the op. To add one, write a function under `@rule("op", ...)`.
RULES: dict[str, Rule] = {}

#: Above this many entries, a constant is not looked through for zeros.
_LARGEST_CONSTANT = 2**20


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Declare a function to be the rule of some ops.

    Args:
        *ops: Their names, without namespace and overload.

    Returns:
        The decorator.
    """

    def declare(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, op
            RULES[op] = function
        return function

    return declare


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
class Reading:
    """One op while its scales are read off.

    Attributes:
        node: The op in the graph.
        system: The equations so far.
        found: The scales of all earlier nodes.
        constants: The values of the nodes that depend on no input and no parameter.
        names: The parameters' and stored means' names, by node.
        pins: The ops that allow no scaling, so far.
    """

    node: fx.Node
    system: System
    found: dict[fx.Node, Result]
    constants: dict[fx.Node, Any]
    names: dict[fx.Node, str]
    pins: list[Pin]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        return arguments_of(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) output."""
        return self.shapes[0]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all outputs."""
        value = self.node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        return [tuple(v.shape) if isinstance(v, Tensor) else () for v in values]

    @property
    def site(self) -> str:
        """What new unknowns of this op are called: its parameter, or its place in the code."""
        first, *others = self.node.all_input_nodes
        for source in (*others, first):  # The first is the activation, as a rule.
            while source not in self.names and len(source.all_input_nodes) == 1:
                (source,) = source.all_input_nodes
            if source in self.names:
                return self.names[source]
        line = source_line(self.node)
        return op_name(self.node) + (f" ({line})" if line else "")

    def scale(self, value: Any) -> Scale:
        """The scale of an argument: of a tensor, or of a number."""
        if isinstance(value, fx.Node) and value not in self.constants:
            found = self.found[value]
            assert isinstance(found, Scale)
            return found
        return self._of_values(self._values(value))

    def beside(self, value: Any, other: Scale) -> Scale:
        """The scale of an argument that meets another tensor entry by entry.

        Args:
            value: A tensor or a number.
            other: The scale of what it is added to or compared with.

        Returns:
            Its scale; zero and infinite entries of a constant take the other's.
        """
        if isinstance(value, fx.Node) and value not in self.constants:
            return self.scale(value)
        loose = _loose(self._values(value))
        shape = torch.broadcast_shapes(loose.shape, other.shape)
        if not bool(loose.any()):
            return constant(shape)
        return other.lifted(len(shape)).apply(shape, lambda ids: torch.where(loose, ids, ZERO))

    def is_loose(self, value: Any) -> bool:
        """Whether an argument is a constant of zeros and infinities, which have every scale."""
        moves = isinstance(value, fx.Node) and value not in self.constants
        return not moves and bool(_loose(self._values(value)).all())

    def __getitem__(self, name: str) -> Scale:
        """The scale of the argument of that name."""
        return self.scale(self.arguments[name])

    def has(self, name: str) -> bool:
        """Whether an argument is given."""
        return self.arguments.get(name) is not None

    def tensors(self) -> list[Scale]:
        """The scales of everything the op reads that can be scaled."""
        found: list[Scale] = []
        for source in self.node.all_input_nodes:
            if source in self.found and source not in self.constants:  # A branch is no tensor.
                scales = self.found[source]
                found += scales if isinstance(scales, list) else [scales]
        return found

    def settled(self, scale: Scale) -> Scale:
        """Name the sums in a scale after this op."""
        return self.system.settled(scale, self.site)

    def fixed(self) -> Result:
        """The outputs' scales where none can be scaled."""
        value = self.node.meta.get("val")
        scales = [constant(shape) for shape in self.shapes]
        return scales if isinstance(value, (list, tuple)) else scales[0]

    def match(self, left: Scale, right: Scale) -> None:
        """State that two tensors that meet scale alike; where one cannot, neither does the other.

        Args:
            left: The scale of the one.
            right: The scale of the other.
        """
        if bool(left.terms) == bool(right.terms):
            self.system.equal(left, right)
            return
        self.pin(left, right, reason="what it is added to or compared with cannot be scaled")

    def pin(self, *scales: Scale, reason: str, known: bool = True) -> None:
        """State that tensors cannot be scaled, and remember why.

        Args:
            *scales: Of the tensors.
            reason: Why, in words.
            known: Whether a rule says so.
        """
        sites: dict[str, None] = {}
        for scale in scales:
            self.system.pin(scale)
            for _, ids in scale.terms:
                starts = torch.tensor(self.system.starts)
                for place in torch.searchsorted(starts, ids.unique(), right=True).unique():
                    sites[self.system.sites[int(place) - 1]] = None
        sites.pop("", None)
        if sites or not known:
            line = source_line(self.node)
            self.pins.append(Pin(op_name(self.node), reason, line, tuple(sites), known))

    def _values(self, value: Any) -> Tensor:
        """A constant, or a number, as a tensor."""
        known = self.constants[value] if isinstance(value, fx.Node) else value
        return known if isinstance(known, Tensor) else torch.as_tensor(float(known))

    def _of_values(self, values: Tensor) -> Scale:
        """The scale of a constant: zero and infinite entries have every scale, others one."""
        loose = _loose(values).expand(values.shape)
        if values.numel() > _LARGEST_CONSTANT or not bool(loose.any()):
            return constant(values.shape)
        ids = torch.zeros(values.shape, dtype=torch.long)
        ids[loose] = self.system.fresh((int(loose.sum()),), "")
        return Scale(tuple(values.shape), ((Fraction(1), squeezed(ids)),))


def apply_rule(reading: Reading) -> Result:
    """Read off one op's scales by its rule, or pin everything it touches.

    Args:
        reading: The op.

    Returns:
        The scales of its outputs.
    """
    op = op_name(reading.node)
    own = hasattr(reading.node.target, "_schema") or op == "getitem"  # Else sizes are computed.
    if op in RULES and own:
        try:
            return RULES[op](reading)
        except TooManyScalesError as error:
            reason = f"too many scales ({error.count:,}) to track"
            reading.pin(*reading.tensors(), reason=reason)
            return reading.fixed()
    if any(scale.terms for scale in reading.tensors()) and is_floating(reading.node):
        reading.pin(
            *reading.tensors(),
            reason="there is no rule for it, so symmetries through it are not claimed; add one in "
            "`symmetry/rules`",
            known=False,
        )
    else:
        reading.pin(*reading.tensors(), reason="its result is no scalable tensor")
    return reading.fixed()


def _loose(values: Tensor) -> Tensor:
    """Where a constant is zero or infinite; of size one along axes that it is expanded along."""
    once = [
        slice(0, 1) if stride == 0 else slice(None)
        for stride, size in zip(values.stride(), values.shape, strict=True)
    ]
    values = values[tuple(once)]
    if values.is_complex() or values.numel() > _LARGEST_CONSTANT:
        return torch.zeros((1,) * values.dim(), dtype=torch.bool)
    return ((values == 0) | values.isinf()).cpu()
