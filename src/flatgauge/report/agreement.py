"""Whether measures agree on which model is flatter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: Below this many models there are too few orders for a coefficient to say anything: we count.
FEW = 4


@dataclass(frozen=True)
class Agreement:
    """How often measures rank the same model first, and how well they agree on the order.

    Attributes:
        ranks: By measure and model, only of measures that every model has a rank in.
        models: The models that are compared.
    """

    ranks: Mapping[str, Mapping[str, int]]
    models: tuple[str, ...]

    @cached_property
    def flattest(self) -> dict[str, int]:
        """How many measures find a model flatter than every other one, by model."""
        winners = [self._alone(ranks) for ranks in self.ranks.values()]
        return {model: winners.count(model) for model in self.models}

    @property
    def undecided(self) -> int:
        """How many measures do not tell the first places apart."""
        return len(self.ranks) - sum(self.flattest.values())

    @cached_property
    def pairs(self) -> dict[tuple[str, str], tuple[int, int]]:
        """For every two models, how many measures find the one flatter, and how many the other."""
        return {
            (one, other): (
                sum(ranks[one] < ranks[other] for ranks in self.ranks.values()),
                sum(ranks[one] > ranks[other] for ranks in self.ranks.values()),
            )
            for one, other in combinations(self.models, 2)
        }

    @cached_property
    def kendall_w(self) -> float | None:
        """Kendall's W with shared ranks: 1 if all orders are the same, near 0 if they are at odds.

        None for fewer than four models or two measures, and where no measure tells any two
        models apart. There is no p-value: measures of one network are not independent.
        """
        import numpy as np
        from scipy.stats import rankdata

        count, size = len(self.ranks), len(self.models)
        if count < 2 or size < FEW:
            return None
        table = np.array([[r[model] for model in self.models] for r in self.ranks.values()])
        ranks = np.apply_along_axis(rankdata, 1, table)
        ties = sum(
            int(shared**3 - shared)
            for row in ranks
            for shared in np.unique(row, return_counts=True)[1]
        )
        spread = float(((ranks.sum(0) - ranks.sum() / size) ** 2).sum())
        most = count**2 * (size**3 - size) - count * ties
        return 12 * spread / most if most else None

    def to_frame(self) -> pd.DataFrame:
        """How many measures find the model of the row flatter than that of the column.

        Returns:
            A square frame of counts.
        """
        import pandas as pd

        names = list(self.models)
        frame = pd.DataFrame(0, index=names, columns=names)
        for (one, other), (flatter, sharper) in self.pairs.items():
            frame.loc[one, other], frame.loc[other, one] = flatter, sharper
        return frame.rename_axis("is flatter than", axis=1)

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain numbers and strings.

        Returns:
            The contents.
        """
        return {
            "measures": list(self.ranks),
            "flattest": self.flattest,
            "undecided": self.undecided,
            "pairs": [
                {"models": list(pair), "first_flatter": a, "second_flatter": b}
                for pair, (a, b) in self.pairs.items()
            ],
            "kendall_w": self.kendall_w,
        }

    def verdict(self) -> str:
        """What the counts say, in a sentence.

        Returns:
            The sentence; with few models it counts, with four or more it also says how well the
            whole orders agree.
        """
        total = len(self.ranks)
        if not total:
            return (
                "no verdict: no measure of flatness that is invariant to rescaling was taken of "
                "all models; the other ranks depend on how the networks are scaled"
            )
        measures = "invariant measures" if total > 1 else "invariant measure"
        counts = sorted(self.flattest.items(), key=lambda item: -item[1])
        (first, most), *rest = counts
        said = f"{most} of {total} {measures} rank{'' if total > 1 else 's'} {first} flattest"
        if 2 * most <= total:
            said, rest = f"no model is flattest by most of {total} {measures}", counts
        others = [f"{model} {count}" for model, count in rest if count]
        if self.undecided:
            others.append(f"{self.undecided} tie for first")
        said += f" ({', '.join(others)})" if others else ""
        if self.kendall_w is not None:
            said += f"; Kendall's W of their orders is {self.kendall_w:.2f} (1: all the same)"
        return said

    @staticmethod
    def _alone(ranks: Mapping[str, int]) -> str | None:
        """The model that has the first place for itself."""
        first = [model for model, rank in ranks.items() if rank == 1]
        return first[0] if len(first) == 1 else None
