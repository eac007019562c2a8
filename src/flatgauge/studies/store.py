"""The folder of a pool: its declaration, one row per finished network, trained networks.

    pool.json         what the pool is
    rows.jsonl        one JSON object per finished network, in order of completion
    models/NAME.safetensors   networks that were trained here, with recipe and scores in the header
    locks/            one empty file per network that was ever worked on

In: the pool's declaration, then rows and networks, each on disk when the call returns. Out: rows by
name. Rows are only appended; whatever is killed while it writes leaves at most half a line, which
readers skip and the next writer ends. A network is claimed by a file lock that the operating
system releases when the process ends, in whatever way: after a crash there is nothing to clean up.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flatgauge.analysis.files import atomic_write, explain_file_errors, from_plain, to_plain
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.training import TrainedNetwork

#: What is kept of a network: its name, what makes it different, how it does, whether it counts,
#: and the reports of its measures as it is and rescaled (None if it was not measured).
Row = dict[str, Any]

_DECLARATION, _ROWS = "pool.json", "rows.jsonl"
_NEEDED = {"name", "columns", "scores", "state", "measured", "rescaled"}

#: Parts of a declaration that may differ on resume: they add networks, leave some out, or change
#: how rows are read; none of them changes a row.
_MAY_CHANGE = (
    *("networks", "factors", "seeds", "target", "confounders", "question", "landscapes"),
)


class PoolStore:
    """The folder of a pool.

    Args:
        folder: Made by `open`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._rows: dict[str, Row] = {}
        self._bytes_read = self._lines_read = 0
        self._digest: str | None = None

    def open(self, declaration: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a pool here, or continue it.

        Args:
            declaration: What the pool is.
            resume: Whether to continue with what is there.

        Raises:
            FileExistsError: If something is finished and is not to be continued.
            ValueError: If the folder holds another pool.
            NotADirectoryError: If it is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{self.folder}` is a file; name a folder for the pool.")
        path, new = self.folder / _DECLARATION, to_plain(declaration)
        self._check_age()
        with explain_file_errors(self.folder):
            for part in ("models", "locks"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        with explain_file_errors(path), self._lock(_DECLARATION):  # One of several declares it.
            old = self.declaration() if path.exists() else new
            changed = [key for key in new if new[key] != old.get(key)]
            if fixed := [key for key in changed if key not in _MAY_CHANGE]:
                raise ValueError(
                    f"`{self.folder}` holds another pool: it differs in {', '.join(fixed)}; resume "
                    "it as it was declared, or name another folder."
                )
            if not resume and (self._has_rows() or any((self.folder / "models").iterdir())):
                raise FileExistsError(
                    f"`{self.folder}` already holds finished networks; continue with `--resume` "
                    "(`resume=True`), or name another folder."
                )
            if changed or not path.exists():
                atomic_write(path, json.dumps(new, indent=2, ensure_ascii=False))

    def declaration(self) -> dict[str, Any]:
        """What the pool is: what `open` was given."""
        path = self.folder / _DECLARATION
        self._check_age()
        if not path.exists():
            raise FileNotFoundError(
                f"`{self.folder}` holds no pool; name a folder that `flatgauge study` or "
                "`flatgauge pool` wrote."
            )
        try:
            found = from_plain(json.loads(path.read_text(encoding="utf-8")))
            if not isinstance(found, dict) or "measures" not in found:
                raise ValueError("something is missing")
        except ValueError as error:
            raise ValueError(
                f"`{path}` is damaged or not of a pool ({error}); name another folder, or delete "
                "it and resume the pool as it was declared."
            ) from error
        return found

    # -- rows -----------------------------------------------------------------------------------

    def rows(self) -> Mapping[str, Row]:
        """All finished networks by name; only what was appended since the last call is read.

        Returns:
            The rows, in the order of completion.

        Raises:
            ValueError: If a line is the row of another pool, or something else.
        """
        path = self.folder / _ROWS
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._bytes_read)
                appended = file.read()
            complete = appended[: appended.rfind(b"\n") + 1]
            for line in complete.splitlines():
                self._lines_read += 1
                with suppress(json.JSONDecodeError, UnicodeDecodeError):  # Half a line.
                    row = from_plain(json.loads(line))
                    self._check_row(row)
                    self._rows[row["name"]] = row
            self._bytes_read += len(complete)
        return self._rows

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Add the row of a network: on disk when this returns, or an error and nothing is left."""
        contents = to_plain({"name": name, **row, "pool": self._identity()})
        line = json.dumps(contents, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        path = self.folder / _ROWS
        with (
            explain_file_errors(path),
            self._lock(_ROWS),
            path.open("ab", buffering=0) as file,
        ):
            size = file.seek(0, os.SEEK_END)
            try:
                if _ends_within_line(path, size):  # Left by a process that was killed.
                    line = b"\n" + line
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                raise

    def _check_row(self, row: Any) -> None:
        place = f"line {self._lines_read} of `{self.folder / _ROWS}`"
        advice = "delete that line and resume, and the network is measured again"
        if not isinstance(row, dict) or _NEEDED - row.keys():
            raise ValueError(f"{place} is not the row of a network; {advice}.")
        if row.pop("pool", None) != self._identity():
            raise ValueError(
                f"{place} is a row of another pool, measured in another way; {advice}."
            )

    def _has_rows(self) -> bool:
        return (self.folder / _ROWS).exists() and bool(self.rows())

    # -- trained networks -----------------------------------------------------------------------

    def model_path(self, name: str) -> Path:
        """Where a trained network is, or will be."""
        return self.folder / "models" / f"{name}.safetensors"

    def save_model(self, name: str, contents: bytes) -> None:
        """Write a trained network (what `pack_model` gave), all of it or nothing."""
        atomic_write(self.model_path(name), contents)

    def training(self, name: str, recipe: Recipe) -> dict[str, Any] | None:
        """The state and the scores of a trained network; None if it is not trained yet."""
        path = self.model_path(name)
        return read_training(path, recipe) if path.exists() else None

    # -- locks ----------------------------------------------------------------------------------

    def try_claim(self, name: str) -> FileLock | None:
        """The lock of a network, taken for this process; None if another has it."""
        lock = self._lock(f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return None
        return lock

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.folder / "locks" / name)

    def _identity(self) -> str:
        """What tells its rows from those of pools that measure in another way."""
        if self._digest is None:
            fixed = {k: v for k, v in self.declaration().items() if k not in _MAY_CHANGE}
            text = json.dumps(to_plain(fixed), sort_keys=True)
            self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._digest

    def _check_age(self) -> None:
        if (self.folder / "study.json").exists():
            raise ValueError(
                f"`{self.folder}` was written by flatgauge 0.1, which kept one file per row; this "
                "version does not read it: run the study in another folder, or use the version "
                "that wrote it."
            )


def read_training(path: Path, recipe: Recipe) -> dict[str, Any]:
    """The state and the scores in the header of a trained network, refused if it is another."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        found: dict[str, Any] = from_plain(json.loads(header["training"]))
        made = Recipe.from_dict(from_plain(json.loads(header["recipe"])))
        if made != recipe:
            raise ValueError("it was trained by another recipe")
        if missing := {"state", "scores"} - found.keys():
            raise ValueError(f"its header lacks {', '.join(sorted(missing))}")
    except (SafetensorError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"`{path}` is no network of this study ({error}); delete it and resume, and the "
            "network is trained again."
        ) from error
    return found


def pack_model(recipe: Recipe, trained: TrainedNetwork) -> bytes:
    """A trained network with its recipe and how its training went, as the contents of a file."""
    from safetensors.torch import save

    state = trained.model.state_dict()
    # Copies, as the format refuses tensors that share memory, such as tied weights.
    weights = {name: part.clone().contiguous() for name, part in state.items()}
    header = {"recipe": recipe.to_dict(), "training": trained.facts()}
    text = {key: json.dumps(to_plain(value)) for key, value in header.items()}
    return save(weights, metadata=text)


def check_names(names: Collection[str]) -> None:
    """Refuse names that cannot be names of files."""
    for name in names:
        if (
            not name
            or name != name.strip()
            or len(name.encode()) > 200
            or set(name) & set("/\\:\0")
        ):
            raise ValueError(
                f"`{name}` cannot name a network: its lock is a file of that name; use letters, "
                "digits, dots and dashes, at most 200."
            )


def _ends_within_line(path: Path, size: int) -> bool:
    """Whether a file does not end with the end of a line."""
    if not size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
