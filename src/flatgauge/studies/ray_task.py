"""One run of a study as a task of Ray: all comes in and goes out as values, no file is shared."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatgauge.runtime.resources import set_threads
from flatgauge.studies.carried_code import CarriedCode, unpacked
from flatgauge.studies.preparing import Prepared, clean_samples, labelled
from flatgauge.studies.running import completing, named
from flatgauge.studies.sent_errors import sendable
from flatgauge.studies.store import Part, Store
from flatgauge.studies.study import Study


@dataclass(frozen=True)
class Job:
    """What a task is to do, beside study and samples, which many tasks share.

    Attributes:
        run: The name of the run.
        model: The file of its network, None if it is not trained yet.
        code: The user's own code that makes the network, None if it is none or installed.
        threads: How many to use.
        version: Of the flatgauge that asks.
    """

    run: str
    model: bytes | None
    code: CarriedCode | None
    threads: int
    version: str


@dataclass(frozen=True)
class FinishedFile:
    """A file that a task has finished.

    Attributes:
        part: Network or row.
        contents: All of it.
    """

    part: Part
    contents: bytes


@dataclass(frozen=True)
class Failed:
    """How a run failed for reasons of its own.

    Attributes:
        error: What was raised.
        text: Its traceback.
    """

    error: Exception
    text: str


def complete_far_away(
    study: Study, samples: dict[str, Any] | None, job: Job
) -> Iterator[FinishedFile | Failed]:
    """Do what a run lacks, with nothing but what is given.

    Args:
        study: The study.
        samples: What `packed` gave; None if they are made here.
        job: What to do.

    Yields:
        Network and row as soon as each is there, or the error in place of what is missing.

    Raises:
        SystemExit: If it is called back: the process ends.
    """
    try:
        _check_version(job.version)
        set_threads(job.threads)
        with (
            tempfile.TemporaryDirectory(prefix="flatgauge-run-") as folder,
            unpacked(job.code),
            named(job.run),
        ):
            store = Store(folder)
            store.open(study.declaration(), resume=False)
            if job.model is not None:
                store.keep(job.run, "models", job.model)
            recipe = study.runs()[job.run]
            clean = clean_samples(recipe, None) if samples is None else _opened(samples)
            for part in completing(study, job.run, store, labelled(recipe, clean)):
                contents = store.contents(job.run, part)
                assert contents is not None
                yield FinishedFile(part, contents)
    except KeyboardInterrupt:
        # Called back, maybe in the midst of an import: no other task may use this process.
        raise SystemExit(0) from None
    except Exception as error:
        yield Failed(*sendable(error))


def complete_at_once(
    study: Study, samples: dict[str, Any] | None, job: Job
) -> list[FinishedFile | Failed]:
    """The same where nothing can be sent before all is there.

    Args:
        study: The study.
        samples: What `packed` gave; None if they are made here.
        job: What to do.

    Returns:
        All that `complete_far_away` yields.
    """
    return list(complete_far_away(study, samples, job))


def packed(samples: Prepared) -> dict[str, Any]:
    """Samples in a form that the processes of a machine read from the same memory.

    Args:
        samples: Those of `clean_samples`.

    Returns:
        Arrays and numbers by name.
    """
    values = {field.name: getattr(samples, field.name) for field in fields(samples)}
    return {k: v.numpy() if isinstance(v, Tensor) else v for k, v in values.items()}


def _opened(samples: dict[str, Any]) -> Prepared:
    """Samples of this process alone: code that writes to its inputs would end it otherwise."""
    own: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in samples.items()
    }
    return Prepared(**own)


def _check_version(wanted: str) -> None:
    """Refuse to compute numbers of one study by two versions."""
    here = metadata.version("flatgauge")
    if here != wanted:
        import platform

        raise ImportError(
            f"the node `{platform.node()}` has flatgauge {here}, and the study is run by {wanted}; "
            "install the same version on all nodes."
        )
