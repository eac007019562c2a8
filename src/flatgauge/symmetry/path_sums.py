"""Sums over all paths of a network, taken in one pass through its graph.

What enters: a graph with one output, and the values of parameters and buffers. What leaves: the sum
over all paths of the product of the weights on them. What depends on the input is an *activation*,
and is known by its sums over the paths that reach it. All other tensors are *weights*, and are
known by their values: parameters, buffers, constants, and whatever is computed from those alone,
which counts as one weight. A path starts at an entry of the input, or at a weight that is added; a
sum that is too large for double precision is infinite. The `path_sum` methods of the rule classes
(`symmetry/inference`) carry the sums through each op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.export import ModelGraph, UnsupportedGraphError
from flatgauge.graph.ops import call_op, is_floating, shape_of, source_line
from flatgauge.symmetry.inference.scales import OpContext, rule_of

#: The sums of an op's output, one per entry; a list if it has several outputs, None for an output
#: that no path runs through (places, truth values).
PathSums = Tensor | list[Tensor | None] | None


@torch.no_grad()
def path_sum(graph: ModelGraph, state: Mapping[str, Tensor], order: float) -> float:
    """Sum the product of |weight|^order over all paths to the output of a graph."""
    (output,) = graph.outputs
    weights = graph.constants(state)
    sums: dict[fx.Node, PathSums] = {node: _input_paths(node) for node in graph.inputs}
    needed = _ancestors(output)
    steps = [node for node in graph.nodes if node in needed and node not in {*weights, *sums}]
    last = {source: node for node in steps for source in node.all_input_nodes}
    for node in steps:
        at = PathContext(node, sums, weights, order)
        if any(sums.get(source, source) is None for source in node.all_input_nodes):
            at.refuse("it reads whole numbers or truth values, which no path runs through")
        sums[node] = rule_of(node).path_sum(at)
        for source in node.all_input_nodes:
            if last[source] is node and source is not output:
                sums.pop(source, None)  # Its memory is wanted for what comes.
    return float(PathContext(output, sums, weights, order).tensor(output).sum())


@dataclass(frozen=True)
class PathContext(OpContext):
    """One op while sums over paths are carried through it: known `sums`, `weights` and `order`."""

    sums: Mapping[fx.Node, PathSums]
    weights: Mapping[fx.Node, Any]
    order: float

    @property
    def first(self) -> Tensor:
        """What stands for the first argument in a sum or product."""
        return self.tensor(next(iter(self.arguments.values())))

    def __getitem__(self, name: str) -> Tensor:
        """What stands for the argument of that name in a sum or product."""
        return self.tensor(self.arguments[name])

    def tensor(self, argument: Any) -> Tensor:
        """The sums of an activation; the size of a weight or number, raised to the order."""
        if self.is_activation(argument):
            found = self.sums[argument]
            assert isinstance(found, Tensor)
            return found
        value = self.value(argument)
        known = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return self.power(known)

    def paths(self, argument: Any) -> Any:
        """What stands for an argument of an op that is run: integers and flags as they are."""
        if self.is_activation(argument):
            return self.sums[argument]
        value = self.value(argument)
        real = isinstance(value, Tensor) and value.is_floating_point()
        return self.power(value) if real else value

    def value(self, argument: Any) -> Any:
        """The value of a weight, in double precision; other arguments stay themselves."""
        if self.is_activation(argument):
            self.refuse("it takes an activation where only weights can be read")
        value = self.weights[argument] if isinstance(argument, fx.Node) else argument
        if isinstance(value, Tensor):
            return to_float64(value) if value.is_floating_point() else value.to(_home(value.device))
        return value

    def is_activation(self, argument: Any) -> bool:
        """Whether an argument depends on the input."""
        return isinstance(argument, fx.Node) and argument in self.sums

    def require_one_activation(self) -> None:
        """Refuse products of activations."""
        if sum(map(self.is_activation, self.factors)) > 1:
            self.refuse("it multiplies two activations")

    def power(self, value: Tensor) -> Tensor:
        """The size of a weight, raised to the order."""
        size = to_float64(value).abs()
        return size if self.order == 1 else size.pow(self.order)

    def run_op(self) -> PathSums:
        """The op itself on sums in the place of activations, and on sizes of weights."""
        keywords = {key: value for key, value in self.node.kwargs.items() if key != "dtype"}
        arguments, keywords = fx.node.map_arg((self.node.args, keywords), self.paths)
        if str(self.node.target).startswith("aten.view") and isinstance(arguments[0], Tensor):
            arguments = (arguments[0].contiguous(), *arguments[1:])  # Sums may lie otherwise.
        result: Any = call_op(self.node, *arguments, **keywords)
        return list(result) if isinstance(result, (tuple, list)) else result

    def with_nothing(self, sums: Tensor) -> PathSums:
        """Sums as the first output of an op; no path runs through further ones."""
        if not self.has_several_outputs:
            return sums
        return [sums, *[None] * (len(self.node.meta["val"]) - 1)]

    def refuse(self, reason: str) -> NoReturn:
        """Raise `UnsupportedGraphError`: paths cannot be carried through this op."""
        line = source_line(self.node)
        where = f" ({line})" if line else ""
        raise UnsupportedGraphError(
            f"paths cannot be summed through `{self.op}`{where}: {reason}. Path norms "
            "are those of networks of linear maps, ReLUs, pooling and the like; leave `path_norm` "
            "out by naming other `measures=`."
        )


def _home(device: torch.device) -> torch.device:
    """Where numbers in double precision live: on the CPU if a device has none."""
    return torch.device("cpu") if device.type == "mps" else device


def _input_paths(node: fx.Node) -> Tensor | None:
    """The one path of no weights that every entry of an input has; whole numbers have none."""
    if not is_floating(node):
        return None
    return torch.ones(shape_of(node), dtype=torch.float64, device=_home(node.meta["val"].device))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
