"""Read the scales of all tensors off a model's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.graph import ModelGraph
from flatgauge.meetings import meetings
from flatgauge.nodes import arguments_of, op_name, shape_of
from flatgauge.symmetry.masks import hidden_entries, masked_form
from flatgauge.symmetry.rules import Pin, Reading, apply_rule
from flatgauge.symmetry.scale import Ids, Scale, constant
from flatgauge.symmetry.system import System

#: Parameters of up to so many entries get an unknown for each, larger ones one per row and column.
_MOST_ENTRIES = 2**16

#: Ops that contract a matrix with an activation.
_LINEAR = ("linear", "matmul", "mm", "addmm", "embedding")

#: Ops that read a stored mean, and where.
_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")

_ONE = Fraction(1)


@dataclass(frozen=True)
class StoredNorm:
    """A batch-norm with stored statistics: y = γ (x - mean) / √(variance + ε) + β.

    Attributes:
        weight: The parameter γ.
        bias: The parameter β.
        mean: The stored mean.
        variance: The stored variance.
        epsilon: ε.
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
        system: The unknowns and equations.
        scales: Of parameters and stored means that the model reads, by name.
        followers: Of stored variances: fixed, but they belong to units.
        pins: The ops that allow no scaling.
        outputs: The scales of the model's outputs.
        times: For every parameter, the numbers of the first and the last op at which it meets
            what depends on the inputs.
        norms: The batch-norms with stored statistics and parameters of their own.
        hidden: Where a constant hides the entries of a parameter, by name: they have no effect.
    """

    system: System
    scales: dict[str, Scale]
    followers: dict[str, Scale]
    pins: list[Pin]
    outputs: list[Scale]
    times: dict[str, tuple[int, int]]
    norms: tuple[StoredNorm, ...]
    hidden: dict[str, Tensor]


def infer(graph: ModelGraph, state: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Inference:
    """Follow scales through a graph.

    Args:
        graph: The model's graph, exported for one shape.
        state: The values of buffers and parameters, by name.
        fixed: The parameters that do not move: constants, as buffers are.

    Returns:
        The scales of parameters and stored means; the outputs' are not pinned yet.
    """
    walk = _Walk(graph, state, fixed)
    for node in graph.nodes:
        walk.read(node)
    return walk.finished()


class _Walk:
    """Reads one node of a graph after the other."""

    def __init__(
        self, graph: ModelGraph, state: Mapping[str, Tensor], fixed: Collection[str]
    ) -> None:
        self._graph = graph
        self._held, self._buffers = graph.held, graph.buffers
        self._names = {node: name for node, name in self._held.items() if name not in fixed}
        self._roles = _roles(graph)
        self._overlapping = _overlapping(state)
        still = [name for name in self._buffers.values() if self._roles[name] == "constant"]
        still += [name for name in self._held.values() if name in fixed]
        values = graph.constants({name: state[name] for name in still})
        self._constants = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in values.items()}
        self._system = System()
        self._found: dict[fx.Node, Scale | list[Scale]] = {}
        self._scales: dict[str, Scale] = {}
        self._followers: dict[str, Scale] = {}
        self._pins: list[Pin] = []

    def read(self, node: fx.Node) -> None:
        """Read off the scales of one node."""
        buffer = self._buffers.get(node, "")
        if node in self._names:
            self._found[node] = self._parameter(self._names[node])
        elif buffer and self._roles[buffer] != "constant":
            self._found[node] = self._stored(node, buffer)
        elif node.op == "placeholder" or node in self._constants:
            self._found[node] = constant(shape_of(node))
        elif op_name(node):
            reading = Reading(
                node, self._system, self._found, self._constants, self._held, self._pins
            )
            self._found[node] = apply_rule(reading)

    def finished(self) -> Inference:
        """What was read, once all nodes are."""
        _follow(self._system, self._scales)
        outputs: list[Scale] = []
        for node in self._graph.outputs:
            returned = self._found.get(node) if isinstance(node, fx.Node) else None
            outputs += returned if isinstance(returned, list) else [returned] if returned else []
        for node in self._graph.mutations:
            written = self._found.get(node)
            if isinstance(written, Scale):
                self._system.pin(written)
        return Inference(
            self._system,
            self._scales,
            self._followers,
            self._pins,
            outputs,
            times=_times(self._graph),
            norms=tuple(_norms(self._graph)),
            hidden=hidden_entries(self._names, self._constants),
        )

    def _parameter(self, name: str) -> Scale:
        """The scale of a parameter; one that nothing reads is not kept."""
        if name in self._scales:
            return self._scales[name]
        nodes = [node for node, other in self._names.items() if other == name]
        scale = _parameter(self._system, nodes, name, self._constants)
        if name in self._overlapping:
            self._system.pin(scale)
            reason = "it shares memory with another parameter"
            self._pins.append(Pin("storage", reason, "", (name,), True))
        if any(node.users for node in nodes):
            self._scales[name] = scale
        return scale

    def _stored(self, node: fx.Node, name: str) -> Scale:
        """The scale of a stored mean, or of a stored variance: fixed, but it belongs to units."""
        mean = self._roles[name] == "running_mean"
        known = self._scales if mean else self._followers
        if name not in known:
            ids = self._system.fresh(shape_of(node), name, parameter=True)
            known[name] = Scale(shape_of(node), ((_ONE, ids),))
            if not mean:
                self._system.zeros.append(ids)
        return known[name]


def _parameter(
    system: System, nodes: list[fx.Node], name: str, constants: Mapping[fx.Node, Any]
) -> Scale:
    """The unknowns of a parameter: one per entry, or per row and column of a contracted one."""
    shape = shape_of(nodes[0])
    nodes = [masked_form(node, constants) for node in nodes]
    users = [user for node in nodes for user in node.users]
    convolution = next((u for n in nodes for u in n.users if _convolves(u, n)), None)
    if convolution is not None:
        groups = arguments_of(convolution)["groups"]
        return _kernel(system, shape, groups, name, transposed=_is_transposed(convolution))
    contracted = len(shape) == 2 and any(op_name(user) in _LINEAR for user in users)
    if not contracted and torch.Size(shape).numel() <= _MOST_ENTRIES:
        return Scale(shape, ((_ONE, system.fresh(shape, name, parameter=True)),))
    terms = []
    for axis, size in enumerate(shape):
        ids = _along(system, shape, axis, size, name)
        if axis:  # A constant can be moved between the terms: the first entry is zero.
            system.zeros.append(ids.reshape(-1)[:1])
        terms.append((_ONE, ids))
    return Scale(shape, tuple(terms))


def _follow(system: System, scales: Mapping[str, Scale]) -> None:
    """Let entries that the example did not read (`pos[:, :T]`) follow those that it did."""
    read = torch.zeros(system.count, dtype=torch.bool)
    for left, right in system.equalities:
        read[left.reshape(-1)] = read[right.reshape(-1)] = True
    for ids in (*system.zeros, *system.seen, *(rows for rows, _ in system.sums)):
        read[ids.reshape(-1)] = True
    for scale in scales.values():
        for _, ids in scale.terms:
            for axis in range(ids.dim()):
                others = [a for a in range(ids.dim()) if a != axis]
                seen = read[ids].any(dim=others) if others else read[ids]
                if seen.any() and not seen.all():
                    last = int(seen.nonzero()[-1])
                    left = ids.index_select(axis, (~seen).nonzero()[:, 0])
                    system.equalities.append(
                        (left.reshape(-1), ids.narrow(axis, last, 1).expand_as(left).reshape(-1))
                    )
                    read[left.reshape(-1)] = True
            system.zeros.append(ids[~read[ids]])


def _kernel(
    system: System, shape: tuple[int, ...], groups: int, name: str, *, transposed: bool
) -> Scale:
    """The unknowns of a convolution's weight: of outputs, and of the inputs of every group."""
    taps = (1,) * (len(shape) - 2)
    own = 1 if transposed else 0  # The axis of outputs.
    outputs = shape[own] * (groups if transposed else 1)
    inputs = shape[1 - own] * (1 if transposed else groups)
    rows = system.fresh((outputs,), name, parameter=True)
    columns = system.fresh((inputs,), name, parameter=True).reshape(groups, -1)
    system.zeros.append(columns[:, 0])
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
        ((_ONE, rows.reshape(*rows.shape, *taps)), (_ONE, columns.reshape(*columns.shape, *taps))),
    )


def _along(system: System, shape: tuple[int, ...], axis: int, size: int, name: str) -> Ids:
    """Unknowns along one axis."""
    ids = system.fresh((size,), name, parameter=True)
    return ids.reshape([size if a == axis else 1 for a in range(len(shape))])


def _convolves(node: fx.Node, weight: fx.Node) -> bool:
    """Whether an op is a convolution with a kernel."""
    return "conv" in op_name(node) and arguments_of(node).get("weight") is weight


def _is_transposed(node: fx.Node) -> bool:
    return "transpose" in op_name(node) or bool(arguments_of(node).get("transposed"))


def _roles(graph: ModelGraph) -> dict[str, str]:
    """What every buffer is: a batch-norm's stored mean or variance and nothing else, or constant.

    Returns:
        "running_mean", "running_var" or "constant", by name.
    """
    seen: dict[str, set[str]] = {}
    written = {source for node in graph.mutations for source in node.all_input_nodes}
    for node, name in graph.buffers.items():
        roles = seen.setdefault(name, set())
        for user in node.users:
            arguments = arguments_of(user) if op_name(user) in _NORMS else {}
            reads = [role for role, value in arguments.items() if value is node]
            roles |= set(reads) if reads and not arguments.get("training") else {"constant"}
        if node in written:
            roles.add("constant")
    return {
        name: next(iter(roles)) if roles in ({"running_mean"}, {"running_var"}) else "constant"
        for name, roles in seen.items()
    }


def _times(graph: ModelGraph) -> dict[str, tuple[int, int]]:
    """When every parameter first and last meets what depends on the inputs, if ever."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return {
        name: (numbers[nodes[0]], numbers[nodes[-1]]) if nodes else (0, 0)
        for name, nodes in meetings(graph).items()
    }


def _norms(graph: ModelGraph) -> Iterator[StoredNorm]:
    """The batch-norms that use stored statistics, scale and shift."""
    names = graph.held | graph.buffers
    for node in graph.nodes:
        given: dict[str, Any] = arguments_of(node) if op_name(node) in _NORMS else {}
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
            before=None if added is None or shared else graph.held.get(added),
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
