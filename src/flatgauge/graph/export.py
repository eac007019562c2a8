"""The exported model graph: which op reads what. The only file that touches torch.export.

What enters: a module and an example call. What leaves: a `ModelGraph` that can be walked, and run
with other parameters, other inputs, and handlers in the place of some ops. `ExportedGraphs` keeps
the graphs of one model for its copies with other weights. Records of ops that other packages bring
through the entry points `flatgauge.rules` join the table (`graph/ops.py`) with the first graph.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flatgauge.estimators.linalg import agrees
from flatgauge.graph.ops import OPS, Op, call_op, filling, is_random, op_name, shape_of
from flatgauge.runtime.isolation import NameClashError, Plugins, explain_copy_errors

LOG = logging.getLogger("flatgauge")

#: Stands in for an op while the graph runs: takes its arguments, returns its output.
Handler = Callable[..., Any]


def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What a slice is assigned: torch's own functional form has no derivative."""
    return source.to(destination).expand_as(destination)


#: What runs in place of ops that cannot be differentiated as they are exported, or that expect
#: tensors to lie in memory as those of the example did.
_SUBSTITUTES: dict[str, Handler] = {
    "copy": _copy,
    "view": torch.reshape,
    "_unsafe_view": torch.reshape,
}

#: How far graph and model may differ, in units of rounding and relative to the largest output.
_ROUNDINGS, _COARSEST = 1e3, 1e-2

#: Ops that merge or split axes without moving data.
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten")


class UnsupportedGraphError(ValueError):
    """The model cannot be read as a graph of known operations."""


@dataclass(frozen=True)
class SampleAxis:
    """Where in a tensor the samples lie."""

    axis: int  # The axis that counts samples, alone or merged with positions.
    major: bool  # Whether, when merged, all positions of one sample are neighbours.

    def first(self, tensor: Tensor, samples: int) -> Tensor:
        """The tensor with the samples in front and what was merged with them behind."""
        front = tensor.movedim(self.axis, 0)
        rest = front.shape[1:]
        if self.major:
            return front.reshape(samples, -1, *rest)
        return front.reshape(-1, samples, *rest).movedim(1, 0)


def _add_records(name: str, records: Any) -> Iterable[str]:
    """Add the records of another package to the table."""
    if not isinstance(records, dict) or not all(isinstance(op, Op) for op in records.values()):
        raise TypeError(f"`{name}` is not a dict of `Op` records by the names of ops.")
    for op in records:
        if op in OPS:
            raise NameClashError(f"the op `{op}` has a record already.")
    OPS.update(records)
    return records


#: The records that other packages bring, loaded before the first graph is made.
OP_PLUGINS = Plugins("flatgauge.rules", _add_records)


class ModelGraph:
    """A model in eval mode, as a graph of functional tensor operations.

    Attributes:
        nodes: The operations, in order of execution.
        parameters: The nodes that stand for parameters, by the name in
            `model.named_parameters()`; a tensor with several names has one.
        outputs: The nodes the model returns, in the order of its flattened output.
        mutations: The nodes that the model writes into its buffers.
        symbol: The name of the number of samples in symbolic shapes, "" where the model treats
            it as a constant.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        samples: int,
        select: Callable[[Any], Any] = lambda output: output,
    ) -> None:
        """Export a model."""
        OP_PLUGINS.packages()
        program = _export(_Called(model, select), arguments, keywords, samples)
        signature = program.graph_signature
        self._module = program.graph_module
        self.nodes: list[fx.Node] = list(program.graph.nodes)
        self._constants = {
            name.removeprefix("model."): value for name, value in program.constants.items()
        }
        aliases = _canonical_names(model)
        self._sources: dict[fx.Node, tuple[str, str]] = {}
        self.parameters: dict[str, fx.Node] = {}
        placeholders = (node for node in self.nodes if node.op == "placeholder")
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            kind, target = spec.kind.name, (spec.target or node.name).removeprefix("model.")
            if kind in ("PARAMETER", "BUFFER"):
                target = aliases.get(target, target)
            if kind == "PARAMETER" and (node.users or target not in self.parameters):
                self.parameters[target] = node
            self._sources[node] = kind, target
        returned: Any = self.nodes[-1].args[0]
        kinds = [(n, s.kind.name) for n, s in zip(returned, signature.output_specs, strict=True)]
        self.outputs = [node for node, kind in kinds if kind == "USER_OUTPUT"]
        self.mutations = [node for node, kind in kinds if kind != "USER_OUTPUT"]
        self.symbol = self._symbol_of_samples()
        open_axis = self.symbol or "fixed"
        LOG.debug("exported %s: %d nodes, samples %s", type(model), len(self.nodes), open_axis)
        self._axes: dict[fx.Node, SampleAxis | None] = {}
        self._sizes: dict[tuple[fx.Node, int], tuple[int, ...]] = {}

    @property
    def draw(self) -> fx.Node | None:
        """An operation that draws random numbers on which the outputs depend; None without one."""
        waiting, seen = [node for node in self.outputs if isinstance(node, fx.Node)], set()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                if is_random(node):
                    return node
                seen.add(node)
                waiting += node.all_input_nodes
        return None

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that stand for what the model is called with."""
        return list(self._names("USER_INPUT"))

    @property
    def parameter_names(self) -> dict[fx.Node, str]:
        """The names of the parameters, by node; a tensor may have several nodes, but one name."""
        return self._names("PARAMETER")

    @property
    def buffer_names(self) -> dict[fx.Node, str]:
        """The names of the buffers, by node; a tensor may have several nodes, but one name."""
        return self._names("BUFFER")

    def _names(self, wanted: str) -> dict[fx.Node, str]:
        """The names of the placeholders of one kind, by node."""
        return {node: name for node, (kind, name) in self._sources.items() if kind == wanted}

    def constants(self, values: Mapping[str, Tensor]) -> dict[fx.Node, Any]:
        """The values of all nodes that depend on no input and on no tensor but those given."""
        known: dict[fx.Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                kind, target = self._sources[node]
                if kind in ("PARAMETER", "BUFFER") and target in values:
                    known[node] = values[target]
                elif kind == "CONSTANT_TENSOR":
                    known[node] = self._constants[target]
            elif (filled := filling(node)) is not None:
                value = node.meta["val"]
                whole = torch.full((), filled, dtype=value.dtype, device=value.device)
                known[node] = whole.expand(shape_of(node))
            elif op_name(node) and all(source in known for source in node.all_input_nodes):
                if is_random(node):
                    continue
                arguments = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = call_op(node, *arguments[0], **arguments[1])
        return known

    def run(
        self,
        values: Mapping[str, Tensor],
        inputs: Sequence[Any],
        handlers: Mapping[fx.Node, Handler],
        until: fx.Node,
    ) -> Tensor:
        """Run the graph up to a node."""
        given = iter(inputs)
        arguments = [
            next(given) if kind == "USER_INPUT" else values.get(name, self._constants.get(name))
            for kind, name in self._sources.values()
        ]
        try:
            _Runner(self._module, handlers, until).run(*arguments)
        except _ReachedError as reached:
            return reached.value
        raise AssertionError(f"the graph does not compute {until}")

    def sample_axis(self, node: fx.Node) -> SampleAxis | None:
        """Where in a node's output the samples lie, None where that is not certain."""
        if node not in self._axes:  # Reading symbols takes long compared with a small chunk.
            self._axes[node] = self._find_axis(node)
        return self._axes[node]

    @torch.no_grad()
    def reproduces(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        select: Callable[[Any], Any] = lambda output: output,
    ) -> bool:
        """Whether the graph gives the outputs of a model, called with an example."""
        state = dict(model.named_parameters()) | dict(model.named_buffers())

        def copies() -> dict[str, Tensor]:
            return {name: tensor.detach().clone() for name, tensor in state.items()}

        try:
            called = copy.deepcopy((arguments, keywords))
            expected = pytree.tree_leaves(select(functional_call(model, copies(), *called)))
            for node, value in zip(self.outputs, expected, strict=True):
                found = node
                if isinstance(node, fx.Node):
                    leaves = pytree.tree_leaves(copy.deepcopy((arguments, keywords)))
                    found = self.run(copies(), leaves, {}, node)
                if not _close(found, value):
                    return False
        except Exception:
            LOG.debug("a graph cannot be run for a model; it is exported again", exc_info=True)
            return False
        return True

    def _find_axis(self, node: fx.Node) -> SampleAxis | None:
        shape = shape_of(node)
        axes = [i for i, size in enumerate(shape) if self._counts_samples(size)]
        if len(axes) != 1:
            return None
        (axis,) = axes
        major = str(shape[axis]) == self.symbol or self._merged_in_front(node, axis)
        return None if major is None else SampleAxis(axis, major)

    def sizes(self, node: fx.Node, samples: int) -> tuple[int, ...]:
        """The shape of a node's output for a number of samples."""
        if (node, samples) not in self._sizes:
            self._sizes[node, samples] = tuple(_size(extent, samples) for extent in shape_of(node))
        return self._sizes[node, samples]

    def _counts_samples(self, size: Any) -> bool:
        return bool(self.symbol) and self.symbol in re.findall(r"\w+", str(size))

    def _merged_in_front(self, node: fx.Node, axis: int) -> bool | None:
        """Whether samples were the outermost (or else the innermost) of the axes merged here."""
        size = _expression(shape_of(node)[axis])
        while op_name(node) not in _RESHAPES:
            sources = [s for s in node.all_input_nodes if size in map(_expression, shape_of(s))]
            if len(sources) != 1:
                return None
            (node,) = sources
        outer = [_expression(extent) for extent in shape_of(node)]
        inner = [_expression(extent) for extent in shape_of(node.all_input_nodes[0])]
        place = outer.index(size)
        where = [i for i, extent in enumerate(inner) if str(extent) == self.symbol]
        if len(where) != 1 or inner[:place] != outer[:place]:
            return None
        product: Any = 1
        for last in range(place, len(inner)):
            product = product * inner[last]
            if product == size:
                break
        if where[0] == place:
            return True
        return False if where[0] == last and product == size else None

    def _symbol_of_samples(self) -> str:
        """The symbol that stands for the number of samples in the inputs' shapes."""
        sizes = [size for node in self.inputs for size in shape_of(node)[:1]]
        # What the model made a constant of is still no `int`, but has no symbols in it.
        symbols = {str(s) for s in sizes if getattr(_expression(s), "free_symbols", None)}
        return symbols.pop() if len(symbols) == 1 else ""


class ExportedGraphs:
    """The graphs exported for one model, kept for it and its copies with other weights.

    A graph is used again only for a model of the same structure, and only after it has computed
    that model's own outputs on the example: what the structure does not show leads to a new export.
    """

    def __init__(self) -> None:
        self._graphs: list[tuple[Any, ModelGraph]] = []

    def export(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        samples: int,
        select: Callable[[Any], Any] = lambda output: output,
    ) -> ModelGraph:
        """Return the graph of a model: one exported before where it fits, else a new one."""
        key = (structure_of(model), _settings((arguments, keywords), {}), samples, select)
        for known, graph in self._graphs:
            if known == key and graph.reproduces(model, arguments, keywords, select):
                return graph
        graph = ModelGraph(model, arguments, keywords, samples, select)
        self._graphs.append((key, graph))
        return graph


#: The parts of a model, by path: its class, its tensors and its settings.
Structure = dict[str, tuple[Any, ...]]

#: Settings that are compared by value, and functions, which are compared by identity.
_COMPARED = (
    *(bool, int, float, str, bytes, type, torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)

#: What belongs to every module and does not steer its forward pass in eval mode.
_BOOKKEEPING = {name for name in vars(nn.Module()) if "forward" not in name}
_BOOKKEEPING |= {"_compiled_call_impl"}


def structure_of(model: nn.Module) -> Structure:
    """What a model is built of: classes, names, shapes and ties of tensors, settings."""
    homes: dict[int, str] = {}
    parts: Structure = {}
    seen = dict[int, int]()
    for path, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters.items(), *module._buffers.items()]
        tensors = tuple(
            (name, tuple(tensor.shape), homes.setdefault(id(tensor), f"{path}.{name}"))
            for name, tensor in own
            if tensor is not None
        )
        others = [item for item in vars(module).items() if item[0] not in _BOOKKEEPING]
        settings = tuple((name, _settings(value, seen)) for name, value in others)
        parts[path] = type(module), tensors, settings
    return parts


def _settings(value: Any, seen: dict[int, int]) -> Any:
    """A setting as something that is equal for copies; tensors by their shapes alone."""
    if value is None or isinstance(value, _COMPARED):
        return type(value), value
    if isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.is_floating_point()
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_settings(item, seen) for item in value)
    if isinstance(value, functools.partial):
        return type(value), _settings((value.func, value.args, value.keywords), {})
    if isinstance(value, types.MethodType):
        return type(value), value.__func__
    if isinstance(value, Mapping):
        items = [(_settings(key, seen), _settings(item, seen)) for key, item in value.items()]
        return type(value), tuple(items)
    return type(value), _settings(getattr(value, "__dict__", None), seen)


class _Called(nn.Module):
    """A model called with a tuple and a dict, of whose output a part is taken."""

    def __init__(self, model: nn.Module, select: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._select = select
        self.train(model.training)

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call it."""
        return self._select(self.model(*arguments, **keywords))


class _ReachedError(Exception):
    """Carries a value out of a running graph."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class _Runner(fx.Interpreter):
    """Runs a graph up to a node, with handlers in place of some ops."""

    def __init__(
        self, module: fx.GraphModule, handlers: Mapping[fx.Node, Handler], until: fx.Node
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._handlers = handlers
        self._until = until

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        handler = self._handlers.get(n, _SUBSTITUTES.get(op_name(n)))
        if handler is None:
            value = super().run_node(n)
        else:
            arguments, keywords = self.fetch_args_kwargs_from_env(n)
            value = handler(*arguments, **keywords)
        if n is self._until:
            raise _ReachedError(value)
        return value


def _export(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], samples: int
) -> Any:
    """Export with the number of samples left open, where the model allows that."""
    if not hasattr(torch.export.Dim, "AUTO"):
        raise UnsupportedGraphError(
            f"torch {torch.__version__} cannot export a model as a graph of whole operations; "
            "gauge, certificate and everything exact need torch 2.6 or later."
        )
    attempts: list[Any] = [torch.export.Dim("samples", min=2, max=2**20), torch.export.Dim.AUTO]
    for attempt in attempts if samples else [None]:
        try:
            return _export_with(model, (arguments, keywords), samples, attempt)
        except Exception as error:
            if attempt is attempts[0]:  # It may still be read for one number of samples.
                LOG.debug("the exporter cannot leave the number of samples open", exc_info=True)
                continue
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            raise UnsupportedGraphError(
                f"the model cannot be exported as a graph: {type(error).__name__}: "
                f"{reason.strip()} Python that depends on the values of tensors is the usual "
                "cause; `torch.export.export(model, inputs, strict=False)` shows the whole message."
            ) from error
    raise AssertionError


def _export_with(model: nn.Module, inputs: tuple[Any, Any], samples: int, dimension: Any) -> Any:
    """Export with one dimension for the samples of all inputs."""

    def open_axis(leaf: Any) -> Any:
        if samples and isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples:
            return {0: dimension}
        return None

    with _quiet_exporter():
        shapes = pytree.tree_map(open_axis, inputs)
        program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=False)
        return program.run_decompositions({})


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter from warning about torch's own code and from printing what it gave up."""
    level = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _close(got: Any, expected: Any) -> bool:
    """Whether outputs agree as far as rounding lets them."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return type(got) is type(expected) and bool(got == expected)
    precise = expected.is_floating_point()
    rtol = min(_ROUNDINGS * torch.finfo(expected.dtype).eps, _COARSEST) if precise else 0.0
    return got.dtype == expected.dtype and agrees(got, expected, rtol)


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the first one that it has."""
    names: dict[str, str] = {}
    for tensors in (model.named_parameters, model.named_buffers):
        first = {id(tensor): name for name, tensor in tensors()}
        names |= {n: first[id(tensor)] for n, tensor in tensors(remove_duplicate=False)}
    return names


def _expression(extent: Any) -> Any:
    """A size as a number or a symbolic expression."""
    return extent if isinstance(extent, int) else extent.node.expr


def _size(extent: Any, samples: int) -> int:
    """A possibly symbolic size as a number; whatever is open is the number of samples."""
    if isinstance(extent, int):
        return extent
    expression = extent.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, samples)))


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself if it computes in a precision, else a copy that does."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if kinds == {dtype}:
        return model
    with explain_copy_errors(model):
        return copy.deepcopy(model).to(dtype)
