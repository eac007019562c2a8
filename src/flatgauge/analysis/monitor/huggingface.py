"""A monitor as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from flatgauge.analysis.monitor.history import History
from flatgauge.analysis.monitor.monitor import Monitor, counts_steps

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "flatgauge.analysis.monitor.huggingface needs transformers, which is not installed; run "
        '`pip install "flatgauge[hf]"`.'
    ) from error


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Measures while Hugging Face's Trainer trains.

    ``trainer.add_callback(MonitorCallback(None, eval_loader, log=trainer))`` logs where the Trainer
    logs: in its history, and through what it reports to.

    Args:
        loss: As for `flatgauge.Monitor`; None for the model's own, ``output.loss``.
        data: As for `flatgauge.Monitor`: batches as the model is called with, for example
            ``trainer.get_eval_dataloader()``.
        every: Epochs, or steps, between measurements.
        unit: ``"epoch"`` or ``"step"`` (of the optimiser).
        **options: Of `flatgauge.Monitor`: ``measures``, ``samples``, ``share``, ``log``, ``seed``,
            ``strict``, ...

    Attributes:
        monitor: The monitor, from the start of the training on; None before.

    Raises:
        ImportError: If transformers is not installed.
    """

    def __init__(
        self, loss: Any, data: Any, *, every: int = 1, unit: str = "epoch", **options: Any
    ) -> None:
        self.monitor: Monitor | None = None
        self._by_step = counts_steps(unit)
        self._loss, self._data = loss, data
        self._options = {"every": every, **options}

    @property
    def history(self) -> History:
        """All rows so far; see `flatgauge.Monitor`."""
        return History() if self.monitor is None else self.monitor.history

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **others: Any,
    ) -> None:
        """Make the monitor; on the first process only."""
        if state.is_world_process_zero and self.monitor is None:
            self.monitor = Monitor(model, self._loss, self._data, **self._options)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Count a step."""
        if self.monitor is not None and self._by_step:
            self.monitor.step(step=state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Count an epoch."""
        if self.monitor is not None and not self._by_step:
            self.monitor.epoch(step=state.global_step)
