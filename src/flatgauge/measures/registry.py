"""Measures declare what they are; everything that lists or checks measures reads it here.

In: records of measures (`flatgauge.measures.declaration` makes them). Out: `registry`, all measures
by name, with the variants and the measures of other packages; `catalogue`, a table of them; and
`sweep_blocks`, one sweep for what several measures need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Generator

from flatgauge.curvature.block_diagonal import (
    DEFAULT_PROBES,
    ProbeSizes,
    block_curvature,
    surrogate_notes,
    with_surrogate,
)
from flatgauge.curvature.blocks import Blocks
from flatgauge.estimators.estimate import Estimate
from flatgauge.runtime.isolation import NameClashError, Plugins
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd

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

#: The groups that scale units; who is invariant to them does not see how a network is scaled.
RESCALINGS = frozenset({"layerwise", "nodewise", "rows"})

#: What a measure is: second derivatives of the loss, its largest or mean rise nearby, or a size of
#: the network that no change of the loss enters. The last is not flatness and has no vote on it.
KINDS = ("curvature", "worst case", "expectation", "capacity")

#: What is measured on the balanced form of the model has this before its name.
BALANCED = "balanced:"

#: The kinds of options that are checked, by how they are declared, and what they are called.
_TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "a text"),
}


@dataclass(frozen=True)
class Needs:
    """What a measure can share with others of the same loss, so that it is computed once.

    Attributes:
        parts: Parts of the exact sweep; see `curvature.sweep.accumulate.PARTS`.
        estimates: Whether the parts that cannot be swept are to be estimated.
        eigenvalues: Whether the sweep is to keep what the blocks' eigenvalues are computed from.
        products: Whether it shares Hessian products: the top eigenvector.
    """

    parts: frozenset[str] = frozenset()
    estimates: bool = False
    eigenvalues: bool = False
    products: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(Needs)))

    def __bool__(self) -> bool:
        return self != Needs()


@dataclass(frozen=True, kw_only=True)
class Family:
    """What measures of one family declare together.

    Attributes:
        paper: Where they come from.
        reference: The keys of papers in the bibliography.
        geometry: How distance is measured around the point.
        functional: What is asked of the loss in that geometry.
        invariant_to: The groups of rewritings that leave them unchanged; see `GROUPS`.
        cost: In passes over the data.
        requires: What can be shared with other measures, if need be as a function of the options.
        probe_sizes: How large the random vectors are that estimate what cannot be swept, where the
            estimates of other measures will not do.
        not_with: By option and value, the claims that do not hold with it.
        kind: What they are, one of `KINDS`.
        model_defaults: For options whose default follows the model, what it is for a surface and
            the other options; None where it does not. A comparison uses the smallest for all.
        docs: Sections of their docstrings.
    """

    invariant_to: frozenset[str]
    paper: str = ""
    reference: str = ""
    geometry: str = ""
    functional: str = ""
    cost: str = ""
    requires: Needs | Callable[[Mapping[str, Any]], Needs] = Needs()
    probe_sizes: ProbeSizes | None = None
    not_with: Mapping[tuple[str, Any], frozenset[str]] = field(default_factory=dict)
    kind: str = "curvature"
    model_defaults: Mapping[str, ModelDefault] = field(default_factory=dict)
    docs: str = ""


@dataclass(frozen=True, kw_only=True)
class Measure(Family):
    """What one measure declares about itself.

    Attributes:
        name: Its name, and that of its function in `flatgauge.measures`.
        symbol: How papers write it.
        definition: One sentence.
        function: The function itself, of a surface and options.
        from_blocks: The same of blocks that `sweep_blocks` made, and options; None where it takes
            more than these, or estimates of its own.
        gauge: ``"balanced"`` if it is measured on the balanced form of the model.
    """

    name: str
    symbol: str = ""
    definition: str = ""
    function: Callable[..., Estimate]
    from_blocks: Callable[..., Estimate] | None = None
    gauge: str | None = None

    def claims(self, options: Mapping[str, Any]) -> frozenset[str]:
        """What it claims to be invariant to under some options."""
        lost = [
            groups
            for (key, value), groups in self.not_with.items()
            if (key in options) and options[key] == value
        ]
        return self.invariant_to.difference(*lost)

    def needs(self, options: Mapping[str, Any] | None = None) -> Needs:
        """What it can share with others under some options; the others are at their defaults."""
        chosen = self.options | dict(options or {})
        return self.requires if isinstance(self.requires, Needs) else self.requires(chosen)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword options of its function with their defaults, but for the generator."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.name != "generator"}

    def check_option(self, key: str, value: Any) -> None:
        """Refuse an option of another type than is declared: a text for a number, half a step.

        Args:
            key: One of `options`.
            value: What is to be passed.

        Raises:
            ValueError: If it is of another type.
        """
        parameter = inspect.signature(self.function).parameters[key]
        annotation = parameter.annotation
        declared = str(getattr(annotation, "__name__", annotation)).split(" | ")
        types = [name for name in declared if name != "None"]
        if not set(types) <= set(_TYPES) or (value is None and "None" in declared):
            return
        for name in types:
            allowed, _ = _TYPES[name]
            if isinstance(value, allowed) and isinstance(value, bool) <= (name == "bool"):
                return
        needed = " or ".join(_TYPES[name][1] for name in types)
        raise ValueError(f"`{self.name}` needs {needed} as `{key}`, but got {value!r}.")

    @property
    def votes(self) -> bool:
        """Whether it measures flatness and so counts for which model is flattest."""
        return self.kind != "capacity"

    @property
    def draws(self) -> bool:
        """Whether it takes a source of randomness."""
        return "generator" in inspect.signature(self.function).parameters


def sweep_blocks(
    surface: LossSurface,
    needs: Needs,
    *,
    surrogate: str | None = None,
    probe_sizes: ProbeSizes | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Blocks:
    """Sweep once for all that measures of one loss need, and note what the loss leaves out.

    Args:
        surface: Where to measure.
        needs: Of one measure, or the union of several.
        surrogate: The loss, None for the surface's own.
        probe_sizes: As `Family` has them.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for what is not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The blocks, for `Measure.from_blocks`.
    """
    notes, surface = surrogate_notes(surface, surrogate), with_surrogate(surface, surrogate)
    blocks = block_curvature(
        surface,
        needs.parts,
        all_columns=all_columns,
        estimate=needs.estimates or probe_sizes is not None,
        probes=probes,
        keep_factors=needs.eigenvalues,
        probe_sizes=probe_sizes,
        generator=generator,
    )
    return replace(blocks, notes=tuple(notes))


def estimate_from_blocks(
    compute: Callable[..., Estimate], options: Sequence[str], blocks: Blocks, /, **given: Any
) -> Estimate:
    """Compute a measure of the layers asked for, with those of the options that it has itself."""
    chosen = {name: given[name] for name in options if name in given}
    return compute(blocks.select(given.get("layers")), **chosen)


class Registry:
    """All measures by name, in the order in which they were declared.

    Measures of other packages (entry points `flatgauge.measures`) are loaded on first use.

    Attributes:
        variants: By the prefix of a name, how to make the variant of a measure.
    """

    def __init__(self) -> None:
        self._declared: dict[str, Measure] = {}
        self._plugins = Plugins("flatgauge.measures", self._check_plugin)
        self.variants: dict[str, Callable[[Measure], Measure]] = {}

    def add(self, measure: Measure) -> None:
        """Add a measure.

        Args:
            measure: The measure.

        Raises:
            NameClashError: If the name is taken.
            ValueError: If a claimed group or the kind does not exist.
        """
        if measure.name in self._declared:
            raise NameClashError(f"a measure named `{measure.name}` exists already; rename one.")
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
        self._declared[measure.name] = measure

    @property
    def packages(self) -> dict[str, str]:
        """The package, with its version, of every measure that another package brings."""
        return self._plugins.packages()

    @property
    def _measures(self) -> dict[str, Measure]:
        """The measures, with those of other packages."""
        self._plugins.packages()
        return self._declared

    def _check_plugin(self, name: str, loaded: Any) -> list[str]:
        """Refuse an entry point that has declared no measure of its name."""
        if name not in self._declared:
            raise TypeError(f"loading {loaded!r} has declared no measure named `{name}`.")
        return [name]

    def __getitem__(self, name: str) -> Measure:
        if not isinstance(name, str):
            raise ValueError(
                f"`{name!r}` is not the name of a measure; pass names such as 'rho_max'."
            )
        for prefix, variant in self.variants.items():
            base = name.removeprefix(prefix)
            if base != name and not base.startswith(prefix):
                return variant(self[base])
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


def catalogue() -> pd.DataFrame:
    """List every measure with what it declares about itself.

    Returns:
        One row per measure: name, symbol, paper, definition, kind, geometry, functional,
        invariant_to, cost, options, package.
    """
    import pandas as pd

    columns = ("name", "symbol", "paper", "definition", "kind", "geometry", "functional")
    rows = [
        {
            **{column: getattr(item, column) for column in columns},
            "invariant_to": ", ".join(group for group in GROUPS if group in item.invariant_to),
            "cost": item.cost,
            "options": ", ".join(f"{key}={value!r}" for key, value in item.options.items()),
            "package": registry.packages.get(item.name, "flatgauge"),
        }
        for item in registry
    ]
    return pd.DataFrame(rows)
