"""Hessian products summed over chunks, with the first-order graphs kept within a budget.

What enters: a model, its empirical risk and vectors. What leaves: the sums of the products over all
chunks. The first way of differentiating twice that passes `hvp_check` is taken. In reverse mode the
graph of the gradient is kept for as many chunks as the budget allows, so that a further product
costs one backward pass; surfaces that share a budget take turns.
"""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatgauge.estimators.linalg import ChunkedSum
from flatgauge.surface.derivatives import (
    DESCRIPTIONS,
    KEPT,
    METHODS,
    ON_A_KINK,
    WORKING,
    Function,
    GradientGraph,
    Method,
    difference_product,
    forward_product,
)
from flatgauge.surface.double_backward import FastDoubleBackward
from flatgauge.surface.hvp_check import (
    ONCE,
    computes_in_double,
    find_fault,
    gradient_at,
    has_right_gradient,
)

if TYPE_CHECKING:
    from flatgauge.surface.batch import Batch
    from flatgauge.surface.model import FlatLayout, FunctionalModel
    from flatgauge.surface.risk import EmpiricalRisk

_WRONG_GRADIENT = (
    "the gradient that autograd computes is not the derivative of the loss, so neither it nor the "
    "second derivatives would be those of this model: its backward pass differs from its forward "
    "pass. Look in the model's forward and in the loss for a tensor hook (`register_hook`), an "
    "`autograd.Function` that changes gradients (gradient reversal, straight-through rounding), or "
    "`.detach()` and `no_grad()` on what depends on parameters; take it out of the copy that is "
    "measured."
)


class NotTwiceDifferentiableError(Exception):
    """A function cannot be differentiated twice in this way."""


class GraphOwner:
    """Which of the surfaces that share a budget keeps graphs now: one at a time."""

    def __init__(self) -> None:
        self._owner: weakref.ref[HessianProducts] | None = None

    def take(self, owner: HessianProducts | None) -> None:
        """Free the graphs of the previous owner."""
        before = None if self._owner is None else self._owner()
        if before is not None and before is not owner:
            before.release()
        self._owner = None if owner is None else weakref.ref(owner)

    def make_room(self, room: float) -> None:
        """Free the graphs if they take more bytes than there is room."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.kept > room:
            self.take(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphOwner:
        return self  # Copies of a surface share its budget.


class HessianProducts:
    """The best way of differentiating a risk twice, and the graphs it has kept."""

    def __init__(
        self,
        model: FunctionalModel,
        risk: EmpiricalRisk,
        layout: FlatLayout,
        products: str,
        owner: GraphOwner,
    ) -> None:
        self._model = model
        self._risk = risk
        self._layout = layout
        self._room = 0
        self.owner = owner
        self._asked = None if products == "auto" else named_method(products)
        self._method: Method | None = None
        self._right = False  # Whether the gradient has been found to be the derivative.
        self._doubles = False  # Whether differences are computed in double precision.
        self._complaints: dict[Method, str] = {}
        self._skip_dead: bool | None = None
        self._graphs: dict[int, GradientGraph] = {}
        self.kept = 0.0  # bytes of the graphs

    @property
    def notes(self) -> list[str]:
        """Why the way taken is not the first choice."""
        if self._method is None:
            return []
        return [
            f"products by {DESCRIPTIONS[self._method]}, as {failed} mode fails: {complaint}"
            for failed, complaint in self._complaints.items()
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> HessianProducts:
        """A copy without the graphs, which belong to the old parameters."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        state = {**self.__dict__, "_graphs": {}, "kept": 0.0}
        twin.__dict__.update({name: copy.deepcopy(part, memo) for name, part in state.items()})
        return twin

    @property
    def method(self) -> Method:
        """The way of differentiating twice: the one asked for, or the first that works."""
        return self._method or self.try_out()

    def try_out(self) -> Method:
        """Choose the way, and what is left out on it, if that has not been done."""
        if self._method is not None:
            return self._method
        self.check_gradient()
        for method in METHODS if self._asked is None else (self._asked,):
            if method in self._complaints:
                continue
            complaint = self._find_fault(method)
            if complaint is None:
                break
            if self._asked is not None:
                raise ValueError(_refusal(method, complaint))
            self._complaints[method] = complaint
        self._method = method
        return method

    def check_gradient(self) -> None:
        """Compare the gradient with differences of the loss, if that has not been done."""
        if self._right:
            return
        self._risk.few()
        trial = partial(has_right_gradient, self._risk, self._model)
        if not all(self._risk.processes.gather("the gradient of a few samples", trial)):
            raise ValueError(_WRONG_GRADIENT)
        self._right = True

    @property
    def skip_dead(self) -> bool:
        """Whether units that are zero on a whole chunk are skipped of its graph."""
        if self._skip_dead is None:
            self.try_out()
        return bool(self._skip_dead)

    def _find_fault(self, method: Method) -> str | None:
        """What is wrong with a way of differentiating twice, if anything."""
        if method == "differences" and not self._model.sharded:
            self._risk.few()
            trial = partial(computes_in_double, self._risk, self._model)
            self._doubles = all(self._risk.processes.gather("a trial", trial))
        complaint = self._check(method, skip_dead=True)
        if method == "reverse":
            self._skip_dead = complaint is None
            if complaint is not None:
                complaint = self._check(method, skip_dead=False)
        return complaint

    def _check(self, method: Method, *, skip_dead: bool) -> str | None:
        """What is wrong with a way of differentiating twice, on a few samples."""
        self._risk.few()
        trial = partial(find_fault, method, self._risk, self._model, skip_dead=skip_dead)
        found = self._risk.processes.gather("a trial", trial)
        return next((one for one in found if one is not None), None)

    def add(self, columns: Tensor, zeros: Tensor, *, chunk: int, room: int) -> Tensor | None:
        """Sum the risk's Hessian products with each row of `columns`."""
        self._room = room
        self.owner.take(self)
        vectors = [self._layout.pieces(column) for column in columns]
        sums = ChunkedSum(zeros)
        while not (self.method == "differences" and self._model.sharded):
            method, leaves = self.method, self._model.leaves
            work = partial(self._add, method, vectors, sums, chunk)
            if method == "differences":
                work = partial(self._add_differences, columns, sums, chunk)
            try:
                self._risk.processes.run(
                    "a Hessian product",
                    partial(self._model.with_parameters, leaves, work),
                    same=self._model.with_state(columns),
                )
            except (
                NotTwiceDifferentiableError
            ) as error:  # In a branch that no sample has taken so far.
                self.release()
                if self._asked is not None:
                    raise ValueError(_refusal(method, str(error))) from error
                self._complaints[method], self._method = str(error), None
                sums.clear()
            else:
                return sums.total()
        return None

    def _add(
        self, method: Method, vectors: list[list[Tensor]], sums: ChunkedSum, chunk: int
    ) -> None:
        """Add the products chunk by chunk."""
        leaves = self._model.leaves
        for position, batch in enumerate(self._risk.chunks(chunk)):
            function = partial(self._risk.total, chunk=batch)
            if method == "forward":
                for vector, total in zip(vectors, sums.partial, strict=True):
                    try:
                        product = forward_product(function, leaves, vector)
                    except (RuntimeError, NotImplementedError) as error:
                        raise NotTwiceDifferentiableError(
                            str(error).strip().splitlines()[0]
                        ) from error
                    self._layout.add(total, product)
                sums.end_chunk()
                continue
            graph, kept = self._graph(position, function, chunk)
            for index, (vector, total) in enumerate(zip(vectors, sums.partial, strict=True)):
                last = not kept and index == len(vectors) - 1
                self._layout.add(total, graph.product(vector, last=last))
            sums.end_chunk()

    def _add_differences(self, columns: Tensor, sums: ChunkedSum, chunk: int) -> None:
        """Add the products chunk by chunk, by differences of the gradient."""
        model = self._model.in_float64() if self._doubles else self._model
        point = self._layout.flat([leaf.detach() for leaf in model.leaves])
        for batch in self._risk.chunks(chunk):
            batch = model.place(batch)
            for column, total in zip(columns.to(point.dtype), sums.partial, strict=True):
                total += self._difference(model, point, column, batch)
            sums.end_chunk()

    def _difference(
        self, model: FunctionalModel, point: Tensor, column: Tensor, batch: Batch
    ) -> Tensor:
        """The product of one batch; where a step crosses kinks, of its halves."""

        def gradient(where: Tensor) -> Tensor:
            leaves = [piece.clone().requires_grad_() for piece in self._layout.pieces(where)]
            total = torch.zeros_like(where)
            # A model may write to its inputs.
            own = model.place(batch)
            self._layout.add(total, gradient_at(leaves, self._risk, model, own))
            return total

        found = difference_product(gradient, point, column)
        if found is not None:
            return found
        half = batch.samples // 2
        if not batch.splittable or half == 0:
            reason = "; ".join(self._complaints.values()) or "`products='differences'`"
            remedy = "Use functions that can be differentiated twice, without `once_differentiable`"
            raise ValueError(ON_A_KINK.format(reason=reason, remedy=remedy))
        parts = (batch.rows(slice(half)), batch.rows(slice(half, None)))
        first, second = (self._difference(model, point, column, part) for part in parts)
        return first + second

    def release(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()
        self.kept = 0.0

    def forget(self) -> None:
        """Choose again how to differentiate twice: the model has changed."""
        self.release()
        self._method, self._complaints, self._skip_dead, self._right = None, {}, None, False

    def _graph(self, position: int, function: Function, chunk: int) -> tuple[GradientGraph, bool]:
        """A chunk's first-order graph, and whether it is kept for later products."""
        if position in self._graphs:
            return self._graphs[position], True
        with FastDoubleBackward(skip_dead=self.skip_dead):
            graph = GradientGraph(function, self._model.leaves)
        if graph.has_dead_end():
            raise NotTwiceDifferentiableError(ONCE)
        needed = KEPT * (len(self._graphs) + 1) + WORKING
        keep = needed * self._risk.graph_bytes(chunk) <= self._room
        if keep:
            self._graphs[position] = graph
            self.kept += KEPT * self._risk.graph_bytes(chunk)
        return graph, keep


def _refusal(method: Method, complaint: str) -> str:
    """Say that the way of differentiating twice that the user asked for does not work."""
    return (
        f"`products={method!r}` does not work here: {complaint}; use `products='auto'`, which "
        "takes a way that does."
    )


def named_method(name: str) -> Method:
    """Look up a way of differentiating twice."""
    for method in METHODS:
        if method == name:
            return method
    raise ValueError(f"unknown `products={name!r}`; use 'auto', {', '.join(map(repr, METHODS))}.")
