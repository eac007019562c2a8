"""Taps: they sit at one op each and turn what is passed back there into curvature.

A tap stands in for its op while the graph runs, and hears every column that is passed back
through the op's output. What it gathers from a chunk of samples it gives as `Parts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, fx

from flatgauge.curvature.workspace import Workspace
from flatgauge.graph import Handler, SampleAxis
from flatgauge.output_curvature import Column

if TYPE_CHECKING:
    from flatgauge.curvature.factors import Kept

#: What a sweep can yield for every parameter.
OF_ALL = ("trace", "diagonal", "own")

#: What it can yield for a layer.
PARTS = (*OF_ALL, "incoming", "outgoing", "relative", "normalized")


class PassesBack(Protocol):
    """Passes columns back by itself."""

    def pass_back(self, columns: Iterable[Column]) -> None:
        """Pass columns back from the logits to where differentiation stops."""


@dataclass
class Chunk:
    """What all taps share while a chunk of samples is swept.

    Attributes:
        samples: How many samples it holds.
        wanted: Which parts are asked for.
        scales: By layer, how much every one of its input units varies over the data (in,).
        leaves: The tensors at which differentiation may stop.
        factor: The weight of the current column for every sample; None if all are one.
        workspace: Memory that is used again in the next chunk.
        floor: Where weights have both signs and columns cancel, the size of what cancelled in the
            weights themselves, for every sample; else None.
        tail: What passes columns back through the last layers, if they need no graph.
    """

    samples: int
    wanted: frozenset[str]
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    leaves: list[Tensor] = field(default_factory=list)
    factor: Tensor | None = None
    floor: Tensor | None = None
    tail: PassesBack | None = None

    def started(self, tensor: Tensor) -> Tensor:
        """Make a tensor one that columns are passed back to."""
        if not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
            self.leaves.append(tensor)
        return tensor

    def pass_back(self, logits: Tensor, columns: Iterable[Column]) -> None:
        """Pass columns back from the logits to where differentiation stops."""
        if self.tail is not None:
            self.tail.pass_back(columns)
            return
        for values, factor in columns:
            if logits.requires_grad:
                self.pass_through(logits, values.to(logits), factor)

    def pass_through(self, output: Tensor, column: Tensor, factor: Tensor | None) -> None:
        """Pass a column at some output back through the graph.

        Args:
            output: The output.
            column: The column there.
            factor: Its weight for every sample; None if all are one.
        """
        self.factor = None if factor is None else factor.to(output)
        torch.autograd.grad(output, self.leaves, column, retain_graph=True, allow_unused=True)

    def let_go(self) -> None:
        """Let go of the graph: it and the taps that listen in it would hold each other for ever."""
        self.leaves.clear()
        self.tail = None

    def size(self, factor: Tensor | None, block: slice = slice(None)) -> Tensor | None:
        """The size of weights (n, ...) of columns, beside which rounding counts.

        Args:
            factor: The weights of some samples; None if all are one.
            block: Which samples these are.

        Returns:
            The sizes; None if none cancel.
        """
        if self.floor is None or factor is None:
            return None
        floor = self.floor[block].to(factor)
        return factor.abs() + floor.reshape((-1,) + (1,) * (factor.dim() - 1))

    @staticmethod
    def squared(values: Tensor, total: Tensor | None, factor: Tensor | None) -> Tensor:
        """Add the squares of a column's values (n, ...), with its weight, to a total.

        Args:
            values: The values.
            total: What to add to, in place; None for zero.
            factor: The column's weight for every sample, None if all are one.

        Returns:
            The total.
        """
        weighted = values
        if factor is not None:
            weighted = values * factor.reshape((-1,) + (1,) * (values.dim() - 1))
        return weighted * values if total is None else total.addcmul_(weighted, values)


#: Which of how many units.
Places = tuple[Tensor, int]


@dataclass
class Parts:
    """Every sample's share in what a tap measures; diagonals come apart, summed over samples.

    Attributes:
        trace: Of the block (n,).
        own: Of the block, every weight's entry times the weight squared (n,).
        incoming: Forms of what enters every output unit (n, out).
        outgoing: Forms of what leaves every input unit (n, in).
        relative: The relative flatness (n,).
        normalized: The same with input units of spread one (n,).
        places: Where not all units are there, by part: which they are, and of how many. The others
            have zeros.
    """

    trace: Tensor | None = None
    own: Tensor | None = None
    incoming: Tensor | None = None
    outgoing: Tensor | None = None
    relative: Tensor | None = None
    normalized: Tensor | None = None
    places: dict[str, Places] = field(default_factory=dict)

    def items(self) -> list[tuple[str, Tensor]]:
        """The parts that were asked for."""
        named = [(item.name, getattr(self, item.name)) for item in fields(self)[:-1]]
        return [(name, value) for name, value in named if value is not None]


class Tap(ABC):
    """Sits at one op.

    Args:
        chunk: The chunk that is swept.
        node: The op.
        axis: Where in its output the samples lie.
    """

    def __init__(self, chunk: Chunk, node: fx.Node, axis: SampleAxis) -> None:
        self.chunk = chunk
        self.node = node
        self.axis = axis

    @abstractmethod
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute the op's output, listening to what will be passed back through it."""

    def handlers(self) -> dict[fx.Node, Handler]:
        """What stands in for which ops while the graph runs."""
        return {self.node: self}

    @abstractmethod
    def take(self) -> dict[str, Parts]:
        """Every parameter's parts from the columns since the last time, but for diagonals."""

    @abstractmethod
    def diagonals(self) -> dict[str, Tensor]:
        """Every parameter's diagonal, summed over the chunk and all its columns."""

    def sizes(self) -> dict[str, Tensor]:
        """The diagonals of layers if no columns had cancelled, where columns are signed."""
        return {}

    def kept(self) -> dict[str, Kept]:
        """The columns of layers, where they are to be kept."""
        return {}

    def heard(self, output: Tensor, listener: Callable[[Tensor], None]) -> Tensor:
        """Pass an output on, and every column that comes back to the listener."""
        output = self.chunk.started(output)
        output.register_hook(lambda column: listener(self.axis.first(column, self.chunk.samples)))
        return output

    def first(self, tensor: Tensor) -> Tensor:
        """A tensor laid out like the output with the samples in front."""
        return self.axis.first(tensor.detach(), self.chunk.samples)


def handlers_of(taps: Iterable[Tap]) -> dict[fx.Node, Handler]:
    """What stands in for ops where taps sit."""
    return {node: handler for tap in taps for node, handler in tap.handlers().items()}


class VectorGather:
    """Gathers a parameter whose gradient per sample and column is at hand.

    Args:
        chunk: The chunk that is swept.
        name: The parameter.
        like: Its value.
    """

    def __init__(self, chunk: Chunk, name: str, like: Tensor) -> None:
        self._chunk = chunk
        self._name = name
        self._like = like
        self._own = like.detach().flatten().square() if "own" in chunk.wanted else None
        self._squares: Tensor | None = None
        self._places: Tensor | None = None
        self._sums = torch.zeros_like(like).flatten()

    def add(self, gradients: Tensor) -> None:
        """Add one column: its gradient by the parameter, for every sample (n, size)."""
        self._squares = self._chunk.squared(gradients, self._squares, self._chunk.factor)

    def add_squares(self, squares: Tensor | None, places: Tensor | None = None) -> None:
        """Take the squares of all columns since the last time; they are not changed.

        Args:
            squares: The squares (n, size); None if there were no columns.
            places: Which entries they are, where the others have zeros.
        """
        self._squares, self._places = squares, places

    def take(self) -> dict[str, Parts]:
        """The parts gathered since the last time."""
        squares = self._squares
        if squares is None:
            squares = self._sums.new_zeros(self._chunk.samples, len(self._sums))
        places = slice(None) if self._places is None else self._places
        parts = Parts(trace=squares.sum(1))
        if self._own is not None:
            parts.own = squares @ self._own[places]
        self._sums[places] += squares.sum(0)
        self._squares = self._places = None
        return {self._name: parts}

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal, summed over the chunk."""
        return {self._name: self._sums.reshape(self._like.shape)}
