"""A monitor as a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flatgauge.analysis.monitor.history import History
from flatgauge.analysis.monitor.monitor import Monitor, counts_steps

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise ImportError(
            "flatgauge.analysis.monitor.lightning needs Lightning, which is not installed; run "
            '`pip install "flatgauge[lightning]"`.'
        ) from error


class MonitorCallback(Callback):  # type: ignore[misc]
    """Measures while Lightning trains, and logs through the Trainer's loggers.

    Args:
        loss: As for `flatgauge.Monitor`.
        data: As for `flatgauge.Monitor`.
        every: Epochs, or steps, between measurements.
        unit: ``"epoch"`` or ``"step"`` (of the optimiser).
        model: Gives what to measure, of the LightningModule: ``lambda module: module.net``. None
            for the LightningModule itself, with its `forward`.
        log: Where numbers go; None for all loggers of the Trainer.
        **options: Of `flatgauge.Monitor`: ``measures``, ``samples``, ``share``, ``seed``,
            ``strict``, ...

    Attributes:
        monitor: The monitor, from the start of the training on; None before.

    Raises:
        ImportError: If Lightning is not installed.
    """

    def __init__(
        self,
        loss: Any,
        data: Any,
        *,
        every: int = 1,
        unit: str = "epoch",
        model: Callable[[LightningModule], nn.Module] | None = None,
        log: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.monitor: Monitor | None = None
        self._by_step = counts_steps(unit)
        self._loss, self._data, self._log = loss, data, log
        self._model, self._options = model, {"every": every, **options}
        self._seen = 0

    @property
    def history(self) -> History:
        """All rows so far; see `flatgauge.Monitor`."""
        return History() if self.monitor is None else self.monitor.history

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the monitor; on the first process only."""
        if not trainer.is_global_zero or self.monitor is not None:
            return
        model = pl_module if self._model is None else self._model(pl_module)
        log = list(trainer.loggers) if self._log is None else self._log
        self.monitor = Monitor(model, self._loss, self._data, log=log, **self._options)
        self._seen = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count a step, if the optimiser made one."""
        if self.monitor is not None and self._by_step and trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self.monitor.step(_loss_of(outputs), step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count an epoch."""
        if self.monitor is not None and not self._by_step:
            self.monitor.epoch(step=trainer.global_step)


def _loss_of(outputs: Any) -> Tensor | None:
    """The training loss in what a training step has returned."""
    found = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return found.detach() if isinstance(found, Tensor) and found.numel() == 1 else None
