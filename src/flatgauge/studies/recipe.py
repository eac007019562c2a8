"""A recipe: everything that makes one trained network, so that it can be made again.

In: plain values, checked here so that nothing is refused in the middle of a study. Out: a frozen
`Recipe` that turns into a dict and back; its `digest` names the network.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from flatgauge.estimators.linalg import check_seed
from flatgauge.studies.networks import INITIALISATIONS, find_architecture

#: The smallest number above 0.
_ABOVE_0 = math.ulp(0.0)

#: Fields that are whole numbers: the least, and whether they may be None.
_WHOLE_NUMBERS = {
    "samples": (1, True),
    "test_samples": (1, True),
    "subset": (0, True),
    "batch": (1, False),
    "epochs": (0, False),
}

#: Fields that are numbers: the least, the largest, and whether they may be None.
_RANGES = {
    "random_labels": (0.0, 1.0, False),
    "momentum": (0.0, 1.0, False),
    "weight_decay": (0.0, math.inf, False),
    "width": (_ABOVE_0, math.inf, False),
    "rate": (_ABOVE_0, math.inf, False),
    "loss_goal": (_ABOVE_0, math.inf, True),
    "gradient_goal": (_ABOVE_0, math.inf, True),
    "accuracy_goal": (0.0, 1.0, True),
}

#: Fields that are one of several words.
_CHOICES = {
    "init": tuple(INITIALISATIONS),
    "optimizer": ("sgd", "adam"),
    "dtype": ("float32", "float64"),
}

#: The one text that may be None.
_NOT_AGAIN = ("rescaling", None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Data, network, training and seed of one network, as plain values.

    Attributes:
        data: A data set by name (`digits`, `mnist`, `fashion-mnist`, `cifar10`; `noise` is made of
            random numbers and labels), or anything `fg.load_dataset` reads.
        samples: How many training samples; None for all.
        test_samples: How many test samples; None for all.
        subset: None takes the first samples; a number draws them with that number as seed, the
            same ones for all networks that share it.
        random_labels: The share of training labels that are replaced by random ones.
        standardise: Whether inputs get mean 0 and deviation 1, as seen on the training samples.
        network: A network by name (see `flatgauge.studies.networks`), or ``file.py:factory``.
        width: Multiplies the widths of a network by name.
        init: How its weights are drawn, by name; ``"default"`` is torch's own way, and leaves those
            of ``file.py:factory`` as they were made.
        optimizer: ``"sgd"`` or ``"adam"``.
        rate: The learning rate.
        momentum: Of ``"sgd"``.
        weight_decay: As torch's optimisers have it.
        batch: Samples per step.
        epochs: The most passes over the data; 0 leaves the network as it is drawn.
        loss_goal: Training is done when the loss on all training samples is at most this. They
            are looked at once the mean loss over an epoch is within five times the goal.
        accuracy_goal: And their accuracy at least this.
        gradient_goal: And the norm of the gradient over all of them at most this.
        early: Whether training stops as soon as its goals are reached; else all epochs are
            trained, and the goals say at the end which networks count.
        dtype: ``"float32"`` or ``"float64"``.
        rescaling: How the network is rewritten before it is measured again: ``"layers 5..25"``
            multiplies every layer by a random factor of that range and divides the last one,
            ``"units 1/100..100"`` multiplies what enters every hidden unit by a factor of its own
            times one of its layer, ``"5, 4, 1/20"`` names the factors of all layers (their product
            is 1); None does not measure again.
        seed: Of everything random: labels, weights, order of samples, factors.
    """

    data: str = "digits"
    samples: int | None = None
    test_samples: int | None = None
    subset: int | None = None
    random_labels: float = 0.0
    standardise: bool = True
    network: str = "mlp-2x64"
    width: float = 1.0
    init: str = "default"
    optimizer: str = "sgd"
    rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch: int = 32
    epochs: int = 100
    loss_goal: float | None = None
    accuracy_goal: float | None = None
    gradient_goal: float | None = None
    early: bool = True
    dtype: str = "float32"
    rescaling: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("data", "network", "init", "standardise", "early", "rescaling"):
            kind = bool if name in ("standardise", "early") else str
            if not isinstance(value := getattr(self, name), kind) and (name, value) != _NOT_AGAIN:
                wanted = "a text" if kind is str else "True or False"
                raise TypeError(f"`{name}={value!r}` must be {wanted}.")
        if ":" not in self.network:
            find_architecture(self.network)
        for name, (least, optional) in _WHOLE_NUMBERS.items():
            _check_whole(name, getattr(self, name), least, optional)
        for name, (low, high, optional) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high, optional)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is unknown; use one of {', '.join(known)}."
                )
        if self.width != 1 and ":" in self.network:
            raise ValueError(
                f"`width={self.width!r}` is for networks by name, and `{self.network}` is made as "
                "it is; leave it out, and let another factory make a wider one."
            )
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"`momentum={self.momentum!r}` is of 'sgd', and `optimizer={self.optimizer!r}`; "
                "leave it out."
            )

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` was called on; an unknown field is an error."""
        unknown = sorted(set(contents) - set(FIELDS))
        if unknown:
            raise ValueError(
                f"a recipe has no field {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(FIELDS)}."
            )
        return cls(**contents)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as plain values."""
        return asdict(self)

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed."""
        return replace(self, **changes)

    @property
    def digest(self) -> str:
        """Eight letters that belong to these values alone."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def has_goal(self) -> bool:
        """Whether training can be done before the last epoch."""
        return any(
            goal is not None for goal in (self.loss_goal, self.accuracy_goal, self.gradient_goal)
        )


#: The names of a recipe's fields.
FIELDS = tuple(field.name for field in fields(Recipe))


def _check_whole(name: str, value: Any, least: int, optional: bool) -> None:
    """Refuse what is not a whole number of at least some size."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        also = ", or None" if optional else ""
        raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}{also}.")


def _check_range(name: str, value: Any, low: float, high: float, optional: bool) -> None:
    """Refuse what is not a number of a range."""
    if optional and value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and low <= value <= high and math.isfinite(value)):
        least = "above 0" if low == _ABOVE_0 else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"`{name}={value!r}` must be a finite number {least}{most}.")
