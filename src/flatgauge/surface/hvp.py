"""Hessian products summed over chunks, with the first-order graphs kept within a budget.

What enters: a model, its empirical risk and vectors. What leaves: the sums of the products over all
chunks. In reverse mode the graph of the gradient is kept for as many chunks as the budget allows,
so that a further product costs one backward pass; surfaces that share a budget take turns.

The first way of differentiating twice is taken in which `find_fault` finds no fault on a few
samples: products must be differences of the gradient, in double precision, at a point near the
model's own. (A unit that is exactly zero, as in a pruned network, sits on the kink of its ReLU,
where differences give something else than the derivative however short the step. Nearby it does
not.)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flatgauge.estimators.linalg import ChunkedSum
from flatgauge.surface.derivatives import (
    DESCRIPTIONS,
    KEPT,
    METHODS,
    ON_A_KINK,
    WORKING,
    FastDoubleBackward,
    GradientGraph,
    Method,
    ScalarFunction,
    difference_product,
    differentiate,
    forward_product,
)

if TYPE_CHECKING:
    from flatgauge.surface.data import Batch
    from flatgauge.surface.model import FlatLayout, FunctionalModel
    from flatgauge.surface.risk import EmpiricalRisk

T = TypeVar("T")

#: One tensor per parameter, None where there is nothing.
Pieces = Sequence[Tensor | None]

_REFUSAL = (
    "`products={!r}` does not work here: {}; use `products='auto'`, which takes a way that does."
)

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
        self._asked = next((method for method in METHODS if method == products), None)
        if self._asked is None and products != "auto":
            known = ", ".join(map(repr, METHODS))
            raise ValueError(f"unknown `products={products!r}`; use 'auto', {known}.")
        self._method: Method | None = None
        self._right = False  # Whether the gradient has been found to be the derivative.
        self._doubles = False  # Whether differences are computed in double precision.
        self._complaints: dict[Method, str] = {}
        self._skip_dead = True  # Whether units that are zero on a whole chunk are left out.
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
        if self._method is None:
            self.check_gradient()
            for method in METHODS if self._asked is None else (self._asked,):
                complaint = self._complaints.get(method) or self._find_fault(method)
                if complaint is None:
                    self._method = method
                    break
                if self._asked is not None:
                    raise ValueError(_REFUSAL.format(method, complaint))
                self._complaints[method] = complaint
        assert self._method is not None  # There is no fault in differences.
        return self._method

    def check_gradient(self) -> None:
        """Compare the gradient with differences of the loss, if that has not been done."""
        if not self._right and not all(self._try("the gradient of a few samples", _has_gradient)):
            raise ValueError(_WRONG_GRADIENT)
        self._right = True

    def _find_fault(self, method: Method) -> str | None:
        """What is wrong with a way of differentiating twice, if anything."""
        if method == "differences":
            if not self._model.sharded:
                self._doubles = all(self._try("a trial", _computes_in_double))
            return None
        for skip_dead in (True, False) if method == "reverse" else (True,):
            trial = partial(find_fault, method, skip_dead=skip_dead)
            found = self._try("a trial", trial)
            complaint = next((one for one in found if one is not None), None)
            if method == "reverse" and skip_dead:
                self._skip_dead = complaint is None
            if complaint is None:
                break
        return complaint

    def _try(self, what: str, trial: Callable[[EmpiricalRisk, FunctionalModel], T]) -> list[T]:
        """What a trial on a few samples gives in every process."""
        self._risk.few()  # Read together, before any process may fail by itself.
        return self._risk.processes.gather(what, partial(trial, self._risk, self._model))

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
            except NotTwiceDifferentiableError as error:
                self.release()  # In a branch that no sample has taken so far.
                if self._asked is not None:
                    raise ValueError(_REFUSAL.format(method, error)) from error
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
        """Free all graphs."""
        self._graphs.clear()
        self.kept = 0.0

    def forget(self) -> None:
        """Choose again how to differentiate twice: the model has changed."""
        self.release()
        self._method, self._complaints, self._right = None, {}, False

    def _graph(
        self, position: int, function: ScalarFunction, chunk: int
    ) -> tuple[GradientGraph, bool]:
        """A chunk's first-order graph, and whether it is kept for later products."""
        if position in self._graphs:
            return self._graphs[position], True
        with FastDoubleBackward(skip_dead=self._skip_dead):
            graph = GradientGraph(function, self._model.leaves)
        if graph.has_dead_end():
            raise NotTwiceDifferentiableError(ONCE)
        needed = KEPT * (len(self._graphs) + 1) + WORKING
        keep = needed * self._risk.graph_bytes(chunk) <= self._room
        if keep:
            self._graphs[position] = graph
            self.kept += KEPT * self._risk.graph_bytes(chunk)
        return graph, keep


def differences_of_gradient(
    gradient: Callable[[Tensor], Tensor], point: Tensor, columns: Tensor
) -> Tensor:
    """Products by differences of the whole gradient: of a model that no process can run alone."""
    found = [difference_product(gradient, point, column) for column in columns]
    products = [product for product in found if product is not None]
    if len(products) < len(found):
        remedy = "In double precision shorter steps can be taken (`model.double()` before it is "
        remedy += "sharded)"
        raise ValueError(ON_A_KINK.format(reason="the model is sharded by FSDP", remedy=remedy))
    return torch.stack(products)


ONCE = "a function in the model is marked once_differentiable"

_NOT_THE_DERIVATIVE = (
    "its products differ from differences of the gradient (a backward pass that detaches, or whose "
    "own derivative is wrong in torch)"
)

#: How many entries of every parameter are compared.
_COMPARED = 2**14

#: How far from the model's parameters derivatives are compared, relative to their size.
_AWAY = 1e-2

#: How far a product may lie from the difference quotient, relative to the parameter's part.
_TOLERANCE = 1e-3

#: What is too small to compare, relative to the whole product.
_SMALL = 1e-4

#: How far a slope may lie from the difference quotient, relative to what parameters add to it.
_SLOPE_TOLERANCE = 1e-4

#: How many times closer two quotients must lie to each other than to what they contradict.
_CLOSER = 30

#: Steps of the difference quotients, relative to the parameters: of the gradient, the first being
#: the least likely to cross the kink of a ReLU; and of the loss, which kinks hardly disturb.
_STEPS, _SLOPE_STEPS = (1e-8, 1e-7, 1e-6), (1e-6, 1e-5, 1e-4)


def find_fault(
    method: Method, risk: EmpiricalRisk, model: FunctionalModel, *, skip_dead: bool = True
) -> str | None:
    """Try a way of differentiating twice on a few samples, and say what is wrong with it."""
    try:
        complaint = _run_once(method, risk, model, skip_dead)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    risk.tidy()
    if complaint is None and model.device.type != "mps":
        try:
            right = _is_derivative(method, risk, model.in_float64(), skip_dead)
        except (RuntimeError, NotImplementedError):  # It computes in single precision only.
            right = True
        complaint = None if right else _NOT_THE_DERIVATIVE
    risk.tidy()
    return complaint


def _computes_in_double(risk: EmpiricalRisk, model: FunctionalModel) -> bool:
    """Whether gradients can be computed in double precision, tried on a few samples."""
    if model.device.type == "mps":
        return False
    double = model.in_float64()
    try:
        gradient_at(double.leaves, risk, double, double.place(risk.few()))
    except (RuntimeError, NotImplementedError):
        return model.dtype is torch.float64
    return True


def gradient_at(
    leaves: Sequence[Tensor], risk: EmpiricalRisk, model: FunctionalModel, batch: Batch
) -> Pieces:
    """The gradient of the loss summed over a batch."""
    return model.with_parameters(
        leaves, lambda: differentiate(risk.total(leaves, batch, model), leaves)
    )


def _has_gradient(risk: EmpiricalRisk, model: FunctionalModel) -> bool:
    """Whether the gradient is the derivative of the loss, as far as differences show."""
    if model.sharded or model.device.type == "mps":
        return True
    try:
        return _slope_agrees(risk, model.in_float64())
    except (RuntimeError, NotImplementedError):  # It computes in single precision only.
        return True
    finally:
        risk.tidy()


def _slope_agrees(risk: EmpiricalRisk, double: FunctionalModel) -> bool:
    """Whether the gradient along one direction is the slope of the loss there."""
    few = double.place(risk.few())
    point, pieces = _finite_near(double, lambda leaves: gradient_at(leaves, risk, double, few))
    if point is None:
        return True  # Said when it is measured.
    vector = _keep_reached(_direction(double.leaves), pieces)
    pairs = zip(pieces, vector, strict=True)
    parts = [float((piece * part).sum()) for piece, part in pairs if piece is not None]
    claimed, size = sum(parts), sum(map(abs, parts))

    def value(step: float) -> float:
        moved = _move(point, vector, step)
        total = double.with_parameters(moved, lambda: risk.total(moved, few, double))
        return float(total.detach())

    before: float | None = None
    for step in _SLOPE_STEPS:
        slope = (value(step) - value(-step)) / (2 * step)
        off, allowed = abs(claimed - slope), _SLOPE_TOLERANCE * max(size, abs(slope))
        if off <= allowed:
            return True
        # No change at all says that the model rounds, not that the loss has no slope.
        if before and slope and off > _CLOSER * abs(slope - before):
            return False
        before = slope
    return True


def _run_once(
    method: Method, risk: EmpiricalRisk, model: FunctionalModel, skip_dead: bool
) -> str | None:
    """What a product says of itself: whether it fails, or is not symmetric."""
    few, leaves = risk.few(), model.leaves
    vector = [torch.ones_like(leaf) for leaf in leaves]
    ramp = [torch.linspace(-1, 1, x.numel()).to(x).reshape(x.shape) for x in leaves]
    function = partial(risk.total, chunk=few)

    def attempt() -> str | None:
        if method == "forward":
            forward_product(function, leaves, vector)
            return None
        with FastDoubleBackward(skip_dead=skip_dead):
            graph = GradientGraph(function, leaves)
            if graph.has_dead_end():
                return ONCE
            products = graph.product(vector, last=False), graph.product(ramp, last=True)
        if not _is_symmetric(vector, ramp, *products):
            return "torch's second derivative of some function is not symmetric"
        return None

    return model.with_parameters(leaves, attempt)


def _is_derivative(
    method: Method, risk: EmpiricalRisk, double: FunctionalModel, skip_dead: bool
) -> bool:
    """Whether a product is the derivative of the gradient, as far as differences show."""
    few = double.place(risk.few())
    vector = _keep_reached(_direction(double.leaves), gradient_at(double.leaves, risk, double, few))
    function = partial(risk.total, chunk=few, model=double)

    def product(leaves: Sequence[Tensor]) -> Pieces:
        def compute() -> Pieces:
            if method == "forward":
                return forward_product(function, leaves, vector)
            with FastDoubleBackward(skip_dead=skip_dead):
                return GradientGraph(function, leaves).product(vector, last=True)

        return double.with_parameters(leaves, compute)

    point, pieces = _finite_near(double, product)
    risk.tidy()
    if point is None:
        return True  # Not a question of the method: said when it is measured.
    claimed = _entries(pieces, point)
    before: list[Tensor] | None = None
    for step in _STEPS:
        quotient = _quotient(function, double, point, vector, step)
        wrong = _disagreeing(claimed, quotient)
        if not wrong:
            return True
        if before is not None and any(
            float((claimed[i] - quotient[i]).norm())
            > _CLOSER * float((quotient[i] - before[i]).norm())
            for i in wrong
        ):
            return False  # Two steps agree with each other, and not with the product.
        before = quotient
    return True  # Differences are too rough to decide: kinks, or rounding inside the model.


def _finite_near(
    double: FunctionalModel, compute: Callable[[Sequence[Tensor]], Pieces]
) -> tuple[Sequence[Tensor] | None, Pieces]:
    """A point near the model's own where derivatives are finite, and these; or its own point."""
    nearby = _move(double.leaves, _direction(double.leaves, seed=1), _AWAY)
    for point in (nearby, double.leaves):
        pieces = compute(point)
        if all(piece is None or bool(torch.isfinite(piece).all()) for piece in pieces):
            return point, pieces
    return None, ()


def _quotient(
    function: ScalarFunction,
    double: FunctionalModel,
    point: Sequence[Tensor],
    vector: Sequence[Tensor],
    step: float,
) -> list[Tensor]:
    """The central difference of the gradient along a vector."""

    def gradient(sign: int) -> list[Tensor]:
        moved = _move(point, vector, sign * step)
        pieces = double.with_parameters(moved, lambda: differentiate(function(moved), moved))
        return _entries(pieces, moved)

    pairs = zip(gradient(1), gradient(-1), strict=True)
    return [(ahead - behind) / (2 * step) for ahead, behind in pairs]


def _move(leaves: Sequence[Tensor], vector: Sequence[Tensor], step: float) -> list[Tensor]:
    """Parameters a step away, as leaves to differentiate by."""
    pairs = zip(leaves, vector, strict=True)
    return [(leaf.detach() + step * part).requires_grad_() for leaf, part in pairs]


def _direction(leaves: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """A random direction in which every parameter moves in proportion to its own size."""
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for leaf in leaves:
        size = leaf.detach().square().mean().sqrt()
        noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        direction.append(noise * torch.where(size > 0, size, 1.0))
    return direction


def _keep_reached(vector: Sequence[Tensor], gradient: Pieces) -> list[Tensor]:
    """The direction without parameters that autograd does not reach (under `no_grad`, say)."""
    return [
        torch.zeros_like(part) if piece is None else part
        for part, piece in zip(vector, gradient, strict=True)
    ]


def _entries(pieces: Pieces, like: Sequence[Tensor]) -> list[Tensor]:
    """Some entries of every piece, zeros for None; whole, they are the model several times over."""
    found = []
    for piece, leaf in zip(pieces, like, strict=True):
        step = max(leaf.numel() // _COMPARED, 1)
        whole = torch.zeros_like(leaf) if piece is None else piece
        found.append(whole.detach().reshape(-1)[::step].clone())
    return found


def _disagreeing(claimed: Sequence[Tensor], measured: Sequence[Tensor]) -> list[int]:
    """The parameters in whose part products do not agree."""
    whole = sum(float(part.square().sum()) for part in measured) ** 0.5
    return [
        place
        for place, (a, b) in enumerate(zip(claimed, measured, strict=True))
        if not float((a - b).norm()) <= _TOLERANCE * float(b.norm()) + _SMALL * whole
    ]


def _is_symmetric(u: Pieces, v: Pieces, of_u: Pieces, of_v: Pieces) -> bool:
    """Whether v·Hu = u·Hv, as it must be for a Hessian."""

    def dot(left: Pieces, right: Pieces) -> float:
        pairs = zip(left, right, strict=True)
        return sum(float((a * b).sum()) for a, b in pairs if a is not None and b is not None)

    def size(pieces: Pieces) -> float:
        return sum(float(piece.norm()) for piece in pieces if piece is not None)

    return abs(dot(v, of_u) - dot(u, of_v)) <= 1e-3 * (size(v) * size(of_u) + size(u) * size(of_v))
