"""The loss surface: a model, a loss and a data set as one function of the parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatgauge.arguments import (
    as_tensor,
    check_finite,
    check_options,
    check_order,
    finite_loss,
)
from flatgauge.budget import COLUMN, Budget
from flatgauge.copying import computed, copying
from flatgauge.group import processes_of
from flatgauge.isolation import ALONE, is_isolated, isolated
from flatgauge.layout import Layout
from flatgauge.likeness import known_likeness
from flatgauge.loss import Loss
from flatgauge.losses import resolve_loss
from flatgauge.memory import available, parse_bytes, resident
from flatgauge.objective import SHARDED, Objective
from flatgauge.precision import Sums, wide
from flatgauge.processes import Processes
from flatgauge.products import DESCRIPTIONS, ON_A_KINK, difference_product
from flatgauge.second_order import SecondOrder, Turn
from flatgauge.sharded import subject_of
from flatgauge.sharding import shard
from flatgauge.subject import Subject

#: From which share of the budget on freed memory is given back to the system after every chunk.
_FULL = 0.7

Point = Tensor | Mapping[str, Tensor]
T = TypeVar("T")


class LossSurface:
    r"""A model, a loss and a data set as one function of the trainable parameters.

    .. math:: L(\theta) = \frac1N \sum_n \ell(f(x_n; \theta), y_n)

    with the model in eval mode. Vectors are flat, in the order of ``names``; ``split`` names
    their parts. The model is never moved and never left changed: parameters, ``.grad``, buffers,
    train/eval mode, hooks and random states stay as they are, also after an exception. Change
    the model's parameters and the surface notices at the next call; change a setting of it (a
    flag, a module, a hook) and it notices when it is measured, or asked for its value. Hooks
    that alter gradients in the backward pass are no part of the function and are left out.
    Freeze, add or remove a layer, or write into tensors that were given as data, and the surface
    says that a new one is needed. Threads may share a model: one measures at a time.

    Args:
        model: A ``torch.nn.Module`` (DDP- or compile-wrapped is fine).
        loss: ``"cross_entropy"``, ``"mse"``, ``"nll"``, ``"l1"``, ``"binary_cross_entropy"`` (of
            logits); a torch loss module; a callable ``(output, target) -> mean loss``; None
            for ``output.loss`` of a Hugging Face model; or ``"auto"`` for the latter where it
            differs from cross-entropy (as a language model's does), else for cross-entropy.
        data: A DataLoader, a data set, any re-iterable of batches, or one ``(inputs, targets)``
            pair. A batch is such a pair or a dict; tuples of inputs are passed as positional,
            dicts as keyword arguments (or whole, to a model that takes one dict).
        memory: What may be taken on top of what the process holds now: a copy of the parameters,
            vectors of the model's size, graphs, columns. ``"2GiB"``, bytes, or ``"auto"`` for half
            of what is free. What does not fit is computed again when it is needed.
        chunk: Samples per pass; None chooses by the memory they need. Results do not depend
            on it.
        dtype: Precision of the computation; None follows the model (half precision is measured
            in float32, a forward with autocast in float64, which autocast leaves as it is).
            ``torch.float64`` measures a float32 model in double precision.
        weight_decay: Adds ½ · weight_decay · ‖θ‖² to the loss.
        denominator: What a callable loss divides by, as a function of a batch's targets (of its
            inputs if it has no targets), where that cannot be found by watching it.
        products: How to differentiate twice: ``"reverse"``, ``"forward"``, ``"differences"``, or
            ``"auto"`` for the first of these that works. One that gives wrong products here is an
            error when it is used.
        compile: Whether passes without derivatives (values, landscapes, expectations) go through
            `torch.compile`. It is tried out against the model itself, and left out where it fails
            or gives something else.
        check_data: Whether to read a loader twice to see that it gives the same samples.
        processes: Who measures this surface together, every rank with its share of the data: None
            for this process alone, ``"all"`` for the default group of `torch.distributed`, or a
            group. All of its ranks must then make the surface, and measure it alike.
        sharded: Whether the ranks were given samples of their own (True), or all of them the same
            ones, to be split here (False); None compares them.

    Raises:
        ValueError: If model, loss and data do not make a fixed mean loss.
        TypeError: If an argument is of the wrong kind.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]])
        >>> model = nn.Linear(1, 1, bias=False).requires_grad_()
        >>> _ = nn.init.constant_(model.weight, 3.0)
        >>> surface = LossSurface(model, "mse", (x, y))  # L(w) = mean of (w x - y)^2
        >>> surface.value(), surface.gradient().item(), surface.hvp(torch.ones(1)).item()
        (2.5, 5.0, 5.0)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[[Any, Any], Any] | None,
        data: Any,
        *,
        memory: str | int = "auto",
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
        weight_decay: float = 0.0,
        denominator: Callable[[Any], float] | None = None,
        products: str = "auto",
        compile: bool = False,
        check_data: bool = True,
        processes: Any = None,
        sharded: bool | None = None,
    ) -> None:
        self.processes = processes_of(processes)
        with self.processes.together("LossSurface"), ALONE, torch.inference_mode(False):
            check_order(model, loss, data)
            switches = {"compile": compile, "check_data": check_data, "sharded": sharded}
            check_options(chunk, dtype, weight_decay, **switches)
            resolved = resolve_loss(loss, denominator)
            before = resident()
            self._subject = subject_of(model, dtype, self.processes, compiles=compile)
            self.memory = self._room(memory)
            self._batches = shard(
                data, self.processes, sharded=sharded, room=self.memory // 4, check=check_data
            )
            self._objective = Objective(self._subject, resolved, self._batches, denominator)
            if before is not None and self.device.type == "cpu":
                self._objective.ceiling = before + int(_FULL * self.memory)
        if self._subject.sharded and products == "auto":
            products = "differences"
        if self._subject.sharded and products != "differences":
            raise ValueError(SHARDED)
        self._layout = Layout(self._subject.names, self._subject.leaves)
        self._second_order = SecondOrder(
            self._subject, self._objective, self._layout, products, Turn()
        )
        self._products = products
        self._origin: LossSurface | None = None
        self.weight_decay = float(weight_decay)
        self.matvecs = 0
        self._chunk = chunk
        self.most_samples = chunk  # What the user allows at a time, None for no bound.
        self._value: float | None = None
        self._gradient: Tensor | None = None
        self._recalled: dict[Hashable, Any] = {}
        self._lasting: dict[Hashable, Any] = {}
        self._likeness: Any = None

    @property
    def subject(self) -> Subject:
        """The model as a function of its parameters, for what is built on the surface."""
        with ALONE, torch.inference_mode(False):
            self._follow()
        return self._subject

    @property
    def objective(self) -> Objective:
        """The loss as a sum over chunks of the data, for what is built on the surface."""
        return self._objective

    @property
    def origin(self) -> LossSurface:
        """The surface that this one was made from by `under`; else this one."""
        return self._origin or self

    @property
    def model(self) -> nn.Module:
        """The user's model, without wrappers."""
        return self._subject.model

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable parameters, as in ``model.named_parameters()``."""
        return self._subject.names

    @property
    def params(self) -> dict[str, Tensor]:
        """The trainable parameters' values now, by name."""
        return self._layout.named(self.point)

    @property
    def point(self) -> Tensor:
        """The trainable parameters' values now, as one flat vector."""
        with ALONE, torch.inference_mode(False), torch.no_grad():
            self._follow()
            return self._layout.flat([leaf.detach() for leaf in self._subject.leaves])

    @property
    def size(self) -> int:
        """The number of trainable parameters p."""
        return self._layout.size

    @property
    def stored(self) -> bool:
        """Whether the data are held in memory; else every pass reads them again."""
        return self._batches.stored_everywhere

    @property
    def samples(self) -> int:
        """The number of samples N, of all processes."""
        return sum(self._batches.shares)

    @property
    def largest_share(self) -> int:
        """The most samples that any process reads."""
        return max(self._batches.shares)

    @property
    def data_text(self) -> str:
        """What the samples are, in words."""
        return self._batches.text

    @property
    def data_digest(self) -> str:
        """A short text that is the same for the same samples in the same order."""
        return self._batches.digest

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the computation."""
        return self._subject.dtype

    @property
    def device(self) -> torch.device:
        """Where the model lives and the computation runs."""
        return self._subject.device

    @property
    def loss_name(self) -> str:
        """What the loss is called in reports."""
        return self._objective.loss.name

    @property
    def chunk(self) -> int:
        """Samples per pass, chosen at first use from the memory a sample needs."""
        if self._chunk is None:
            with isolated(self.model, self.device):
                self._chunk = self._objective.fitting_chunk(self.budget)
        return self._chunk

    @property
    def budget(self) -> Budget:
        """How the memory budget is shared out."""
        return Budget(self.memory, self.size, self.dtype.itemsize)

    @property
    def product_method(self) -> str:
        """How Hessian products are computed, in words; tried out at first use."""
        self.try_out_products()
        return DESCRIPTIONS[self._second_order.method]

    @property
    def exact_products(self) -> bool:
        """Whether Hessian products are right up to rounding: not by differences."""
        with isolated(self.model, self.device):
            return self._second_order.method != "differences"

    def try_out_products(self) -> None:
        """Choose how Hessian products are computed, if that has not been done."""
        with isolated(self.model, self.device):
            self._second_order.try_out()

    @property
    def notes(self) -> list[str]:
        """What was assumed or done to make model, loss and data one fixed function."""
        parts = (self._subject, self._batches, self._objective, self._second_order)
        return [note for part in parts for note in part.notes]

    def value(self, point: Point | None = None) -> float:
        """The mean loss.

        Args:
            point: Where; None for the model's own parameters.

        Returns:
            The loss. Away from the model's own parameters it may be infinite.

        Raises:
            ValueError: If the loss at the model's own parameters is not finite.
        """
        if point is None:
            self._recognise()
        with isolated(self.model, self.device), torch.no_grad():
            self._follow()
            if point is None and self._value is not None:
                return self._value
            leaves, chunk = self._leaves(point), self.chunk

            def summed() -> float:
                total = 0.0
                for batch, weight in self._objective.rounds(chunk):
                    total += self._objective.value(leaves, batch, weight)
                return total

            total = self.processes.sum("the loss", summed, same=self._subject.and_state(leaves))
            value = total / self._objective.count + self.penalty(leaves)
            if point is None:
                self._value = finite_loss(value)
        return math.inf if math.isnan(value) else value

    def gradient(self, point: Point | None = None) -> Tensor:
        """The gradient of the mean loss.

        Args:
            point: Where; None for the model's own parameters.

        Returns:
            A flat vector (p,).
        """
        return self.value_and_gradient(point)[1]

    def value_and_gradient(self, point: Point | None = None) -> tuple[float, Tensor]:
        """The mean loss and its gradient, in one pass.

        Args:
            point: Where; None for the model's own parameters.

        Returns:
            The loss and a flat vector (p,).

        Raises:
            ValueError: If the loss or gradient at the model's own parameters is not finite, or the
                gradient is not the derivative of the loss.
        """
        if point is None:
            self._recognise()
        with isolated(self.model, self.device):
            self._follow()
            if point is None and self._gradient is not None and self._value is not None:
                return self._value, self._gradient.clone()
            self._second_order.check_gradient()
            leaves, chunk = self._leaves(point), self.chunk
            sums = Sums(torch.zeros(self.size, dtype=self.dtype, device=self.device))

            def summed() -> float:
                total = 0.0
                for batch, weight in self._objective.rounds(chunk):
                    loss, pieces = self._objective.total_and_gradient(leaves, batch, weight)
                    total += loss
                    self._layout.add(sums.near, pieces)
                    sums.settle()
                return total

            same = self._subject.and_state(leaves)
            total = self.processes.sum("the gradient", summed, same=same)
            value = total / self._objective.count + self.penalty(leaves)
            gradient = self.processes.total(sums.total()) / self._objective.count
            gradient = gradient.to(self.dtype)
            if self.weight_decay:
                gradient += self.weight_decay * self._layout.flat([x.detach() for x in leaves])
            if point is None:
                self._value = finite_loss(value)
                check_finite(self._layout.named(gradient), "gradient")
                self._gradient = gradient.clone()
        return math.inf if math.isnan(value) else value, gradient

    def hvp(self, vectors: Tensor) -> Tensor:
        """The Hessian times a vector, or times every column of a matrix.

        The first product keeps the first-order graph of as many chunks as the memory budget
        allows; later products reuse them. ``release`` lets them go.

        Args:
            vectors: A vector (p,) or matrix (p, k).

        Returns:
            The product, of the same shape.

        Raises:
            ValueError: If the vectors' length is not the number of parameters, the Hessian is not
                finite, or it cannot be computed rightly: `products` names a way that fails, the
                gradient is not the derivative of the loss, or the point lies on a kink and only
                differences are left.
        """
        vectors = as_tensor(vectors, "vectors")
        if vectors.dim() not in (1, 2) or len(vectors) != self.size:
            raise ValueError(
                f"`vectors` has shape {tuple(vectors.shape)}, but the surface has {self.size} "
                f"parameters; give a vector ({self.size},) or a matrix ({self.size}, k)."
            )
        with isolated(self.model, self.device):
            self._follow()
            columns = vectors.detach().to(self.device, self.dtype).reshape(self.size, -1).T
            if columns.is_inference():
                columns = columns.clone()
            sums = torch.zeros_like(columns, memory_format=torch.contiguous_format)
            room = self.budget.passes - COLUMN * (len(columns) - 1) * self.budget.vector
            added = self._second_order.add(columns, sums, chunk=self.chunk, room=room)
            if added is None:
                for column, product in zip(columns, sums, strict=True):
                    found = difference_product(self.gradient, self.point, column)
                    if found is None:
                        raise ValueError(
                            ON_A_KINK.format(
                                reason="the model is sharded by FSDP",
                                remedy="In double precision shorter steps can be taken "
                                "(`model.double()` before it is sharded)",
                            )
                        )
                    product += found
            else:
                sums = self.processes.total(added)
                sums /= self._objective.count
                if self.weight_decay:
                    sums += self.weight_decay * columns
            if sums.isnan().any() and not columns.isnan().any():
                check_finite(self._layout.named(sums.T), "second derivative")
        self.matvecs += len(columns)
        if self._origin is not None:
            self._origin.matvecs += len(columns)
        return sums.T.reshape(vectors.shape).to(vectors.dtype)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Name the parts of a flat vector.

        Args:
            vector: A vector (p,), or a matrix (p, k).

        Returns:
            For every parameter its part, as a view of the parameter's shape (then k).
        """
        return self._layout.named(vector)

    def flatten(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join named parts into one flat vector: the inverse of ``split``.

        Args:
            parts: A tensor for every parameter name.

        Returns:
            The vector (p,).

        Raises:
            ValueError: If names are missing or unknown, or a shape differs.
        """
        return self._layout.from_named(parts)

    def penalty(self, leaves: Sequence[Tensor]) -> float:
        """The weight-decay part of the loss, at values of the parameters in their order."""
        if not self.weight_decay:
            return 0.0
        squares = (float(wide(leaf.detach()).square().sum()) for leaf in leaves)
        return self.weight_decay / 2 * sum(squares)

    def recall(self, key: Hashable, compute: Callable[[], T], *, lasting: bool = False) -> T:
        """Give what was computed under a key at these parameters before, or compute it now.

        Args:
            key: What it is.
            compute: How to compute it.
            lasting: Whether it does not depend on the parameters' values.

        Returns:
            The same object until the parameters change, or until `release`.
        """
        if lasting:
            self._recognise()
        with ALONE, torch.inference_mode(False):
            self._follow()
            held = self._lasting if lasting else self._recalled
            if key not in held:
                held[key] = compute()
            found: T = held[key]
        return found

    def make_room(self, needed: float) -> None:
        """Let go of kept graphs, of this surface or another with the same budget, if need be.

        Args:
            needed: The bytes that must fit the budget beside them.
        """
        self._second_order.turn.make_room(self.budget.free - needed)

    def release(self, *, lasting: bool = True) -> None:
        """Let go of everything kept for speed; it is computed anew when it is needed.

        Args:
            lasting: Whether also of what holds for every value of the parameters (how the model is
                read as a graph); else it is kept, and what takes memory is not.
        """
        self._second_order.release()
        self._recalled.clear()
        if lasting:
            self._lasting.clear()
        for other in self._lasting.values():
            if isinstance(other, LossSurface):
                other.release(lasting=False)

    @contextmanager
    def watched(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Report progress to a listener: the samples of every chunk as it is finished.

        Args:
            listener: Called with a number of samples.

        Yields:
            Nothing.
        """
        before, self._objective.listener = self._objective.listener, listener
        try:
            yield
        finally:
            self._objective.listener = before

    def __repr__(self) -> str:
        return (
            f"LossSurface({type(self.model).__name__}, {self.loss_name}, N={self.samples}, "
            f"p={self.size}, {str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    def twin(self, dtype: torch.dtype | None = None) -> LossSurface:
        """The same loss and data on a copy of the model, which may be changed at will.

        Args:
            dtype: Precision of the computation and of the copy; None for this surface's own.

        Returns:
            The surface; its `model` is the copy.

        Raises:
            ValueError: If the model is sharded, or holds something that cannot be copied.
        """
        if self._subject.sharded:
            raise ValueError(SHARDED)
        other = copy.deepcopy(self)
        other._subject.convert(dtype or self.dtype)
        other._objective.forget_costs()
        other._chunk = self.most_samples
        other._second_order.release()
        other._value = other._gradient = None
        return other

    def first(self, samples: int) -> LossSurface:
        """The same loss on the first samples only, on a copy of the model.

        Args:
            samples: How many; all if there are fewer.

        Returns:
            The surface; its `model` is the copy.

        Raises:
            ValueError: If that is none.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"`samples={samples!r}` must be a whole number of at least 1.")
        other = self.twin()
        other._batches = self._batches.first(samples)
        other._objective.read(other._batches)
        return other

    def under(self, loss: Loss) -> LossSurface:
        """The same model and data under another loss, without weight decay; made once.

        Args:
            loss: The other loss; its count must be known.

        Returns:
            The surface. It follows the model as this one does, and its products count here.

        Raises:
            ValueError: If the model is sharded.
        """
        if self._subject.sharded:
            raise ValueError(SHARDED)

        def make() -> LossSurface:
            other = type(self).__new__(type(self))
            other.__dict__.update(self.__dict__)
            other._origin, other.weight_decay = self, 0.0
            other._subject = self._subject.remake(self.dtype)
            other._objective = self._objective.under(other._subject, loss)
            other._second_order = SecondOrder(
                other._subject,
                other._objective,
                self._layout,
                self._products,
                self._second_order.turn,
            )
            other._chunk, other.matvecs = self.most_samples, 0
            other._value = other._gradient = None
            other._recalled, other._lasting = {}, {}
            return other

        other = self.recall(("under", loss.name), make, lasting=True)
        other._objective.listener = self._objective.listener
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LossSurface:
        twin = memo[id(self)] = type(self).__new__(type(self))
        memo |= computed(self.model)
        # What is kept is to be computed anew.
        held = self.__dict__ | {"_recalled": {}, "_lasting": {}, "_origin": None}
        held["_likeness"] = None
        with copying(self.model):
            twin.__dict__.update(copy.deepcopy(held, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a LossSurface holds functions and cannot be pickled; pickle model and data, and make "
            "the surface anew with LossSurface(model, loss, data)."
        )

    def _room(self, memory: str | int) -> int:
        """The memory budget of every process: the smallest that one has by itself."""
        if memory != "auto":
            return min(self.processes.gathered(parse_bytes(memory)))
        shared = self.processes.neighbours if self.device.type == "cpu" else 1
        return min(self.processes.gathered(available(self.device) // (2 * shared)))

    def _follow(self) -> None:
        """Notice a changed model: forget everything computed at its old parameters."""
        self._batches.check(bits=False)
        if self._subject.refresh():
            self._second_order.release()
            self._recalled.clear()
            self._value = self._gradient = None

    def _recognise(self) -> None:
        """Notice a model that runs other code, or under other settings: forget everything."""
        with ALONE:
            if is_isolated():
                return
            self._batches.check(bits=True)
            found = known_likeness(self.model)
            if self._likeness is not None and found != self._likeness:
                self._second_order.forget()
                self._objective.forget_costs()
                self._chunk = self.most_samples
                self._recalled.clear()
                self._lasting.clear()
                self._value = self._gradient = None
            self._likeness = found

    def _leaves(self, point: Point | None) -> Sequence[Tensor]:
        """The leaves to differentiate by at a point."""
        if point is None:
            return self._subject.leaves
        if isinstance(point, Mapping):
            point = self.flatten({k: as_tensor(v, f"point[{k!r}]") for k, v in point.items()})
        point = as_tensor(point, "point")
        if point.shape != (self.size,):
            raise ValueError(
                f"`point` has shape {tuple(point.shape)}, but the surface has {self.size} "
                f"parameters; give a flat vector ({self.size},) or a dict of `surface.names`."
            )
        moved = point.detach().to(self.device, self.dtype)
        return [part.clone().requires_grad_() for part in self._layout.pieces(moved)]


def shared_processes(surfaces: Iterable[LossSurface]) -> Processes:
    """Who measures some surfaces together.

    Args:
        surfaces: The surfaces.

    Returns:
        The processes.

    Raises:
        ValueError: If they are not the same for all.
    """
    found = list({id(surface.processes): surface.processes for surface in surfaces}.values())
    if len(found) > 1:
        raise ValueError(
            "the surfaces are measured by different processes; give all of them the same "
            "`processes=`."
        )
    return found[0]
