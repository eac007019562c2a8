"""Layers: parameters contracted with an activation, found in the graph and not by class.

A graph enters, a `Layer` for every such parameter leaves: which op contracts it, where its output
and input units lie, and how to bring its weights to the shape (groups, out, in, taps) and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx
from torch.nn import functional as F

from flatgauge.graph.ops import arguments_of, is_floating, op_name, shape_of, source_line

if TYPE_CHECKING:
    from flatgauge.graph.export import ModelGraph

#: Ops that only reorder the axes of a matrix.
_TRANSPOSES = ("t", "transpose", "permute", "numpy_T")


@dataclass(frozen=True)
class Layer:
    """A parameter that is contracted with an activation.

    Its weights are seen as an array (groups, out, in, taps): `canonical` brings a tensor of the
    parameter's shape there, `original` brings it back.
    """

    name: str  # The parameter, as in `model.named_parameters()`.
    shape: tuple[int, ...]
    node: fx.Node  # The contraction.
    position: int  # Which of its arguments is the activation.
    kind: str  # "linear", "convolution" or "transposed" (convolution).
    out_axis: int  # The parameter's axis of output units.
    in_axis: int  # The parameter's axis of input units.
    groups: int = 1
    bias: str | None = None  # The parameter that the same op adds, if any.
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()  # Before and after along every spatial axis.
    dilation: tuple[int, ...] = ()

    @property
    def input(self) -> fx.Node:
        """The activation it reads."""
        node = self.node.args[self.position]
        assert isinstance(node, fx.Node)
        return node

    @property
    def source(self) -> str:
        """Where in the user's code it stands."""
        return source_line(self.node)

    def canonical(self, weights: Tensor) -> Tensor:
        """Bring weights to the shape (groups, out, in, taps)."""
        if self.kind == "linear":
            return weights.permute(self.out_axis, self.in_axis)[None, :, :, None]
        grouped = weights.reshape(self.groups, -1, weights.shape[1], weights[0, 0].numel())
        return grouped.transpose(1, 2) if self.kind == "transposed" else grouped

    def original(self, values: Tensor) -> Tensor:
        """Bring an array (..., groups, out, in, taps) back to the parameter's shape."""
        if self.kind == "linear":
            matrix = values[..., 0, :, :, 0]
            return matrix if self.out_axis == 0 else matrix.mT
        if self.kind == "transposed":
            values = values.transpose(-3, -2)
        return values.reshape(*values.shape[:-4], *self.shape)

    def contract(self, activations: Tensor, weights: Tensor) -> Tensor:
        """Contract activations with weights of the parameter's shape; no bias is added."""
        if self.kind == "linear":
            return F.linear(activations, weights.permute(self.out_axis, self.in_axis))
        given = arguments_of(self.node) | {"input": activations, "weight": weights, "bias": None}
        result: Tensor = self.node.target(*given.values())  # type: ignore[operator]
        return result

    def bias_of(self, given: Sequence[Any]) -> Tensor | float:
        """What the op, called with some arguments, adds to the contraction; zero if nothing."""
        names = list(arguments_of(self.node))
        role = "self" if op_name(self.node) == "addmm" else "bias"
        place = names.index(role) if role in names else len(given)
        if place >= len(given) or given[place] is None:
            return 0.0
        bias: Tensor = given[place].detach()
        return bias if self.kind == "linear" else bias.reshape(-1, *(1,) * len(self.stride))

    def incoming(self, values: Tensor) -> Tensor:
        """Sum an array (..., groups, out, in, taps) over what enters every output unit."""
        return values.sum((-1, -2)).flatten(-2)

    def outgoing(self, values: Tensor) -> Tensor:
        """Sum an array (..., groups, out, in, taps) over what leaves every input unit."""
        return values.sum((-1, -3)).flatten(-2)


def find_layers(graph: ModelGraph) -> dict[str, Layer]:
    """Find every parameter that one op contracts with an activation."""
    names = {node: name for name, node in graph.parameters.items()}
    for node in graph.nodes:  # Autocast reads a parameter in another precision.
        if op_name(node) == "_to_copy" and is_floating(node):
            (source,) = node.all_input_nodes
            if source in names:
                names[node] = names[source]
    layers: dict[str, Layer] = {}
    for node in graph.nodes:
        layer = _layer_at(node, names)
        if layer is not None:
            layers.setdefault(layer.name, layer)
    return layers


def _layer_at(node: fx.Node, names: dict[fx.Node, str]) -> Layer | None:
    """The layer that an op is, if it is one."""
    op, given = op_name(node), arguments_of(node)
    if op == "linear":
        return _linear(node, 0, given["weight"], given["bias"], names, out_axis=0)
    if op in ("matmul", "mm"):
        return _linear(node, 0, given["other" if op == "matmul" else "mat2"], None, names)
    if op == "addmm" and given["beta"] == given["alpha"] == 1:
        return _linear(node, 1, given["mat2"], given["self"], names)
    if op.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose", "convolution")):
        return _convolution(node, op, given, names)
    return None


def _linear(
    node: fx.Node,
    position: int,
    weight: Any,
    bias: Any,
    names: dict[fx.Node, str],
    out_axis: int = 1,
) -> Layer | None:
    """A product of rows with a matrix (in, out), or with its transpose where `out_axis` is 0."""
    while isinstance(weight, fx.Node) and len(shape_of(weight)) == 2:
        if weight in names:
            return Layer(
                names[weight],
                tuple(shape_of(weight)),
                node,
                position,
                "linear",
                out_axis,
                1 - out_axis,
                bias=None if bias is None else names.get(bias),
            )
        op, given = op_name(weight), arguments_of(weight)
        if op not in _TRANSPOSES:
            return None
        same = op == "transpose" and given["dim0"] % 2 == given["dim1"] % 2
        if not same and (op != "permute" or given["dims"][0] % 2 == 1):
            out_axis = 1 - out_axis
        weight = weight.args[0]
    return None


def _convolution(
    node: fx.Node, op: str, given: dict[str, Any], names: dict[fx.Node, str]
) -> Layer | None:
    """A convolution of any dimension, or a transposed one."""
    weight, bias = given["weight"], given["bias"]
    if weight not in names:
        return None
    kernel = tuple(shape_of(weight)[2:])
    spatial = len(kernel)
    if len(shape_of(node)) != spatial + 2:  # An image without a batch axis.
        return None
    transposed = "transpose" in op or bool(given.get("transposed"))
    dilation = _per_axis(given["dilation"], spatial)
    padding = given["padding"]
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = tuple((t // 2, t - t // 2) for t in total)
    else:
        sides = tuple((p, p) for p in _per_axis(0 if padding == "valid" else padding, spatial))
    return Layer(
        names[weight],
        tuple(shape_of(weight)),
        node,
        0,
        "transposed" if transposed else "convolution",
        out_axis=int(transposed),
        in_axis=int(not transposed),
        groups=given["groups"],
        bias=names.get(bias) if bias is not None else None,
        stride=_per_axis(given["stride"], spatial),
        padding=sides,
        dilation=dilation,
    )


def _per_axis(value: Any, count: int) -> tuple[int, ...]:
    """One number per spatial axis."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return numbers * count if len(numbers) == 1 else numbers


def input_dependent_uses(graph: ModelGraph) -> dict[str, list[fx.Node]]:
    """Find the ops at which every parameter meets what depends on the inputs."""
    fed = set(graph.inputs)
    holding = {node: {name} for node, name in graph.parameter_names.items()}
    found: dict[str, list[fx.Node]] = {name: [] for name in graph.parameter_names.values()}
    for node in graph.nodes:
        sources = node.all_input_nodes
        names = {name for source in sources for name in holding.get(source, ())}
        if any(source in fed for source in sources):
            fed.add(node)
            for name in names:
                found[name].append(node)
        else:
            holding.setdefault(node, set()).update(names)
    return found
