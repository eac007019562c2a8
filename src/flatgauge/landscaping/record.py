"""What has been computed of landscapes, in memory and on disk, so that it can be continued."""

from __future__ import annotations

import json
import math
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Seconds between two writes of the file.
_PAUSE = 1.0

#: How far the loss at the model itself may be off, by rounding on another machine.
_ROUNDING = 1e-4


@dataclass
class Part:
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


class Record:
    """Landscapes in the making; with a path, a file of all finished points.

    The file is replaced as a whole, so that it is never seen half written; it is written when the
    block is left, too, whatever ends it.

    Args:
        path: The file; None for none. One that exists is continued.
        settings: What the numbers depend on: of JSON.
        shape: Of every grid.
        count: How many models there are.

    Raises:
        ValueError: If the file is none of ours, or belongs to other settings.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: Mapping[str, Any],
        shape: tuple[int, ...],
        count: int,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.parts = [
            Part(np.zeros(shape), np.full(shape, math.nan), np.zeros(shape, bool))
            for _ in range(count)
        ]
        self._last = 0.0
        if self._path is not None and self._path.exists():
            self._read(self._path)
        self._write()  # Also to see now, and not after an hour, that it can be.

    @property
    def finished(self) -> int:
        """How many points are done."""
        return sum(int(part.done.sum()) for part in self.parts)

    def keep(self) -> None:
        """Write the file, unless that was done just now."""
        if time.monotonic() - self._last > _PAUSE:
            self._write()

    def __enter__(self) -> Record:
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
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                np.savez(file, **arrays)
            draft.replace(self._path)
        finally:
            draft.unlink(missing_ok=True)
        self._last = time.monotonic()

    def _read(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as held:
                before = json.loads(str(held["settings"]))
                arrays = {name: held[name] for name in held.files}
        except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(
                f"`save={str(path)!r}` exists, but is no file of a landscape ({error}); give "
                "another name."
            ) from error
        self._compare(path, before)
        for number, part in enumerate(self.parts):
            part.loss[...], part.accuracy[...], part.done[...] = (
                arrays[f"{name} {number}"] for name in ("loss", "accuracy", "done")
            )
            part.stack = int(arrays[f"stack {number}"])

    def _compare(self, path: Path, before: Mapping[str, Any]) -> None:
        """Refuse a file that belongs to something else."""
        now = self._settings
        other = [k for k in now.keys() | before.keys() if not _same(now.get(k), before.get(k))]
        if other:
            raise ValueError(
                f"`save={str(path)!r}` holds a landscape of something else: it differs in "
                f"{', '.join(sorted(other))}; give another name, or remove the file to start anew."
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING)
    return bool(one == other)
