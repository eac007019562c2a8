"""Measures declare what they are; everything that lists or checks measures reads it here."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from flatgauge.estimators import Estimate
from flatgauge.geometry.balanced import balanced_twin
from flatgauge.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd

P = ParamSpec("P")

#: The default of an option on a surface, given the other options.
ModelDefault = Callable[[LossSurface, Mapping[str, Any]], float | None]

#: The ways of rewriting a network that a measure can be blind to.
GROUPS = {
    "layerwise": "one positive factor per layer, with product one",
    "nodewise": "one positive factor per hidden unit: what enters times c, what leaves over c",
    "rows": "one positive factor per unit of a single layer",
    "permutation": "the hidden units of a layer in another order",
    "output_scale": "all outputs times one positive factor",
    "output_shift": "all outputs plus one number",
    "branches": "weight moved between parallel identical branches",
}

#: What a measure is: second derivatives of the loss, its largest or mean rise nearby, or a size of
#: the network that no change of the loss enters. The last is not flatness and has no vote on it.
KINDS = ("curvature", "worst case", "expectation", "capacity")

#: What is measured on the balanced form of the model has this before its name.
BALANCED = "balanced:"

#: The kinds of options that are checked, by how they are declared, and what they are called.
_KINDS: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "a text"),
}

#: The parts of the sweep that are of units: what enters them, and what leaves them.
_SIDES = ("incoming", "outgoing")

#: What balancing makes every measure invariant to, and what it leaves as it is.
_FIXED, _KEPT = {"layerwise", "nodewise", "rows"}, {"permutation", "output_shift"}


@dataclass(frozen=True)
class Measure:
    """What a measure declares about itself.

    Attributes:
        name: Its name, and that of its function in `flatgauge.measures`.
        symbol: How papers write it.
        paper: Where it comes from.
        definition: One sentence.
        geometry: How distance is measured around the point.
        functional: What is asked of the loss in that geometry.
        invariant_to: The groups of rewritings that leave it unchanged; see `GROUPS`.
        cost: In passes over the data.
        needs: What it shares with other measures: parts of the sweep ("trace", "diagonal", "own",
        "incoming", "outgoing", "relative", "normalized"), "estimates" of what cannot be swept,
        "eigenvalues" of blocks, or "products". Where it has an option `surrogate`, it shares
        with those that measure the same loss.
        function: The function itself.
        gauge: ``"balanced"`` if it is measured on the balanced form of the model.
        given_up: By option and value, the claims that do not hold with it.
        kind: What it is, one of `KINDS`.
        model_defaults: For options whose default follows the model, what it is for a surface and
        the other options; None where it does not. A comparison uses the smallest for all.
    """

    name: str
    symbol: str
    paper: str
    definition: str
    geometry: str
    functional: str
    invariant_to: frozenset[str]
    cost: str
    needs: tuple[str, ...]
    function: Callable[..., Estimate]
    gauge: str | None = None
    given_up: Mapping[tuple[str, Any], frozenset[str]] = field(default_factory=dict)
    kind: str = "curvature"
    model_defaults: Mapping[str, ModelDefault] = field(default_factory=dict)

    def claims(self, options: Mapping[str, Any]) -> frozenset[str]:
        """What it claims to be invariant to under some options."""
        lost = [
            groups
            for (key, value), groups in self.given_up.items()
            if (key in options) and options[key] == value
        ]
        return self.invariant_to.difference(*lost)

    def needed(self, options: Mapping[str, Any]) -> set[str]:
        """What it shares under some options: an option `side` chooses one of the sides of units."""
        side = (self.options | dict(options)).get("side")
        return {need for need in self.needs if need not in _SIDES or side in (None, need)}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options of its function with their defaults, but for the generator."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.name != "generator"}

    def check_option(self, key: str, value: Any) -> None:
        """Refuse an option of another kind than is declared: a text for a number, half a step.

        Args:
            key: One of `options`.
            value: What is to be passed.

        Raises:
            ValueError: If it is of another kind.
        """
        parameter = inspect.signature(self.function).parameters[key]
        annotation = parameter.annotation
        declared = str(getattr(annotation, "__name__", annotation)).split(" | ")
        kinds = [name for name in declared if name != "None"]
        if not set(kinds) <= set(_KINDS) or (value is None and "None" in declared):
            return
        for kind in kinds:
            allowed, _ = _KINDS[kind]
            if isinstance(value, allowed) and isinstance(value, bool) <= (kind == "bool"):
                return
        needed = " or ".join(_KINDS[kind][1] for kind in kinds)
        raise ValueError(f"`{self.name}` needs {needed} as `{key}`, but got {value!r}.")

    @property
    def votes(self) -> bool:
        """Whether it measures flatness and so counts for which model is flattest."""
        return self.kind != "capacity"

    @property
    def draws(self) -> bool:
        """Whether it takes a source of randomness."""
        return "generator" in inspect.signature(self.function).parameters


class Registry:
    """All measures by name, in the order in which they were declared."""

    def __init__(self) -> None:
        self._measures: dict[str, Measure] = {}

    def add(self, measure: Measure) -> None:
        """Take a measure in.

        Args:
            measure: The measure.

        Raises:
            ValueError: If the name is taken, or a claimed group or the kind does not exist.
        """
        if measure.name in self._measures:
            raise ValueError(f"a measure named `{measure.name}` exists already; rename one.")
        unknown = sorted(measure.invariant_to - GROUPS.keys())
        if unknown:
            raise ValueError(
                f"`{measure.name}` claims invariance to {', '.join(unknown)}; the groups are "
                f"{', '.join(GROUPS)}."
            )
        if measure.kind not in KINDS:
            raise ValueError(
                f"`{measure.name}` is of the kind {measure.kind!r}; the kinds are "
                f"{', '.join(KINDS)}."
            )
        self._measures[measure.name] = measure

    def __getitem__(self, name: str) -> Measure:
        if not isinstance(name, str):
            raise ValueError(f"`{name!r}` is no name of a measure; pass names such as 'rho_max'.")
        if name.startswith(BALANCED) and not name.removeprefix(BALANCED).startswith(BALANCED):
            return _at_balance(self[name.removeprefix(BALANCED)])
        if name not in self._measures:
            close = get_close_matches(name, self._measures, n=1)
            hint = f"Did you mean `{close[0]}`? " if close else ""
            raise ValueError(
                f"there is no measure `{name}`. {hint}The measures are {', '.join(self._measures)}."
            )
        return self._measures[name]

    def __contains__(self, name: object) -> bool:
        return str(name).removeprefix(BALANCED) in self._measures

    def __iter__(self) -> Iterator[Measure]:
        return iter(self._measures.values())

    def __len__(self) -> int:
        return len(self._measures)


registry = Registry()


def measure(
    *,
    symbol: str,
    paper: str,
    geometry: str,
    functional: str,
    invariant_to: Iterable[str],
    cost: str,
    needs: tuple[str, ...] = (),
    given_up: Mapping[tuple[str, Any], Iterable[str]] | None = None,
    kind: str = "curvature",
    model_defaults: Mapping[str, ModelDefault] | None = None,
) -> Callable[
    [Callable[Concatenate[LossSurface, P], Estimate]],
    Callable[Concatenate[LossSurface, P], Estimate],
]:
    """Declare a function of a surface to be a measure.

    The first sentence of its docstring is its definition in one line. The declared function
    checks its first argument and fills in what every measure reports the same way: time,
    products, and the surface's notes on how products were computed.

    Args:
        symbol: How papers write it.
        paper: Where it comes from.
        geometry: How distance is measured around the point.
        functional: What is asked of the loss in that geometry.
        invariant_to: The groups of rewritings that leave it unchanged.
        cost: In passes over the data.
        needs: What it shares with other measures.
        given_up: By option and value, the claims that do not hold with it.
        kind: What it is, one of `KINDS`.
        model_defaults: For options whose default follows the model, how to compute it.

    Returns:
        The decorator.
    """

    def declare(
        function: Callable[Concatenate[LossSurface, P], Estimate],
    ) -> Callable[Concatenate[LossSurface, P], Estimate]:
        @functools.wraps(function)
        def measured(surface: LossSurface, /, *args: P.args, **kwargs: P.kwargs) -> Estimate:
            if not isinstance(surface, LossSurface):
                raise TypeError(
                    f"`{function.__name__}` measures a LossSurface, but got a "
                    f"{type(surface).__name__}; make one with LossSurface(model, loss, data)."
                )
            start, matvecs = time.perf_counter(), surface.matvecs
            with surface.processes.together(function.__name__):
                estimate = function(surface, *args, **kwargs)
            return replace(
                estimate,
                seconds=time.perf_counter() - start,
                matvecs=surface.matvecs - matvecs,
            )

        registry.add(
            Measure(
                name=function.__name__,
                symbol=symbol,
                paper=paper,
                definition=_first_sentence(function),
                geometry=geometry,
                functional=functional,
                invariant_to=frozenset(invariant_to),
                cost=cost,
                needs=needs,
                function=measured,
                given_up={key: frozenset(lost) for key, lost in (given_up or {}).items()},
                kind=kind,
                model_defaults=model_defaults or {},
            )
        )
        return measured

    return declare


def _at_balance(item: Measure) -> Measure:
    """The measure of the balanced form: invariant to rescaling, whatever it was before."""

    @functools.wraps(item.function)
    def measured(surface: LossSurface, /, **options: Any) -> Estimate:
        twin, notes = balanced_twin(surface)
        estimate = item.function(twin, **options)
        surface.matvecs += estimate.matvecs
        return replace(estimate, notes=(*notes, *estimate.notes))

    # Another gauge is left behind by an output's scale or by merged branches, so that only what
    # does not see rescaling anyway stays invariant to these.
    kept = item.invariant_to if "nodewise" in item.invariant_to else item.invariant_to & _KEPT
    kept -= {"output_scale"}  # To rounding only: the balance moves by roots of the factor.
    return replace(
        item,
        name=BALANCED + item.name,
        definition=f"{item.definition.rstrip('.')}, of the balanced form of the model.",
        invariant_to=kept | _FIXED,
        function=measured,
        gauge="balanced",
    )


def _first_sentence(function: Callable[..., Any]) -> str:
    """The summary line of a docstring."""
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def catalogue() -> pd.DataFrame:
    """List every measure with what it declares about itself.

    Returns:
        One row per measure: name, symbol, paper, definition, kind, geometry, functional,
        invariant_to, cost, options.
    """
    import pandas as pd

    rows = [
        {
            "name": item.name,
            "symbol": item.symbol,
            "paper": item.paper,
            "definition": item.definition,
            "kind": item.kind,
            "geometry": item.geometry,
            "functional": item.functional,
            "invariant_to": ", ".join(group for group in GROUPS if group in item.invariant_to),
            "cost": item.cost,
            "options": ", ".join(f"{key}={value!r}" for key, value in item.options.items()),
        }
        for item in registry
    ]
    return pd.DataFrame(rows)
