"""Logging through the tracker that is there: one small adapter each, none of them imported.

A tracker is recognised by the name and the home of its class, or of a class that it inherits from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

#: Takes numbers by name, and the step.
Log = Callable[[Mapping[str, float], int], object]

#: What every name begins with in a tracker.
PREFIX = "flatgauge/"


def as_log(tracker: Any) -> Log:
    """Say how to log through a tracker.

    Args:
        tracker: A TensorBoard ``SummaryWriter``, a W&B run (or the module ``wandb``), the module
            ``mlflow`` (or an active run), a Lightning logger, a Hugging Face ``Trainer`` or
            ``Accelerator``; a function that takes a dict of numbers and the step; a list of these;
            or None.

    Returns:
        A function that takes numbers by name, and the step.

    Raises:
        TypeError: If it is none of these.
    """
    if tracker is None:
        return lambda values, step: None
    if isinstance(tracker, (list, tuple)):
        return _each([as_log(item) for item in tracker])
    if isinstance(tracker, ModuleType):
        if tracker.__name__ in _MODULES:
            return _MODULES[tracker.__name__](tracker)
    else:
        homes = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(tracker).__mro__}
        for known, adapter in _CLASSES.items():
            if known in homes:
                return adapter(tracker)
        if callable(tracker):
            log: Log = tracker
            return log
    raise TypeError(
        f"`log` is a {type(tracker).__name__}; pass a TensorBoard SummaryWriter, a W&B run, the "
        "module mlflow, a Lightning logger, a Hugging Face Trainer, a function of (values, step), "
        "or a list of these."
    )


def _each(logs: Sequence[Log]) -> Log:
    def log(values: Mapping[str, float], step: int) -> None:
        for one in logs:
            one(values, step)

    return log


def _tensorboard(writer: Any) -> Log:
    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(PREFIX + name, value, step)

    return log


def _wandb(run: Any) -> Log:
    # W&B has one step for all that is logged, and it may not fall: our numbers bring their own.
    axis = f"{PREFIX}step"
    run.define_metric(axis, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=axis)

    def log(values: Mapping[str, float], step: int) -> None:
        run.log(_add_prefix(values) | {axis: step})

    return log


def _wandb_module(module: Any) -> Log:
    if module.run is None:
        raise TypeError("`log=wandb` has no run yet; call `wandb.init()` first, or pass its run.")
    return _wandb(module.run)


def _mlflow_module(module: Any) -> Log:
    return lambda values, step: module.log_metrics(_add_prefix(values), step=step)


def _mlflow_run(run: Any) -> Log:
    module, name = sys.modules["mlflow"], run.info.run_id
    return lambda values, step: module.log_metrics(_add_prefix(values), step=step, run_id=name)


def _lightning(logger: Any) -> Log:
    return lambda values, step: logger.log_metrics(_add_prefix(values), step)


def _accelerator(accelerator: Any) -> Log:
    return lambda values, step: accelerator.log(_add_prefix(values), step=step)


def _trainer(trainer: Any) -> Log:
    """Log where a Hugging Face Trainer logs: its history and what it reports to."""

    def log(values: Mapping[str, float], step: int) -> None:
        # Logging clears the wish to log, which at this step may be the Trainer's own.
        wished = trainer.control.should_log
        trainer.log(_add_prefix(values))
        trainer.control.should_log = wished

    return log


def _add_prefix(values: Mapping[str, float]) -> dict[str, float]:
    return {PREFIX + name: value for name, value in values.items()}


#: By the package and the name of a class.
_CLASSES: dict[tuple[str, str], Callable[[Any], Log]] = {
    ("torch", "SummaryWriter"): _tensorboard,
    ("tensorboardX", "SummaryWriter"): _tensorboard,
    ("wandb", "Run"): _wandb,
    ("mlflow", "ActiveRun"): _mlflow_run,
    ("lightning", "Logger"): _lightning,
    ("pytorch_lightning", "Logger"): _lightning,
    ("lightning_fabric", "Logger"): _lightning,
    ("accelerate", "Accelerator"): _accelerator,
    ("transformers", "Trainer"): _trainer,
}

_MODULES: dict[str, Callable[[Any], Log]] = {"wandb": _wandb_module, "mlflow": _mlflow_module}
