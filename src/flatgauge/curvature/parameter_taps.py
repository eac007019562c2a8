"""Taps at parameters that are no layers: scales and shifts of norms, slopes, added terms, ..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.curvature.taps import Chunk, Parts, Tap, VectorGather
from flatgauge.graph import SampleAxis
from flatgauge.nodes import arguments_of, call_op, op_name

#: The names of batch-norm with stored statistics in exported graphs.
BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


@dataclass(frozen=True)
class Norm:
    """A batch-norm with stored statistics, and what it is called with.

    Attributes:
        space: How many axes its images have behind their channels.
        mean: The stored mean (channels,).
        inverse: One over the stored standard deviation (channels,).
        weight: Its scale (channels,); None for one.
        bias: Its shift (channels,); None for zero.
    """

    space: int
    mean: Tensor
    inverse: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def scale(self) -> Tensor:
        """What every channel is multiplied by, all in all."""
        return self.inverse if self.weight is None else self.inverse * self.weight

    @property
    def shift(self) -> Tensor:
        """What is added afterwards."""
        shift = -self.mean * self.scale
        return shift if self.bias is None else shift + self.bias

    @property
    def vanishes(self) -> bool:
        """Whether some channel is multiplied by so little that its digits are lost."""
        kind = torch.finfo(self.mean.dtype)
        least = [part.abs().min() for part in (self.scale, self.weight) if part is not None]
        return bool(min(least) < kind.tiny / kind.eps)

    def spread(self, values: Tensor) -> Tensor:
        """Values of channels, to be multiplied with images."""
        return values.view(1, -1, *(1,) * self.space)


class BatchNormTap(Tap):
    """Batch-norm with stored statistics, as the scale and shift of every channel that it is.

    Args:
        chunk: The chunk that is swept.
        node: The op.
        axis: Where in its output the samples lie.
        names: The parameters to gather, by role (``weight``, ``bias``).
    """

    def __init__(
        self, chunk: Chunk, node: fx.Node, axis: SampleAxis, names: dict[str, str]
    ) -> None:
        super().__init__(chunk, node, axis)
        self._roles = list(arguments_of(node))
        self._parameters = names
        self._gathers: dict[str, VectorGather] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Scale and shift."""
        norm = self.read(*arguments, **keywords)
        images: Tensor = arguments[0] if arguments else keywords["input"]
        output = torch.addcmul(norm.spread(norm.shift), images, norm.spread(norm.scale))
        normal = None
        if self.reads_inputs:
            normal = (images.detach() - norm.spread(norm.mean)) * norm.spread(norm.inverse)
        self.open(norm, normal)
        output = self.chunk.started(output)
        output.register_hook(self.hear)
        return self.returned(output)

    @property
    def reads_inputs(self) -> bool:
        """Whether the normalised input is asked for."""
        return "weight" in self._parameters

    def read(self, *arguments: Any, **keywords: Any) -> Norm:
        """What the op is called with."""
        given = dict(zip(self._roles, arguments, strict=False)) | keywords
        inverse = (given["running_var"] + given["eps"]).rsqrt()
        weight, bias = (
            None if given[role] is None else given[role].detach() for role in ("weight", "bias")
        )
        return Norm(given["input"].dim() - 2, given["running_mean"], inverse, weight, bias)

    def open(self, norm: Norm, normal: Tensor | None) -> None:
        """Make ready for columns.

        Args:
            norm: What the op is called with.
            normal: The normalised input, where it is asked for.
        """
        self._normal = None if normal is None else normal.reshape(*normal.shape[:2], -1)
        values = {"weight": norm.weight, "bias": norm.bias}
        self._gathers = {}
        for role, name in self._parameters.items():
            value = values[role]
            assert value is not None  # It is read there.
            self._gathers[role] = VectorGather(self.chunk, name, value)

    def returned(self, output: Tensor) -> Any:
        """The op's output, as it returns it."""
        if op_name(self.node) == "batch_norm":
            return output
        return output, output.new_empty(0), output.new_empty(0)

    def take(self) -> dict[str, Parts]:
        """The parts gathered since the last time."""
        taken = [gather.take() for gather in self._gathers.values()]
        return {name: parts for item in taken for name, parts in item.items()}

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals of scale and shift."""
        found = [gather.diagonal() for gather in self._gathers.values()]
        return {name: diagonal for item in found for name, diagonal in item.items()}

    def hear(self, column: Tensor) -> None:
        """A column at the output."""
        if not self._gathers:
            return
        column = column.reshape(*column.shape[:2], -1)  # (n * folds, channels, positions)
        sums = {}
        if "bias" in self._gathers:
            sums["bias"] = column.sum(2)
        if self._normal is not None:
            sums["weight"] = torch.linalg.vecdot(column, self._normal)
        for role, values in sums.items():
            self._gathers[role].add(self.axis.first(values, self.chunk.samples).sum(1))


class PointTap(Tap):
    """Any op that is linear in parameters: their gradient by every sample is taken apart.

    Args:
        chunk: The chunk that is swept.
        node: The op.
        axis: Where in its output the samples lie.
        parameters: The parameters to gather: name, node and value.
        axes: Where in the op's other inputs the samples lie.
    """

    def __init__(
        self,
        chunk: Chunk,
        node: fx.Node,
        axis: SampleAxis,
        parameters: list[tuple[str, fx.Node, Tensor]],
        axes: dict[fx.Node, SampleAxis],
    ) -> None:
        super().__init__(chunk, node, axis)
        self._axes = axes
        self._gathers = [
            (chain_from(source), value.detach(), VectorGather(chunk, name, value))
            for name, source, value in parameters
        ]

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the op, keeping what it was computed from."""
        given = pytree.tree_leaves((arguments, keywords))
        nodes, spec = pytree.tree_flatten((self.node.args, dict(self.node.kwargs)))
        places = {i: self._axes[n] for i, n in enumerate(nodes) if n in self._axes}
        moved = {i: axis.first(given[i].detach(), self.chunk.samples) for i, axis in places.items()}

        def op(chain: Chain, parameter: Tensor, rows: dict[int, Tensor]) -> Tensor:
            """The op on one sample, along whose axis are its folds."""
            for step in chain:
                parameter = step(parameter)
            leaves = [parameter if n is chain.end else x for n, x in zip(nodes, given, strict=True)]
            for i, row in rows.items():
                leaves[i] = row.movedim(0, places[i].axis)
            positional, named = pytree.tree_unflatten(leaves, spec)
            output: Tensor = call_op(self.node, *positional, **named)
            return output

        def hear(column: Tensor) -> None:
            for chain, value, gather in self._gathers:

                def gradient(
                    rows: dict[int, Tensor],
                    part: Tensor,
                    chain: Chain = chain,
                    value: Tensor = value,
                ) -> Tensor:
                    back = torch.func.vjp(lambda p: op(chain, p, rows), value)[1]
                    found: Tensor = back(part.movedim(0, self.axis.axis))[0]
                    return found

                gather.add(torch.vmap(gradient)(moved, column).reshape(len(column), -1))

        output = call_op(self.node, *arguments, **keywords)
        return self.heard(output, hear)

    def take(self) -> dict[str, Parts]:
        """The parts gathered since the last time."""
        taken = [gather.take() for *_, gather in self._gathers]
        return {name: parts for item in taken for name, parts in item.items()}

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals."""
        found = [gather.diagonal() for *_, gather in self._gathers]
        return {name: diagonal for item in found for name, diagonal in item.items()}


class Chain(list[Callable[[Tensor], Tensor]]):
    """The ops between a parameter and the op that joins it with samples.

    Attributes:
        end: The last of these ops, or the parameter itself.
        reader: The op that joins it with samples.
    """

    end: fx.Node
    reader: fx.Node


def chain_from(parameter: fx.Node) -> Chain:
    """Follow a parameter up to the first op with another tensor in it.

    Args:
        parameter: The parameter's node.

    Returns:
        The ops on the way.
    """
    chain = Chain()
    node = parameter
    while True:
        (reader,) = node.users
        if len(reader.all_input_nodes) > 1 or len(reader.users) != 1:
            break
        chain.append(link(reader, node))
        node = reader
    chain.end, chain.reader = node, reader
    return chain


def link(op: fx.Node, source: fx.Node) -> Callable[[Tensor], Tensor]:
    """An op that reads one node, as a function of that node's value."""

    def function(tensor: Tensor) -> Tensor:
        arguments, keywords = pytree.tree_map(
            lambda leaf: tensor if leaf is source else leaf, (op.args, dict(op.kwargs))
        )
        output: Tensor = call_op(op, *arguments, **keywords)
        return output

    return function
