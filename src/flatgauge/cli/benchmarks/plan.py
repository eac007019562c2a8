"""What to measure: on which workloads, what of them, how often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatgauge.cli.benchmarks import workloads
from flatgauge.cli.benchmarks.quantities import OTHERS, QUANTITIES, USUAL


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not known, and none at all."""
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        given = ", ".join(map(repr, wrong)) or "nothing"
        raise ValueError(f"`{what}` has {given}; there are {', '.join(known)}.")


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        workloads: On which workloads.
        quantities: What of them.
        rounds: How many rounds count.
        scale: What share of the samples to take.
        data: Where MNIST and CIFAR-10 lie; None for synthetic images.
    """

    workloads: Sequence[str] = tuple(workloads.KINDS)
    quantities: Sequence[str] = USUAL
    rounds: int = 3
    scale: float = 1.0
    data: str | None = None

    def __post_init__(self) -> None:
        _check("workloads", self.workloads, list(workloads.KINDS))
        _check("quantities", self.quantities, [*QUANTITIES, *OTHERS])
        if self.rounds < 1:
            raise ValueError(f"`rounds={self.rounds}` times nothing; use at least 1.")
        if not self.scale > 0:
            raise ValueError(f"`scale={self.scale:g}` leaves no samples; use 1 for all of them.")
        if self.scale == math.inf:
            raise ValueError("`scale=inf` is no share of the samples; use 1 for all of them.")
        if not any(True for _ in self.pairs()) and not set(self.quantities) & set(OTHERS):
            raise ValueError(
                f"none of {', '.join(self.quantities)} is measured on "
                f"{', '.join(self.workloads)}; `classes` needs {workloads.MANY_CLASSES}, all "
                f"others one of {', '.join(workloads.STANDARD)}."
            )

    @property
    def drawable(self) -> bool:
        """Whether there will be costs in gradients outside of series."""
        return any(set(wanted) - {"growth"} for _, wanted in self.pairs())

    def pairs(self) -> Iterable[tuple[str, list[str]]]:
        """The workloads that something is measured on, each with what that is."""
        for name in self.workloads:
            wanted = [
                quantity
                for quantity in self.quantities
                if quantity in QUANTITIES and name in QUANTITIES[quantity].workloads
            ]
            if wanted:
                yield name, wanted


#: Some minutes at most, to see it work.
QUICK = BenchPlan(
    workloads=("W1", "W2"),
    quantities=("product", "trace", "sweep", "units", "eigenvalue", "layers"),
    rounds=1,
    scale=0.02,
)
