"""Which of several models is flatter, measure by measure, as far as errors let one say.

Reports of several models enter. `difference` subtracts two values with an interval, `rank` orders
the values of one measure, and models that cannot be distinguished share a rank. `rank_models`
does so once for every measure of the reports; `Agreement` counts over measures. Texts and pages
are made from these tables in `flatgauge.report`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import to_plain
from flatgauge.curvature.blocks import standard_error
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import FLOAT32_RTOL, FLOAT64_RTOL
from flatgauge.measures import registry

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.analysis.measurement import Report

#: How surely an interval holds the difference.
LEVEL = 0.95

#: How a difference's error is known: from the contributions of the same samples; from the errors
#: of both, as if their samples were others; not at all, so that it holds for these samples only.
PAIRED, UNPAIRED, GIVEN = "paired", "unpaired", "these samples"

#: How many combined errors two values must lie apart to be distinguished.
_APART = 2.0

#: Relative differences that are rounding, by precision; half precisions keep three digits.
_ROUNDING = {"float64": FLOAT64_RTOL, "float32": FLOAT32_RTOL}
_COARSE = 1e-2

#: Settings that change how well a value is known, and not what it is.
_ACCURACY = {"tolerance", "starts", "steps", "probes", "all_columns", "solver", "method"}

#: Below this many models there are too few orders for a coefficient to say anything.
_FEW = 4

#: By what rescalings cannot move, strongest first: the title of the class.
INVARIANCE_CLASSES = {
    "units": "Blind to the scale of every unit",
    "layers": "Blind to the scale of whole layers only",
    "nothing": "Classical: depend on how the network is written",
}


# -- what a measure claims ---------------------------------------------------------------------


def claimed_groups(measure: str, *options: Mapping[str, Any]) -> frozenset[str]:
    """The groups that a measure claims not to see with all of these options; none if unknown."""
    if measure not in registry or not options:
        return frozenset()
    return frozenset.intersection(*(registry[measure].claims(chosen) for chosen in options))


def invariance_class(claims: Collection[str]) -> str:
    """The key of `INVARIANCE_CLASSES` that groups of transforms amount to."""
    if "nodewise" in claims:
        return "units"
    return "layers" if "layerwise" in claims else "nothing"


def by_invariance_class(claims: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Measures by key of `INVARIANCE_CLASSES`, from what each claims; no key is empty."""
    found: dict[str, list[str]] = {key: [] for key in INVARIANCE_CLASSES}
    for name, groups in claims.items():
        found[invariance_class(groups)].append(name)
    return {key: members for key, members in found.items() if members}


# -- differences -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingError:
    """How far other samples (`paired`: the same for both models) would move a difference."""

    stderr: float
    samples: int
    paired: bool = True


#: By measure, then by the names of two models.
SamplingErrors = Mapping[str, Mapping[tuple[str, str], SamplingError]]


@dataclass(frozen=True)
class Difference:
    """The value of one model minus that of another, with its interval.

    Attributes:
        value: The difference; negative where the first is flatter.
        stderr: Its standard error: of the choice of samples, where that is known, and of the
            estimators' own randomness.
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
        """−1 where the first is flatter, 1 where the second is, 0 where the interval has zero."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0


def difference(
    first: Estimate,
    second: Estimate,
    error: SamplingError | None = None,
    *,
    level: float = LEVEL,
    rounding: float = FLOAT32_RTOL,
) -> Difference:
    """Subtract two values of a measure, with an interval.

    Standard errors are independent and add as squares; bounds of solvers, and what rounding can
    make (`rounding`, relative), add to the interval as they are.

    Returns:
        The difference; its interval holds it with probability `level`.

    Example:
        >>> found = difference(Estimate(5.0), Estimate(4.0), SamplingError(0.25, samples=100))
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


def sampling_errors(
    reports: Mapping[str, Report],
) -> dict[str, dict[tuple[str, str], SamplingError]]:
    """How far other samples would move the difference of each pair of models, by measure."""
    found: dict[str, dict[tuple[str, str], SamplingError]] = {}
    for one, other in combinations(reports, 2):
        for measure in reports[one]:
            if measure in reports[other]:
                error = _sampling_error(reports[one], reports[other], measure)
                if error is not None:
                    found.setdefault(measure, {})[one, other] = error
    return found


def _sampling_error(one: Report, other: Report, measure: str) -> SamplingError | None:
    """From each sample's contributions where both saw the same samples, else from both errors."""
    first, second = one[measure], other[measure]
    same = one.facts.data_digest and one.facts.data_digest == other.facts.data_digest
    a, b = first.samples, second.samples
    if same and a is not None and b is not None and len(a) == len(b) > 1:
        stderr = standard_error(a.cpu() - b.cpu())
        assert stderr is not None
        return SamplingError(stderr, len(a))
    if first.data_stderr is None or second.data_stderr is None:
        return None
    samples = min(one.facts.samples, other.facts.samples)
    return SamplingError(math.hypot(first.data_stderr, second.data_stderr), samples, paired=False)


# -- ranks -------------------------------------------------------------------------------------


def is_flatter(
    first: Estimate,
    second: Estimate,
    *,
    error: SamplingError | None = None,
    rounding: float = FLOAT32_RTOL,
) -> bool:
    """Whether the first value is below the second by more than both may be off.

    Returns:
        True where the samples are paired and the interval of the difference lies below zero, or,
        for the samples given, where the values lie more than twice their combined error apart.
        An error that is not known (nan) distinguishes nothing.

    Example:
        >>> is_flatter(Estimate(1.0, stderr=0.1), Estimate(1.2, stderr=0.1))
        False
        >>> is_flatter(Estimate(1.0, stderr=0.1), Estimate(1.3, stderr=0.1))
        True
        >>> is_flatter(Estimate(1.0), Estimate(1.3), error=SamplingError(0.2, samples=100))
        False
    """
    if not first.value < second.value:
        return False
    if math.isinf(second.value - first.value):
        return True
    if error is not None and error.paired:
        return difference(first, second, error, rounding=rounding).high < 0
    off = math.hypot(first.stderr, second.stderr) + (first.bound or 0.0) + (second.bound or 0.0)
    size = max(abs(first.value), abs(second.value))
    return second.value - first.value > max(_APART * off, rounding * size)


def rank(
    estimates: Mapping[str, Estimate],
    *,
    errors: Mapping[tuple[str, str], SamplingError] | None = None,
    rounding: float = FLOAT32_RTOL,
) -> dict[str, int | None]:
    """Give every model its rank: one more than the number of models that are flatter.

    Returns:
        By model, flattest first; models that cannot be distinguished share a rank, and one that
        could not be measured comes last and has None.

    Example:
        >>> values = {"a": 3.0, "b": 1.0, "c": 3.0, "d": math.nan}
        >>> rank({name: Estimate(value) for name, value in values.items()})
        {'b': 1, 'a': 2, 'c': 2, 'd': None}
    """
    known = {name: e for name, e in estimates.items() if not math.isnan(e.value)}
    both = dict(errors or {})
    both |= {(second, first): error for (first, second), error in both.items()}
    ranks = {
        name: 1
        + sum(
            is_flatter(e, own, error=both.get((other, name)), rounding=rounding)
            for other, e in known.items()
        )
        for name, own in known.items()
    }
    order = sorted(known, key=lambda name: (ranks[name], known[name].value))
    failed = [name for name in estimates if name not in known]
    return {name: ranks[name] for name in order} | dict.fromkeys(failed)


@dataclass(frozen=True)
class ModelDifference:
    """Two models by one measure: the first's value minus the second's."""

    measure: str
    first: str
    second: str
    found: Difference
    error: SamplingError | None

    @property
    def flatter(self) -> str | None:
        """The model that is flatter, None where the interval covers zero."""
        return {-1: self.first, 0: None, 1: self.second}[self.found.sign]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain numbers and strings."""
        found, error = self.found, self.error
        return {
            "measure": self.measure,
            "first": self.first,
            "second": self.second,
            "difference": found.value,
            "stderr": found.stderr,
            "low": found.low,
            "high": found.high,
            "p": found.p,
            "kind": found.kind,
            "flatter": self.flatter,
            "data_stderr": None if error is None else error.stderr,
            "samples": None if error is None else error.samples,
        }


def errors_from_rows(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, dict[tuple[str, str], SamplingError]]:
    """The errors of differences from the rows that `ModelDifference.to_dict` made of them."""
    found: dict[str, dict[tuple[str, str], SamplingError]] = {}
    for row in rows:
        if row["data_stderr"] is not None:
            error = SamplingError(float(row["data_stderr"]), row["samples"], row["kind"] == PAIRED)
            found.setdefault(row["measure"], {})[row["first"], row["second"]] = error
    return found


@dataclass(frozen=True)
class MeasureRanking:
    """All models by one measure.

    Attributes:
        ranks: By model, flattest first; None where the measure failed, was not taken, or where
            values cannot be compared.
        uneven: Which setting differs between the models, "" where none does.
        claims: The groups that the measure claims not to see, for every model.
        errors: How far other samples would move the difference of each pair of models.
        rounding: The relative difference that rounding can make.
    """

    measure: str
    estimates: Mapping[str, Estimate]
    ranks: Mapping[str, int | None]
    uneven: str
    claims: frozenset[str]
    errors: Mapping[tuple[str, str], SamplingError]
    rounding: float

    @property
    def votes(self) -> bool:
        """Whether it is a measure of flatness; those of capacity do not vote on it."""
        return self.measure not in registry or registry[self.measure].votes

    @property
    def known_ranks(self) -> dict[str, int]:
        """The ranks there are."""
        return {model: rank for model, rank in self.ranks.items() if rank is not None}

    def is_tied(self, model: str) -> bool:
        """Whether a model shares its rank."""
        return list(self.known_ranks.values()).count(self.known_ranks.get(model, 0)) > 1

    def differences(self, level: float = LEVEL) -> Iterator[ModelDifference]:
        """Each pair of models that can be compared, subtracted."""
        if self.uneven:
            return
        for (first, one), (second, other) in combinations(self.estimates.items(), 2):
            if not math.isnan(one.value - other.value):
                error = self.errors.get((first, second))
                found = difference(one, other, error, level=level, rounding=self.rounding)
                yield ModelDifference(self.measure, first, second, found, error)


def rank_models(
    reports: Mapping[str, Report], errors: SamplingErrors | None = None
) -> dict[str, MeasureRanking]:
    """Rank models by every measure taken of any of them; by default the reports give the errors."""
    errors = sampling_errors(reports) if errors is None else errors
    coarsest = max(
        (_ROUNDING.get(report.facts.dtype, _COARSE) for report in reports.values()),
        default=FLOAT32_RTOL,
    )
    table = {}
    for measure in dict.fromkeys(name for report in reports.values() for name in report):
        found = {model: r.estimates[measure] for model, r in reports.items() if measure in r}
        options = {model: estimate.options for model, estimate in found.items()}
        uneven, pairs = _uneven_options(options), errors.get(measure, {})
        ranks = {} if uneven else rank(found, errors=pairs, rounding=coarsest)
        table[measure] = MeasureRanking(
            measure,
            found,
            ranks | {model: None for model in reports if model not in ranks},
            uneven,
            claimed_groups(measure, *options.values()),
            pairs,
            coarsest,
        )
    return table


def _uneven_options(options: Mapping[str, Mapping[str, Any]]) -> str:
    """The last setting that differs between the models of a measure, with its values."""
    uneven = ""
    options = {model: chosen for model, chosen in options.items() if chosen}
    for key in dict.fromkeys(key for chosen in options.values() for key in chosen):
        found = {model: to_plain(chosen.get(key)) for model, chosen in options.items()}
        if key not in _ACCURACY and len({repr(value) for value in found.values()}) > 1:
            uneven = f"`{key}` differs: {by_model(found)}"
    return uneven


def by_model(found: Mapping[str, Any]) -> str:
    """One value of each model, in a line."""
    return ", ".join(
        f"{model} {value:.6g}" if isinstance(value, float) else f"{model} {value}"
        for model, value in found.items()
    )


# -- agreement ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How often measures rank the same model first, and how well they agree on the order.

    Attributes:
        ranks: By measure and model.
        models: The models that are compared.
    """

    ranks: Mapping[str, Mapping[str, int]]
    models: tuple[str, ...]

    @cached_property
    def flattest(self) -> dict[str, int]:
        """How many measures find a model flatter than every other one, by model."""
        first = [[model for model, r in ranks.items() if r == 1] for ranks in self.ranks.values()]
        return {model: first.count([model]) for model in self.models}

    @property
    def undecided_count(self) -> int:
        """How many measures give the first rank to several models."""
        return len(self.ranks) - sum(self.flattest.values())

    @cached_property
    def pairs(self) -> dict[tuple[str, str], tuple[int, int]]:
        """For each pair of models, how many measures find either one flatter."""
        counts = {}
        for one, other in combinations(self.models, 2):
            both = [(r[one], r[other]) for r in self.ranks.values() if one in r and other in r]
            counts[one, other] = (sum(a < b for a, b in both), sum(a > b for a, b in both))
        return counts

    @property
    def contradictory(self) -> bool:
        """Whether two measures put two models in opposite order."""
        return any(one and other for one, other in self.pairs.values())

    @cached_property
    def kendall_w(self) -> float | None:
        """Kendall's W with shared ranks: 1 if all orders are the same, near 0 if they are at odds.

        None for fewer than four models or two measures, and where no measure distinguishes any
        two models. There is no p-value: measures of one network are not independent.
        """
        import numpy as np
        from scipy.stats import rankdata

        count, size = len(self.ranks), len(self.models)
        if count < 2 or size < _FEW:
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
            "undecided": self.undecided_count,
            "pairs": [
                {"models": list(pair), "first_flatter": a, "second_flatter": b}
                for pair, (a, b) in self.pairs.items()
            ],
            "kendall_w": self.kendall_w,
        }

    def verdict(self, subject: str = "invariant measures") -> str:
        """What the counts say, in a sentence.

        Args:
            subject: What the measures are called.

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
        measures = subject if total > 1 else subject.replace("measures", "measure")
        counts = sorted(self.flattest.items(), key=lambda item: -item[1])
        (first, most), *rest = counts
        text = f"{most} of {total} {measures} rank{'' if total > 1 else 's'} {first} flattest"
        if 2 * most <= total:
            text, rest = f"no model is flattest by most of {total} {measures}", counts
        others = [f"{model} {count}" for model, count in rest if count]
        if self.undecided_count:
            others.append(f"{self.undecided_count} tie for first")
        text += f" ({', '.join(others)})" if others else ""
        if self.kendall_w is not None:
            text += f"; Kendall's W of their orders is {self.kendall_w:.2f} (1: all the same)"
        return text
