"""Studies: pools whose networks are trained first, by recipes that differ by design.

In: a recipe, factors (values of its fields, all combined with all) and seeds. Out: a pool with one
network per combination and seed, each named by its values and the digest of its recipe. A network
is trained, kept as a checkpoint with its recipe, and then measured like any other of a pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from flatgauge.estimators.linalg import check_seed
from flatgauge.studies.pool import TARGETS, NetworkPool, check_each
from flatgauge.studies.recipe import FIELDS, Recipe
from flatgauge.studies.runner import Step
from flatgauge.studies.store import PoolStore
from flatgauge.studies.tasks import Network, Task, measure_network, read_rescaling, train_network
from flatgauge.studies.training import Scores

#: Fields of a recipe that are not numbers, and scores of a training that are.
_TEXTS = ("data", "network", "init", "optimizer", "dtype", "rescaling")
_SCORES = ("steps", "replaced", *Scores.__dataclass_fields__, "seconds")


@dataclass(frozen=True, kw_only=True)
class Study(NetworkPool):
    """A declared pool of networks: recipe × factors × seeds, measured in one way.

    It takes everything that a pool takes: `name`, `measures`, `measured`, `target`, `confounders`,
    `question`, `published`, `landscapes`.

    Attributes:
        recipe: What all networks have in common.
        factors: What differs by design: values by field of the recipe, all combined with all.
            Fields that change together are written with commas:
            ``{"batch, rate": [(4, .001), (32, .008)]}``.
        seeds: How many networks of every kind (seeds from 0), or the seeds themselves.

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

    recipe: Recipe
    factors: Mapping[str, Sequence[Any]]
    seeds: int | Sequence[int] = 1
    confounders: Sequence[str] = ("rate", "batch", "steps", "train_loss", "norm")
    _members: dict[str, Network] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"`recipe` is a {type(self.recipe).__name__}; make one with fg.Recipe(...)."
            )
        if self.target not in TARGETS:
            raise ValueError(
                f"`target={self.target!r}` is unknown; use one of {', '.join(TARGETS)}."
            )
        numbers = [name for name in (*FIELDS, *_SCORES) if name not in _TEXTS]
        check_each("confounders", self.confounders, numbers)
        object.__setattr__(self, "_members", self._name_networks())
        for recipe in self.runs().values():
            if recipe.rescaling is not None:
                read_rescaling(recipe.rescaling)

    @property
    def members(self) -> Mapping[str, Network]:
        """All networks by name."""
        return self._members

    @property
    def factor_names(self) -> list[str]:
        """The fields that differ by design; of those that change together, the first."""
        return [_fields(key)[0] for key in self.factors]

    @property
    def varying_fields(self) -> list[str]:
        """All fields that differ by design, those that change together too."""
        return [name for key in self.factors for name in _fields(key)]

    @property
    def seed_column(self) -> str | None:
        """The column of seeds."""
        return "seed"

    def runs(self) -> dict[str, Recipe]:
        """All networks of the study.

        Returns:
            Recipes by the name of the network.
        """
        return {name: one.recipe for name, one in self._members.items() if one.recipe is not None}

    def declaration(self) -> dict[str, Any]:
        """What the study is, as plain values, without published numbers."""
        return {
            "kind": "study",
            "name": self.name,
            "recipe": self.recipe.to_dict(),
            "factors": {key: list(values) for key, values in self.factors.items()},
            "seeds": self._seeds(),
            "measures": self.options,
            "measured": self.measured,
            "target": self.target,
            "confounders": list(self.confounders),
            "question": self.question,
            "landscapes": list(self.landscapes),
        }

    @classmethod
    def from_dict(cls, declaration: Mapping[str, Any]) -> Study:
        """The study that `declaration` was called on, without published numbers."""
        contents = {key: value for key, value in declaration.items() if key != "kind"}
        return cls(recipe=Recipe.from_dict(contents.pop("recipe")), **contents)

    def next_step(self, name: str, store: PoolStore, folder: str | None) -> Step | None:
        """Training, then measuring; None if the network has its row."""
        if name in store.rows():
            return None
        task = self.task(name, store, folder)
        return (train_network if task.weights is None else measure_network), task

    def task(self, name: str, store: PoolStore, folder: str | None) -> Task:
        """The task of measuring a network, or of training it if there is no checkpoint."""
        network, recipe = self._members[name], self.runs()[name]
        return Task(
            network=network,
            source=recipe,
            measures=self.options,
            measured=self.measured,
            loss="cross_entropy",
            rescaling=recipe.rescaling,
            seed=recipe.seed,
            # No two networks of a study share it: each is rescaled by factors of its own.
            rescaling_seed=int(recipe.digest, 16),
            folder=folder,
            weights=store.model_path(name) if store.training(name, recipe) else None,
        )

    def save(self, name: str, result: Any, store: PoolStore) -> None:
        """Keep a checkpoint or a row."""
        if isinstance(result, bytes):
            store.save_model(name, result)
        else:
            store.append(name, result)

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

    def _name_networks(self) -> dict[str, Network]:
        """All networks by name, in the order of factors and seeds."""
        if not isinstance(self.factors, Mapping) or not self.factors:
            raise ValueError(
                f"`factors={self.factors!r}` must name at least one field of a recipe with its "
                'values, as in {"batch": [8, 64]}.'
            )
        levels = [_levels(key, values) for key, values in self.factors.items()]
        twice = sorted(
            {name for name in self.varying_fields if self.varying_fields.count(name) > 1}
        )
        if twice:
            raise ValueError(f"`factors` sets `{twice[0]}` twice; name every field once.")
        found: dict[str, Network] = {}
        for chosen in product(*levels):
            changes = {name: value for level in chosen for name, value in level.items()}
            for seed in self._seeds():
                recipe = self.recipe.but(**changes, seed=seed)
                parts = {name: getattr(recipe, name) for name in self.factor_names} | {"seed": seed}
                label = "_".join(f"{name}-{_safe(value)}" for name, value in parts.items())
                name = f"{label}_{recipe.digest}"
                found[name] = Network(name=name, columns=recipe.to_dict(), recipe=recipe)
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
