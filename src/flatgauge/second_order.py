"""Hessian products summed over chunks, with the first-order graphs kept within a budget."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flatgauge.layout import Layout
from flatgauge.objective import KEPT, WORKING, Objective
from flatgauge.products import (
    DESCRIPTIONS,
    METHODS,
    Function,
    GradientGraph,
    Method,
    forward_product,
)
from flatgauge.subject import Subject


class SecondOrder:
    """The best way of differentiating an objective twice, and the graphs it has kept.

    Attributes:
        notes: Why the way taken is not the first choice.
    """

    def __init__(
        self, subject: Subject, objective: Objective, layout: Layout, memory: int, products: str
    ) -> None:
        self._subject = subject
        self._objective = objective
        self._layout = layout
        self._memory = memory
        self._method = None if products == "auto" else named_method(products)
        self._graphs: dict[int, GradientGraph] = {}
        self.notes: list[str] = []

    @property
    def method(self) -> Method:
        """The way of differentiating twice: the one asked for, or the first that works."""
        if self._method is None:
            complaints: dict[Method, str] = {}
            for method in METHODS:
                complaint = self._objective.works(method)
                if complaint is None:
                    break
                complaints[method] = complaint
            self._method = method
            self.notes = [
                f"products by {DESCRIPTIONS[method]}, as {failed} mode fails: {complaint}"
                for failed, complaint in complaints.items()
            ]
        return self._method

    def add(self, columns: Tensor, sums: Tensor, *, chunk: int) -> None:
        """Add the objective's Hessian products with each row of `columns` to `sums`.

        Args:
            columns: Vectors (k, p), one per row.
            sums: Where to add the products (k, p).
            chunk: Samples at a time.
        """
        vectors = [self._layout.pieces(column) for column in columns]
        method, leaves = self.method, self._subject.leaves
        self._subject.holding(leaves, lambda: self._add(method, vectors, sums, chunk))

    def _add(self, method: Method, vectors: list[list[Tensor]], sums: Tensor, chunk: int) -> None:
        """Add the products chunk by chunk."""
        leaves = self._subject.leaves
        for position, batch in enumerate(self._objective.chunks(chunk)):
            function = partial(self._objective.total, chunk=batch)
            if method == "forward":
                for vector, total in zip(vectors, sums, strict=True):
                    self._layout.add(total, forward_product(function, leaves, vector))
                continue
            graph, kept = self._graph(position, function, chunk)
            for index, (vector, total) in enumerate(zip(vectors, sums, strict=True)):
                last = not kept and index == len(vectors) - 1
                self._layout.add(total, graph.product(vector, last=last))

    def release(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    def _graph(self, position: int, function: Function, chunk: int) -> tuple[GradientGraph, bool]:
        """A chunk's first-order graph, and whether it is kept for later products."""
        if position in self._graphs:
            return self._graphs[position], True
        graph = GradientGraph(function, self._subject.leaves)
        needed = KEPT * (len(self._graphs) + 1) + WORKING
        keep = needed * self._objective.graph_bytes(chunk) <= self._memory
        if keep:
            self._graphs[position] = graph
        return graph, keep


def named_method(name: str) -> Method:
    """Look up a way of differentiating twice.

    Args:
        name: As the user gave it.

    Returns:
        The way.

    Raises:
        ValueError: If there is no such way.
    """
    for method in METHODS:
        if method == name:
            return method
    raise ValueError(
        f"`products={name!r}` is no way to differentiate twice; use 'auto', "
        f"{', '.join(map(repr, METHODS))}."
    )
