"""The loss surface: a model, a loss and a data set as one function of the parameters.

What enters: a torch model, a loss and data. What leaves: value, gradient and Hessian products at
any parameters, in chunks that fit a memory budget, on one process or several. `FunctionalModel`
calls the model with other parameters, `EmpiricalRisk` sums the loss over chunks of the data,
`HessianProducts` differentiates twice. Every call runs in isolation, so that the user's model stays
as it was, and first looks whether the parameters have changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatgauge.estimators.linalg import as_tensor, to_float64
from flatgauge.graph.export import ExportedGraphs
from flatgauge.runtime.distributed import SHARDED, resolve_processes
from flatgauge.runtime.isolation import (
    PROCESS_LOCK,
    computed_tensors,
    explain_copy_errors,
    isolate,
)
from flatgauge.runtime.resources import MemoryBudget, available_bytes, parse_bytes, resident_bytes
from flatgauge.surface.arguments import check_options, check_order, make_functional, shard
from flatgauge.surface.derivatives import DESCRIPTIONS, Method
from flatgauge.surface.hvp import GraphOwner, HessianProducts, differences_of_gradient
from flatgauge.surface.losses import Loss
from flatgauge.surface.model import FlatLayout, FunctionalModel
from flatgauge.surface.risk import EmpiricalRisk, check_finite, finite_loss
from flatgauge.surface.user_loss import resolve_loss

T = TypeVar("T")

#: From which share of the budget on freed memory is given back to the system after every chunk.
_FULL = 0.7

Point = Tensor | Mapping[str, Tensor]


class SurfaceCache:
    """The results kept for one surface, by key.

    A key names all that a result depends on apart from model, loss and data: a frozen dataclass, or
    a tuple that begins with the name of its owner. Where random numbers matter, it holds the seed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check  # Refuses data that were written to; it reads all of them.
        self._current: dict[Hashable, Any] = {}
        self.static: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], T], *, static: bool = False) -> T:
        """The result under a key, computed if it is not there; `static` if for all parameters."""
        results = self.static if static else self._current
        with PROCESS_LOCK, torch.inference_mode(False):
            if static:
                self._check()
            if key not in results:
                results[key] = compute()
            result: T = results[key]
        return result

    def clear(self, *, static: bool = True) -> None:
        """Drop the results for the present parameters; with `static` all others too."""
        self._current.clear()
        if static:
            self.static.clear()


class LossSurface:
    r"""A model, a loss and a data set as one function of the trainable parameters.

    .. math:: L(\theta) = \frac1N \sum_n \ell(f(x_n; \theta), y_n)

    with the model in eval mode. Vectors are flat, in the order of ``names``; ``split`` names
    their parts. The model is never moved and never left changed: parameters, ``.grad``, buffers,
    train/eval mode, hooks and random states stay as they are, also after an exception. Change
    the model's parameters and the surface notices at the next call; after a change of its code or
    of a setting (a flag, a module, a hook) call `refresh`. Hooks that alter gradients in the
    backward pass are no part of the function and are left out. Freeze, add or remove a layer, or
    write into tensors that were given as data, and the surface says that a new one is needed.
    Threads may share a model: one measures at a time.

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
        check_data: Whether to read a loader twice to see that it gives the same samples.
        processes: Which processes measure this surface together, every rank with its share of the
            data: None for this process alone, ``"all"`` for the default group of
            `torch.distributed`, or a group. All of its ranks must then make the surface, and
            measure it in the same way.
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
        check_data: bool = True,
        processes: Any = None,
        sharded: bool | None = None,
    ) -> None:
        self.processes = resolve_processes(processes)
        with self.processes.scope("LossSurface"), PROCESS_LOCK, torch.inference_mode(False):
            check_order(model, loss, data)
            check_options(chunk, dtype, weight_decay, check_data=check_data, sharded=sharded)
            resolved = resolve_loss(loss, denominator)
            before = resident_bytes()
            self._functional_model = make_functional(model, dtype, self.processes)
            shared = self.processes.ranks_on_host if self.device.type == "cpu" else 1
            free = available_bytes(self.device) // (2 * shared)
            free = free if memory == "auto" else parse_bytes(memory)
            self.memory = min(self.processes.all_gather(free))
            self.data = shard(
                data, self.processes, sharded=sharded, room=self.memory // 4, check=check_data
            )
            self.risk = EmpiricalRisk(self._functional_model, resolved, self.data, denominator)
            if before is not None and self.device.type == "cpu":
                self.risk.ceiling = before + int(_FULL * self.memory)
        if self._functional_model.sharded and products == "auto":
            products = "differences"
        if self._functional_model.sharded and products != "differences":
            raise ValueError(SHARDED)
        self._layout = FlatLayout(self._functional_model.names, self._functional_model.leaves)
        self._hvp = HessianProducts(
            self._functional_model, self.risk, self._layout, products, GraphOwner()
        )
        self._product_method = products
        self._origin: LossSurface | None = None
        self.weight_decay = float(weight_decay)
        self.matvecs = 0
        self._chunk = chunk
        self.most_samples = chunk  # What the user allows at a time, None for no bound.
        self._value: float | None = None
        self._gradient: Tensor | None = None
        self._cache = SurfaceCache(self.data.check_contents)
        self.graphs = ExportedGraphs()

    @property
    def functional_model(self) -> FunctionalModel:
        """The model as a function of its parameters, for what is built on the surface."""
        self._follow()
        return self._functional_model

    @property
    def cache(self) -> SurfaceCache:
        """The results kept for this surface; those for other parameters are dropped first."""
        self._follow()
        return self._cache

    @property
    def origin(self) -> LossSurface:
        """The surface that this one was made from by `with_loss`; else this one."""
        return self._origin or self

    @property
    def model(self) -> nn.Module:
        """The user's model, without wrappers."""
        return self._functional_model.model

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable parameters, as in ``model.named_parameters()``."""
        return self._functional_model.names

    @property
    def params(self) -> dict[str, Tensor]:
        """The trainable parameters' values now, by name."""
        return self._layout.by_name(self.point)

    @property
    def point(self) -> Tensor:
        """The trainable parameters' values now, as one flat vector."""
        leaves = self.functional_model.leaves
        with PROCESS_LOCK, torch.inference_mode(False):
            return self._layout.flat([leaf.detach() for leaf in leaves])

    @property
    def size(self) -> int:
        """The number of trainable parameters p."""
        return self._layout.size

    @property
    def samples(self) -> int:
        """The number of samples N, of all processes."""
        return sum(self.data.shares)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the computation."""
        return self._functional_model.dtype

    @property
    def device(self) -> torch.device:
        """Where the model lives and the computation runs."""
        return self._functional_model.device

    @property
    def loss_name(self) -> str:
        """What the loss is called in reports."""
        return self.risk.loss.name

    @property
    def chunk(self) -> int:
        """Samples per pass, chosen at first use from the memory a sample needs."""
        if self._chunk is None:
            with isolate(self.model, self.device):
                self._chunk = self.risk.fitting_chunk(self.budget)
        return self._chunk

    @property
    def budget(self) -> MemoryBudget:
        """How the memory budget is shared out."""
        return MemoryBudget(self.memory, self.size, self.dtype.itemsize)

    def try_out_products(self) -> Method:
        """Choose how Hessian products are computed, if that has not been done."""
        with isolate(self.model, self.device):
            return self._hvp.method

    @property
    def product_method(self) -> str:
        """How Hessian products are computed, as text; tried out at first use."""
        return DESCRIPTIONS[self.try_out_products()]

    @property
    def notes(self) -> list[str]:
        """What was assumed or done to make model, loss and data one fixed function."""
        parts = (self._functional_model, self.data, self.risk, self._hvp)
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
        return self._evaluate(point, slope=False)[0]

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
        value, gradient = self._evaluate(point, slope=True)
        assert gradient is not None
        return value, gradient

    def _evaluate(self, point: Point | None, *, slope: bool) -> tuple[float, Tensor | None]:
        """The mean loss, with `slope` its gradient too; kept for the model's own parameters."""
        here = point is None
        if here:
            self.data.check_contents()
        with isolate(self.model, self.device), torch.set_grad_enabled(slope):
            self._follow()
            if here and self._value is not None and not slope:
                return self._value, None
            if here and self._value is not None and self._gradient is not None:
                return self._value, self._gradient.clone()
            if slope:
                self._hvp.check_gradient()
            leaves, layout = self._leaves(point), self._layout if slope else None
            value, gradient = self.risk.mean(leaves, self.chunk, layout)
            value += self.penalty(leaves)
            if gradient is not None and self.weight_decay:
                gradient += self.weight_decay * self._layout.flat([x.detach() for x in leaves])
            if here:
                self._value = finite_loss(value)
            if here and gradient is not None:
                check_finite(self._layout.by_name(gradient), "gradient")
                self._gradient = gradient.clone()
        return math.inf if math.isnan(value) else value, gradient

    def hvp(self, vectors: Tensor) -> Tensor:
        """The Hessian times a vector, or times every column of a matrix.

        The first product keeps the first-order graph of as many chunks as the memory budget
        allows; later products reuse them. ``release`` frees them.

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
        with isolate(self.model, self.device):
            self._follow()
            columns = vectors.detach().to(self.device, self.dtype).reshape(self.size, -1).T
            if columns.is_inference():
                columns = columns.clone()
            sums = torch.zeros_like(columns, memory_format=torch.contiguous_format)
            room = self.budget.hvp(len(columns))
            added = self._hvp.add(columns, sums, chunk=self.chunk, room=room)
            if added is None:  # The model is sharded: all ranks compute each gradient together.
                sums = differences_of_gradient(self.gradient, self.point, columns)
            else:
                sums = self.processes.all_sum(added)
                sums /= self.risk.count
                if self.weight_decay:
                    sums += self.weight_decay * columns
            if sums.isnan().any() and not columns.isnan().any():
                check_finite(self._layout.by_name(sums.T), "second derivative")
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
        return self._layout.by_name(vector)

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
        squares = (float(to_float64(leaf.detach()).square().sum()) for leaf in leaves)
        return self.weight_decay / 2 * sum(squares)

    def make_room(self, needed: float) -> None:
        """Free kept graphs of surfaces with this budget, if they leave fewer bytes than needed."""
        self._hvp.owner.make_room(self.budget.free - needed)

    def release(self, *, static: bool = True) -> None:
        """Free everything kept for speed; it is computed again when it is needed.

        Args:
            static: Whether to free also what holds for every value of the parameters (the exported
                graph); else only what takes memory.
        """
        for other in self._cache.static.values():
            if isinstance(other, LossSurface):
                other.release(static=False)
        self._hvp.release()
        self._cache.clear(static=static)
        if static:
            self.graphs = ExportedGraphs()

    def refresh(self) -> None:
        """Forget everything known about the model: needed after its code or a setting changed.

        New values of parameters and buffers are noticed without.
        """
        with PROCESS_LOCK:
            self.release()
            self._hvp.forget()
            self.risk.forget_costs()
            self._chunk = self.most_samples
            self._value = self._gradient = None

    @contextmanager
    def on_progress(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Call `listener` with the number of samples of every chunk that is finished."""
        before, self.risk.listener = self.risk.listener, listener
        try:
            yield
        finally:
            self.risk.listener = before

    def __repr__(self) -> str:
        return (
            f"LossSurface({type(self.model).__name__}, {self.loss_name}, N={self.samples}, "
            f"p={self.size}, {str(self.dtype).removeprefix('torch.')} on {self.device})"
        )

    def copy(self, dtype: torch.dtype | None = None) -> LossSurface:
        """The same loss and data on a copy of the model, which may be changed at will.

        Args:
            dtype: Precision of the computation and of the copy; None for this surface's own.

        Returns:
            The surface; its `model` is the copy.

        Raises:
            ValueError: If the model is sharded, or holds something that cannot be copied.
        """
        if self._functional_model.sharded:
            raise ValueError(SHARDED)
        other = copy.deepcopy(self)
        other._functional_model.convert(dtype or self.dtype)
        other.risk.forget_costs()
        return other

    def with_weights(self, state: Mapping[str, Any]) -> LossSurface:
        """The same loss and data on a copy of the model with other weights.

        The copy is not exported again: this is the fast way to measure several checkpoints.

        Args:
            state: The weights, as ``model.load_state_dict`` takes them.

        Returns:
            The surface; its `model` is the copy.

        Raises:
            ValueError: If the model is sharded, or holds something that cannot be copied.
            RuntimeError: If names or shapes of the weights are not those of the model.
        """
        other = self.copy()
        other.model.load_state_dict(state)
        return other

    def subset(self, samples: int) -> LossSurface:
        """The same loss on the first samples only, on a copy of the model.

        Args:
            samples: How many; all if there are fewer.

        Returns:
            The surface; its `model` is the copy.

        Raises:
            ValueError: If `samples` is not a positive whole number.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"`samples={samples!r}` must be a whole number of at least 1.")
        other = self.copy()
        other.data = self.data.first(samples)
        other.risk.read(other.data)
        other._cache = SurfaceCache(other.data.check_contents)
        return other

    def with_loss(self, loss: Loss) -> LossSurface:
        """The same model and data under another loss, without weight decay; made once."""
        if self._functional_model.sharded:
            raise ValueError(SHARDED)

        def make() -> LossSurface:
            model = self._functional_model.in_precision(self.dtype)
            risk = self.risk.under(model, loss)
            hvp = HessianProducts(model, risk, self._layout, self._product_method, self._hvp.owner)
            other = self._assemble(model, risk, hvp)
            other._origin, other.weight_decay = self, 0.0
            return other

        other = self.cache.get(("with_loss", loss.name), make, static=True)
        other.risk.listener = self.risk.listener
        return other

    def _assemble(
        self, model: FunctionalModel, risk: EmpiricalRisk, hvp: HessianProducts
    ) -> LossSurface:
        """A surface of other parts with this one's settings; nothing is computed yet."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._functional_model, other.risk, other._hvp = model, risk, hvp
        other._cache, other._origin = SurfaceCache(self.data.check_contents), None
        other._chunk, other.matvecs = self.most_samples, 0
        other._value = other._gradient = None
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LossSurface:
        memo |= computed_tensors(self.model)
        memo[id(self.risk.listener)] = None  # It reports on this surface.
        with explain_copy_errors(self.model):
            parts = copy.deepcopy((self._functional_model, self.risk, self._hvp), memo)
        twin = memo[id(self)] = self._assemble(*parts)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a LossSurface holds functions and cannot be pickled; pickle model and data, and make "
            "the surface again with LossSurface(model, loss, data)."
        )

    def _follow(self) -> None:
        """Notice a changed model: forget everything computed at its old parameters."""
        with PROCESS_LOCK, torch.inference_mode(False):
            self.data.check(bits=False)
            if self._functional_model.refresh():
                self._hvp.release()
                self._cache.clear(static=False)
                self._value = self._gradient = None

    def _leaves(self, point: Point | None) -> Sequence[Tensor]:
        """The leaves to differentiate by at a point."""
        if point is None:
            return self._functional_model.leaves
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
