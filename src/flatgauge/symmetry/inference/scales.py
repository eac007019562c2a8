"""Infer the scales of all tensors of a model from its graph, op by op.

What enters: an exported graph, the values of parameters and buffers, and the parameters that are
fixed. What leaves: an `Inference`, the scales of parameters, stored means and outputs with the
equations between them. Each parameter gets unknowns (one per entry, or per row and column), then
the ops are visited in the order in which they run, and the `Rule` of each gives the scales of its
outputs.

There is one rule class per family of ops (see `graph/ops.py`), with one method per analysis:
`scale` here, `path_sum` in `path_sums.py`. What a class does not define refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx

from flatgauge.graph.export import ModelGraph
from flatgauge.graph.layers import input_dependent_uses
from flatgauge.graph.ops import arguments_of, is_floating, op_name, op_record, shape_of, source_line
from flatgauge.runtime.isolation import NameClashError
from flatgauge.symmetry.inference.equations import (
    ZERO,
    Scale,
    ScaleEquations,
    TooManyScalesError,
    constant,
    squeeze,
)

if TYPE_CHECKING:
    from flatgauge.symmetry.path_sums import PathContext, PathSums

#: The scale of an op's output, or of each of several.
Result = Scale | list[Scale]

#: Above this many entries, a constant is not searched for zeros.
_LARGEST_CONSTANT = 2**20
#: Up to that many entries of a parameter get an unknown each; of larger ones, rows and columns.
_MOST_ENTRIES = 2**16

#: Ops that contract a matrix with an activation.
_LINEAR = ("linear", "matmul", "mm", "addmm", "embedding")
_ONE = Fraction(1)


# -- rules ----------------------------------------------------------------------------------------


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

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        return arguments_of(self.node)

    @property
    def factors(self) -> list[Any]:
        """The arguments that the op multiplies with each other."""
        given = [self.arguments[name] for name in op_record(self.node).factors]
        return list(chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in given))

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
    """One op while its scales are inferred."""

    equations: ScaleEquations
    found: dict[fx.Node, Result]  #: The scales of all earlier nodes.
    constants: dict[fx.Node, Any]  #: Values of nodes that depend on no input and no parameter.
    names: dict[fx.Node, str]  #: Of parameters.
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
        """Whether an argument is a number or constant."""
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
        return Scale(tuple(values.shape), ((_ONE, squeeze(ids)),))

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
        path_by_op: Whether sums over paths go through the op as numbers do.
        path_refusal: Why paths cannot be summed through such an op.
    """

    path_by_op: ClassVar[bool] = False
    path_refusal: ClassVar[str] = "it is not known to be piecewise linear"

    def __init_subclass__(cls, *, family: str = "") -> None:
        """Register the class for a family of ops."""
        if family in RULES:
            raise NameClashError(f"the family of ops `{family}` has a rule already.")
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
        if not self.path_by_op:
            at.refuse(self.path_refusal)
        return at.run_op()


#: The rules by family.
RULES: dict[str, Rule] = {}

_NO_RULE = Rule()


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node's op."""
    return RULES.get(op_record(node).family, _NO_RULE)


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


# -- the graph ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredNorm:
    """A batch-norm with stored statistics: y = γ (x - mean) / √(variance + ε) + β."""

    weight: str
    bias: str
    mean: str
    variance: str
    epsilon: float
    before: str | None  #: What the op before adds to x, where nothing but this norm reads x.


@dataclass(frozen=True)
class Inference:
    """The scales of everything that can be rescaled, and the equations between them."""

    equations: ScaleEquations
    scales: dict[str, Scale]  #: Of parameters and stored means that the model reads, by name.
    followers: dict[str, Scale]  #: Of stored variances: fixed, but they belong to units.
    pins: list[Pin]
    outputs: list[Scale]
    #: For every parameter, the first and the last op at which it meets what depends on the inputs.
    times: dict[str, tuple[int, int]]
    norms: tuple[StoredNorm, ...]  #: With stored statistics and parameters of their own.
    hidden: dict[str, Tensor]  #: Where a constant hides entries of a parameter: without effect.


def infer_scales(
    graph: ModelGraph, state: Mapping[str, Tensor], fixed: Collection[str] = ()
) -> Inference:
    """Infer scales from a graph exported for one shape; the outputs' are not pinned yet."""
    return _ScaleInference(graph, state, fixed).run()


class _ScaleInference:
    """Visits the nodes of a graph in the order in which they run."""

    def __init__(
        self, graph: ModelGraph, state: Mapping[str, Tensor], fixed: Collection[str]
    ) -> None:
        self._graph = graph
        self._held, self._buffers = graph.parameter_names, graph.buffer_names
        self._names = {node: name for node, name in self._held.items() if name not in fixed}
        self._roles = _buffer_roles(graph)
        self._overlapping = _overlapping(state)
        still = [name for name in self._buffers.values() if self._roles[name] == "constant"]
        still += [name for name in self._held.values() if name in fixed]
        values = graph.constants({name: state[name] for name in still})
        self._constants = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in values.items()}
        self._equations = ScaleEquations()
        self._found: dict[fx.Node, Result] = {}
        self._scales: dict[str, Scale] = {}
        self._followers: dict[str, Scale] = {}
        self._pins: list[Pin] = []

    def _visit(self, node: fx.Node) -> None:
        """Infer the scales of one node."""
        buffer = self._buffers.get(node, "")
        if node in self._names:
            self._found[node] = self._parameter(self._names[node])
        elif buffer and self._roles[buffer] != "constant":
            self._found[node] = self._statistic(node, buffer)
        elif node.op == "placeholder" or node in self._constants:
            self._found[node] = constant(shape_of(node))
        elif op_name(node):
            self._found[node] = self._infer_op(node)

    def _infer_op(self, node: fx.Node) -> Result:
        """The scales of one op's outputs by its rule; without one, all that it reads is pinned."""
        at = ScaleContext(
            node, self._equations, self._found, self._constants, self._held, self._pins
        )
        if not hasattr(node.target, "_schema") and at.op != "getitem":  # It computes sizes.
            return _NO_RULE.scale(at)
        try:
            return rule_of(node).scale(at)
        except TooManyScalesError as error:
            return at.pin_everything(f"too many scales ({error.count:,}) to track")

    def run(self) -> Inference:
        """Visit all nodes, and give what was inferred."""
        for node in self._graph.nodes:
            self._visit(node)
        _tie_unread(self._equations, self._scales)
        outputs: list[Scale] = []
        for node in self._graph.outputs:
            returned = self._found.get(node) if isinstance(node, fx.Node) else None
            outputs += returned if isinstance(returned, list) else [returned] if returned else []
        for node in self._graph.mutations:
            written = self._found.get(node)
            if isinstance(written, Scale):
                self._equations.pin(written)
        place = {node: number for number, node in enumerate(self._graph.nodes)}
        uses = input_dependent_uses(self._graph)
        return Inference(
            self._equations,
            self._scales,
            self._followers,
            self._pins,
            outputs,
            {n: (place[u[0]], place[u[-1]]) if u else (0, 0) for n, u in uses.items()},
            tuple(_stored_norms(self._graph)),
            _hidden_entries(self._names, self._constants),
        )

    def _parameter(self, name: str) -> Scale:
        """The scale of a parameter; one that nothing reads is not kept."""
        if name in self._scales:
            return self._scales[name]
        nodes = [node for node, other in self._names.items() if other == name]
        scale = _parameter_scale(self._equations, nodes, name, self._constants)
        if name in self._overlapping:
            self._equations.pin(scale)
            reason = "it shares memory with another parameter"
            self._pins.append(Pin("storage", reason, "", (name,), True))
        if any(node.users for node in nodes):
            self._scales[name] = scale
        return scale

    def _statistic(self, node: fx.Node, name: str) -> Scale:
        """The scale of a stored mean, or of a stored variance: fixed, but it belongs to units."""
        is_mean = self._roles[name] == "running_mean"
        known = self._scales if is_mean else self._followers
        if name not in known:
            ids = self._equations.fresh(shape_of(node), name, parameter=True)
            known[name] = Scale(tuple(ids.shape), ((_ONE, ids),))
            self._equations.zeros += [] if is_mean else [ids]
        return known[name]


def _parameter_scale(
    equations: ScaleEquations, nodes: list[fx.Node], name: str, constants: Mapping[fx.Node, Any]
) -> Scale:
    """The unknowns of a parameter: one per entry, or per row and column of a contracted one."""
    shape = shape_of(nodes[0])
    nodes = [masked_form(node, constants) for node in nodes]
    users = [(user, node) for node in nodes for user in node.users]
    for user, node in users:
        given = arguments_of(user) if op_record(user).family == "convolution" else {}
        if given.get("weight") is node:
            transposed = "transpose" in op_name(user) or bool(given.get("transposed"))
            return _kernel_scale(equations, shape, given["groups"], name, transposed=transposed)
    contracted = len(shape) == 2 and any(op_name(user) in _LINEAR for user, _ in users)
    if not contracted and torch.Size(shape).numel() <= _MOST_ENTRIES:
        return Scale(shape, ((_ONE, equations.fresh(shape, name, parameter=True)),))
    terms = []
    for axis, size in enumerate(shape):
        ids = equations.fresh((size,), name, parameter=True)
        ids = ids.reshape([size if a == axis else 1 for a in range(len(shape))])
        if axis:  # A constant can be moved between the terms: the first entry is zero.
            equations.zeros.append(ids.reshape(-1)[:1])
        terms.append((_ONE, ids))
    return Scale(shape, tuple(terms))


def _tie_unread(equations: ScaleEquations, scales: Mapping[str, Scale]) -> None:
    """Tie entries that the example did not read (`pos[:, :T]`) to those that it did."""
    read = torch.zeros(equations.count, dtype=torch.bool)
    for left, right in equations.equalities:
        read[left.reshape(-1)] = read[right.reshape(-1)] = True
    for ids in (*equations.zeros, *equations.read, *(rows for rows, _ in equations.sums)):
        read[ids.reshape(-1)] = True
    for scale in scales.values():
        for _, ids in scale.terms:
            for axis in range(ids.dim()):
                others = [a for a in range(ids.dim()) if a != axis]
                seen = read[ids].any(dim=others) if others else read[ids]
                if seen.any() and not seen.all():
                    last = int(seen.nonzero()[-1])
                    left = ids.index_select(axis, (~seen).nonzero()[:, 0])
                    equations.equalities.append(
                        (left.reshape(-1), ids.narrow(axis, last, 1).expand_as(left).reshape(-1))
                    )
                    read[left.reshape(-1)] = True
            equations.zeros.append(ids[~read[ids]])


def _kernel_scale(
    equations: ScaleEquations, shape: tuple[int, ...], groups: int, name: str, *, transposed: bool
) -> Scale:
    """The unknowns of a convolution's weight: of outputs, and of the inputs of every group."""
    kernel = (1,) * (len(shape) - 2)
    own = 1 if transposed else 0  # The axis of outputs.
    outputs = shape[own] * (groups if transposed else 1)
    inputs = shape[1 - own] * (1 if transposed else groups)
    rows = equations.fresh((outputs,), name, parameter=True)
    columns = equations.fresh((inputs,), name, parameter=True).reshape(groups, -1)
    equations.zeros.append(columns[:, 0])
    if transposed:
        rows = rows.reshape(groups, 1, -1).expand(-1, inputs // groups, -1)
        columns = columns.reshape(inputs, 1)
        rows = rows.reshape(inputs, -1) if groups > 1 else rows[0, :1]
    else:
        rows = rows.reshape(outputs, 1)
        columns = columns[:, None].expand(-1, outputs // groups, -1)
        columns = columns.reshape(outputs, -1) if groups > 1 else columns[0, :1]
    terms = ((_ONE, ids.reshape(*ids.shape, *kernel)) for ids in (rows, columns))
    return Scale(shape, tuple(terms))


def _buffer_roles(graph: ModelGraph) -> dict[str, str]:
    """What every buffer is: only a batch-norm's "running_mean" or "running_var", or "constant"."""
    seen: dict[str, set[str]] = {}
    written = {source for node in graph.mutations for source in node.all_input_nodes}
    for node, name in graph.buffer_names.items():
        roles = seen.setdefault(name, set())
        for user in node.users:
            arguments = arguments_of(user) if op_record(user).family == "batch_norm" else {}
            reads = [role for role, value in arguments.items() if value is node]
            roles |= set(reads) if reads and not arguments.get("training") else {"constant"}
        if node in written:
            roles.add("constant")
    return {
        name: next(iter(roles)) if roles in ({"running_mean"}, {"running_var"}) else "constant"
        for name, roles in seen.items()
    }


def _stored_norms(graph: ModelGraph) -> Iterator[StoredNorm]:
    """The batch-norms that use stored statistics, scale and shift."""
    names = graph.parameter_names | graph.buffer_names
    for node in graph.nodes:
        given: dict[str, Any] = arguments_of(node) if op_record(node).family == "batch_norm" else {}
        roles = ("running_mean", "running_var", "weight", "bias")
        if given.get("training") or any(given.get(role) not in names for role in roles):
            continue
        source = given["input"]
        added = arguments_of(source).get("bias") if op_name(source) else None
        shared = added is None or max(len(source.users), len(added.users)) > 1
        yield StoredNorm(
            weight=names[given["weight"]],
            bias=names[given["bias"]],
            mean=names[given["running_mean"]],
            variance=names[given["running_var"]],
            epsilon=float(given["eps"]),
            before=None if added is None or shared else graph.parameter_names.get(added),
        )


def _overlapping(tensors: Mapping[str, Tensor]) -> set[str]:
    """The tensors that share memory with another one without being the same, or with themselves."""
    spans, found = [], set()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta":
            reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + reach * tensor.element_size(), name))
            if reach < tensor.numel():  # An expanded one.
                found.add(name)
    reached, widest = 0, ""
    for start, end, name in sorted(spans):
        if start < reached:
            found |= {widest, name}
        if end > reached:
            reached, widest = end, name
    return found


# -- constant masks on parameters, as those of pruned layers ---------------------------------------


def masked_form(weight: fx.Node, constants: Mapping[fx.Node, Any]) -> fx.Node:
    """The one product with a constant that reads a parameter, else the parameter itself."""
    users = list(weight.users)
    masked = len(users) == 1 and _mask_of(users[0], weight, constants) is not None
    return users[0] if masked else weight


def _hidden_entries(
    names: Mapping[fx.Node, str], constants: Mapping[fx.Node, Any]
) -> dict[str, Tensor]:
    """For every parameter by name, the entries that every op reads times a constant zero."""
    found: dict[str, Tensor] = {}
    for node, name in names.items():
        for user in node.users:
            mask = _mask_of(user, node, constants)
            mask = torch.zeros((), dtype=torch.bool) if mask is None else mask
            found[name] = found[name] & mask if name in found else mask
    return {name: mask for name, mask in found.items() if bool(mask.any())}


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
