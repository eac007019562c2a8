"""The empirical risk: the loss summed over chunks of the data as a function of the parameters.

What enters: a functional model, a loss and a data source. What leaves: the chunks, their totals and
gradients, the denominator of the mean, and the memory that a chunk's graph takes. Before anything
is summed, model and loss are tried out on a few samples.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flatgauge.estimators.linalg import ChunkedSum
from flatgauge.runtime.distributed import SHARDED, ProcessGroup
from flatgauge.runtime.isolation import isolate
from flatgauge.runtime.resources import MemoryBudget, saved_bytes, trim_heap
from flatgauge.surface.data import Batch, DataSource, tensors
from flatgauge.surface.derivatives import (
    REENTRANT,
    WORKING,
    GradientGraph,
    nodes_from,
)
from flatgauge.surface.losses import Loss, float_tensors, logits_of
from flatgauge.surface.model import FlatLayout, FunctionalModel
from flatgauge.surface.user_loss import Count, ModelLoss, find_reduction

#: What one chunk's graph should take: large enough for efficient kernels, small enough that
#: its tensors are still near the cache when the backward pass comes back to them.
_WORKING_SET = 24 * 2**20

#: Below this many samples, kernels lose more by being small than the cache gives.
_SMALLEST_CHUNK = 48

#: Entries of every parameter's gradient by which losses are compared.
_ENTRIES = 256

#: Samples on which memory and methods are tried out.
_FEW = 4

#: How far a loss and the model's own may differ, in value and gradient together: models round.
_OWN = 1e-3

_OTHER_LOSS = (
    "the loss {!r} of the model's outputs and the labels is {:.6g} on the first samples, but the "
    "model's own loss from the same labels (`output.loss`) is {:.6g}: it reads them in another way "
    "(a causal language model compares every output with the next token). Pass `loss=None` "
    "(`--loss output`) for the model's own; or, to have the other one all the same, a function: "
    "`lambda output, labels: F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())`."
)

_TOO_COARSE = (
    "the model computes in {} by casts in its forward, and rounds so much that samples do not add "
    "up to a mean; second derivatives of it would be noise. Take the casts out (compute in the "
    "precision of the parameters), or write `with torch.autocast(...)` in their place, which is "
    "left out when measuring."
)


class EmpiricalRisk:
    """Model, loss and data joined: totals of chunks, what divides them, what they cost.

    The loss surface is the sum of `total` over `chunks`, divided by `count`.

    Attributes:
        denominator: What a chunk adds to `count`.
        count: The denominator of the whole data set.
        notes: What was assumed about the loss.
        listener: Called with the number of samples of every chunk that was used.
        ceiling: Where more bytes than this are resident, memory that was freed is given back to
            the system between chunks.
    """

    def __init__(
        self,
        model: FunctionalModel,
        loss: Loss,
        batches: DataSource,
        denominator: Callable[[Any], float] | None,
    ) -> None:
        self._model = model
        self._batches = batches
        self._bytes: tuple[float, float] | None = None
        self._examples: dict[int, Batch] = {}
        self.listener: Callable[[int], None] | None = None
        self.ceiling: int | None = None
        with isolate(model.model, model.device):
            model.settle_precision(partial(self._output, self._first_few(), own=loss.own))
            self.loss = self._choose_loss(loss)
            self._try_out()
            given = self._given_count(denominator)
            try:
                self.denominator, self.notes = self._find_count(model, given)
            except ValueError:
                if model.dtype is torch.float64 or model.device.type == "mps" or model.sharded:
                    raise
                # Kernels round differently for one sample, and a ReLU may flip: look again in
                # double precision before refusing.
                try:
                    self.denominator, self.notes = self._find_count(model.in_float64(), given)
                except ValueError as error:
                    if not model.coarse:
                        raise
                    raise ValueError(_TOO_COARSE.format(model.coarse)) from error
        self.notes = [*self.loss.notes, *self._remarks, *self.notes]
        self._count_all()

    def _given_count(self, denominator: Callable[[Any], float] | None) -> Count | None:
        """What the loss is known to be a mean over, by itself or from the user."""
        loss = self.loss  # Not `self`: that would be a cycle, and copies would share it.
        if denominator is None:
            return (lambda batch: loss.count(batch.target)) if loss.knows_count else None
        return lambda batch: float(
            denominator(batch.inputs if batch.target is None else batch.target)
        )

    def _find_count(self, model: FunctionalModel, given: Count | None) -> tuple[Count, list[str]]:
        """What the loss is a mean over, found by the model in some precision."""
        entries, whole = partial(self._entries, model), not model.sharded
        find = partial(find_reduction, self.loss, self._batches, entries, given, whole=whole)
        return self.processes.run("the loss of samples", find)

    @property
    def processes(self) -> ProcessGroup:
        """Who sums over the data together."""
        return self._batches.processes

    def total(
        self, leaves: Sequence[Tensor], chunk: Batch, model: FunctionalModel | None = None
    ) -> Tensor:
        """The loss summed over a chunk, at given parameters (of the model in other precision)."""
        return self.total_and_output(leaves, chunk, model)[0]

    def value(self, leaves: Sequence[Tensor], chunk: Batch, weight: float = 1.0) -> float:
        """The loss summed over a chunk, as a number; nothing is differentiated."""
        return weight * self._model.with_parameters(
            leaves, lambda: float(self.total(leaves, chunk))
        )

    def total_and_gradient(
        self, leaves: Sequence[Tensor], chunk: Batch, weight: float = 1.0
    ) -> tuple[float, Sequence[Tensor | None]]:
        """The loss summed over a chunk and its gradient, None where it does not depend."""

        def both() -> tuple[float, Sequence[Tensor | None]]:
            total = self.total(leaves, chunk)
            total = total if weight == 1.0 else weight * total
            return float(total.detach()), self._model.differentiate(total, leaves)

        return self._model.with_parameters(leaves, both)

    def mean(
        self, leaves: Sequence[Tensor], size: int, layout: FlatLayout | None
    ) -> tuple[float, Tensor | None]:
        """The mean loss over all data, with a `layout` its gradient too."""
        sums = None
        if layout is not None:
            like = self._model.leaves[0]
            sums = ChunkedSum(torch.zeros(layout.size, dtype=like.dtype, device=like.device))

        def add_chunks() -> float:
            total = 0.0
            for batch, weight in self.rounds(size):
                if layout is None or sums is None:
                    total += self.value(leaves, batch, weight)
                    continue
                loss, pieces = self.total_and_gradient(leaves, batch, weight)
                total += loss
                layout.add(sums.partial, pieces)
                sums.end_chunk()
            return total

        what = "the loss" if sums is None else "the gradient"
        same = self._model.with_state(leaves)
        value = self.processes.gather_sum(what, add_chunks, same=same) / self.count
        if sums is None:
            return value, None
        gradient = self.processes.all_sum(sums.total()) / self.count
        return value, gradient.to(self._model.dtype)

    def total_and_output(
        self,
        leaves: Sequence[Tensor],
        chunk: Batch,
        model: FunctionalModel | None = None,
        *,
        check: bool = True,
    ) -> tuple[Tensor, Any]:
        """The loss summed over a chunk, and the output."""
        found, output = self._call(model or self._model, leaves, chunk, check=check)
        return found if self.loss.knows_count else found * self.denominator(chunk), output

    def _call(
        self, model: FunctionalModel, leaves: Sequence[Tensor], chunk: Batch, *, check: bool = True
    ) -> tuple[Tensor, Any]:
        """What the loss returns, a total if its count is known, else a mean; and the output."""
        output = model(leaves, chunk, with_labels=self.loss.own)
        if check:
            self.loss.check(output, chunk.target)
        return self.loss.total(output, chunk.target), output

    def chunks(self, size: int) -> Iterator[Batch]:
        """Every chunk that counts, in a fixed order, on the model's device."""
        if self._model.sharded:
            raise ValueError(SHARDED)
        yield from self._read(size)

    def rounds(self, size: int) -> Iterator[tuple[Batch, float]]:
        """Every chunk that counts with a weight of one; as many rounds in every process."""
        # Where parameters are sharded, no process can run the model alone: one whose chunks are at
        # an end goes on with an example of weight zero.
        if not self._model.sharded:
            yield from ((chunk, 1.0) for chunk in self.chunks(size))
            return
        own, idle = sum(1 for _ in self._read(size)), self.example(1)
        rounds = max(self.processes.all_gather(own))
        yield from ((chunk, 1.0) for chunk in self._read(size))
        yield from ((idle, 0.0) for _ in range(own, rounds))

    def _read(self, size: int) -> Iterator[Batch]:
        for chunk in self._batches.chunks(size):
            if self.denominator(chunk) != 0:
                yield self._model.place(chunk)
            if self.listener is not None:
                self.listener(chunk.samples)
            self.tidy()

    def tidy(self) -> None:
        """Give freed memory back to the system, where there is much of it."""
        if self.ceiling is not None:
            trim_heap(above=self.ceiling)

    def under(self, model: FunctionalModel, loss: Loss) -> EmpiricalRisk:
        """The same data under another loss, whose count is known."""
        other = copy.copy(self)
        other._model, other.loss, other.notes, other._examples = model, loss, [], {}
        other.denominator = lambda batch: loss.count(batch.target)
        other.forget_costs()
        with isolate(model.model, model.device):
            other._try_out()
        other._count_all()
        return other

    def read(self, batches: DataSource) -> None:
        """Read other samples of the same kind."""
        self._batches, self._examples = batches, {}
        self._count_all()

    def forget_costs(self) -> None:
        """Measure again what graphs take: the precision has changed."""
        self._bytes = None

    def graph_bytes(self, samples: int) -> float:
        """What the twice-differentiable graph of a chunk takes, measured on a few samples."""
        if self._bytes is None:
            few = self.few()
            sizes = [few] if few.samples < 2 or not few.splittable else [few.rows(slice(1)), few]
            amounts = [self._measured_bytes(batch) for batch in sizes]
            slope = amounts[-1] / few.samples
            if len(amounts) == 2:
                slope = (amounts[1] - amounts[0]) / (few.samples - 1)
            self._bytes = max(amounts[-1] - slope * few.samples, 0.0), max(slope, 1.0)
        fixed, each = self._bytes
        return fixed + each * samples

    def fitting_chunk(self, budget: MemoryBudget) -> int:
        """How many samples to take at once."""
        one = WORKING * self.graph_bytes(1)
        if one > budget.hvp():
            raise budget.shortage("differentiating one sample twice", one)
        fixed = self.graph_bytes(0)
        each = self.graph_bytes(1) - fixed
        wanted = max(_WORKING_SET / each, _SMALLEST_CHUNK)
        fitting = (budget.hvp() / (2 * WORKING) - fixed) / each
        return max(1, min(int(wanted), int(fitting), self._batches.samples))

    def few(self) -> Batch:
        """A few samples that count, to try things out on."""
        return self.example(_FEW)

    def example(self, samples: int) -> Batch:
        """The first samples that count, the same in all processes, on the model's device."""
        if samples not in self._examples:
            found = self._first(samples, lambda chunk: self.denominator(chunk) != 0)
            self._examples[samples] = found.copy()  # A view would be copied with all data.
        return self._model.place(self._examples[samples])

    def _first(self, samples: int, counts: Callable[[Batch], bool]) -> Batch:
        """The first chunk that counts, of the first process that has one."""
        processes, chunks = self.processes, self._batches.chunks(samples)
        own = processes.run("an example", lambda: next(filter(counts, chunks), None))
        found = processes.first_available(own)
        assert found is not None  # Else there is no data, or nothing in it counts.
        return found

    def _count_all(self) -> None:
        """Add up the denominator of the whole data set."""
        self.count = self.processes.gather_sum(
            "the denominator", lambda: sum(self.denominator(batch) for batch in self._batches)
        )
        if not self.count > 0:
            raise ValueError(
                f"the denominator of the loss over all data is {self.count}; every label is "
                "ignored or has weight zero, so there is no loss to measure."
            )

    def _entries(self, model: FunctionalModel, batch: Batch, *, gradient: bool = True) -> Tensor:
        """Loss and entries of the gradient of a small batch, as one vector."""
        # Some entries of every parameter say as much as all about how samples add up.
        leaves, few = model.leaves, model.place(batch)
        if not gradient:
            with torch.no_grad():
                call = partial(self._call, model, leaves, few)
                return model.with_parameters(leaves, call)[0].reshape(1)

        def loss_and_pieces() -> tuple[Tensor, Sequence[Tensor | None]]:
            value, _ = self._call(model, leaves, few)
            return value, model.differentiate(value, leaves)

        value, pieces = model.with_parameters(leaves, loss_and_pieces)
        parts = [
            torch.zeros_like(leaf) if piece is None else piece
            for leaf, piece in zip(leaves, pieces, strict=True)
        ]
        entries = [part.reshape(-1)[:: max(part.numel() // _ENTRIES, 1)] for part in parts]
        return torch.cat([value.detach().reshape(1), *entries])

    def _measured_bytes(self, batch: Batch) -> float:
        """What autograd keeps for a chunk beyond parameters and inputs."""
        leaves = self._model.leaves
        known = chain(leaves, tensors((batch.inputs, batch.target)))
        try:
            if self._model.sharded:
                raise NotImplementedError
            graph = self._model.with_parameters(
                leaves, lambda: GradientGraph(lambda values: self.total(values, batch), leaves)
            )
        except (RuntimeError, NotImplementedError):  # It can be differentiated once only.
            total = self._model.with_parameters(leaves, lambda: self.total(leaves, batch))
            return float(saved_bytes(nodes_from([total.grad_fn]), known))
        return float(saved_bytes(graph.nodes(), known))

    def _choose_loss(self, loss: Loss) -> Loss:
        """The loss asked for, or the model's own where it reads the labels of batches otherwise."""
        few = self._first_few()
        if loss.own_differs == "ignore" or few.label_key is None or self._model.sharded:
            return loss
        own = ModelLoss()
        try:
            expected = self._loss_and_entries(own, few)
        except Exception:  # It has no loss of its own, or none that can be differentiated.
            return loss
        try:
            found = self._loss_and_entries(loss, few) / loss.count(few.target)
        except Exception as error:
            if loss.own_differs != "take":
                return loss  # What is wrong is said when it is tried out.
            note = f"cross-entropy of its outputs and the labels fails ({error})"
            own.notes = (f"the model's own loss is measured: {note}",)
            return own
        if (found - expected).norm() <= _OWN * expected.norm():
            return loss
        if loss.own_differs == "refuse":
            raise ValueError(_OTHER_LOSS.format(loss.name, float(found[0]), float(expected[0])))
        own.notes = (
            f"the model's own loss is measured, {float(expected[0]):.6g} on the first samples; "
            f"cross-entropy of its outputs and the labels is {float(found[0]):.6g}",
        )
        return own

    def _loss_and_entries(self, loss: Loss, few: Batch) -> Tensor:
        """Value and gradient of a few samples under a loss."""
        other = copy.copy(self)
        other.loss = loss
        return other._entries(self._model, few)

    def _output(self, few: Batch, *, own: bool) -> Any:
        """What the model returns."""
        model = self._model
        return model(model.leaves, model.place(few), with_labels=own)

    def _first_few(self) -> Batch:
        """The first samples, whether they count or not."""
        few = self._first(_FEW, lambda chunk: True)
        return few.rows(slice(_FEW)) if few.splittable else few

    def _try_out(self) -> None:
        """Call model and loss on a few samples, so that misfits are reported here and clearly."""
        few = self._model.place(self._first_few())
        with torch.no_grad():
            try:
                output, warned = _record_warnings(
                    lambda: self._model.first_call(few, with_labels=self.loss.own)
                )
            except Exception as error:
                raise ValueError(
                    f"the model fails on inputs {_shapes(few.inputs)} (the first samples of the "
                    f"data): "
                    f"{type(error).__name__}: {error}"
                ) from error
            if any("None of the inputs have requires_grad" in warning for warning in warned):
                raise ValueError(REENTRANT)
            self._remarks = _check_choice(self.loss, output, few.target)
            self.loss.check(output, few.target)
            try:
                self.loss.total(output, few.target)
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(
                    f"the loss {self.loss.name!r} fails on outputs {_shapes(output)} and targets "
                    f"{_shapes(few.target)} (the first samples of the data): "
                    f"{type(error).__name__}: {error}"
                ) from error
        call = partial(self._call, self._model, self._model.leaves, check=False)
        self._model.lay_out(few, call)


def _check_choice(loss: Loss, output: Any, target: Any) -> list[str]:
    """Refuse several tensors unless only the first fits the targets; return notes on the choice."""
    if not loss.knows_count or isinstance(output, Tensor) or logits_of(output) is not None:
        return []
    found = float_tensors(output)
    if len(found) < 2:
        return []
    fitting = [place for place, tensor in enumerate(found) if _fits(loss, tensor, target)]
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found)
    if fitting == [0]:
        return [f"the model returns tensors of shapes {shapes}; the loss is taken of the first"]
    targets = f" of shape {tuple(target.shape)}" if isinstance(target, Tensor) else ""
    raise ValueError(
        f"the model returns {len(found)} tensors, of shapes {shapes}; {len(fitting)} of them fit "
        f"the targets{targets}, so the loss {loss.name!r} cannot choose the first. Return one "
        "tensor, or a dict that has it as `logits`; or pass a function that picks it, such as "
        "`loss=lambda output, target: F.cross_entropy(output[1], target)`."
    )


def _fits(loss: Loss, tensor: Tensor, target: Any) -> bool:
    """Whether a loss takes a tensor with the targets."""
    try:
        loss.check(tensor, target)
    except ValueError:
        return False
    return True


def _shapes(tree: Any) -> str:
    """The shapes of all tensors in a structure."""
    found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(tree))
    return f"of shape {found}" if found else f"of type {type(tree).__name__}"


def _record_warnings(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Do something and note its warnings, which are passed on (those of checkpoints are not)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    texts = [str(warning.message) for warning in caught]
    for warning, text in zip(caught, texts, strict=True):
        if "requires_grad" not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return result, texts


def finite_loss(value: float) -> float:
    """Refuse a loss that is not finite at the model's own parameters."""
    if not math.isfinite(value):
        raise ValueError(
            f"the loss at the model's own parameters is {value}; the training diverged, or the "
            "loss overflows on this data. Nothing can be measured there."
        )
    return value


def check_finite(parts: dict[str, Tensor], what: str) -> None:
    """Refuse a derivative that is not finite, and name the parameters it is taken by."""
    bad = [name for name, part in parts.items() if not torch.isfinite(part).all()]
    if bad:
        names = ", ".join(f"`{name}`" for name in bad[:3]) + (", ..." if len(bad) > 3 else "")
        raise ValueError(
            f"the {what} by {names} is not finite, where the loss is; look for a square "
            "root, a norm or a logarithm at zero in model or loss, and keep it away from there "
            "(`torch.sqrt(x + 1e-12)`)."
        )
