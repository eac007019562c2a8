"""The perceptron at the end of a model: columns go back through its layers all together.

Linear layers with nothing but ReLUs between them, the last of which gives the logits, need no
graph: a column is multiplied by a weight and by a mask, layer by layer. Done here for many columns
of a few samples at a time, products are large, and what they give is still near the cache when it
is masked, squared and added up. What leaves a unit behind a ReLU needs no sums of its own: where
the unit does not speak, its weights are multiplied by zero. Units that are silent on the whole
chunk are left out on both sides (see `flatgauge.silent_units`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.curvature.factors import Kept, KeptColumns
from flatgauge.curvature.layer_taps import OfLayer, added_by
from flatgauge.curvature.rows import Rows
from flatgauge.curvature.taps import Chunk, Parts, Tap, VectorGather
from flatgauge.graph import Handler, SampleAxis
from flatgauge.layers import Layer
from flatgauge.output_curvature import Column
from flatgauge.silent_units import Choice, speaking

#: How many columns go back together, and what the widest layer's share of them may take.
TOGETHER, _BYTES = 16, 5 * 2**19


@dataclass(frozen=True)
class Group:
    """Columns that go back together.

    Attributes:
        values: At the logits (c, n, outputs).
        factors: Their weights (c, n); None if all are one.
        sizes: The weights if none cancelled (c, n), see `Chunk.size`; None where none do.
    """

    values: Tensor
    factors: Tensor | None
    sizes: Tensor | None

    def apart(self, rows: Tensor) -> Tensor:
        """Rows (c * samples, k) as (c, samples, k)."""
        apart: Tensor = rows.unflatten(0, (len(self.values), -1))
        return apart

    def add(self, total: Tensor, rows: Tensor, samples: slice, weights: Tensor | None) -> None:
        """Add weighted squares, summed over columns.

        Args:
            total: What to add to (n, k).
            rows: The columns of some samples (c * samples, k).
            samples: Which.
            weights: Of the columns (c, n); None if all are one.
        """
        part = total[samples]
        for number, column in enumerate(self.apart(rows)):
            weighted = column if weights is None else column * weights[number, samples, None]
            part.addcmul_(weighted, column)

    def add_lengths(self, total: Tensor, rows: Tensor, samples: slice) -> None:
        """Add squared lengths of rows (c * samples, k), summed over columns, to a total (n,)."""
        lengths = self.apart(torch.linalg.vector_norm(rows, dim=1).square())
        if self.factors is not None:
            lengths = lengths * self.factors[:, samples]
        total[samples] += lengths.sum(0)


class Link(OfLayer):
    """One layer of the tail.

    Attributes:
        inputs: What goes in (n, in), of units that speak.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        weight: Its weight.
        biases: What gathers its bias, None if it is not to be gathered.
        gather: What gathers the weight's curvature, None if it is not to be gathered.
        keeper: What keeps the columns, None if they are not to be kept.
        before: The layer before it, with a ReLU between; None if it is the first.
    """

    gather: Rows | None
    inputs: Tensor
    _outputs: Tensor
    _mask: Tensor
    _passing: Tensor
    _ordered: Tensor

    def __init__(
        self,
        chunk: Chunk,
        layer: Layer,
        weight: Tensor,
        biases: VectorGather | None,
        gather: Rows | None,
        keeper: KeptColumns | None,
        before: Link | None,
    ) -> None:
        self.layer = layer
        self._chunk, self._before = chunk, before
        self.biases, self.gather, self.keeper = biases, gather, keeper
        self._weight = layer.canonical(weight)[0, :, :, 0]  # (out, in)
        self._speaking: Tensor | None = None  # The output units that do; None for all.
        self._scales = None if gather is None else gather.scales
        self._sums: dict[str, Tensor] = {}  # Of the columns since the last time; see `Rows.fill`.
        self._turn = 0

    # -- forwards -----------------------------------------------------------------------------

    def map(self, inputs: Tensor, added: Tensor | float) -> Tensor:
        """Run the layer.

        Args:
            inputs: What goes in (n, in), of units that speak.
            added: Its bias.

        Returns:
            What comes out (n, out).
        """
        self.inputs = inputs
        shape = (len(inputs), len(self._weight))
        weight = self._chosen(None).taken(self._weight)
        self._outputs = torch.mm(inputs.detach(), weight.T, out=self._memory("values", shape))
        return torch.add(self._outputs, added, out=self._memory("outputs", shape))

    def rectify(self, outputs: Tensor) -> Tensor:
        """Run the ReLU behind it; only units that speak are passed on."""
        units = outputs.relu_()
        self._speaking = chosen = speaking(units)
        if chosen is not None:
            shape = (len(units), len(chosen))
            values, units = (
                torch.index_select(whole, 1, chosen, out=self._memory(name, shape))
                for name, whole in (("chosen values", self._outputs), ("chosen", units))
            )
            self._outputs = values
        self._mask = torch.gt(units, 0, out=self._memory("mask", units.shape))
        return units

    def open(self) -> None:
        """Make ready for columns, when all layers have run."""
        choice = self._chosen(self._speaking)
        inputs, outputs = self.inputs.detach(), self._outputs
        if self.gather is not None:
            self.gather.open(inputs, outputs, choice)
        if self.keeper is not None:
            # What is kept outlives the chunk, whose memory is written over.
            self.keeper.open(inputs.clone()[:, None], outputs[:, None], choice)
        order = choice.columns
        if order is not None and (self._by_length or self._scales is not None):
            silent = torch.ones(self._weight.shape[1], dtype=torch.bool, device=order.device)
            silent[order] = False
            order = torch.cat([order, silent.nonzero()[:, 0]])
        self._passing = Choice(choice.rows, order).taken(self._weight)
        if self._scales is not None:
            self._ordered = self._scales if order is None else self._scales[order]

    def _chosen(self, rows: Tensor | None) -> Choice:
        return Choice(rows, None if self._before is None else self._before._speaking)

    # -- backwards ----------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """How many numbers a column has on either side, at most."""
        return max(self._passing.shape)

    @property
    def _by_length(self) -> bool:
        return self.gather is not None and "relative" in self._chunk.wanted

    @property
    def goes_on(self) -> bool:
        """Whether it matters what becomes of columns in front of the layer."""
        wanted = self.gather is not None and self.gather.reads_back
        return wanted or self._before is not None or self.inputs.requires_grad

    def back(self, group: Group, rows: Tensor, samples: slice) -> Tensor:
        """Take columns at the layer's output; pass them on to its input and through the ReLU there.

        Args:
            group: The columns.
            rows: What they are here, for some samples (c * samples, out).
            samples: Which.

        Returns:
            What they are at the output of the layer before, or at the input.
        """
        if self.gather is not None or self.biases is not None:
            group.add(self._sum("s2", rows.shape[1]), rows, samples, group.factors)
            if group.sizes is not None:
                group.add(self._sum("size", rows.shape[1]), rows, samples, group.sizes)
        if self.keeper is not None:
            self.keeper.put(group.apart(rows).transpose(0, 1)[:, :, None], samples, group.factors)
        if not self.goes_on:
            return rows
        shape = (len(rows), self._passing.shape[1])
        passed = torch.mm(rows, self._passing, out=self._memory("passed", shape))
        if self._by_length:
            group.add_lengths(self._sum("lengths"), passed, samples)
        if self._scales is not None:
            group.add_lengths(self._sum("scaled"), passed * self._ordered, samples)
        if self._before is None:
            if self.gather is not None and self.gather.reads_back:
                group.add(self._sum("t2", passed.shape[1]), passed, samples, group.factors)
            return passed
        passed = passed[:, : self.inputs.shape[1]]
        group.apart(passed).mul_(self._before._mask[samples])
        return passed

    def _sum(self, name: str, *size: int) -> Tensor:
        """A running total (n, ...)."""
        if name not in self._sums:
            found = self._memory(f"{name} {self._turn}", (self._chunk.samples, *size))
            self._sums[name] = found.zero_()
        return self._sums[name]

    def _memory(self, what: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again in the next chunk."""
        return self._chunk.workspace.tensor((what, self.layer.name), shape, self._weight)

    # -- at the end ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Hand over what was added up since the last time."""
        sums, before = self._sums, self._before
        if "s2" not in sums:
            return
        # Behind a ReLU, what does not speak is multiplied by zero anyway.
        t2 = sums.get("t2") if before is None else before._sums.get("s2")
        if self.gather is not None:
            named = (sums.get(name) for name in ("lengths", "scaled", "size"))
            self.gather.fill(sums["s2"], t2, *named)

    def take(self) -> dict[str, Parts]:
        """The parts of weight and bias since the last time, all layers having settled."""
        parts: dict[str, Parts] = {}
        if self.biases is not None:
            self.biases.add_squares(self._sums.get("s2"), self._speaking)
            parts |= self.biases.take()
        if self.gather is not None:
            parts[self.layer.name] = self.gather.take()
        self._sums = {}
        self._turn += 1
        return parts


class Tail(Tap):
    """Stands in for the layers at the end of a model and the ReLUs between them.

    Args:
        chunk: The chunk that is swept.
        axis: Where in the logits the samples lie.
        links: The layers, from first to last.
        relus: The ReLUs between them.
    """

    def __init__(
        self, chunk: Chunk, axis: SampleAxis, links: Sequence[Link], relus: Sequence[fx.Node]
    ) -> None:
        super().__init__(chunk, links[-1].layer.node, axis)
        self._links, self._relus = links, relus

    def handlers(self) -> dict[fx.Node, Handler]:
        """Stand in for every op."""
        maps: dict[fx.Node, Handler] = {
            link.layer.node: partial(self._map, link) for link in self._links
        }
        pairs = zip(self._relus, self._links[:-1], strict=True)
        return maps | {relu: link.rectify for relu, link in pairs}

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the logits."""
        return self._map(self._links[-1], *arguments, **keywords)

    def _map(self, link: Link, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute one layer."""
        inputs = arguments[link.layer.position]
        if inputs.requires_grad and inputs.is_leaf:
            inputs = inputs.view_as(inputs)  # Its hooks are to hear what is passed back to it.
        output = link.map(inputs, added_by(link.layer, list(arguments)))
        if link is self._links[-1]:
            for each in self._links:
                each.open()
            self.chunk.tail = self
        return output

    def pass_back(self, columns: Iterable[Column]) -> None:
        """Pass columns back from the logits to where differentiation stops.

        Args:
            columns: The columns, with their weights.
        """
        waiting = iter(columns)
        while together := list(islice(waiting, TOGETHER)):
            self._pass_back(together)

    def _pass_back(self, columns: Sequence[Column]) -> None:
        first = self._links[0]
        like = first.inputs.detach()
        group = self._grouped(columns, like)
        count, samples, _ = group.values.shape
        front: Tensor | None = None
        if first.inputs.requires_grad:
            front = self.chunk.workspace.tensor("front", (count, *like.shape), like)
        widest = max(link.width for link in self._links)
        step = max(_BYTES // (widest * count * like.element_size()), 8)
        for start in range(0, samples, step):
            block = slice(start, min(start + step, samples))
            rows = group.values[:, block].flatten(0, 1)
            for link in reversed(self._links):
                rows = link.back(group, rows, block)
            if front is not None:
                front[:, block] = group.apart(rows)
        if front is not None:
            for (_, factor), passed in zip(columns, front, strict=True):
                self.chunk.pass_through(first.inputs, passed, factor)

    def _grouped(self, columns: Sequence[Column], like: Tensor) -> Group:
        """Columns side by side."""
        values = torch.stack([values for values, _ in columns]).to(like)
        given = [factor for _, factor in columns]
        if all(factor is None for factor in given):
            return Group(values, None, None)
        one = like.new_ones(self.chunk.samples)
        factors = [one if factor is None else factor.to(like) for factor in given]
        sizes = [self.chunk.size(factor) for factor in factors]
        known = [size for size in sizes if size is not None]
        return Group(values, torch.stack(factors), torch.stack(known) if known else None)

    def take(self) -> dict[str, Parts]:
        """The parts of all layers since the last time."""
        for link in self._links:
            link.settle()
        return {name: parts for link in self._links for name, parts in link.take().items()}

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals of all layers."""
        return {name: found for link in self._links for name, found in link.diagonals().items()}

    def sizes(self) -> dict[str, Tensor]:
        """The sizes of all diagonals."""
        return {name: found for link in self._links for name, found in link.sizes().items()}

    def kept(self) -> dict[str, Kept]:
        """The columns that were kept of all layers."""
        return {name: found for link in self._links for name, found in link.kept().items()}
