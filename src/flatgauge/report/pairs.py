"""The difference of two models on the same samples, which is known better than either value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from flatgauge.curvature.summary import spread
from flatgauge.estimators import Estimate
from flatgauge.precision import SINGLE

if TYPE_CHECKING:
    from flatgauge.report.report import Report

#: How surely an interval holds the difference.
LEVEL = 0.95

#: How a difference's error is known: from shares of the same samples; from the errors of both,
#: as if their samples were others; not at all, so that it holds for these samples only.
PAIRED, UNPAIRED, GIVEN = "paired", "unpaired", "these samples"


@dataclass(frozen=True)
class DataError:
    """How far other samples of the same kind would move a difference.

    Attributes:
        stderr: The standard error.
        samples: From how many samples it is known.
        paired: Whether these are the same for both models.
    """

    stderr: float
    samples: int
    paired: bool = True


#: By measure, then by the names of two models.
Pairs = Mapping[str, Mapping[tuple[str, str], DataError]]


@dataclass(frozen=True)
class Difference:
    """The value of one model minus that of another.

    Attributes:
        value: The difference; negative where the first is flatter.
        stderr: Its standard error: of the choice of samples, where that is known, and of the
            estimators' own randomness.
        low: Lower end of the interval.
        high: Upper end.
        p: How often a difference at least as large would come by chance from models that do not
            differ; None where the error of the choice of samples is not known.
        kind: One of `PAIRED`, `UNPAIRED`, `GIVEN`.
    """

    value: float
    stderr: float
    low: float
    high: float
    p: float | None
    kind: str

    @property
    def sign(self) -> int:
        """−1 where the first is flatter, 1 where the second is, 0 where it cannot be told."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0


def difference(
    first: Estimate,
    second: Estimate,
    error: DataError | None = None,
    *,
    level: float = LEVEL,
    rounding: float = SINGLE,
) -> Difference:
    """Subtract two values of a measure, with an interval.

    Standard errors are independent and add as squares; bounds of solvers add to the interval as
    they are, and so does what rounding can make.

    Args:
        first: One estimate.
        second: The other.
        error: From the choice of samples; None if it is not known.
        level: How surely the interval is to hold the difference, samples being drawn at random.
        rounding: The relative difference that rounding can make.

    Returns:
        The difference.

    Example:
        >>> found = difference(Estimate(5.0), Estimate(4.0), DataError(0.25, samples=100))
        >>> f"{found.low:.3f} to {found.high:.3f}, p = {found.p:.5f}"
        '0.504 to 1.496, p = 0.00012'
    """
    from scipy.special import stdtr, stdtrit

    value = first.value - second.value
    own = math.hypot(first.stderr, second.stderr)
    stderr = own if error is None else math.hypot(own, error.stderr)
    freedom = math.inf if error is None else error.samples - 1
    factor = float(stdtrit(freedom, 0.5 + level / 2))
    fixed = max(
        (first.bound or 0.0) + (second.bound or 0.0),
        rounding * max(abs(first.value), abs(second.value)),
    )
    reach = factor * stderr + fixed
    p = None
    if error is not None and not math.isnan(value + reach):
        apart = max(abs(value) - fixed, 0.0)
        p = 2 * float(stdtr(freedom, -apart / stderr)) if stderr else float(apart == 0)
    kind = GIVEN if error is None else PAIRED if error.paired else UNPAIRED
    return Difference(value, stderr, value - reach, value + reach, p, kind)


def pairs_of(reports: Mapping[str, Report]) -> dict[str, dict[tuple[str, str], DataError]]:
    """How far other samples would move the differences of models, measure by measure.

    Args:
        reports: By name of the model.

    Returns:
        For every measure and every two models, in their order: from the shares of single samples,
        where both models were measured on the same; else from the errors of both.
    """
    found: dict[str, dict[tuple[str, str], DataError]] = {}
    for one, other in combinations(reports, 2):
        for measure in reports[one]:
            if measure in reports[other]:
                error = _error(reports[one], reports[other], measure)
                if error is not None:
                    found.setdefault(measure, {})[one, other] = error
    return found


def _error(one: Report, other: Report, measure: str) -> DataError | None:
    """How far other samples would move one difference."""
    first, second = one[measure], other[measure]
    same = one.facts.data_digest and one.facts.data_digest == other.facts.data_digest
    shares = [share for share in (first.samples, second.samples) if share is not None]
    if same and len(shares) == 2 and len(shares[0]) == len(shares[1]) > 1:
        stderr = spread(shares[0].cpu() - shares[1].cpu())
        assert stderr is not None
        return DataError(stderr, len(shares[0]))
    if first.data_stderr is None or second.data_stderr is None:
        return None
    samples = min(one.facts.samples, other.facts.samples)
    return DataError(math.hypot(first.data_stderr, second.data_stderr), samples, paired=False)
