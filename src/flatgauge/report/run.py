"""What a report says about the run: the point, the data, the versions."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata

import torch

from flatgauge.precision import length_of
from flatgauge.stationarity import descent_note
from flatgauge.surface import LossSurface


@dataclass(frozen=True)
class Facts:
    """Where and how something was measured.

    Attributes:
        model: The model's class.
        parameters: Number of trainable parameters.
        samples: Number of samples.
        loss_name: What the loss is called.
        loss: The loss at the point.
        gradient_norm: Length of the gradient there; zero at a minimum.
        weight_decay: Strength of the penalty that was added to the loss.
        dtype: Precision of the computation.
        device: Where it ran.
        products: How Hessian products were computed, if any were.
        sweep: What the sweep took that measures shared, if there was one.
        seed: Of everything random.
        versions: Of the software.
        finished: When, in UTC.
        notes: Caveats that hold for every number of the run.
        data: What the samples are.
        platform: The machine's system and kind of processor.
        threads: How many threads torch used.
        seconds: Wall-clock time of the whole run, None where it was not taken.
        data_digest: The same for the same samples in the same order; empty if not known.
    """

    model: str
    parameters: int
    samples: int
    loss_name: str
    loss: float
    gradient_norm: float
    weight_decay: float
    dtype: str
    device: str
    products: str | None
    sweep: str | None
    seed: int
    versions: dict[str, str]
    finished: str
    notes: tuple[str, ...]
    data: str = ""
    platform: str = ""
    threads: int = 1
    seconds: float | None = None
    data_digest: str = ""


def facts_of(
    surface: LossSurface, *, seed: int, sweep: str | None = None, seconds: float | None = None
) -> Facts:
    """Collect the facts of a run on a surface.

    Args:
        surface: What was measured.
        seed: With which seed.
        sweep: What the sweep took that measures shared, if there was one.
        seconds: What the whole run took.

    Returns:
        The facts.
    """
    loss, gradient = surface.value_and_gradient()
    descent = descent_note(surface)
    notes = (*surface.notes, *([descent] if descent else []))
    return Facts(
        model=type(surface.model).__name__,
        parameters=surface.size,
        samples=surface.samples,
        loss_name=surface.loss_name,
        loss=loss,
        gradient_norm=length_of(gradient),
        weight_decay=surface.weight_decay,
        dtype=surface.subject.coarse or str(surface.dtype).removeprefix("torch."),
        device=str(surface.device),
        products=surface.product_method if surface.matvecs else None,
        sweep=sweep,
        seed=seed,
        versions={
            "flatgauge": metadata.version("flatgauge"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        notes=notes,
        data=surface.data_text,
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        seconds=seconds,
        data_digest=surface.data_digest,
    )
