"""Measure a surface: requests enter, each measure's estimate and one report leave.

`run_measures` is the one loop over measures. It groups requests by the loss that they need, of
the model as it is or of its balanced form, sweeps each loss once for the union of the needs, and
hands the blocks to the measures. Random numbers come from sources made of the seed and their
purpose, so a value does not depend on which other measures run. A measure that fails is an error
if `strict` is set, else it is marked; `sweeps` is filled with what the shared sweeps took, as text.
`measure` adds progress, saving and the facts of the run; `Report` is the record.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from flatgauge.analysis.files import from_plain
from flatgauge.analysis.formatting import kind
from flatgauge.analysis.memory import memory_estimate
from flatgauge.analysis.request import (
    Progress,
    Request,
    result_callback,
    show_progress,
    validate_request,
)
from flatgauge.analysis.result import UNFINISHED, Result
from flatgauge.curvature.blocks import Blocks
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, float64_pieces, vector_norm
from flatgauge.measures.registry import BALANCED, Needs, sweep_blocks
from flatgauge.runtime.distributed import GroupError
from flatgauge.runtime.isolation import describe_error
from flatgauge.runtime.resources import duration
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.balance import balanced_surface

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from flatgauge.report.tables import Table

T = TypeVar("T")

#: The purpose of the source of randomness that measures of one sweep share.
_SHARED = "curvature"

#: A fall of the loss by more than this share of its scale marks the point.
FALL = 0.01

#: The fractions by which weights are changed, largest first.
_FRACTIONS = tuple(2.0**-k for k in range(2, 13))


def measure(
    surface: LossSurface,
    *,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    gauge: str | None = None,
    seed: int = 0,
    progress: Progress | bool = False,
    save: str | Path | Callable[[Report], object] | None = None,
) -> Report:
    """Measure how flat a surface is at its point.

    Measures that need the exact sweep share one. Random numbers come from sources made of the
    seed and their purpose: a value does not depend on which others are measured.

    Args:
        surface: Where to measure.
        measures: Names of measures, or a mapping from names to their options; None or ``"all"``
            for all, where one that fails is marked in the report and does not lose the others.
            ``"balanced:hessian_trace"`` is the Hessian trace of the balanced form of the model
            (the way to write it that has the smallest norm), where every measure is invariant to
            rescaling.
        gauge: ``"balanced"`` to measure all of them there; None for the model as it is.
        seed: Of everything random.
        progress: True for a bar on stderr; or a function called before each measure with its
            name, how many are done, and how many there are.
        save: A file that holds the report as JSON after every measure that is finished, so that
            neither a failure nor Ctrl-C loses any (`Report.from_json` reads it); or a function
            that is called with the report so far.

    Returns:
        The report: estimates by name, and the facts of the run.

    Raises:
        ValueError: If a measure, an option or a gauge does not exist, or a measure asked for by
            name fails.
        RuntimeError: If the model fails while a measure asked for by name runs.
        MemoryError: If a measure asked for by name does not fit the budget.
        TypeError: If `surface` or `measures` is of the wrong kind.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> report = measure(two_weights(2.0, 3.0), measures=["hessian_trace"])
        >>> report["hessian_trace"].value
        26.0
    """
    requests = validate_request(surface, measures, gauge, seed)
    # Asked for by name, the answer may be an error.
    strict = measures is not None and measures != "all"
    sweeps = strict and any(request.needs.parts for request in requests)
    with surface.processes.scope("measure"), show_progress(progress, surface) as notify:
        keep = result_callback(save, surface.processes)
        foreseen = memory_estimate(surface, sweep=sweeps)  # What cannot fit is refused first.
        if progress is True and not surface.processes.rank:
            sys.stderr.write(f"{foreseen}\n")
        for report in successive_reports(
            surface, requests, seed=seed, strict=strict, progress=notify, every=keep is not None
        ):
            if keep is not None:
                keep(report)
        return report


def measure_requests(
    surface: LossSurface, requests: Sequence[Request], *, seed: int, strict: bool
) -> Report:
    """Run measures that were looked up before, without progress and saving."""
    return next(successive_reports(surface, requests, seed=seed, strict=strict, every=False))


def successive_reports(
    surface: LossSurface,
    requests: Sequence[Request],
    *,
    seed: int,
    strict: bool,
    progress: Progress | None = None,
    every: bool = True,
) -> Iterator[Report]:
    """Run measures; yield the report so far after each if `every`, and the complete one last."""
    start, sweeps = time.perf_counter(), list[str]()
    found: dict[str, Estimate] = {}
    for request, estimate in run_measures(
        surface, requests, seed=seed, strict=strict, progress=progress, sweeps=sweeps
    ):
        found[request.name] = estimate
        complete = len(found) == len(requests)
        if every or complete:
            known = {one.name: found[one.name] for one in requests if one.name in found}
            seconds = time.perf_counter() - start
            facts = run_info(
                surface, seed=seed, sweep=" and ".join(sweeps) or None, seconds=seconds
            )
            yield Report(known, facts, complete)


def run_measures(
    surface: LossSurface,
    requests: Sequence[Request],
    *,
    seed: int,
    strict: bool,
    progress: Progress | None = None,
    sweeps: list[str] | None = None,
) -> Iterator[tuple[Request, Estimate]]:
    """Run measures, with one sweep of each loss; yield each request and estimate once known."""
    notify = progress or (lambda name, done, total: None)
    shared: dict[tuple[str | None, str | None], _SharedBlocks] = {}
    for gauge in dict.fromkeys(request.measure.gauge for request in requests):
        needs = _shared_needs([one for one in requests if one.measure.gauge == gauge])
        if needs:
            notify("sweep", 0, len(requests))
            swept, cost = _sweep(surface, gauge, needs, seed)
            shared |= {(gauge, surrogate): blocks for surrogate, blocks in swept.items()}
            if cost and sweeps is not None:
                sweeps.append(cost)
    # Eigenvalues of blocks come first: they release the factors that the sweep has stored.
    for done, request in enumerate(sorted(requests, key=lambda one: not one.needs.eigenvalues)):
        notify(request.name, done, len(requests))
        compute = _computation(surface, request, shared, seed)
        try:
            same = surface.functional_model.with_state()
            estimate = surface.processes.run(request.name, compute, same=same)
        except GroupError:  # Nothing more can be measured together.
            raise
        except Exception as error:
            if strict:
                raise
            note = f"could not be measured: {_reason(error)}"
            estimate = Estimate(math.nan, converged=False, notes=(note,))
        yield request, estimate


@dataclass(frozen=True)
class _SharedBlocks:
    """The blocks of one loss, and what must be noted with every number of theirs."""

    blocks: Blocks
    notes: tuple[str, ...]


def _computation(
    surface: LossSurface,
    request: Request,
    shared: Mapping[tuple[str | None, str | None], _SharedBlocks],
    seed: int,
) -> Callable[[], Estimate]:
    """What computes a measure: of shared blocks where it can, else of the surface."""
    item, options = request.measure, dict(request.options)
    found = shared.get((item.gauge, _surrogate(request)))
    if item.from_blocks is not None and found is not None and _can_share(request):
        return partial(_estimate_from_blocks, item.from_blocks, found, options)
    if item.draws:
        purpose = _SHARED if request.needs else item.name.removeprefix(BALANCED)
        options["generator"] = child_generator(seed, purpose)
    return partial(item.function, surface, **options)


def _estimate_from_blocks(
    compute: Callable[..., Estimate], found: _SharedBlocks, options: Mapping[str, Any]
) -> Estimate:
    """A measure of shared blocks; the time is its own, and products are those of the sweep."""
    start = time.perf_counter()
    estimate = compute(found.blocks, **options)
    seconds = time.perf_counter() - start
    return replace(estimate, seconds=seconds, notes=(*found.notes, *estimate.notes))


def _surrogate(request: Request) -> str | None:
    """The loss whose curvature a measure is of, None for the surface's own."""
    surrogate: str | None = (request.measure.options | dict(request.options)).get("surrogate")
    return surrogate


def _can_share(request: Request) -> bool:
    """Whether a measure can use the shared sweep: these options need a sweep of their own."""
    return not {"all_columns", "probes"} & request.options.keys()


def _shared_needs(requests: Iterable[Request]) -> dict[str | None, Needs]:
    """What one sweep of each loss can yield for all measures, by surrogate."""
    needs: dict[str | None, Needs] = {}
    for request in filter(_can_share, requests):
        own, surrogate = request.needs, _surrogate(request)
        if request.options.get("layers"):  # Its eigenvalues are of other layers.
            own = replace(own, eigenvalues=False)
        needs[surrogate] = needs.get(surrogate, Needs()) | own
    return {surrogate: found for surrogate, found in needs.items() if found.parts}


def _sweep(
    surface: LossSurface, gauge: str | None, needs: Mapping[str | None, Needs], seed: int
) -> tuple[dict[str | None, _SharedBlocks], str | None]:
    """Sweep each loss once, and what that took as text."""
    # Where a sweep fails, the measures that need it sweep for themselves, and raise.
    start = time.perf_counter()
    notes: tuple[str, ...] = ()
    swept: dict[str | None, _SharedBlocks] = {}
    if gauge is not None:
        try:
            balance = partial(balanced_surface, surface)
            surface, notes = surface.processes.run("the balance", balance)
        except GroupError:
            raise
        except Exception:
            return {}, None
    matvecs = surface.matvecs
    for surrogate, found in needs.items():
        compute = partial(sweep_blocks, surface, found, surrogate=surrogate)
        try:
            generator = child_generator(seed, _SHARED)
            blocks = surface.processes.run("sweep", partial(compute, generator=generator))
            swept[surrogate] = _SharedBlocks(blocks, notes)
        except GroupError:
            raise
        except Exception:
            continue
    cost, spent = duration(time.perf_counter() - start), surface.matvecs - matvecs
    if not swept:
        return {}, None
    return swept, f"{cost} and {spent} Hessian products" if spent else cost


def _reason(error: Exception) -> str:
    """Why a measure failed; an error that says nothing by itself is named, with its place."""
    explained = type(error) in (ValueError, RuntimeError, MemoryError)
    return str(error) if explained and str(error) else describe_error(error)


@dataclass(frozen=True)
class RunInfo:
    """Where and how something was measured.

    Attributes:
        model: The model's class.
        parameters: Number of trainable parameters.
        samples: Number of samples.
        loss_name: What the loss is called.
        loss: The loss at the point.
        gradient_norm: Length of the gradient there; zero at a minimum.
        weight_decay: Strength of the penalty that was added to the loss.
        dtype: Precision of the computation.
        device: Where it ran.
        products: How Hessian products were computed, if any were.
        sweep: What the sweep took that measures shared, if there was one.
        seed: Of everything random.
        versions: Of the software.
        finished: When, in UTC.
        notes: Caveats that hold for every number of the run.
        data: What the samples are.
        platform: The machine's system and kind of processor.
        threads: How many threads torch used.
        seconds: Wall-clock time of the whole run, None where it was not taken.
        data_digest: The same for the same samples in the same order; empty if not known.
    """

    model: str
    parameters: int
    samples: int
    loss_name: str
    loss: float
    gradient_norm: float
    weight_decay: float
    dtype: str
    device: str
    products: str | None
    sweep: str | None
    seed: int
    versions: dict[str, str]
    finished: str
    notes: tuple[str, ...]
    data: str = ""
    platform: str = ""
    threads: int = 1
    seconds: float | None = None
    data_digest: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.parameters:,} parameters, {self.samples:,} samples, "
            f"{self.dtype} on {self.device}",
            f"loss ({self.loss_name}) {self.loss:.6g}, ‖gradient‖ {self.gradient_norm:.3g}",
        ]
        if self.sweep:
            lines.append(f"sweeps that measures of blocks share: {self.sweep}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def run_info(
    surface: LossSurface, *, seed: int, sweep: str | None = None, seconds: float | None = None
) -> RunInfo:
    """The facts of a run on a surface, with what its shared sweeps and the whole of it took."""
    loss, gradient = surface.value_and_gradient()
    descent = descent_note(surface)
    notes = (*surface.notes, *([descent] if descent else []))
    return RunInfo(
        model=type(surface.model).__name__,
        parameters=surface.size,
        samples=surface.samples,
        loss_name=surface.loss_name,
        loss=loss,
        gradient_norm=vector_norm(gradient),
        weight_decay=surface.weight_decay,
        dtype=surface.functional_model.coarse or str(surface.dtype).removeprefix("torch."),
        device=str(surface.device),
        products=surface.product_method if surface.matvecs else None,
        sweep=sweep,
        seed=seed,
        versions={
            "flatgauge": metadata.version("flatgauge"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=notes,
        data=surface.data.text,
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        seconds=seconds,
        data_digest=surface.data.digest,
    )


def descent_note(surface: LossSurface) -> str | None:
    """Say that a point is not a minimum, if a small change of its weights lowers the loss."""
    # Every weight is changed by the same fraction t of its own size, against its slope:
    # θ − t |θ| sign(g). To first order the loss falls by t Σ |θ g|; the loss at the changed weights
    # says how much it really falls. Rescaling changes neither number. (A gradient alone depends on
    # the scale of the weights.) The fall is compared with the smaller of 1 + L and the loss of the
    # same model with all its trainable parameters at zero: neither the unit of the loss nor a loss
    # close to zero decides.
    try:
        return surface.cache.get(("descent note",), lambda: _find_descent(surface))
    except GroupError:
        raise
    except Exception:  # Whatever the user's model raises there.
        return None


def _find_descent(surface: LossSurface) -> str | None:
    loss, gradient = surface.value_and_gradient()
    pairs = float64_pieces(surface.point, gradient)
    slope = sum(float((point * part).abs().sum()) for point, part in pairs)
    if not slope:
        return None
    threshold = FALL * _scale(surface, loss)
    direction = surface.point.abs() * gradient.sign()
    for fraction in _FRACTIONS:
        # Along a convex line the loss falls by less than its slope says.
        if fraction * slope <= threshold:
            return None
        lower = surface.value(surface.point - fraction * direction)
        if loss - lower > threshold:
            return (
                f"not at a minimum: changing every weight by {fraction:.2g} of its size against "
                f"the gradient lowers the loss from {loss:.3g} to {lower:.3g} (gradient norm "
                f"{vector_norm(gradient):.2g}); train longer, or read the values as curvature at a "
                "point"
            )
    return None


def _scale(surface: LossSurface, loss: float) -> float:
    """What the loss is compared with: see `descent_note`."""
    scale = 1 + abs(loss)
    try:
        at_zero = surface.value(torch.zeros_like(surface.point))
    except GroupError:
        raise
    except Exception:  # The model cannot be computed there.
        return scale
    return min(scale, at_zero) if 0 < at_zero < math.inf else scale


@dataclass(frozen=True, repr=False)
class Report(Mapping[str, Estimate], Result):
    """Estimates by the name of their measure, and the facts of the run.

    Attributes:
        estimates: By name of the measure.
        facts: What was measured, and how.
        complete: Whether all that was asked for is there; not if the run was interrupted.
    """

    kind = "report"

    estimates: Mapping[str, Estimate]
    facts: RunInfo
    complete: bool = True

    def __getitem__(self, name: str) -> Estimate:
        if name not in self.estimates:
            raise KeyError(
                f"`{name}` was not measured; this report has {', '.join(self.estimates)}."
            )
        return self.estimates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.estimates)

    def __len__(self) -> int:
        return len(self.estimates)

    def to_frame(self) -> pd.DataFrame:
        """The estimates as a table, one row per measure.

        Returns:
            A frame with the index ``measure``.
        """
        import pandas as pd

        columns = ("value", "stderr", "data_stderr", "bound", "exact", "converged", "matvecs")
        rows = {
            name: {"value": estimate.value, "kind": kind(estimate)}
            | {column: getattr(estimate, column) for column in (*columns, "seconds")}
            | {"notes": "; ".join(estimate.notes)}
            for name, estimate in self.items()
        }
        frame = pd.DataFrame.from_dict(rows, orient="index")
        return frame.rename_axis("measure")

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as plain numbers, strings, lists and dicts.

        Returns:
            Facts and estimates, but for the contributions of single samples. Numbers that JSON
            cannot hold are written as "inf", "nan".
        """
        return self.plain_contents(
            {
                "complete": self.complete,
                "facts": asdict(self.facts),
                "measures": {
                    name: {key: value for key, value in vars(estimate).items() if key != "samples"}
                    for name, estimate in self.items()
                },
            }
        )

    def tables(self) -> list[Table]:
        """Every number with its errors and cost, under the facts of the run.

        Returns:
            One table.
        """
        from flatgauge.report.views.report import report_tables

        return report_tables(self)

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Self:
        """The report that `to_dict` was called on.

        Args:
            contents: What it gave; what is unknown in them is left out.

        Returns:
            The report.

        Raises:
            ValueError: If they are not those of a report.
        """
        cls.check_schema(contents)
        measures, facts = contents.get("measures"), contents.get("facts")
        if not isinstance(measures, dict) or not isinstance(facts, dict):
            held = ", ".join(f"`{key}`" for key in contents) or "nothing"
            raise ValueError(
                f"this is no report: it needs `facts` and `measures`, and holds {held}; give what "
                "`Report.to_json` or `flatgauge measure --save` wrote."
            )
        estimates = {name: _read_record(Estimate, entry, name) for name, entry in measures.items()}
        complete = bool(contents.get("complete", True))
        return cls(estimates, _read_record(RunInfo, facts, "facts"), complete)

    def to_html(self, path: str | Path, *, name: str | None = None, **extras: Any) -> Path:
        """The report as one self-contained page: tables, pictures, provenance, a glossary.

        The page asks the network for nothing, and holds the same numbers as `to_json`.

        Args:
            path: Where to write it; an existing file is replaced.
            name: What the model is called there; None for its class.
            **extras: What else the page shows, such as `certificates`, `gauges`, `spectra` and
                `landscapes`: see `flatgauge.report.page.write_page`.

        Returns:
            The path.
        """
        from flatgauge.report.page import write_page

        remarks = (*(() if self.complete else (UNFINISHED,)), *extras.pop("remarks", ()))
        return write_page(path, {name or self.facts.model: self}, remarks=remarks, **extras)

    def plot(self, ax: Axes | None = None, *, measure: str | None = None) -> Axes:
        """Draw bars: the values of a measure layer by layer, or all measures next to each other.

        Args:
            ax: Where to draw; None for a new figure.
            measure: Whose layers to draw; None for all measures, on a logarithmic axis.

        Returns:
            The axes.

        Raises:
            ValueError: If the measure has no values of layers.
            KeyError: If it was not measured.
        """
        from flatgauge.report.layer_bars import report_axes

        return report_axes(self, measure, ax)


def _read_record(kind: type[T], entry: Any, where: str) -> T:
    """One record from its attributes, as plain numbers and strings."""
    if not isinstance(entry, dict):
        raise ValueError(f"`{where}` of this report is {entry!r}; it must hold named values.")
    found = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name in entry:
            found[item.name] = _read_value(str(item.type), item.name, entry[item.name])
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"`{where}` of this report lacks `{item.name}`; measure again.")
    return kind(**found)


def _read_value(kind: str, name: str, value: Any) -> Any:
    """One attribute: numbers that JSON cannot hold, tuples and tensors become what they were."""
    if kind.startswith("tuple"):
        return tuple(value)
    if kind.startswith("str"):
        return value
    value = from_plain(value)
    return {key: _read_tensor(part) for key, part in value.items()} if name == "units" else value


def _read_tensor(values: Any) -> Tensor:
    tensor = torch.tensor(values)
    # What was written with all digits is read with all digits.
    return torch.tensor(values, dtype=torch.float64) if tensor.is_floating_point() else tensor
