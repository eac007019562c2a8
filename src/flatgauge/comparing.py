"""Compare models: the same measures of each, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flatgauge.asking import as_keeper, checked_request
from flatgauge.measures import Measure
from flatgauge.measuring import report_of
from flatgauge.nested import tensors
from flatgauge.progress import Progress, shown
from flatgauge.report import Comparison, Report
from flatgauge.surface import LossSurface, shared_processes


def compare(
    surfaces: Mapping[str, LossSurface],
    *,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    gauge: str | None = None,
    seed: int = 0,
    progress: Progress | bool = False,
    save: str | Path | Callable[[Comparison], object] | None = None,
) -> Comparison:
    """Measure several models alike and say which is flatter.

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
        TypeError: If `surfaces` is no mapping from names to surfaces.
        ValueError: If there are fewer than two, or a measure, an option or a gauge does not exist.

    Example:
        >>> from flatgauge.examples import two_weights
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
    requests = [checked_request(surface, measures, gauge, seed) for surface in surfaces.values()]
    reports: dict[str, Report] = {}
    processes = shared_processes(surfaces.values())
    with processes.together("compare"), shown(progress, *surfaces.values()) as listener:
        keep, remarks = as_keeper(save, processes), _shape_remarks(surfaces)
        wanted = [
            (item, options | _shared(item, options, surfaces)) for item, options in requests[0]
        ]
        for number, (name, surface) in enumerate(surfaces.items()):

            def so_far(report: Report, name: str = name) -> None:
                reports[name] = report
                if keep is not None:
                    done = len(reports) == len(surfaces) and report.complete
                    keep(Comparison(dict(reports), remarks, complete=done))

            told = _told(listener, name, number, len(surfaces))
            report_of(surface, wanted, seed=seed, strict=False, progress=told, keep=so_far)
            surface.release()  # The next model needs the memory that this one's graphs take.
    return Comparison(reports, remarks)


def _check(surfaces: Any) -> None:
    """Refuse what is no mapping from names to two or more surfaces."""
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


def _shared(
    item: Measure, options: Mapping[str, Any], surfaces: Mapping[str, LossSurface]
) -> dict[str, float]:
    """The smallest of the models' defaults, for options whose default follows the model."""
    given = {**item.options, **options}
    shared = {}
    for key, default in item.model_defaults.items():
        if given[key] is not None:
            continue
        found = []
        for surface in surfaces.values():
            # A model without one cannot be measured this way, and its report says why.
            with suppress(ValueError, RuntimeError, MemoryError):
                compute = partial(default, surface, given)
                found.append(surface.processes.attempt(item.name, compute))
            surface.release(lasting=False)
        known = [value for value in found if value is not None]
        if known:
            shared[key] = min(known)
    return shared


def _told(listener: Progress, model: str, number: int, models: int) -> Progress:
    """Progress within one model as progress of all."""

    def tell(measure: str, done: int, total: int) -> None:
        listener(f"{model}: {measure}", number * total + done, models * total)

    return tell


def _shape_remarks(surfaces: Mapping[str, LossSurface]) -> tuple[str, ...]:
    """Say whether the models see samples of other shapes."""
    shapes = {name: _shapes(surface) for name, surface in surfaces.items()}
    if len({str(shape) for shape in shapes.values()}) == 1:
        return ()
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return (f"samples of different shapes: {listed}",)


def _shapes(surface: LossSurface) -> list[tuple[int, ...]]:
    """The shapes of the tensors of one sample."""
    batch = surface.objective.example(1)
    return [tuple(tensor.shape) for tensor in tensors((batch.inputs, batch.target))]
