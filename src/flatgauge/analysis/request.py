"""What is asked of a run, checked before it starts.

Names of measures with their options enter, `Request` records leave; also what to do with results
while they come in. Everything that a user may have got wrong is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatgauge.analysis.files import check_writable
from flatgauge.estimators.linalg import check_seed
from flatgauge.measures.registry import BALANCED, Measure, Needs, registry
from flatgauge.runtime.distributed import ProcessGroup
from flatgauge.surface.surface import LossSurface


@dataclass(frozen=True)
class Request:
    """A measure with the options that were given for it."""

    measure: Measure
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the measure."""
        return self.measure.name

    @property
    def claims(self) -> frozenset[str]:
        """What it claims to be invariant to."""
        return self.measure.claims(self.options)

    @property
    def needs(self) -> Needs:
        """What it can share with other measures of the same loss."""
        return self.measure.needs(self.options)

    def with_options(self, **options: Any) -> Request:
        """The same with further options."""
        return replace(self, options={**self.options, **options})


def validate_request(
    surface: Any,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None,
    gauge: str | None,
    seed: int,
) -> list[Request]:
    """Check the arguments of `fg.measure` before anything runs, and return its requests."""
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`surface` is a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    check_seed(seed)
    if gauge not in (None, "balanced"):
        raise ValueError(
            f"`gauge={gauge!r}` is unknown; use 'balanced', or None for the model as it is."
        )
    return resolve_measures(measures, balanced=gauge is not None)


def resolve_measures(
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None, *, balanced: bool = False
) -> list[Request]:
    """Look up the measures asked for (all for None or ``"all"``), and check their options."""
    if isinstance(measures, str) and measures != "all":
        raise TypeError(f"`measures={measures!r}` is one string; pass a list: [{measures!r}].")
    if measures is None or measures == "all":
        measures = [item.name for item in registry]
    if not isinstance(measures, Iterable):
        raise TypeError(f"`measures={measures!r}` must be a list of names, or None for all.")
    named = list(measures.items() if isinstance(measures, Mapping) else ((n, {}) for n in measures))
    if not named:
        raise ValueError("`measures` is empty; name at least one, or pass None for all.")
    requests: dict[str, Request] = {}
    for name, options in named:
        prefix = BALANCED if balanced and not str(name).startswith(BALANCED) else ""
        item = registry[prefix + name if prefix else name]
        if not isinstance(options, Mapping):
            raise TypeError(f"the options of `{name}` are {options!r}; pass a dict, or {{}}.")
        unknown = sorted(set(options) - set(item.options))
        if unknown:
            raise ValueError(
                f"`{name}` has no option {', '.join(map(repr, unknown))}; its options are "
                f"{', '.join(item.options)}."
            )
        for key, value in options.items():
            item.check_option(key, value)
        if item.name in requests:
            raise ValueError(f"`{item.name}` is asked for twice; a report has one number of each.")
        requests[item.name] = Request(item, dict(options))
    return list(requests.values())


def result_callback(save: Any, processes: ProcessGroup) -> Callable[[Any], object] | None:
    """What to call with each result: `save`, a writer of JSON (on the first process), or None."""
    if save is None or callable(save):
        keep: Callable[[Any], object] | None = save
        return keep
    if not isinstance(save, (str, Path)):
        raise TypeError(f"`save={save!r}` must be the path of a file, or a function.")
    if processes.rank:
        return None
    place = check_writable(save)
    return lambda result: result.to_json(place)
