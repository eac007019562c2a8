"""Compare models: the same measures of each, ranked, and which model is flatter.

Surfaces by name enter `compare`; a `Comparison` leaves: the report of each model, and one table of
ranks that all its frames, texts and verdicts read. Reports that were measured apart make a
`Comparison`, too; `comparison_warnings` says what makes their numbers incomparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flatgauge.analysis.files import from_plain
from flatgauge.analysis.formatting import kind
from flatgauge.analysis.measurement import Report, successive_reports
from flatgauge.analysis.ranking import (
    LEVEL,
    Agreement,
    MeasureRanking,
    ModelDifference,
    SamplingErrors,
    by_model,
    errors_from_rows,
    invariance_class,
    rank_models,
    sampling_errors,
)
from flatgauge.analysis.request import (
    Progress,
    Request,
    result_callback,
    show_progress,
    validate_request,
)
from flatgauge.analysis.result import UNFINISHED, Result
from flatgauge.measures.registry import GROUPS
from flatgauge.surface.arguments import shared_processes
from flatgauge.surface.data import tensors
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from flatgauge.report.tables import Table

#: What a measure must not see for its ranks to mean anything between networks.
RESCALING = "nodewise"

#: What must be the same for numbers to be compared as they stand, and why.
_SAME_MEANING = {
    "loss_name": ("losses", "curvature is that of the loss"),
    "samples": ("numbers of samples", "these are not the same data"),
    "weight_decay": ("weight decays", "these are not the same losses"),
}

#: What moves numbers a little, and why.
_SAME_ACCURACY = {
    "dtype": ("precisions", "rounding differs"),
    "seed": ("seeds", "random estimates differ by their errors"),
}

#: Losses differ where the largest is this many times the smallest, and by more than models that
#: all fit.
_UNLIKE, _FITTED = 3.0, 1e-4


def compare(
    surfaces: Mapping[str, LossSurface],
    *,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    gauge: str | None = None,
    seed: int = 0,
    progress: Progress | bool = False,
    save: str | Path | Callable[[Comparison], object] | None = None,
) -> Comparison:
    """Take the same measures of several models and say which is flatter.

    The verdict counts only measures of flatness that are invariant to rescaling single units: the
    ranks by others depend on how the networks are parametrised, and norms of the network
    (`path_norm`) are not flatness. A radius whose default follows the model
    (`psi_epsilon_sharpness`) is the smallest of the models' defaults for all of them. All
    models should be measured on the same samples with the same loss; where they are not, the
    comparison says so.

    Args:
        surfaces: By the name of the model, at least two.
        measures: As for `fg.measure`; None for all. One that fails for one model is marked
            there, also if it was asked for by name.
        gauge: As for `fg.measure`.
        seed: Of everything random, the same for every model.
        progress: True for a bar on stderr; or a function called before each measure with the
            names of model and measure, how many are done, and how many there are.
        save: A file that holds the comparison as JSON after every measure that is finished; or a
            function that is called with the comparison so far.

    Returns:
        The comparison: reports by name of the model, ranks, and how far measures agree.

    Raises:
        TypeError: If `surfaces` is not a mapping from names to surfaces.
        ValueError: If there are fewer than two, or a measure, an option or a gauge does not exist.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> comparison = compare(
        ...     {"flat": two_weights(0.1, 0.1), "sharp": two_weights(2.0, 3.0)},
        ...     measures=["hessian_trace", "adaptive_trace"],
        ... )
        >>> comparison.verdict
        '1 of 1 invariant measure ranks flat flattest'
        >>> comparison.ranks().loc["adaptive_trace"].to_dict()
        {'flat': 1, 'sharp': 2}
    """
    _check(surfaces)
    if isinstance(measures, Iterator):
        measures = list(measures)
    checked = [validate_request(surface, measures, gauge, seed) for surface in surfaces.values()]
    reports: dict[str, Report] = {}
    processes = shared_processes(surfaces.values())
    graphs = next(iter(surfaces.values())).graphs
    for surface in surfaces.values():  # Models of one structure are exported once.
        surface.graphs = graphs
    with processes.scope("compare"), show_progress(progress, *surfaces.values()) as listener:
        keep, remarks = result_callback(save, processes), _shape_remarks(surfaces)
        requests = [one.with_options(**_smallest_defaults(one, surfaces)) for one in checked[0]]
        for number, (name, surface) in enumerate(surfaces.items()):
            notify = _notifier(listener, name, number, len(surfaces))
            for report in successive_reports(
                surface,
                requests,
                seed=seed,
                strict=False,
                progress=notify,
                every=keep is not None,
            ):
                reports[name] = report
                if keep is not None:
                    complete = len(reports) == len(surfaces) and report.complete
                    keep(Comparison(dict(reports), remarks, complete=complete))
            surface.release(
                static=False
            )  # The next model needs the memory that this one's graphs take.
    return Comparison(reports, remarks)


def _check(surfaces: Any) -> None:
    """Refuse what is not a mapping from names to two or more surfaces."""
    if not isinstance(surfaces, Mapping) or not all(isinstance(name, str) for name in surfaces):
        raise TypeError(
            f"`surfaces` is a {type(surfaces).__name__}; pass a dict from the models' names to "
            "their surfaces: {'small batch': LossSurface(...), 'large batch': LossSurface(...)}."
        )
    if len(surfaces) < 2:
        raise ValueError(
            f"`surfaces` has {len(surfaces)} model{'s' if len(surfaces) != 1 else ''}, and a "
            "comparison needs two; use fg.measure for one."
        )


def _smallest_defaults(request: Request, surfaces: Mapping[str, LossSurface]) -> dict[str, float]:
    """The smallest of the models' defaults, for options whose default follows the model."""
    item = request.measure
    given = {**item.options, **request.options}
    smallest = {}
    for key, default in item.model_defaults.items():
        if given[key] is not None:
            continue
        found = []
        for surface in surfaces.values():
            # A model without one cannot be measured this way, and its report says why.
            with suppress(ValueError, RuntimeError, MemoryError):
                compute = partial(default, surface, given)
                found.append(surface.processes.run(item.name, compute))
            surface.release(static=False)
        known = [value for value in found if value is not None]
        if known:
            smallest[key] = min(known)
    return smallest


def _notifier(listener: Progress, model: str, number: int, models: int) -> Progress:
    """Progress within one model as progress of all."""

    def notify(measure: str, done: int, total: int) -> None:
        listener(f"{model}: {measure}", number * total + done, models * total)

    return notify


def _shape_remarks(surfaces: Mapping[str, LossSurface]) -> tuple[str, ...]:
    """Say whether the models see samples of other shapes."""
    shapes = {}
    for name, surface in surfaces.items():
        batch = surface.risk.example(1)
        shapes[name] = [tuple(part.shape) for part in tensors((batch.inputs, batch.target))]
    if len({str(shape) for shape in shapes.values()}) == 1:
        return ()
    return (f"samples of different shapes: {by_model(shapes)}",)


@dataclass(frozen=True, repr=False)
class Comparison(Mapping[str, Report], Result):
    """Reports by the name of their model, ranked measure by measure.

    It can be made of reports that were measured apart, too:
    ``Comparison({"a": Report.from_json("a.json"), "b": Report.from_json("b.json")})``.

    Attributes:
        reports: By name of the model.
        remarks: What was seen while they were measured.
        complete: Whether every model is there with all that was asked for.
        pairs: How far other samples would move the differences of models, by measure and models;
            None reads it from the contributions of single samples, as far as the reports hold
            them.
    """

    kind = "comparison"

    reports: Mapping[str, Report]
    remarks: tuple[str, ...] = ()
    complete: bool = True
    pairs: SamplingErrors | None = None

    def __getitem__(self, name: str) -> Report:
        if name not in self.reports:
            raise KeyError(f"`{name}` was not compared; there are {', '.join(self.reports)}.")
        return self.reports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    @cached_property
    def sampling_errors(self) -> SamplingErrors:
        """How far other samples would move the differences."""
        return sampling_errors(self.reports) if self.pairs is None else self.pairs

    @cached_property
    def table(self) -> dict[str, MeasureRanking]:
        """Every measure's ranks, derived once for all that this comparison says."""
        return rank_models(self.reports, self.sampling_errors)

    @property
    def measures(self) -> tuple[str, ...]:
        """Every measure that was taken of any model, in order."""
        return tuple(self.table)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What makes the comparison meaningless, or that of some measures."""
        return (*_warnings(self.reports, self.table), *self.remarks)

    @property
    def notes(self) -> tuple[str, ...]:
        """In what the runs differ, so that numbers are to be compared with care."""
        return (*self.warnings, *_unlike(self.reports, _SAME_ACCURACY))

    def difference_rows(self, level: float = LEVEL) -> list[ModelDifference]:
        """Each pair of models subtracted, by measure; `differences` has them as a frame."""
        if not 0 < level < 1:
            raise ValueError(f"`level={level!r}` must lie between 0 and 1, such as 0.95.")
        return [row for ranking in self.table.values() for row in ranking.differences(level)]

    def differences(self, *, level: float = LEVEL) -> pd.DataFrame:
        """Which of two models is flatter, and can that be trusted?

        Both models are measured on the same samples, and a sample that is hard for one is hard for
        the other: the difference of their shares varies less than either, so a difference is known
        better than the values are. Where a measure keeps every sample's share (kind ``paired``),
        the interval is for other samples of the same kind; else it is that of both errors
        (``unpaired``), or holds for the samples given only (``these samples``).

        Args:
            level: How surely an interval is to hold the difference, each for itself.

        Returns:
            A frame, one row per measure and two models: measure, first, second, difference (first
            minus second: negative where the first is flatter), stderr, low, high, p, kind, flatter
            (the model's name; missing where the interval covers zero), data_stderr, samples.
        """
        import pandas as pd

        rows = [row.to_dict() for row in self.difference_rows(level)]
        return pd.DataFrame(rows, columns=None if rows else ["measure", "first", "second"])

    def ranking(self, measure: str) -> pd.DataFrame:
        """The models by one measure, flattest first.

        Args:
            measure: Its name.

        Returns:
            A frame with the index ``model`` and the columns rank, value, error and kind. The
            rank is one more than the number of models that are flatter: the interval of the paired
            difference lies below zero, or, where samples cannot be paired, the values are more than
            twice their combined error apart (standard error and solver's bound). So models that
            cannot be distinguished share it. A model whose measure failed comes last and has no
            rank; where the models were measured at different radii, none has.
        """
        import pandas as pd

        ranks = self.ranks_of(measure)
        found = {model: self[model].get(measure) for model in ranks}
        rows = {
            "rank": pd.array(list(ranks.values()), dtype="Int64"),
            "value": [float("nan") if e is None else e.value for e in found.values()],
            "error": [float("nan") if e is None else e.error for e in found.values()],
            "kind": ["not measured" if e is None else kind(e) for e in found.values()],
        }
        return pd.DataFrame(rows, index=pd.Index(list(ranks), name="model"))

    def ranks(self) -> pd.DataFrame:
        """The rank of every model by every measure; see `ranking`.

        Returns:
            A frame, measures × models: 1 is flattest, missing where the measure failed or the
            values cannot be compared.
        """
        import pandas as pd

        rows = {measure: ranking.ranks for measure, ranking in self.table.items()}
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(self))
        return frame.astype("Int64").rename_axis("measure").rename_axis("model", axis=1)

    def ranks_of(self, measure: str) -> dict[str, int | None]:
        """The ranks by one measure, flattest first; see `ranking`.

        Args:
            measure: Its name.

        Returns:
            By model; None where it failed, was not taken, or cannot be compared.

        Raises:
            KeyError: If no model was measured by it.
        """
        if measure not in self.table:
            raise KeyError(f"`{measure}` was not measured; there are {', '.join(self.measures)}.")
        return dict(self.table[measure].ranks)

    def invariant_to(self, measure: str) -> tuple[str, ...]:
        """What a measure claims not to see, with the options it was taken with.

        Args:
            measure: Its name.

        Returns:
            Groups of transforms, see `flatgauge.measures.GROUPS`; none for an unknown measure.
        """
        claims = self.table[measure].claims if measure in self.table else ()
        return tuple(group for group in GROUPS if group in claims)

    def agreement(self, invariance: str = "units") -> Agreement:
        """Whether the measures of flatness that no rescaling of units can move agree.

        Args:
            invariance: Which measures count: "units", "layers" for those that only rescaling
                within layers moves, or "nothing" for the classical ones.

        Returns:
            Counts, and Kendall's W for four and more models. Measures of capacity
            (`path_norm`), measures that failed for a model, and measures taken at different
            radii do not count.
        """
        counted = {
            measure: ranking.known_ranks
            for measure, ranking in self.table.items()
            if invariance_class(ranking.claims) == invariance
            and ranking.votes
            and None not in ranking.ranks.values()
        }
        return Agreement(counted, tuple(self))

    @property
    def verdict(self) -> str:
        """Which model is flattest by the invariant measures, in a sentence."""
        return self.agreement().verdict()

    def to_frame(self) -> pd.DataFrame:
        """Every number, one row per measure and model.

        ``to_frame()["value"].unstack("model")`` is the table of values, measures × models.

        Returns:
            A frame with the index (measure, model), the columns of `Report.to_frame`, the rank,
            and what the measure is invariant to.
        """
        import pandas as pd

        frames = {model: report.to_frame() for model, report in self.items()}
        frame = pd.concat(frames, names=["model"]).swaplevel()
        frame = frame.loc[[(m, n) for m in self.measures for n in self if m in self[n]]]
        ranks = [self.table[m].ranks[n] for m, n in frame.index]
        frame.insert(1, "rank", pd.Series(ranks, frame.index, dtype="Int64"))
        claims = {measure: ", ".join(self.invariant_to(measure)) for measure in self.measures}
        frame["invariant_to"] = [claims[measure] for measure, _ in frame.index]
        return frame

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The models' reports, ranks, claims, agreement, differences and notes.
        """
        return self.plain_contents(
            {
                "complete": self.complete,
                "verdict": self.verdict,
                "ranks": {measure: self.ranks_of(measure) for measure in self.measures},
                "invariant_to": {measure: self.invariant_to(measure) for measure in self.measures},
                "agreement": self.agreement().to_dict(),
                "differences": [row.to_dict() for row in self.difference_rows()],
                "warnings": self.warnings,
                "notes": self.notes,
                "remarks": self.remarks,
                "models": {model: report.to_dict() for model, report in self.items()},
            }
        )

    def tables(self) -> list[Table]:
        """The models, their ranks by every measure, paired differences, and the verdict.

        Returns:
            The tables.
        """
        from flatgauge.report.views.comparison import comparison_tables

        return comparison_tables(self)

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Self:
        """The comparison that `to_dict` was called on.

        Args:
            contents: What it gave.

        Returns:
            The comparison; its ranks are computed from the reports.

        Raises:
            ValueError: If it is not a comparison.
        """
        models = contents.get("models")
        cls.check_schema(contents)
        if not isinstance(models, dict):
            raise ValueError(
                "this is no comparison: it has no `models`; give what `Comparison.to_json` or "
                "`flatgauge compare --save` wrote, and a single report to `Report.from_json`."
            )
        reports = {model: Report.from_dict(report) for model, report in models.items()}
        remarks = tuple(contents.get("remarks", ()))
        pairs = errors_from_rows(from_plain(contents.get("differences", [])))
        return cls(reports, remarks, bool(contents.get("complete", True)), pairs)

    def to_html(self, path: str | Path, **extras: Any) -> Path:
        """Write the comparison as one self-contained page.

        Args:
            path: Where to.
            **extras: What else the page shows: see `flatgauge.report.page.write_page`.

        Returns:
            The path.
        """
        from flatgauge.report.page import write_page

        remarks = (*self.page_remarks(), *extras.pop("remarks", ()))
        written: Path = write_page(
            path, self.reports, remarks=remarks, pairs=self.sampling_errors, **extras
        )
        return written

    def page_remarks(self) -> tuple[str, ...]:
        """What a page says about the comparison as a whole."""
        notes = (f"Warning: {text}" if text in self.warnings else text for text in self.notes)
        return (self.verdict, *notes, *(() if self.complete else (UNFINISHED,)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw every measure of every model relative to the flattest one, on a log scale.

        Args:
            ax: Where to draw; None for a figure of its own.

        Returns:
            The axes. Measures with values that are zero, negative or missing have no ratio and
            are named below the picture.
        """
        from flatgauge.report.plots.bars import plot_ratios

        invariant = [m for m, ranking in self.table.items() if RESCALING in ranking.claims]
        others = [m for m in self.measures if m not in invariant]
        values = {
            m: [self[n][m].value if m in self[n] else float("nan") for n in self]
            for m in (*invariant, *others)
        }
        errors = {m: [self[n][m].error if m in self[n] else 0.0 for n in self] for m in values}
        return plot_ratios(values, errors, list(self), marked=invariant, ax=ax)


def _warnings(reports: Mapping[str, Report], table: Mapping[str, MeasureRanking]) -> Iterator[str]:
    """What makes a comparison of models meaningless, or that of some measures."""
    yield from _unlike(reports, _SAME_MEANING)
    yield from _other_data(reports)
    yield from _other_fit(reports)
    yield from _other_architecture(reports)
    uneven: dict[str, list[str]] = {}
    for measure, ranking in table.items():
        uneven.setdefault(ranking.uneven, []).append(measure)
    yield from (
        f"{', '.join(names)}: not comparable, as {why}" for why, names in uneven.items() if why
    )


def _unlike(reports: Mapping[str, Report], facts: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """The facts in which runs differ, with the reason why that matters."""
    for name, (what, why) in facts.items():
        found = {model: getattr(report.facts, name) for model, report in reports.items()}
        if len(set(found.values())) > 1:
            yield f"different {what}, and {why}: {by_model(found)}"


def _other_data(reports: Mapping[str, Report]) -> Iterator[str]:
    """Whether models were measured on other samples, where their number does not show it."""
    known = {m: r.facts for m, r in reports.items() if r.facts.data_digest}
    if len({facts.samples for facts in known.values()}) != 1:
        return
    first, *others = known
    odd = [m for m in others if known[m].data_digest != known[first].data_digest]
    if odd:
        yield (
            f"not the same data: the samples of {', '.join(odd)} are not those of {first}, or come "
            "in another order; differences are those of the models and of the data, and are not "
            "paired"
        )


def _other_fit(reports: Mapping[str, Report]) -> Iterator[str]:
    """Whether models fit the data differently well."""
    losses = {model: report.facts.loss for model, report in reports.items()}
    low, high = min(losses.values()), max(losses.values())
    if high - low > (_UNLIKE - 1) * abs(low) and high - low > _FITTED:
        yield (
            f"the losses are unlike: {by_model(losses)}; a model that fits better is flatter for "
            "that alone (the curvature of cross-entropy falls with the loss), so compare models at "
            "like losses, or by `normalized_sharpness`, which does not see the scale of the outputs"
        )


def _other_architecture(reports: Mapping[str, Report]) -> Iterator[str]:
    """Whether models are other functions of other numbers of parameters."""
    found = {m: f"{r.facts.model} of {r.facts.parameters:,}" for m, r in reports.items()}
    if len({report.facts.parameters for report in reports.values()}) > 1:
        yield (
            f"different architectures, with different numbers of parameters: {by_model(found)}; "
            "sums over weights, units and layers grow with their number, and radii mean something "
            "else, so that ranks between them say little"
        )
    elif len(set(found.values())) > 1:
        yield f"different classes of models: {by_model(found)}; check that they can be compared"
