"""Infer the scales of all tensors of a model from its graph.

What enters: an exported graph, the values of parameters and buffers, and the parameters that are
fixed. What leaves: an `Inference`, the scales of parameters, stored means and outputs with the
equations between them. Each parameter gets unknowns (one per entry, or per row and column), then
the ops are visited in the order in which they run, and the rule of each gives the scales of its
outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.graph.export import ModelGraph
from flatgauge.graph.layers import input_dependent_uses
from flatgauge.graph.ops import arguments_of, op_name, op_record, shape_of
from flatgauge.symmetry.inference.equations import Scale, ScaleEquations, constant
from flatgauge.symmetry.inference.rules.elementwise import hidden_entries, masked_form
from flatgauge.symmetry.inference.rules.rule import Pin, Result, ScaleContext, infer_op

#: Parameters of up to that many entries get an unknown for each, larger ones one per row and
#: column.
_MOST_ENTRIES = 2**16

#: Ops that contract a matrix with an activation.
_LINEAR = ("linear", "matmul", "mm", "addmm", "embedding")

_ONE = Fraction(1)


@dataclass(frozen=True)
class StoredNorm:
    """A batch-norm with stored statistics: y = γ (x - mean) / √(variance + ε) + β.

    Attributes:
        before: The parameter that the op before adds to x, where nothing but this norm reads x.
    """

    weight: str
    bias: str
    mean: str
    variance: str
    epsilon: float
    before: str | None


@dataclass(frozen=True)
class Inference:
    """The scales of everything that can be rescaled, and the equations between them.

    Attributes:
        scales: Of parameters and stored means that the model reads, by name.
        followers: Of stored variances: fixed, but they belong to units.
        times: For every parameter, the numbers of the first and the last op at which it meets
            what depends on the inputs.
        norms: The batch-norms with stored statistics and parameters of their own.
        hidden: Where a constant hides the entries of a parameter, by name: they have no effect.
    """

    equations: ScaleEquations
    scales: dict[str, Scale]
    followers: dict[str, Scale]
    pins: list[Pin]
    outputs: list[Scale]
    times: dict[str, tuple[int, int]]
    norms: tuple[StoredNorm, ...]
    hidden: dict[str, Tensor]


def infer_scales(
    graph: ModelGraph, state: Mapping[str, Tensor], fixed: Collection[str] = ()
) -> Inference:
    """Infer scales from a graph exported for one shape; the outputs' are not pinned yet."""
    walk = _Walk(graph, state, fixed)
    for node in graph.nodes:
        walk.visit(node)
    return walk.finish()


class _Walk:
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

    def visit(self, node: fx.Node) -> None:
        """Infer the scales of one node."""
        buffer = self._buffers.get(node, "")
        if node in self._names:
            self._found[node] = self._parameter(self._names[node])
        elif buffer and self._roles[buffer] != "constant":
            self._found[node] = self._statistic(node, buffer)
        elif node.op == "placeholder" or node in self._constants:
            self._found[node] = constant(shape_of(node))
        elif op_name(node):
            self._found[node] = infer_op(
                ScaleContext(
                    node, self._equations, self._found, self._constants, self._held, self._pins
                )
            )

    def finish(self) -> Inference:
        """What was inferred, once all nodes were visited."""
        _tie_unread(self._equations, self._scales)
        outputs: list[Scale] = []
        for node in self._graph.outputs:
            returned = self._found.get(node) if isinstance(node, fx.Node) else None
            outputs += returned if isinstance(returned, list) else [returned] if returned else []
        for node in self._graph.mutations:
            written = self._found.get(node)
            if isinstance(written, Scale):
                self._equations.pin(written)
        return Inference(
            self._equations,
            self._scales,
            self._followers,
            self._pins,
            outputs,
            times=_times(self._graph),
            norms=tuple(_stored_norms(self._graph)),
            hidden=hidden_entries(self._names, self._constants),
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
            known[name] = Scale(shape_of(node), ((_ONE, ids),))
            if not is_mean:
                self._equations.zeros.append(ids)
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
    return Scale(
        shape,
        (
            (_ONE, rows.reshape(*rows.shape, *kernel)),
            (_ONE, columns.reshape(*columns.shape, *kernel)),
        ),
    )


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


def _times(graph: ModelGraph) -> dict[str, tuple[int, int]]:
    """The numbers of the first and last op at which every parameter meets an activation."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return {
        name: (numbers[nodes[0]], numbers[nodes[-1]]) if nodes else (0, 0)
        for name, nodes in input_dependent_uses(graph).items()
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
    spans = []
    found: set[str] = set()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            first = int(tensor.storage_offset()) * tensor.element_size()
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            last = first + (reach + 1) * tensor.element_size()
            spans.append((storage.data_ptr(), first, last, name))
            if reach + 1 < tensor.numel():  # An expanded one.
                found.add(name)
    home, reached, widest = 0, 0, ""
    for place, start, end, name in sorted(spans):
        if place == home and start < reached:
            found |= {widest, name}
        if place != home or end > reached:
            home, reached, widest = place, end, name
    return found
