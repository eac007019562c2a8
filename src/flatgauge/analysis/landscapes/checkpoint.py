"""Finished points of landscapes, in memory and in a file, so that a run can be continued.

The file knows what its numbers depend on (`fingerprint`) and is refused for anything else.
"""

from __future__ import annotations

import io
import json
import math
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.analysis.files import atomic_write, check_writable
from flatgauge.loading.files import expand
from flatgauge.surface.model import digest
from flatgauge.surface.surface import LossSurface

#: Seconds between two writes of the file.
_PAUSE = 1.0

#: How far the loss at the model itself may be off, by rounding on another machine.
_ROUNDING = 1e-4


@dataclass
class PartialGrid:
    """What is known of one model's landscape.

    Attributes:
        loss: The loss at every point of the grid.
        accuracy: The accuracy; nan where there is none.
        done: Which points are finished.
        stack: How many points were evaluated together, 0 if not known yet.
    """

    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    done: NDArray[np.bool_]
    stack: int = 0


class LandscapeCheckpoint:
    """Landscapes in the making; with a path, a file of all finished points.

    The file is replaced as a whole, so that it is never seen half written; it is written when the
    block is left, too, whatever ends it.

    Args:
        path: The file; None for none. One that exists is continued.
        settings: What the numbers depend on: of JSON.
        shape: Of every grid.
        count: How many models there are.

    Raises:
        ValueError: If the file is none of ours, is damaged, or belongs to other settings.
        OSError: If it cannot be written.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: Mapping[str, Any],
        shape: tuple[int, ...],
        count: int,
    ) -> None:
        self._path = None if path is None else expand(check_writable(path))
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.parts = [
            PartialGrid(np.zeros(shape), np.full(shape, math.nan), np.zeros(shape, bool))
            for _ in range(count)
        ]
        self._last = 0.0
        if self._path is not None and self._path.is_file():  # A device never ends.
            self._read(self._path)
        self._write()

    @property
    def points_done(self) -> int:
        """How many points are done."""
        return sum(int(part.done.sum()) for part in self.parts)

    def save(self) -> None:
        """Write the file, unless that was done just now; what fails is tried again later."""
        if time.monotonic() - self._last > _PAUSE:
            self._last = time.monotonic()
            with suppress(OSError):
                self._write()

    def __enter__(self) -> LandscapeCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        arrays: dict[str, Any] = {"settings": np.array(json.dumps(self._settings))}
        for number, part in enumerate(self.parts):
            arrays |= {f"{name} {number}": np.asarray(value) for name, value in vars(part).items()}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        atomic_write(self._path, buffer.getvalue())
        self._last = time.monotonic()

    def _read(self, path: Path) -> None:
        with _of_a_landscape(path):
            zipfile.ZipFile(path).close()  # Else NumPy tries a pickle, and its error is about that.
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            before = dict(json.loads(str(arrays["settings"])))
        self._compare(path, before)
        with _of_a_landscape(path):
            for number, part in enumerate(self.parts):
                part.loss[...] = arrays[f"loss {number}"]
                part.accuracy[...] = arrays[f"accuracy {number}"]
                part.done[...] = arrays[f"done {number}"]
                part.stack = int(arrays[f"stack {number}"])

    def _compare(self, path: Path, before: Mapping[str, Any]) -> None:
        """Refuse a file that belongs to something else."""
        now = self._settings
        other = [k for k in now.keys() | before.keys() if not _same(now.get(k), before.get(k))]
        if other:
            raise ValueError(
                f"`save={str(path)!r}` holds a landscape of something else: it differs in "
                f"{', '.join(sorted(other))}; give another name, or remove the file to start again."
            )


def fingerprint(surface: LossSurface) -> dict[str, Any]:
    """What identifies a surface, as short texts and numbers; its data are read once."""
    state = surface.functional_model.state
    return {
        "weights": digest(value for _, value in sorted(state.items())),
        "data": surface.data.digest,
        "loss": surface.loss_name,
        "value": surface.value(),
        "dtype": str(surface.dtype),
        "weight_decay": surface.weight_decay,
    }


@contextmanager
def _of_a_landscape(path: Path) -> Iterator[None]:
    """Refuse a file whose contents are not what was written; damage has many faces."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"`save={str(path)!r}` exists, but is not the file of a landscape, or is damaged "
            f"({type(error).__name__}: {error}); give another name, or remove the file to start "
            "again."
        ) from error


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return bool(one == other)
