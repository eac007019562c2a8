"""Pools of networks: what is measured of them, and the one way to run them.

In: the networks of a pool (`Pool`: checkpoints of one's own, or of a manifest; `Study`: recipes to
train them by), the measures, and what these are to be compared with. Out: `PoolResult`.
`NetworkPool.run` opens the folder, gives every network that is not finished to workers, and keeps
each result as it arrives (`runner.py`).
"""

from __future__ import annotations

import csv
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import to_plain
from flatgauge.analysis.landscapes.directions import SPACES
from flatgauge.analysis.request import Progress, resolve_measures, show_progress
from flatgauge.estimators.linalg import check_seed
from flatgauge.loading.files import expand
from flatgauge.studies.ray_engine import RayEngine
from flatgauge.studies.runner import PATIENCE, Step, Workers, local_workers, run_networks
from flatgauge.studies.store import PoolStore, check_names
from flatgauge.studies.tasks import (
    Network,
    PoolSamples,
    Task,
    measure_network,
    read_rescaling,
)

if TYPE_CHECKING:
    from flatgauge.studies.result import PoolResult, PublishedNumber

#: Where a pool can run, by name.
ENGINES = ("local", "ray")

#: What a pool can ask flatness to follow.
TARGETS = ("accuracy_gap", "loss_gap", "test_loss", "test_accuracy")

#: Columns of a manifest that say where a network is; all others are the user's.
_PLACES = ("name", "checkpoint", "factory", "normalisation", "group")


@dataclass(frozen=True, kw_only=True)
class NetworkPool(ABC):
    """Networks that are measured in one way: what pools of checkpoints and studies share.

    Attributes:
        name: Of the pool.
        measures: What to measure; as `fg.measure` takes it.
        measured: Measure on the first that many training samples; None for all.
        target: What flatness is to follow: ``"accuracy_gap"`` (training minus test),
            ``"loss_gap"`` (test minus training), ``"test_loss"``, ``"test_accuracy"``, or another
            column of numbers.
        confounders: Columns that are shown next to the measures.
        question: What the pool asks, in a sentence.
        published: Numbers of a paper to compare with.
        landscapes: Spaces in which one network of every kind of the first factor is drawn.
    """

    name: str
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None
    measured: int | None = None
    target: str = "loss_gap"
    confounders: Sequence[str] = ()
    question: str = ""
    published: Sequence[PublishedNumber] = ()
    landscapes: Sequence[str] = ()

    def __post_init__(self) -> None:
        whole = isinstance(self.measured, int) and not isinstance(self.measured, bool)
        if self.measured is not None and not (whole and self.measured >= 1):
            raise ValueError(
                f"`measured={self.measured!r}` must be a whole number of at least 1, or None."
            )
        if isinstance(self.measures, Iterable) and not isinstance(self.measures, (str, Mapping)):
            object.__setattr__(self, "measures", tuple(self.measures))
        resolve_measures(self.measures)  # Refused before anything is trained or measured.
        check_each("landscapes", self.landscapes, list(SPACES))

    @property
    @abstractmethod
    def members(self) -> Mapping[str, Network]:
        """All networks by name."""

    @property
    @abstractmethod
    def factor_names(self) -> list[str]:
        """The columns that differ by design."""

    @property
    @abstractmethod
    def seed_column(self) -> str | None:
        """The column of seeds, None if there is none."""

    @property
    def options(self) -> dict[str, Mapping[str, Any]]:
        """The measures by name, with their options."""
        return {request.name: request.options for request in resolve_measures(self.measures)}

    @abstractmethod
    def declaration(self) -> dict[str, Any]:
        """What the pool is, as plain values, without published numbers."""

    @abstractmethod
    def next_step(self, name: str, store: PoolStore, folder: str | None) -> Step | None:
        """What a network needs next: a function of `tasks.py` with its task; None if finished."""

    @abstractmethod
    def task(self, name: str, store: PoolStore, folder: str | None) -> Task:
        """The task of measuring a network."""

    @abstractmethod
    def save(self, name: str, result: Any, store: PoolStore) -> None:
        """Keep what a step of a network returned."""

    def check_rows(self, store: PoolStore) -> None:
        """Refuse rows that do not belong to these networks, before anything is computed."""
        store.rows()

    def run(
        self,
        folder: str | Path,
        *,
        data: str | Path | None = None,
        resume: bool = False,
        workers: int = 1,
        progress: Progress | bool = False,
        engine: str | RayEngine = "local",
        patience: float = PATIENCE,
    ) -> PoolResult:
        """Train what is to be trained and measure all networks; keep each as soon as it is there.

        Interrupt it at any moment, in any way: with ``resume=True`` it continues where it was.
        Several processes may run the same pool in one folder.

        Args:
            folder: Where rows and trained networks are kept.
            data: The folder of data sets that are read from files.
            resume: Whether to continue with what is in the folder.
            workers: How many processes work on it, each with one thread; 1 works in this one. In a
                script, call it with more under ``if __name__ == "__main__":``.
            progress: True for a bar on stderr; or a function called with the name of a network,
                how many are done, and how many there are.
            engine: ``"local"`` for processes of this machine; ``"ray"`` or a
                `flatgauge.studies.RayEngine` for tasks of Ray. Rows are the same, and what one
                began another can resume.
            patience: After this many seconds on one network, and ten times what the others took,
                its name is logged, as it may hang.

        Returns:
            What was found.

        Raises:
            ValueError: If `workers` is not a number of processes, or the engine is unknown.
        """
        from flatgauge.studies.result import PoolResult

        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"`workers={workers!r}` must be a whole number of at least 1.")
        if engine not in ENGINES and not isinstance(engine, RayEngine):
            raise ValueError(
                f"`engine={engine!r}` is unknown; use {' or '.join(map(repr, ENGINES))}, or a "
                "`flatgauge.studies.RayEngine`."
            )
        if engine != "local" and workers != 1:
            raise ValueError(
                f"`workers={workers}` are processes of this machine; on Ray as many tasks run at "
                "once as fit: leave it out, and give what a task needs, as in `RayEngine(cpus=2)`."
            )
        store = PoolStore(folder)
        place = None if data is None else str(Path(data).expanduser())
        store.open(self.declaration(), resume=resume)
        self.check_rows(store)
        with show_progress(progress) as notify, self._workers(engine, workers) as computing:
            run_networks(
                self.members,
                lambda name: self.next_step(name, store, place),
                lambda name, result: self.save(name, result, store),
                store=store,
                workers=computing,
                progress=notify,
                patience=patience,
            )
        return PoolResult(self, store, place)

    @contextmanager
    def _workers(self, engine: str | RayEngine, workers: int) -> Iterator[Workers]:
        if engine == "local":
            with local_workers(workers) as found:
                yield found
            return
        ray = RayEngine() if isinstance(engine, str) else engine
        code = {network.factory or network.columns["network"] for network in self.members.values()}
        with ray.workers(sorted(reference for reference in code if ":" in reference)) as found:
            yield found


@dataclass(frozen=True, kw_only=True)
class Pool(NetworkPool):
    """Checkpoints of one's own: which measure follows their generalization?

    All are measured on the same samples. Losses are computed, or taken from columns that are called
    `train_loss`, `test_loss`, `train_accuracy` and `test_accuracy`.

    Attributes:
        networks: The checkpoints.
        data: The training data, as `fg.load_dataset` reads it.
        test_data: The test data; None for the split "test" of `data`.
        samples: How many training samples to read; None for all.
        test_samples: How many test samples.
        loss: The name of a loss, as of `fg.LossSurface`, or ``file.py:name``.
        factors: Columns that differ by design; correlations are also taken within their levels.
        rescaling: How every network is rewritten before it is measured again, as of `fg.Recipe`;
            None measures once.
        seed: Of everything random.

    Example:
        >>> pool = Pool(
        ...     name="runs",
        ...     networks=[Network(name="a", factory="nets.py:small", checkpoint="a.pt")],
        ...     data="digits",
        ...     measures=["hessian_trace"],
        ... )
        >>> list(pool.members)
        ['a']
    """

    networks: Sequence[Network]
    data: str
    test_data: str | None = None
    samples: int | None = None
    test_samples: int | None = None
    loss: str = "cross_entropy"
    factors: Sequence[str] = ()
    confounders: Sequence[str] = ("train_loss", "norm")
    rescaling: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        object.__setattr__(self, "networks", tuple(self.networks))
        if not self.networks:
            raise ValueError("`networks` is empty; a pool needs at least one checkpoint.")
        names = [network.name for network in self.networks]
        check_names(names)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two networks are called `{twice[0]}`; give each a name of its own.")
        known = [*dict.fromkeys(key for network in self.networks for key in network.columns)]
        numbers = [key for key in known if all(map(_is_number, self._column(key)))]
        numbers += ["train_loss", "train_accuracy", "test_loss", "test_accuracy", "norm"]
        check_each("target", [self.target], [*TARGETS, *numbers])
        check_each("factors", self.factors, known)
        check_each("confounders", self.confounders, numbers)
        if self.rescaling is not None:
            read_rescaling(self.rescaling)

    @classmethod
    def from_manifest(
        cls, path: str | Path, *, factory: str | None = None, **settings: Any
    ) -> Pool:
        """Read the networks of a pool from a table.

        Args:
            path: A CSV file with a line per network, or a JSON file with a list of objects.
                ``checkpoint`` is needed. ``factory`` (``file.py:name``), ``name``, ``group`` and
                ``normalisation`` (mean and deviation, as ``0.5/0.25``, or a list of two in JSON)
                are read if they are there; paths are relative to the file. All other columns are
                yours, to be factors, confounders or targets.
            factory: Makes the models of networks without a factory of their own.
            **settings: All else that a pool takes: `data`, `measures`, ...

        Returns:
            The pool, called as the file unless `name` is given.

        Raises:
            ValueError: If a network lacks its checkpoint or its factory.
        """
        place = expand(path)
        networks = read_manifest(place, factory)
        return cls(networks=networks, **{"name": place.stem} | settings)

    @classmethod
    def from_checkpoints(
        cls, factory: str, checkpoints: Sequence[str | Path], **settings: Any
    ) -> Pool:
        """A pool of checkpoints of one model, named as their files.

        Args:
            factory: Makes the model, ``file.py:name``.
            checkpoints: The files.
            **settings: All else that a pool takes.

        Returns:
            The pool.
        """
        named = zip(_names_of(checkpoints), checkpoints, strict=True)
        networks = [
            Network(name=name, factory=factory, checkpoint=str(place)) for name, place in named
        ]
        return cls(networks=networks, **{"name": "pool"} | settings)

    @cached_property
    def members(self) -> Mapping[str, Network]:
        """All networks by name."""
        return {network.name: network for network in self.networks}

    @property
    def factor_names(self) -> list[str]:
        """The columns that differ by design."""
        return list(self.factors)

    @property
    def seed_column(self) -> str | None:
        """The column of seeds, None if there is none."""
        return "seed" if all("seed" in network.columns for network in self.networks) else None

    def declaration(self) -> dict[str, Any]:
        """What the pool is, as plain values, without published numbers."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "published"}
        found["networks"] = [asdict(network) for network in self.networks]
        found["measures"] = self.options
        plain: dict[str, Any] = to_plain({"kind": "pool", **found})
        return plain

    @classmethod
    def from_dict(cls, declaration: Mapping[str, Any]) -> Pool:
        """The pool that `declaration` was called on."""
        contents = {key: value for key, value in declaration.items() if key != "kind"}
        networks = [Network(**network) for network in contents.pop("networks")]
        return cls(networks=networks, **contents)

    def next_step(self, name: str, store: PoolStore, folder: str | None) -> Step | None:
        """Measuring, if the network has no row."""
        if name in store.rows():
            return None
        return measure_network, self.task(name, store, folder)

    def task(self, name: str, store: PoolStore, folder: str | None) -> Task:
        """The task of measuring a network."""
        network = self.members[name]
        tested = not all("test_loss" in one.columns for one in self.networks)
        return Task(
            network=network,
            source=PoolSamples(self.data, self.test_data, self.samples, self.test_samples, tested),
            measures=self.options,
            measured=self.measured,
            loss=self.loss,
            rescaling=self.rescaling,
            seed=self.seed,
            rescaling_seed=int(hashlib.sha256(f"{self.seed} {name}".encode()).hexdigest()[:8], 16),
            folder=folder,
            weights=Path(network.checkpoint),
        )

    def save(self, name: str, result: Any, store: PoolStore) -> None:
        """Keep a row."""
        store.append(name, result)

    def check_rows(self, store: PoolStore) -> None:
        """Refuse rows of checkpoints that have changed since they were measured."""
        rows = store.rows()
        for network in self.networks:
            place = expand(network.checkpoint)
            if not place.is_file():
                raise FileNotFoundError(
                    f"the checkpoint `{network.checkpoint}` of `{network.name}` does not exist "
                    f"(working directory `{Path.cwd()}`)."
                )
            row = rows.get(network.name)
            if row and row.get("checkpoint") != hashlib.sha256(place.read_bytes()).hexdigest():
                raise ValueError(
                    f"`{network.checkpoint}` has changed since `{network.name}` was measured; "
                    "delete its line in `rows.jsonl` and resume, or name another folder."
                )

    def _column(self, name: str) -> list[Any]:
        return [network.columns[name] for network in self.networks if name in network.columns]


def read_manifest(path: Path, factory: str | None = None) -> list[Network]:
    """Read the networks of a pool from a CSV or JSON file: see `Pool.from_manifest`."""
    if not path.is_file():
        raise FileNotFoundError(f"`{path}` is not a file; name a manifest in CSV or JSON.")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        lines = json.loads(text)
    else:
        lines = [
            {k: _parse(v) for k, v in line.items()} for line in csv.DictReader(text.split("\n"))
        ]
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"`{path}` holds no list of networks; give a list of JSON objects.")
    names = _names_of([str(line.get("checkpoint", "")) for line in lines])
    named = zip(names, lines, strict=True)
    return [_read_network(path, k, name, line, factory) for k, (name, line) in enumerate(named, 1)]


def _read_network(
    path: Path, number: int, name: str, line: dict[str, Any], factory: str | None
) -> Network:
    """One network of a manifest."""
    checkpoint, code = line.get("checkpoint"), line.get("factory") or factory
    if not checkpoint or not code:
        lacking = "`checkpoint`" if not checkpoint else "`factory`, and no factory for all is given"
        raise ValueError(f"network {number} of `{path}` has no {lacking}.")
    place, _, maker = str(code).rpartition(":")
    if line.get("factory") and (path.parent / place).is_file():
        code = f"{path.parent / place}:{maker}"
    return Network(
        name=str(line.get("name") or name),
        columns={k: v for k, v in line.items() if k not in _PLACES or (k == "group" and v)},
        factory=str(code),
        checkpoint=str(path.parent / expand(checkpoint)),
        normalisation=_read_normalisation(line.get("normalisation")),
        group=str(line.get("group") or ""),
    )


def _read_normalisation(given: Any) -> tuple[Any, Any] | None:
    """Mean and deviation of the inputs: ``"0.5/0.25"``, ``"0.4 0.5 0.6/0.2 0.2 0.2"``, or lists."""
    if given is None or given == "":
        return None
    try:
        parts = given if isinstance(given, (list, tuple)) else str(given).split("/")
        mean, deviation = ([float(x) for x in _numbers(part)] for part in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the normalisation {given!r} cannot be read; write mean and deviation as `0.5/0.25`, "
            "or per channel as `0.4 0.5 0.6/0.2 0.2 0.2`."
        ) from error
    return mean, deviation


def _numbers(part: Any) -> Sequence[Any]:
    if isinstance(part, (list, tuple)):
        return part
    return part.split() if isinstance(part, str) else [part]


def _parse(text: Any) -> Any:
    """A cell of a CSV file: a number where it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def _names_of(checkpoints: Sequence[str | Path]) -> list[str]:
    """The names of checkpoints: of their files, or of their whole paths where files share names."""
    stems = [Path(checkpoint).stem for checkpoint in checkpoints]
    if len(set(stems)) < len(stems):
        stems = ["-".join(Path(place).with_suffix("").parts) for place in checkpoints]
    return [
        "".join(char if char.isalnum() or char in "._+-=" else "-" for char in stem)[-150:]
        for stem in stems
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_each(argument: str, names: Any, known: Sequence[str]) -> None:
    """Refuse names that have no meaning, and one name in the place of a list."""
    if isinstance(names, str):
        raise TypeError(f"`{argument}={names!r}` must be a list; give [{names!r}].")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"`{argument}` names {', '.join(map(repr, unknown))}; use some of {', '.join(known)}."
        )
