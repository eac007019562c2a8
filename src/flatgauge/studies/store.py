"""The folder of a study: every finished network and its row, each written whole or not at all.

A network is one file with its recipe and how training went in its header, so that it is complete
by itself; its row of measurements is another. A run is held by a lock that the system releases
when its process ends, in whatever way: nothing has to be cleaned up after a crash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from torch import nn

from flatgauge.analysis.files import atomic_write, explain_file_errors, from_plain, to_plain
from flatgauge.loading.models import load_weights
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.training import Trained

_DECLARATION = "study.json"

#: What is kept of a run, after the folders: its network, and what was measured of it.
Part = Literal["models", "rows"]

_ENDINGS: dict[Part, str] = {"models": ".safetensors", "rows": ".json"}

#: What may change when a study goes on: runs are added or left out, and read in other ways, but
#: none of them differs.
_GROWING = ("factors", "seeds", "target", "confounders", "question", "landscapes")


class Store:
    """A study's folder.

    Attributes:
        folder: Where it is.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def open(self, declaration: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a study here, or go on with it.

        Args:
            declaration: What the study is.
            resume: Whether to go on with what is there.

        Raises:
            FileExistsError: If there are runs and they are not to be resumed.
            ValueError: If the folder holds another study.
            NotADirectoryError: If it is no folder.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{self.folder}` is a file; name a folder for the study.")
        with explain_file_errors(self.folder):
            for part in ("models", "rows", "locks"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        wanted = to_plain(declaration)
        with self._held_alone():  # Of processes that begin at once, one declares the study.
            if not self._declared.exists():
                atomic_write(self._declared, json.dumps(wanted, indent=2, ensure_ascii=False))
                return
        if not resume and self._has_runs():
            raise FileExistsError(
                f"`{self.folder}` already holds a study; go on with it (`--resume`, or "
                "`resume=True`), or name another folder."
            )
        found = self.declaration()
        differing = [key for key in wanted if found.get(key) != wanted[key]]
        others = [key for key in differing if key not in _GROWING]
        if others:
            raise ValueError(
                f"`{self.folder}` holds another study: it differs in {', '.join(others)}; "
                "resume it as it was declared, or name another folder."
            )
        if differing:
            with self._held_alone():
                atomic_write(self._declared, json.dumps(wanted, indent=2, ensure_ascii=False))

    def declaration(self) -> dict[str, Any]:
        """What the study is.

        Returns:
            What `open` was given.

        Raises:
            FileNotFoundError: If there is no study.
        """
        if not self._declared.exists():
            raise FileNotFoundError(
                f"`{self.folder}` holds no study; name a folder that `flatgauge study` wrote."
            )
        advice = "name another folder, or delete it and resume the study as it was declared"
        return _contents(self._declared, {"recipe", "factors"}, advice)

    @contextmanager
    def held(self, run: str) -> Iterator[bool]:
        """Hold a run against other processes.

        Args:
            run: Its name.

        Yields:
            Whether it is held here; not if another process holds it.
        """
        import fcntl

        with self._lock(run) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def keep_model(self, run: str, recipe: Recipe, trained: Trained) -> None:
        """Write a trained network with its recipe.

        Args:
            run: Its name.
            recipe: How it was made.
            trained: The network.
        """
        from safetensors.torch import save

        state = trained.model.state_dict()
        # Copies, as the format refuses tensors that share memory, such as tied weights.
        weights = {name: part.clone().contiguous() for name, part in state.items()}
        header = {"recipe": recipe.to_dict(), "training": trained.facts()}
        text = {key: json.dumps(to_plain(value)) for key, value in header.items()}
        atomic_write(self._model(run), save(weights, metadata=text))

    def has_model(self, run: str) -> bool:
        """Whether a run's network is trained.

        Args:
            run: Its name.

        Returns:
            Whether it is there.
        """
        return self._model(run).exists()

    def training(self, run: str) -> dict[str, Any] | None:
        """How a network's training went.

        Args:
            run: Its name.

        Returns:
            The facts, None if it is not there.

        Raises:
            ValueError: If the file is damaged, or was written by something else.
        """
        from safetensors import SafetensorError, safe_open

        place = self._model(run)
        if not place.exists():
            return None
        try:
            with safe_open(place, framework="pt") as file:
                header = file.metadata()
            found: dict[str, Any] = from_plain(json.loads(header["training"]))
            made = Recipe.from_dict(from_plain(json.loads(header["recipe"])))
            if not run.endswith(made.digest):
                raise ValueError("it was trained by another recipe")
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"`{place}` is no network of this study ({error}); delete it and resume, and the "
                "network is trained again."
            ) from error
        return found

    def load_model(self, run: str, model: nn.Module) -> None:
        """Put the weights of a finished network into a network of its shape.

        Args:
            run: Its name.
            model: Changed in place.
        """
        load_weights(model, self._model(run))

    def keep_row(self, run: str, row: Mapping[str, Any]) -> None:
        """Write what was measured of a network, with the study it belongs to.

        Args:
            run: Its name.
            row: Plain values.
        """
        text = json.dumps(to_plain(row) | {"study": self._identity()}, ensure_ascii=False)
        atomic_write(self._row(run), text)

    def has_row(self, run: str) -> bool:
        """Whether a run is finished.

        Args:
            run: Its name.

        Returns:
            Whether its row is there.
        """
        return self._row(run).exists()

    def row(self, run: str) -> dict[str, Any] | None:
        """What was measured of a network.

        Args:
            run: Its name.

        Returns:
            The row, None if it is not there.

        Raises:
            ValueError: If the file is damaged, or the row of another run or study.
        """
        if not self.has_row(run):
            return None
        place = self._row(run)
        advice = "delete it and resume, and the network is measured again"
        needed = {"run", "recipe", "training", "measured", "rescaled"}
        found = _contents(place, needed, advice)
        if found["run"] != run:
            raise ValueError(f"`{place}` is the row of another run, `{found['run']}`; {advice}.")
        own = self._identity()
        if found.pop("study", own) != own:
            raise ValueError(
                f"`{place}` is a row of another study, measured in another way; {advice}."
            )
        return found

    def check_rows(self, runs: Iterable[str]) -> None:
        """Refuse rows that are damaged or belong to something else, before anything is trained.

        Args:
            runs: The names of the study's runs.

        Raises:
            ValueError: If there is one.
        """
        wanted = set(runs)
        for run in wanted:
            self.row(run)
        own = self._identity()
        for place in sorted((self.folder / "rows").glob(f"*{_ENDINGS['rows']}")):
            if place.stem in wanted:
                continue
            # Rows of runs that the study had before stay where they are.
            found = _contents(place, {"run"}, "move it out of the folder")
            if found.get("study", own) != own:
                raise ValueError(
                    f"`{place}` is a row of another study; move it out of the folder, or give "
                    "every study a folder of its own."
                )

    def contents(self, run: str, part: Part) -> bytes | None:
        """A file of a run as it is, to be kept by the store of another machine.

        Args:
            run: The name of the run.
            part: Its network or its row.

        Returns:
            All of the file, None if it is not there.
        """
        place = self._place(run, part)
        return place.read_bytes() if place.exists() else None

    def keep(self, run: str, part: Part, contents: bytes) -> None:
        """Write a file of a run that the store of another machine has.

        Args:
            run: The name of the run.
            part: Its network or its row.
            contents: What `contents` gave there.
        """
        atomic_write(self._place(run, part), contents)

    def _identity(self) -> str:
        """What tells its rows from those of studies that measure in another way."""
        fixed = {k: v for k, v in self.declaration().items() if k not in _GROWING}
        text = json.dumps(to_plain(fixed), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @contextmanager
    def _held_alone(self) -> Iterator[None]:
        """Hold the whole folder, once others that do have let it go."""
        import fcntl

        with self._lock(_DECLARATION) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _lock(self, name: str) -> TextIO:
        place = self.folder / "locks" / name
        with explain_file_errors(place):
            return open(place, "w", encoding="utf-8")

    @property
    def _declared(self) -> Path:
        return self.folder / _DECLARATION

    def _has_runs(self) -> bool:
        return any(any((self.folder / part).iterdir()) for part in ("models", "rows"))

    def _model(self, run: str) -> Path:
        return self._place(run, "models")

    def _row(self, run: str) -> Path:
        return self._place(run, "rows")

    def _place(self, run: str, part: Part) -> Path:
        return self.folder / part / f"{run}{_ENDINGS[part]}"


def _contents(place: Path, needed: set[str], advice: str) -> dict[str, Any]:
    """A file of JSON that has certain keys, or what to do as it is damaged."""
    try:
        found = from_plain(json.loads(place.read_text(encoding="utf-8")))
        if not isinstance(found, dict) or needed - set(found):
            raise ValueError("something is missing")
    except ValueError as error:
        raise ValueError(f"`{place}` is damaged or not of a study ({error}); {advice}.") from error
    return found
