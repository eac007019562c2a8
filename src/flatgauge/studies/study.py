"""A study: a pool of networks that differ by design, what is measured of them, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.landscapes.spaces import SPACES
from flatgauge.analysis.request import resolve_measures
from flatgauge.estimators.linalg import check_seed
from flatgauge.studies.recipe import FIELDS, Recipe
from flatgauge.studies.rescaling import read_rescaling
from flatgauge.studies.training import Standing

if TYPE_CHECKING:
    from flatgauge.analysis.progress import Progress
    from flatgauge.studies.figure import Figure
    from flatgauge.studies.findings import Findings
    from flatgauge.studies.ray_engine import RayEngine

#: What a study can ask flatness to follow: columns of its table.
TARGETS = ("accuracy_gap", "loss_gap", "test_loss", "test_accuracy")

#: Facts of a training that flatness may merely stand for.
CONFOUNDERS = ("rate", "batch", "steps", "train_loss", "norm")

#: Seconds after which a process is named that does not get on with a network.
PATIENCE = 60.0

#: Fields of a recipe that are no numbers, and facts of a training that are.
_TEXTS = ("data", "network", "init", "optimizer", "dtype", "rescaling")
_FACTS = ("steps", "replaced", *Standing.__dataclass_fields__, "seconds")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A declared pool of networks: recipe × factors × seeds, measured in one way.

    Attributes:
        name: Of the study.
        recipe: What all networks have in common.
        factors: What differs by design: values by field of the recipe, all combined with all.
            Fields that change together are written with commas:
            ``{"batch, rate": [(4, .001), (32, .008)]}``.
        seeds: How many networks of every kind (seeds from 0), or the seeds themselves.
        measures: What to measure; as `fg.measure` takes it.
        measured: Measure on the first so many training samples; None for all.
        target: What flatness is to follow: ``"accuracy_gap"`` (training minus test),
            ``"loss_gap"`` (test minus training), ``"test_loss"`` or ``"test_accuracy"``.
        confounders: Columns that are shown beside the measures.
        question: What the study asks, in a sentence.
        published: Figures of a paper to stand beside.
        landscapes: Spaces in which one network of every kind of the first factor is drawn.

    Example:
        >>> study = Study(
        ...     name="batches",
        ...     recipe=Recipe(data="digits", network="mlp-2x64", loss_goal=0.02),
        ...     factors={"batch": [8, 64]},
        ...     seeds=2,
        ...     measures=["rho_sum", "hessian_trace"],
        ... )
        >>> list(study.runs())
        ['batch-8_seed-0_...', 'batch-8_seed-1_...', 'batch-64_seed-0_...', 'batch-64_seed-1_...']
    """

    name: str
    recipe: Recipe
    factors: Mapping[str, Sequence[Any]]
    seeds: int | Sequence[int] = 1
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None
    measured: int | None = None
    target: str = "loss_gap"
    confounders: Sequence[str] = CONFOUNDERS
    question: str = ""
    published: Sequence[Figure] = ()
    landscapes: Sequence[str] = ()
    _runs: dict[str, Recipe] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"`recipe` is a {type(self.recipe).__name__}; make one with fg.Recipe(...)."
            )
        if self.target not in TARGETS:
            raise ValueError(
                f"`target={self.target!r}` is unknown; use one of {', '.join(TARGETS)}."
            )
        whole = isinstance(self.measured, int) and not isinstance(self.measured, bool)
        if self.measured is not None and not (whole and self.measured >= 1):
            raise ValueError(
                f"`measured={self.measured!r}` must be a whole number of at least 1, or None."
            )
        if isinstance(self.measures, Iterable) and not isinstance(self.measures, (str, Mapping)):
            object.__setattr__(self, "measures", tuple(self.measures))
        resolve_measures(
            self.measures
        )  # Refuses what cannot be measured, before anything is trained.
        numbers = [name for name in (*FIELDS, *_FACTS) if name not in _TEXTS]
        _check_each("confounders", self.confounders, numbers)
        _check_each("landscapes", self.landscapes, list(SPACES))
        object.__setattr__(self, "_runs", self._named())
        for one in self._runs.values():
            if one.rescaling is not None:
                read_rescaling(one.rescaling)

    @property
    def factor_names(self) -> list[str]:
        """The fields that differ by design; of those that change together, the first."""
        return [_fields(key)[0] for key in self.factors]

    @property
    def varied(self) -> list[str]:
        """All fields that differ by design, those that change together too."""
        return [name for key in self.factors for name in _fields(key)]

    def runs(self) -> dict[str, Recipe]:
        """All networks of the study.

        Returns:
            Recipes by the name of the run.
        """
        return dict(self._runs)

    def run(
        self,
        out: str | Path,
        *,
        data: str | Path | None = None,
        resume: bool = False,
        workers: int = 1,
        progress: Progress | bool = False,
        engine: str | RayEngine = "local",
        patience: float = PATIENCE,
    ) -> Findings:
        """Train and measure all networks, and keep each of them as soon as it is there.

        Interrupt it at any moment, in any way: with ``resume=True`` it goes on where it was.
        Several processes may work in one folder.

        Args:
            out: The study's folder.
            data: The folder of data sets that are read from files.
            resume: Whether to go on with what is in the folder.
            workers: How many processes work on it, each with one thread; 1 works in this one. In a
                script, call it with more under ``if __name__ == "__main__":``.
            progress: True for a bar on stderr; or a function called with the name of a run, how
                many are done, and how many there are.
            engine: ``"local"`` for processes of this machine; ``"ray"`` or a
                `flatgauge.studies.RayEngine` for a task of Ray per network. Rows are the same, and
                what one began another can resume.
            patience: Where several processes work: after so many seconds on one network, and ten
                times what the others took, a process is named on stderr, as it may hang.

        Returns:
            What was found.
        """
        from flatgauge.studies.working import run_study

        return run_study(
            self,
            out,
            data=data,
            resume=resume,
            workers=workers,
            progress=progress,
            engine=engine,
            patience=patience,
        )

    def declaration(self) -> dict[str, Any]:
        """What the study is, as plain values.

        Returns:
            All but published figures.
        """
        return {
            "name": self.name,
            "recipe": self.recipe.to_dict(),
            "factors": {key: list(values) for key, values in self.factors.items()},
            "seeds": self._seeds(),
            "measures": {one.name: one.options for one in resolve_measures(self.measures)},
            "measured": self.measured,
            "target": self.target,
            "confounders": list(self.confounders),
            "question": self.question,
            "landscapes": list(self.landscapes),
        }

    @classmethod
    def from_dict(cls, declaration: Mapping[str, Any]) -> Study:
        """The study that `declaration` was called on, without published figures.

        Args:
            declaration: What it gave.

        Returns:
            The study.
        """
        contents = dict(declaration)
        return cls(recipe=Recipe.from_dict(contents.pop("recipe")), **contents)

    def _seeds(self) -> list[int]:
        """The seeds of every kind of network."""
        one = isinstance(self.seeds, int) and not isinstance(self.seeds, bool) and self.seeds > 0
        if not one and not isinstance(self.seeds, Sequence):
            raise ValueError(f"`seeds={self.seeds!r}` must be at least 1, or a list of seeds.")
        found = list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)
        for seed in found:
            check_seed(seed)
        if not found or len(set(found)) < len(found):
            raise ValueError(f"`seeds={self.seeds!r}` must name at least one seed, each once.")
        return found

    def _named(self) -> dict[str, Recipe]:
        """All recipes by name, in the order of factors and seeds."""
        if not isinstance(self.factors, Mapping) or not self.factors:
            raise ValueError(
                f"`factors={self.factors!r}` must name at least one field of a recipe with its "
                'values, as in {"batch": [8, 64]}.'
            )
        levels = [_levels(key, values) for key, values in self.factors.items()]
        _check_once(self.varied)
        found: dict[str, Recipe] = {}
        for chosen in product(*levels):
            changes = {name: value for level in chosen for name, value in level.items()}
            for seed in self._seeds():
                recipe = self.recipe.but(**changes, seed=seed)
                parts = {name: getattr(recipe, name) for name in self.factor_names} | {"seed": seed}
                label = "_".join(f"{name}-{_safe(value)}" for name, value in parts.items())
                found[f"{label}_{recipe.digest}"] = recipe
        return found


def _fields(key: str) -> list[str]:
    """The fields of a factor, refused if a recipe has none of that name."""
    names = [name.strip() for name in key.split(",")]
    unknown = [name for name in names if name not in FIELDS or name == "seed"]
    if unknown:
        raise ValueError(
            f"`factors` names {', '.join(map(repr, unknown))}, which is no factor; use fields of "
            f"a recipe: {', '.join(name for name in FIELDS if name != 'seed')}."
        )
    return names


def _check_once(names: Sequence[str]) -> None:
    """Refuse a field that two factors set."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"`factors` sets `{twice[0]}` twice; name every field once.")


def _check_each(argument: str, names: Any, known: Sequence[str]) -> None:
    """Refuse names that have no meaning, and one name that is not in a list."""
    if isinstance(names, str):
        raise TypeError(f"`{argument}={names!r}` must be a list; give [{names!r}].")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"`{argument}` names {', '.join(map(repr, unknown))}; use some of {', '.join(known)}."
        )


def _levels(key: str, values: Any) -> list[dict[str, Any]]:
    """What every level of a factor sets."""
    names = _fields(key)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"the factor `{key}` is {values!r}; give a list of its values.")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise ValueError(f"the factor `{key}` has a value twice in {values!r}; give each once.")
    if len(names) == 1:
        return [{names[0]: value} for value in values]
    for value in values:
        if not isinstance(value, (tuple, list)) or len(value) != len(names):
            raise ValueError(
                f"the factor `{key}` has {value!r}; give {len(names)} values together, as "
                f"({', '.join(names)})."
            )
    return [dict(zip(names, value, strict=True)) for value in values]


def _safe(value: Any) -> str:
    """A value as a part of a file's name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-")[:40]
