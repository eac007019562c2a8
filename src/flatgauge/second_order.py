"""Hessian products summed over chunks, with the first-order graphs kept within a budget."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatgauge.batch import Batch
from flatgauge.double_backward import CheapTwice
from flatgauge.layout import Layout
from flatgauge.objective import KEPT, WORKING, Objective
from flatgauge.precision import Sums
from flatgauge.products import (
    DESCRIPTIONS,
    METHODS,
    ON_A_KINK,
    Function,
    GradientGraph,
    Method,
    difference_product,
    forward_product,
)
from flatgauge.subject import Subject
from flatgauge.trials import ONCE, computes_in_double, gradient_at, has_right_gradient, works

_WRONG_GRADIENT = (
    "the gradient that autograd computes is not the derivative of the loss, so neither it nor the "
    "second derivatives would be those of this model: its backward pass differs from its forward "
    "pass. Look in the model's forward and in the loss for a tensor hook (`register_hook`), an "
    "`autograd.Function` that changes gradients (gradient reversal, straight-through rounding), or "
    "`.detach()` and `no_grad()` on what depends on parameters; take it out of the copy that is "
    "measured."
)


class DeadEnd(Exception):
    """A function cannot be differentiated twice in this way."""


class Turn:
    """Who keeps graphs now, of surfaces that share a budget: one at a time."""

    def __init__(self) -> None:
        self._owner: weakref.ref[SecondOrder] | None = None

    def take(self, owner: SecondOrder | None) -> None:
        """Let whoever else keeps graphs let go of them."""
        before = None if self._owner is None else self._owner()
        if before is not None and before is not owner:
            before.release()
        self._owner = None if owner is None else weakref.ref(owner)

    def make_room(self, room: float) -> None:
        """Let whoever keeps graphs let go of them, if they take more bytes than there is room."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner.kept > room:
            self.take(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        return self  # Copies of a surface share its budget.


class SecondOrder:
    """The best way of differentiating an objective twice, and the graphs it has kept."""

    def __init__(
        self,
        subject: Subject,
        objective: Objective,
        layout: Layout,
        products: str,
        turn: Turn,
    ) -> None:
        self._subject = subject
        self._objective = objective
        self._layout = layout
        self._room = 0
        self.turn = turn
        self._asked = None if products == "auto" else named_method(products)
        self._method: Method | None = None
        self._right = False  # Whether the gradient has been found to be the derivative.
        self._doubles = False  # Whether differences are computed in double precision.
        self._complaints: dict[Method, str] = {}
        self._leave_out: bool | None = None
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

    def __deepcopy__(self, memo: dict[int, Any]) -> SecondOrder:
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
        """Choose the way, and what is left out on it, if that has not been done.

        Returns:
            The way.

        Raises:
            ValueError: If the gradient is not the derivative of the loss, or the way that the user
                asked for fails or gives wrong products.
        """
        if self._method is not None:
            return self._method
        self.check_gradient()
        for method in METHODS if self._asked is None else (self._asked,):
            if method in self._complaints:
                continue
            complaint = self._tried(method)
            if complaint is None:
                break
            if self._asked is not None:
                raise ValueError(_refusal(method, complaint))
            self._complaints[method] = complaint
        self._method = method
        return method

    def check_gradient(self) -> None:
        """Compare the gradient with differences of the loss, if that has not been done.

        Raises:
            ValueError: If it is not the derivative of the loss.
        """
        if self._right:
            return
        self._objective.few()
        trial = partial(has_right_gradient, self._objective, self._subject)
        if not all(self._objective.processes.collected("the gradient of a few samples", trial)):
            raise ValueError(_WRONG_GRADIENT)
        self._right = True

    @property
    def leave_out(self) -> bool:
        """Whether units that are silent on a chunk are left out of its graph."""
        if self._leave_out is None:
            self.try_out()
        return bool(self._leave_out)

    def _tried(self, method: Method) -> str | None:
        """What speaks against a way of differentiating twice, if anything."""
        if method == "differences" and not self._subject.sharded:
            self._objective.few()
            trial = partial(computes_in_double, self._objective, self._subject)
            self._doubles = all(self._objective.processes.collected("a trial", trial))
        complaint = self._complaint(method, leave_out=True)
        if method == "reverse":
            self._leave_out = complaint is None
            if complaint is not None:
                complaint = self._complaint(method, leave_out=False)
        return complaint

    def _complaint(self, method: Method, *, leave_out: bool) -> str | None:
        """What speaks against a way of differentiating twice, on a few samples."""
        self._objective.few()
        trial = partial(works, method, self._objective, self._subject, leave_out=leave_out)
        found = self._objective.processes.collected("a trial", trial)
        return next((one for one in found if one is not None), None)

    def add(self, columns: Tensor, zeros: Tensor, *, chunk: int, room: int) -> Tensor | None:
        """Sum the objective's Hessian products with each row of `columns`.

        Args:
            columns: Vectors (k, p), one per row.
            zeros: Where to add the products (k, p); zeros again where it fails.
            chunk: Samples at a time.
            room: Bytes for the chunk at work and for graphs that are kept.

        Returns:
            The sums (k, p), in double precision if there are many chunks; None if only
            differences of the whole gradient are left, as the model is sharded.

        Raises:
            ValueError: If the way that the user asked for turns out to give wrong products, or
                only differences of the gradient are left, and these cross kinks at any step.
        """
        self._room = room
        self.turn.take(self)
        vectors = [self._layout.pieces(column) for column in columns]
        sums = Sums(zeros)
        while not (self.method == "differences" and self._subject.sharded):
            method, leaves = self.method, self._subject.leaves
            work = partial(self._add, method, vectors, sums, chunk)
            if method == "differences":
                work = partial(self._add_differences, columns, sums, chunk)
            try:
                self._objective.processes.attempt(
                    "a Hessian product",
                    partial(self._subject.holding, leaves, work),
                    same=self._subject.and_state(columns),
                )
            except DeadEnd as error:  # In a branch that no sample has taken so far.
                self.release()
                if self._asked is not None:
                    raise ValueError(_refusal(method, str(error))) from error
                self._complaints[method], self._method = str(error), None
                sums.clear()
            else:
                return sums.total()
        return None

    def _add(self, method: Method, vectors: list[list[Tensor]], sums: Sums, chunk: int) -> None:
        """Add the products chunk by chunk."""
        leaves = self._subject.leaves
        for position, batch in enumerate(self._objective.chunks(chunk)):
            function = partial(self._objective.total, chunk=batch)
            if method == "forward":
                for vector, total in zip(vectors, sums.near, strict=True):
                    try:
                        product = forward_product(function, leaves, vector)
                    except (RuntimeError, NotImplementedError) as error:
                        raise DeadEnd(str(error).strip().splitlines()[0]) from error
                    self._layout.add(total, product)
                sums.settle()
                continue
            graph, kept = self._graph(position, function, chunk)
            for index, (vector, total) in enumerate(zip(vectors, sums.near, strict=True)):
                last = not kept and index == len(vectors) - 1
                self._layout.add(total, graph.product(vector, last=last))
            sums.settle()

    def _add_differences(self, columns: Tensor, sums: Sums, chunk: int) -> None:
        """Add the products chunk by chunk, by differences of the gradient."""
        subject = self._subject.doubled() if self._doubles else self._subject
        point = self._layout.flat([leaf.detach() for leaf in subject.leaves])
        for batch in self._objective.chunks(chunk):
            batch = subject.place(batch)
            for column, total in zip(columns.to(point.dtype), sums.near, strict=True):
                total += self._difference(subject, point, column, batch)
            sums.settle()

    def _difference(self, subject: Subject, point: Tensor, column: Tensor, batch: Batch) -> Tensor:
        """The product of one batch; where a step crosses kinks, of its halves."""

        def gradient(where: Tensor) -> Tensor:
            leaves = [piece.clone().requires_grad_() for piece in self._layout.pieces(where)]
            total = torch.zeros_like(where)
            # A model may write to its inputs.
            own = subject.place(batch)
            self._layout.add(total, gradient_at(leaves, self._objective, subject, own))
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
        first, second = (self._difference(subject, point, column, part) for part in parts)
        return first + second

    def release(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()
        self.kept = 0.0

    def forget(self) -> None:
        """Try out anew how to differentiate twice: the model runs other code."""
        self.release()
        self._method, self._complaints, self._leave_out, self._right = None, {}, None, False

    def _graph(self, position: int, function: Function, chunk: int) -> tuple[GradientGraph, bool]:
        """A chunk's first-order graph, and whether it is kept for later products."""
        if position in self._graphs:
            return self._graphs[position], True
        with CheapTwice(leave_out=self.leave_out):
            graph = GradientGraph(function, self._subject.leaves)
        if graph.has_dead_end():
            raise DeadEnd(ONCE)
        needed = KEPT * (len(self._graphs) + 1) + WORKING
        keep = needed * self._objective.graph_bytes(chunk) <= self._room
        if keep:
            self._graphs[position] = graph
            self.kept += KEPT * self._objective.graph_bytes(chunk)
        return graph, keep


def _refusal(method: Method, complaint: str) -> str:
    """Say that the way of differentiating twice that the user asked for does not work."""
    return (
        f"`products={method!r}` does not work here: {complaint}; use `products='auto'`, which "
        "takes a way that does."
    )


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
