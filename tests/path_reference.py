"""Basis paths by their definition: explicit routes, explicit lists of weights, dense Hessians.

Which edges may be on the skeleton is said by time: the edge that leaves a unit for good must be
used after everything has entered the unit, the edge that enters it must be used before the unit is
read for the first time. Then times grow along every route, and every basis path is a path that a
signal can really take. Without shared streams this excludes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from path_graph import CONSTANT, INPUT, OUTPUT, Edge, Graph
from torch import Tensor
from torch.func import functional_call

SOURCES = (INPUT, CONSTANT)


class Paths:
    """The basis paths of one network at its weights, and the loss as a function of their values.

    Attributes:
        edges, weights: All edges, also those left out.
        leaves, enters: For every hidden unit its free edge s and its incoming edge r (numbers).
        kept: The hidden units that lie on a non-zero skeleton; `dropped` the others.
        coordinates: The numbers of the edges that are no free ones, of kept units.
    """

    def __init__(self, graph: Graph, skeleton: str, weights: list[float] | None = None) -> None:
        self.graph, self.edges = graph, graph.edges
        self.weights = graph.weights() if weights is None else weights
        self.outgoing = {
            u: [n for n, e in enumerate(self.edges) if e.tail == u] for u in graph.units
        }
        self.incoming = {
            u: [n for n, e in enumerate(self.edges) if e.head == u] for u in graph.units
        }
        self.leaves: dict[str, int | None] = {}
        self.enters: dict[str, int | None] = {}
        self.tied: set[str] = set()
        self._diagonal = skeleton == "diagonal"
        for unit in graph.units:
            self._leave(unit)
            self._enter(unit)
        self.kept = [u for u in graph.units if self.u(u) != 0]
        self.dropped = [u for u in graph.units if self.u(u) == 0]
        self.free = {self.leaves[u] for u in self.kept}
        taking_part = [
            n for n, e in enumerate(self.edges) if not {e.tail, e.head} & set(self.dropped)
        ]
        self.m = len(taking_part)
        self.coordinates = [n for n in taking_part if n not in self.free]

    # -- the skeleton ------------------------------------------------------------------------

    def _leave(self, unit: str) -> int | None:
        """s(h): the paper's diagonal edge, or the edge of largest |w| |R(head)|."""
        if unit not in self.leaves:
            entered = max((self.edges[n].time for n in self.incoming[unit]), default=-1)
            ahead = [n for n in self.outgoing[unit] if self.edges[n].time > entered]
            if self._diagonal:
                ahead = [n for n in ahead if self.edges[n].diagonal_out]
                self.leaves[unit] = ahead[0] if ahead else None
            else:
                sizes = [
                    abs(self.weights[n]) * abs(self.product(self.out_route(self.edges[n].head)))
                    for n in ahead
                ]
                self.leaves[unit] = self._largest(unit, ahead, sizes)
        return self.leaves[unit]

    def _enter(self, unit: str) -> int | None:
        """r(h): the paper's diagonal edge, or the edge of largest |P(tail)| |w|."""
        if unit not in self.enters:
            read = min((self.edges[n].time for n in self.outgoing[unit]), default=math.inf)
            before = [n for n in self.incoming[unit] if self.edges[n].time < read]
            if self._diagonal:
                before = [n for n in before if self.edges[n].diagonal_in]
                self.enters[unit] = before[0] if before else None
            else:
                sizes = [
                    abs(self.product(self.in_route(self.edges[n].tail))) * abs(self.weights[n])
                    for n in before
                ]
                self.enters[unit] = self._largest(unit, before, sizes)
        return self.enters[unit]

    def _largest(self, unit: str, numbers: list[int], sizes: list[float]) -> int | None:
        if not sizes or max(sizes) == 0:
            return None
        if sizes.count(max(sizes)) > 1:
            self.tied.add(unit)
        return numbers[sizes.index(max(sizes))]

    # -- routes ------------------------------------------------------------------------------

    def out_route(self, unit: str) -> list[int] | None:
        """The free edges from a unit to an output; None where there is no skeleton."""
        if unit == OUTPUT:
            return []
        edge = self._leave(unit)
        rest = None if edge is None else self.out_route(self.edges[edge].head)
        return None if rest is None else [edge, *rest]

    def in_route(self, unit: str) -> list[int] | None:
        """The incoming skeleton edges from an input or a bias to a unit."""
        if unit in SOURCES:
            return []
        edge = self._enter(unit)
        rest = None if edge is None else self.in_route(self.edges[edge].tail)
        return None if rest is None else [*rest, edge]

    def product(self, route: list[int] | None) -> float:
        return 0.0 if route is None else math.prod(self.weights[n] for n in route)

    def r(self, unit: str) -> float:
        return self.product(self.out_route(unit))

    def p(self, unit: str) -> float:
        return self.product(self.in_route(unit))

    def u(self, unit: str) -> float:
        return self.p(unit) * self.r(unit)

    def path(self, edge: int) -> list[int]:
        """in-route(tail), the edge, out-route(head)."""
        tail, head = self.edges[edge].tail, self.edges[edge].head
        return [*self.in_route(tail), edge, *self.out_route(head)]

    def root(self, unit: str) -> int:
        """The last edge on the in-route that is not free."""
        return [n for n in self.in_route(unit) if n not in self.free][-1]

    @property
    def values(self) -> Tensor:
        """v_e, the product of the weights along the path of every coordinate."""
        return torch.tensor(
            [self.product(self.path(n)) for n in self.coordinates], dtype=torch.float64
        )

    @property
    def smallest(self) -> float:
        return min((abs(self.u(unit)) for unit in self.kept), default=math.inf)

    # -- back to weights -----------------------------------------------------------------------

    def to_weights(self, values: Tensor) -> Tensor:
        """What every edge weighs at these values, in the gauge of the model's own free edges."""
        place = {n: i for i, n in enumerate(self.coordinates)}
        through: dict[str, Tensor] = {}  # ũ

        def reach(unit: str) -> Tensor:
            if unit in SOURCES:
                return torch.ones((), dtype=torch.float64)
            if unit not in through:
                through[unit] = gauged(self.enters[unit]) * reach(
                    self.edges[self.enters[unit]].tail
                )
            return through[unit]

        def gauged(n: int) -> Tensor:
            """ŵ: the free edges are signs, the others sgn R(a) v / ũ(b)."""
            if n in self.free:
                return torch.tensor(math.copysign(1.0, self.weights[n]), dtype=torch.float64)
            tail, head = self.edges[n].tail, self.edges[n].head
            return math.copysign(1.0, self.r(head)) * values[place[n]] / reach(tail)

        moving = [self.edges[n] for n in self.coordinates]
        signs = [math.copysign(1.0, self.r(edge.head)) for edge in moving]
        back = [
            (1.0 if edge.tail in SOURCES else abs(self.r(edge.tail))) / abs(self.r(edge.head))
            for edge in moving
        ]
        found = torch.tensor(signs).double() * values / torch.stack([reach(e.tail) for e in moving])
        weights = torch.tensor(self.weights, dtype=torch.float64)
        place_of = torch.tensor(self.coordinates)
        return weights.index_put((place_of,), found * torch.tensor(back, dtype=torch.float64))

    def loss(self, values: Tensor) -> Tensor:
        """L(v): map back, run the network."""
        case, state = self.graph.case, self.graph.parameters(self.to_weights(values))
        return case.torch_loss(functional_call(case.model, state, (case.inputs,)), case.targets)

    def hessian(self) -> Tensor:
        return torch.autograd.functional.hessian(self.loss, self.values)

    def gradient(self) -> Tensor:
        return torch.autograd.functional.jacobian(self.loss, self.values)

    def relative_hessian(self) -> Tensor:
        """The Hessian in t at 0, where v = v₀ exp(t)."""
        values = self.values
        return torch.autograd.functional.hessian(
            lambda t: self.loss(values * t.exp()), torch.zeros_like(values)
        )

    # -- second derivatives by the formulas ------------------------------------------------------

    def _in_weights(self) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the loss in the weights of the edges."""
        case = self.graph.case

        def loss(weights: Tensor) -> Tensor:
            state = self.graph.parameters(weights)
            return case.torch_loss(functional_call(case.model, state, (case.inputs,)), case.targets)

        weights = torch.tensor(self.weights, dtype=torch.float64)
        return (
            torch.autograd.functional.jacobian(loss, weights),
            torch.autograd.functional.hessian(loss, weights),
        )

    def second_derivatives(self) -> tuple[list[float], float]:
        """∂²L/∂v² of every coordinate, and the first-order part of their sum."""
        gradient, hessian = self._in_weights()
        runs: dict[int, list[str]] = {}
        for unit in self.kept:
            runs.setdefault(self.root(unit), []).append(unit)
        found, first_order = [], 0.0
        for n, value in zip(self.coordinates, self.values.tolist(), strict=True):
            if n not in runs:
                tail, head = self.edges[n].tail, self.edges[n].head
                found.append(float(hessian[n, n]) / (self.p(tail) * self.r(head)) ** 2)
                continue
            direction = torch.zeros(len(self.edges), dtype=torch.float64)
            direction[n] = self.weights[n]
            slope = 0.0
            for unit in runs[n]:
                for other in self.outgoing[unit]:
                    if other != self.leaves[unit] and other in self.coordinates:
                        direction[other] -= self.weights[other]
                        slope += self.weights[other] * float(gradient[other])
            found.append((float(direction @ hessian @ direction) + 2 * slope) / value**2)
            first_order += 2 * slope / value**2
        return found, first_order


def every_path(graph: Graph) -> Iterator[list[int]]:
    """All paths that a signal can take: from an input or a bias to an output, forward in time."""

    def onward(edge: int) -> Iterator[list[int]]:
        here: Edge = graph.edges[edge]
        if here.head == OUTPUT:
            yield [edge]
            return
        for n, e in enumerate(graph.edges):
            if e.tail == here.head and e.time > here.time:
                yield from ([edge, *rest] for rest in onward(n))

    for n, e in enumerate(graph.edges):
        if e.tail in SOURCES:
            yield from onward(n)


def rescaled(graph: Graph, generator: torch.Generator) -> list[float]:
    """The edges' weights after multiplying every hidden unit by a factor of its own."""
    factors = {u: math.exp(torch.randn((), generator=generator).item()) for u in graph.units}
    return [
        weight * factors.get(edge.head, 1.0) / factors.get(edge.tail, 1.0)
        for weight, edge in zip(graph.weights(), graph.edges, strict=True)
    ]


def numbers(paths: Paths, entries: list[tuple[str, Tensor]]) -> list[int]:
    """Where the coordinates that are listed as entries of parameters stand among the reference's.

    Fails unless both have the same coordinates.
    """
    listed = [(name, index) for name, indices in entries for index in indices.tolist()]
    mine = {(paths.edges[n].name, paths.edges[n].index): i for i, n in enumerate(paths.coordinates)}
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(mine)
    return [mine[key] for key in listed]
