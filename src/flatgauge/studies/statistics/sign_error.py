"""How often a measure orders two networks wrongly, in the worst change of one factor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flatgauge.studies.statistics.design import design_of, idle, one_factor_pairs, order

if TYPE_CHECKING:
    import pandas as pd

#: A factor and the two levels that are compared.
Environment = tuple[str, object, object]


@dataclass(frozen=True)
class SignError:
    """Sign-errors over environments, or the reason why there are none.

    Attributes:
        worst: The largest sign-error over environments, from 0 to 1; nan if there is none.
        mean: The mean over environments.
        worst_environment: Where the worst one occurs.
        by_environment: The sign-error of each environment.
        count: How many networks it rests on.
        notes: What was left out.
        reason: Why there is no value, in a few words; empty if there is one.
    """

    worst: float
    mean: float
    count: int
    worst_environment: Environment | None = None
    by_environment: Mapping[Environment, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""


def sign_error(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    *,
    seed_column: str | None = "seed",
) -> SignError:
    r"""How often a measure and the target disagree when one factor changes.

    An environment is a change of one factor between two levels, with all other factors and the
    seed kept. Its sign-error is the mean over its pairs of networks of

    .. math:: \tfrac12 \big(1 - \operatorname{sgn}(\mu - \mu')\operatorname{sgn}(g - g')\big),

    so 0 is always right, 1 always wrong, and a tie counts one half. A measure is robust if even
    its worst environment is good [dziugaite2020search]. Other than there, pairs are not weighted
    by how surely their targets differ.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        factors: The columns that vary by design.
        seed_column: The column of the seeds. None compares across seeds.

    Returns:
        The worst and the mean sign-error, and all of them.
    """
    design = design_of(frame, measure, target, factors, seed_column)
    ready = design.ready
    if ready.reason:
        nan = math.nan
        return SignError(nan, nan, ready.count, notes=ready.notes, reason=ready.reason)
    found: dict[Environment, float] = {}
    notes = list(ready.notes)
    for name in design.factors:
        pairs = one_factor_pairs(design, name)
        if not len(pairs.first):
            notes.append(idle(design, name))
            continue
        errors = (1 - np.prod([order(column, pairs) for column in ready.columns], axis=0)) / 2
        ends = np.stack([design.factors[name][side] for side in (pairs.first, pairs.second)])
        both, at = np.unique(np.sort(ends, axis=0), axis=1, return_inverse=True)
        means = np.bincount(at.reshape(-1), errors) / np.bincount(at.reshape(-1))
        for low, high, error in zip(*both, means, strict=True):
            label = design.labels[name]
            found[name, label[low], label[high]] = float(error)
    if not found:
        reason = "no two networks differ in one factor alone"
        return SignError(math.nan, math.nan, ready.count, notes=tuple(notes), reason=reason)
    worst = max(found, key=lambda environment: found[environment])
    mean = float(np.mean(list(found.values())))
    return SignError(found[worst], mean, ready.count, worst, found, tuple(notes))
