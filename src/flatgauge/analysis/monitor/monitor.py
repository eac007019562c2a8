"""Measure a model while it is trained, without changing the training.

A `Monitor` reads a few samples once (`read_subset`), counts steps and epochs, and measures when it
is time to and a `TimeBudget` allows it. Rows go into a `History` and to trackers.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from flatgauge.analysis.measurement import Report, measure_requests
from flatgauge.analysis.monitor.history import DIVERGED, FAILED, MEASURED, History, HistoryRow
from flatgauge.analysis.monitor.trackers import as_log
from flatgauge.analysis.request import resolve_measures
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.linalg import check_seed, child_generator, to_float64
from flatgauge.runtime.isolation import preserve_rng
from flatgauge.runtime.resources import duration
from flatgauge.surface.arguments import is_one_batch
from flatgauge.surface.data import Batch, as_batch, as_tensors, map_tensors
from flatgauge.surface.surface import LossSurface

#: What is measured unless something else is asked for: one sweep has all of it.
DEFAULT = ("hessian_trace", "kappa_trace_sum", "rho_sum")

#: What a first measurement is guessed to take: seconds to read the model as a graph, and gradients.
_READING, _GRADIENTS = 4.0, 30

#: Samples per batch that are read from a data set without batches of its own.
_READ = 64


class Monitor:
    r"""Measures a model regularly during its training, on a fixed set of samples.

    The training does not notice: weights, gradients, buffers, modes, hooks, random states (Python,
    NumPy, torch), loaders and the optimiser are left as they are, and a run with a monitor ends in
    the same weights, bit for bit, as one without. Under DDP the first process measures, on copies
    of the weights and without any communication; the others go on until they need it.

    Measuring keeps to a share of the training time: a measurement that would exceed it is skipped,
    which the history counts and a warning reports once. An error while measuring or logging is
    recorded and warned about once; it does not end the training.

    Args:
        model: The model that is trained; DDP- or compile-wrapped is fine.
        loss: As for `LossSurface`.
        data: As for `LossSurface`; best what is not trained on. Some samples are chosen and read
            once.
        measures: As for `fg.measure`; None for ``hessian_trace``, ``kappa_trace_sum`` and
            ``rho_sum``, which share one sweep.
        every: Calls of `step`, or of `epoch`, between measurements.
        samples: How many samples to measure on, drawn at random where the data can be indexed;
            None for all.
        share: Measuring takes at most this share of the training time: 0.1 adds a tenth. None for
            no bound.
        log: Where numbers go, layer by layer: a TensorBoard ``SummaryWriter``, a W&B run, the
            module ``mlflow``, a Lightning logger, a Hugging Face ``Trainer``, a function of
            (values by name, step), or a list of these.
        seed: Of the choice of samples and of everything random in measures.
        strict: Whether an error while measuring or logging is raised.
        **options: Passed to `LossSurface`: ``dtype``, ``memory``, ``weight_decay``, ...

    Attributes:
        history: All rows so far: `History.to_frame`, `History.plot`, `History.layers`.
        surface: The loss on the chosen samples; None where another process measures.

    Raises:
        ValueError: If a measure or an option does not exist.
        TypeError: If an argument is of the wrong kind.

    Example:
        >>> import flatgauge as fg
        >>> _ = torch.manual_seed(0)
        >>> inputs, targets = torch.randn(200, 4), torch.randint(3, (200,))
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> held_out = torch.randn(50, 4), torch.randint(3, (50,))
        >>> monitor = fg.Monitor(model, "cross_entropy", held_out, every=10, share=None)
        >>> for _ in range(30):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(inputs), targets)
        ...     loss.backward()
        ...     optimizer.step()
        ...     monitor.step(loss)
        >>> monitor.history.steps
        [10, 20, 30]
        >>> list(monitor.history.layers("kappa_trace_sum"))
        ['0.weight', '2.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        data: Any,
        *,
        measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
        every: int = 1,
        samples: int | None = 256,
        share: float | None = 0.1,
        log: Any = None,
        seed: int = 0,
        strict: bool = False,
        **options: Any,
    ) -> None:
        _check_number("every", every)
        if samples is not None:
            _check_number("samples", samples)
        if share is not None and not (isinstance(share, (int, float)) and 0 < share < math.inf):
            raise ValueError(
                f"`share={share!r}` must be a part of the training time such as 0.1, or None for "
                "no bound."
            )
        self.history = History()
        self.surface: LossSurface | None = None
        self._requests = resolve_measures(DEFAULT if measures is None else measures)
        self._every, self._seed, self._strict = every, check_seed(seed), strict
        self._steps = self._epochs = self._skipped = 0
        self._is_read = False
        self._warned: set[str] = set()
        self._budget = TimeBudget(share)
        self._log = as_log(log)
        if _is_elsewhere():
            return
        with self._budget.measuring():
            chosen = read_subset(data, samples, seed=seed)
            with preserve_rng(_device(model)):
                self.surface = LossSurface(model, loss, chosen, **options)
                before = self._budget.elapsed_seconds
                self.surface.value_and_gradient()
                gradient = self._budget.elapsed_seconds - before
                self.surface.release()
        self._budget.expected = _READING + _GRADIENTS * gradient

    def __repr__(self) -> str:
        names = ", ".join(request.name for request in self._requests)
        text = f"Monitor({names}; every {self._every}"
        if self._budget.share is not None:
            text += f", at most {100 * self._budget.share:g} % of the training time"
        return f"{text}): {len(self.history)} rows, {duration(self._budget.spent)} spent measuring"

    @property
    def spent(self) -> float:
        """Seconds that measuring took so far, setting up included."""
        return self._budget.spent

    def step(self, loss: float | Tensor | None = None, *, step: int | None = None) -> None:
        """Count one step of the optimiser; measure if it is time to.

        Args:
            loss: The training loss of the step, to be recorded; a tensor is read only when a
                measurement is due.
            step: The number of the step; None counts.
        """
        self._steps = self._steps + 1 if step is None else step
        if self._steps % self._every == 0:
            self._due(loss)

    def epoch(self, loss: float | Tensor | None = None, *, step: int | None = None) -> None:
        """Count one epoch; measure if it is time to.

        Args:
            loss: The training loss of the epoch, to be recorded.
            step: The number of steps so far; None for as many as were counted.
        """
        self._epochs += 1
        self._steps = self._steps if step is None else step
        if self._epochs % self._every == 0:
            self._due(loss)

    def measure(self, loss: float | Tensor | None = None) -> None:
        """Measure now, whatever the share of time: at the end of a training, for example.

        Args:
            loss: The training loss, to be recorded.
        """
        if self.surface is None or _is_elsewhere():
            return
        _wait(self.surface.device)
        self._read(self.surface)
        with self._budget.measuring():
            row = self._row(self.surface, _number(loss))
            self.history.append(row)
            self._publish(row)
        self._skipped = 0

    def _due(self, loss: float | Tensor | None) -> None:
        """Measure, unless that took too large a share of the time."""
        if self.surface is None or _is_elsewhere():
            return
        if self._budget.allows():
            self.measure(loss)
            return
        self._skipped += 1
        self.history.skipped += 1
        budget = self._budget
        self._warn(
            "skipped",
            f"flatgauge skips measurements, first at step {self._steps}: one takes about "
            f"{duration(budget.expected)}, and `share={budget.share}` of the training time so far "
            f"is {duration((budget.share or 0.0) * budget.training)}, of which "
            f"{duration(budget.spent)} are spent. Take fewer `samples`, other `measures`, a "
            "larger `every` or `share`, or leave it so.",
        )

    def _read(self, surface: LossSurface) -> None:
        """Read the model as a graph, once: no measurement after the first takes as long."""
        if self._is_read or not any(request.needs.parts for request in self._requests):
            return
        self._is_read = True
        # Errors of the model are reported where it is measured.
        with self._budget.measuring(), preserve_rng(surface.device), suppress(Exception):
            sweep_of(surface)

    def _row(self, surface: LossSurface, loss: float | None) -> HistoryRow:
        """Measure; errors become notes of the row."""
        start = self._budget.elapsed_seconds
        row = HistoryRow(
            self._steps, self._epochs, start, 0.0, training_loss=loss, skipped=self._skipped
        )
        try:
            with preserve_rng(surface.device):
                value, gradient = surface.value_and_gradient()
                row = replace(row, loss=value, gradient_norm=float(to_float64(gradient).norm()))
                report = measure_requests(
                    surface, self._requests, seed=self._seed, strict=self._strict
                )
                row = self._fill_row(row, report)
        except Exception as error:
            diverged = not _is_finite(surface, loss)
            if self._strict and not diverged:
                raise
            row = replace(row, status=DIVERGED if diverged else FAILED, note=str(error))
        finally:
            surface.release(static=False)  # The memory belongs to the training.
        if row.status == FAILED and (not self.history or row.note != self.history[-1].note):
            surface.refresh()  # What failed may work again: nothing learned from it is kept.
        if loss is not None and not math.isfinite(loss):
            row = replace(row, status=DIVERGED, note=row.note or f"the training loss is {loss}")
        if row.status != MEASURED:
            self._warn(
                row.status,
                f"flatgauge: the measurement at step {row.step} has {row.status}, and the training "
                f"goes on: {row.note}",
            )
        return replace(row, cost=self._budget.elapsed_seconds - start)

    @staticmethod
    def _fill_row(row: HistoryRow, report: Report) -> HistoryRow:
        """A row with what was measured, without what takes memory."""
        kept = {name: replace(e, units={}, samples=None) for name, e in report.items()}
        failed = {name: e for name, e in kept.items() if math.isnan(e.value)}
        note = "; ".join(f"{name} {'; '.join(e.notes)}" for name, e in failed.items())
        return replace(row, estimates=kept, status=FAILED if failed else row.status, note=note)

    def _publish(self, row: HistoryRow) -> None:
        """Hand the numbers of a row to the trackers."""
        values = {name: value for name, value in row.values().items() if math.isfinite(value)}
        try:
            with preserve_rng(torch.device("cpu")):
                self._log(values, row.step)
        except Exception as error:
            if self._strict:
                raise
            self._warn("log", f"flatgauge could not log step {row.step}: {error!r}")

    def _warn(self, kind: str, text: str) -> None:
        """Warn once of every kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, UserWarning, stacklevel=4)


class TimeBudget:
    """Keeps measuring within a share of the training time.

    The training time is what passes outside of `measuring`. A measurement is expected to take as
    long as the last one did; before the first, as long as the caller guesses. It is allowed only
    if all measuring, that one included, then stays within the share of the training time so far,
    so what one takes longer than expected is paid back before the next; and only if the time since
    the last one pays for it, so that what was saved up is not spent all at once.

    Args:
        share: Of the training time; None for no bound.
        clock: Gives the time in seconds.

    Attributes:
        spent: Seconds that measuring took so far.
        expected: Seconds that the next measurement is expected to take.

    Example:
        >>> now = [0.0]
        >>> budget = TimeBudget(0.1, clock=lambda: now[0])
        >>> with budget.measuring():
        ...     now[0] += 2.0
        >>> now[0] += 30.0  # of training: 10 % of it pay for one measurement, and not for two
        >>> budget.allows()
        False
        >>> now[0] += 10.0
        >>> budget.allows()
        True
    """

    def __init__(
        self, share: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.share = share
        self.spent = self.expected = 0.0
        self._clock = clock
        self._start = clock()
        self._trained = 0.0  # until the last measurement

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start, measuring included."""
        return self._clock() - self._start

    @property
    def training(self) -> float:
        """Seconds that training took so far."""
        return self.elapsed_seconds - self.spent

    def allows(self) -> bool:
        """Whether one more measurement stays within the share."""
        if self.share is None:
            return True
        since = self.training - self._trained
        return (
            self.spent + self.expected <= self.share * self.training
            and self.expected <= self.share * since
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count what happens inside as measuring, and expect the next to take as long."""
        before = self._clock()
        try:
            yield
        finally:
            self.expected = self._clock() - before
            self.spent += self.expected
            self._trained = self.training


def read_subset(data: Any, samples: int | None, *, seed: int) -> Any:
    """Choose samples, and read them once: a loader is not touched again afterwards.

    Of a pair of tensors, a data set, or a loader of a data set that can be indexed, samples are
    drawn at random, without replacement; of other batches, the first are taken.

    Args:
        data: What a `LossSurface` takes.
        samples: How many at most; None for all.
        seed: Of the choice.

    Returns:
        The samples, as a `LossSurface` takes them.
    """
    with preserve_rng(torch.device("cpu")):
        if is_one_batch(data):
            return _drawn_rows(data, samples, seed)
        if isinstance(data, DataLoader) and data.batch_size is not None:
            if not isinstance(data.dataset, IterableDataset):
                return _draw_samples(data.dataset, data.collate_fn, samples, seed)
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            return _draw_samples(data, default_collate, samples, seed)
        if not isinstance(data, Iterable) or iter(data) is data:
            return data  # Errors are reported where a surface is made of it.
        return list(_first(data, samples))


def _choose_indices(count: int, samples: int | None, seed: int) -> list[int]:
    """Some of the indices below `count`, in their order."""
    if samples is None or samples >= count:
        return list(range(count))
    drawn = torch.randperm(count, generator=child_generator(seed, "held samples"))[:samples]
    return sorted(drawn.tolist())


def _drawn_rows(data: Any, samples: int | None, seed: int) -> Any:
    """Some samples of one batch."""
    batch = as_batch(data, where="`data`")
    if not batch.splittable:
        return data
    return _rows(data, _choose_indices(batch.samples, samples, seed))


def _draw_samples(dataset: Any, collate: Any, samples: int | None, seed: int) -> list[Any]:
    """Some samples of a data set, in batches."""
    subset = Subset(dataset, _choose_indices(len(dataset), samples, seed))
    return list(DataLoader(subset, batch_size=_READ, collate_fn=collate))


def _first(data: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """The first batches, the last one cut where that is possible."""
    left = samples
    for position, raw in enumerate(data):
        batch: Batch = as_batch(raw, where=f"batch {position} of `data`")
        if left is not None and batch.splittable and batch.samples > left:
            raw = _rows(raw, list(range(left)))
        yield map_tensors(torch.clone, as_tensors(raw))  # A loader may fill the same tensors again.
        if left is not None:
            left -= batch.samples
            if left <= 0:
                return


def _rows(data: Any, index: list[int]) -> Any:
    """Some samples of a batch, which keeps its form."""
    return map_tensors(lambda tensor: tensor[index], as_tensors(data))


def _check_number(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}={value!r}` must be a whole number of at least 1.")


def _number(loss: float | Tensor | None) -> float | None:
    """The training loss as a number, if there is one."""
    return float(loss.detach()) if isinstance(loss, Tensor) else loss


def _is_elsewhere() -> bool:
    """Whether another process measures."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_rank() != 0


def _device(model: Any) -> torch.device:
    """Where a model lives, for its random state; what is not a model is reported later."""
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def _wait(device: torch.device) -> None:
    """Wait for what the training has asked an accelerator for: that time is not ours."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_finite(surface: LossSurface, loss: float | None) -> bool:
    """Whether training loss, weights and the loss on the samples are numbers."""
    state = [*surface.model.parameters(), *surface.model.buffers()]
    if not all(torch.isfinite(t).all() for t in state if t.is_floating_point()):
        return False
    if loss is not None and not math.isfinite(loss):
        return False
    try:
        return math.isfinite(surface.value(surface.point))
    except Exception:
        return True  # Unknown: the error itself is reported.


def counts_steps(unit: str) -> bool:
    """Whether a callback counts steps, not epochs; refuses other units."""
    if unit not in ("epoch", "step"):
        raise ValueError(f"`unit={unit!r}` is unknown; measure at every 'epoch' or every 'step'.")
    return unit == "step"
