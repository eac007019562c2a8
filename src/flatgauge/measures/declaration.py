"""Declaring measures: from a function and what is claimed of it to a public function.

In: a function of a surface or of swept blocks, and facts. Out: a public function with checks,
signature and docstring, which is added to the registry. There are three ways: `@measure(...)`
before a function of a surface, `declare(...)` for a function of swept blocks (or of a surface) that
makes several measures of one family, and `grid_row(...)` in `measures.grid` for cells of the grid.
`declare` assembles the docstring: what the family's sections (`Definition:`, `Args:`, ...) leave
out is filled in from the facts, and from `OPTIONS`, which holds one text per option.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import require_generator
from flatgauge.measures.registry import (
    GROUPS,
    Family,
    Measure,
    ModelDefault,
    Needs,
    estimate_from_blocks,
    registry,
    sweep_blocks,
)
from flatgauge.surface.surface import LossSurface

P = ParamSpec("P")

_NOTHING = Needs()

#: Name and default of a source of randomness without which nothing can be computed.
_REQUIRED = ("generator", inspect.Parameter.empty)

#: The option that all measures of blocks have, and the sweep does not.
_LAYERS = inspect.Parameter(
    "layers",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation="str | Sequence[str] | None",
)

#: What an option means wherever a family does not say more.
OPTIONS = {
    "surface": "Where to measure.",
    "layers": "Glob patterns of the layers to take; None for all.",
    "parameters": '``"all"`` trainable ones, or the weights of ``"layers"`` only.',
    "surrogate": '``"normalized_cross_entropy"``, or None for the surface\'s own loss.',
    "all_columns": "Whether to be exact also with 64 or more outputs.",
    "probes": "Hessian products for what is not exact.",
    "generator": "Source of randomness, required where not everything is exact.",
}

#: What every measure of swept blocks costs, returns and raises.
_OF_BLOCKS = """
Cost:
    One sweep, exact for layers in which the output is linear (with 64 or more outputs: the
    largest factors and random combinations, unless ``all_columns``). The others take Hessian
    products.

Returns:
    The estimate with every layer's value.

Raises:
    ValueError: If an option is unknown, the model has no layers, a pattern matches none, or a
        generator is needed and missing.
"""

_ORDER = ["Definition", "Invariance", "Cost", "Reference", "Args", "Returns", "Raises", "Example"]

#: A name that a section lists, with the text on it.
_ENTRY = re.compile(r"(?m)^    (\w+): (.+(?:\n {8}.+)*)")


def measure(
    *,
    symbol: str,
    paper: str,
    geometry: str,
    functional: str,
    invariant_to: Iterable[str],
    cost: str,
    needs: Needs | Callable[[Mapping[str, Any]], Needs] = _NOTHING,
    not_with: Mapping[tuple[str, Any], Iterable[str]] | None = None,
    kind: str = "curvature",
    model_defaults: Mapping[str, ModelDefault] | None = None,
) -> Callable[
    [Callable[Concatenate[LossSurface, P], Estimate]],
    Callable[Concatenate[LossSurface, P], Estimate],
]:
    """Declare a function of a surface to be a measure.

    The first sentence of its docstring is its definition in one line. The declared function
    checks its first argument and fills in what every measure reports the same way: time and
    Hessian products.

    Args:
        symbol: How papers write it.
        paper: Where it comes from.
        geometry: How distance is measured around the point.
        functional: What is asked of the loss in that geometry.
        invariant_to: The groups of rewritings that leave it unchanged.
        cost: In passes over the data.
        needs: What it can share with other measures, if need be as a function of the options.
        not_with: By option and value, the claims that do not hold with it.
        kind: What it is, one of `KINDS`.
        model_defaults: For options whose default follows the model, how to compute it.

    Returns:
        The decorator.

    Raises:
        TypeError: If `needs` is neither a `Needs` nor a function of the options.
    """
    if not (isinstance(needs, Needs) or callable(needs)):
        raise TypeError(
            f"`needs` must be a `flatgauge.measures.Needs` or a function of the options that "
            f"returns one, but got {needs!r}; write `Needs(parts=frozenset({{'trace'}}))`."
        )
    family = Family(
        paper=paper,
        geometry=geometry,
        functional=functional,
        invariant_to=frozenset(invariant_to),
        cost=cost,
        requires=needs,
        not_with={key: frozenset(lost) for key, lost in (not_with or {}).items()},
        kind=kind,
        model_defaults=model_defaults or {},
    )

    def register(
        function: Callable[Concatenate[LossSurface, P], Estimate],
    ) -> Callable[Concatenate[LossSurface, P], Estimate]:
        summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        measuring = functools.update_wrapper(_add_facts(function.__name__, function), function)
        _register(family, function.__name__, symbol, summary, measuring)
        return measuring

    return register


def declare(
    compute: Callable[..., Estimate],
    family: Family,
    *,
    name: str,
    symbol: str,
    summary: str,
    docs: str = "",
    **fixed: Any,
) -> Callable[..., Estimate]:
    """Declare a function, with some of its arguments fixed, to be a measure of a family.

    Args:
        compute: Of a surface or, if its first argument is called `blocks`, of swept blocks. The
            keyword arguments that are not fixed are options of the measure; one called
            `surrogate` names the loss that is swept, and a `generator` without a default is
            required: users who leave it out get an error that says how to make one.
        family: What the measure has in common with others.
        name: Its name.
        symbol: How papers write it.
        summary: Its definition in one sentence.
        docs: Sections of its docstring, in addition to those of the family.
        **fixed: Arguments.

    Returns:
        The measure: a function of a surface, with a signature and a docstring.
    """
    first, *rest = inspect.signature(compute).parameters.values()
    own = [option for option in rest if option.name not in fixed]
    required = [option for option in own if (option.name, option.default) == _REQUIRED]
    if required:  # Users may leave it out, and get an error that helps.
        source = required[0].replace(default=None, annotation="Generator | None")
        own = [source if option in required else option for option in own]
    surface, _, _, _, *of_sweep = inspect.signature(sweep_blocks).parameters.values()
    of_blocks = first.name == "blocks"
    options = [*own, _LAYERS, *of_sweep] if of_blocks else own
    signature = inspect.Signature([surface, *options], return_annotation="Estimate")

    names = [option.name for option in own]
    computing = functools.partial(compute, **fixed)
    from_blocks = functools.partial(estimate_from_blocks, computing, names)

    def function(surface: LossSurface, /, *args: Any, **given: Any) -> Estimate:
        try:
            bound = signature.bind(surface, *args, **given)
        except TypeError as error:
            raise TypeError(f"`{name}`: {error}") from None
        bound.apply_defaults()
        chosen = {key: bound.arguments[key] for key in list(signature.parameters)[1:]}
        if required:
            instead = "call `fg.measure(surface, seed=0)`"
            require_generator(chosen["generator"], caller=f"{name}(surface)", otherwise=instead)
        if not of_blocks:
            return compute(surface, **fixed, **chosen)
        blocks = sweep_blocks(
            surface,
            registry[name].needs(chosen),
            surrogate=chosen.get("surrogate"),
            probe_sizes=family.probe_sizes,
            **{option.name: chosen[option.name] for option in of_sweep},
        )
        return from_blocks(blocks, **chosen)

    measuring: Any = functools.update_wrapper(_add_facts(name, function), compute)
    measuring.__name__ = measuring.__qualname__ = name
    measuring.__signature__ = signature
    measuring.__annotations__ = {option.name: option.annotation for option in [surface, *options]}
    measuring.__doc__ = assemble_docstring(
        summary,
        [_OF_BLOCKS, family.docs, docs] if of_blocks else [family.docs, docs],
        family,
        signature,
        names={"name": name, **{key: str(value) for key, value in fixed.items()}},
    )
    shared = from_blocks if of_blocks and family.probe_sizes is None else None
    return _register(family, name, symbol, summary, measuring, shared)


def docstring_sections(*texts: str) -> dict[str, str]:
    """The Google sections of texts by title: later ones replace earlier ones, but `Args` add up."""
    found: dict[str, str] = {}
    for text in texts:
        _, *parts = re.split(r"(?m)^(\w+):\n", inspect.cleandoc(text))
        for title, body in zip(parts[::2], parts[1::2], strict=True):
            earlier = f"{found[title]}\n" if title == "Args" and title in found else ""
            found[title] = earlier + body.strip("\n").rstrip()
    return found


def assemble_docstring(
    summary: str,
    texts: Iterable[str],
    family: Family,
    signature: inspect.Signature,
    names: Mapping[str, str],
) -> str:
    """The docstring of a measure, of sections and facts; `names` replace ``<key>`` in the texts."""
    found = {"Cost": _paragraph(f"{family.cost[0].upper()}{family.cost[1:]}.")}
    found |= docstring_sections(*texts)
    claims = [group for group in GROUPS if group in family.invariant_to]
    found["Invariance"] = _paragraph(f"{', '.join(claims)}. {found.get('Invariance', '')}")
    found["Reference"] = _paragraph(family.reference)
    options = OPTIONS | dict(re.findall(_ENTRY, found.get("Args", "")))
    found["Args"] = "\n".join(
        _paragraph(f"{option}: {options[option]}", hanging=True) for option in signature.parameters
    )
    body = "\n\n".join(f"{title}:\n{found[title]}" for title in _ORDER if found.get(title))
    for key, text in names.items():
        body = body.replace(f"<{key}>", text)
    return f"{summary}\n\n{body}\n"


def _paragraph(text: str, *, hanging: bool = False) -> str:
    """A text in lines of an indented section."""
    return textwrap.fill(
        " ".join(text.split()),
        96,
        initial_indent=" " * 4,
        subsequent_indent=" " * (8 if hanging else 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _add_facts(
    name: str, function: Callable[Concatenate[LossSurface, P], Estimate]
) -> Callable[Concatenate[LossSurface, P], Estimate]:
    """The function with what all measures check and report: the surface, time and products."""

    def measuring(surface: LossSurface, /, *args: P.args, **kwargs: P.kwargs) -> Estimate:
        if not isinstance(surface, LossSurface):
            raise TypeError(
                f"`{name}` measures a LossSurface, but got a {type(surface).__name__}; make one "
                "with LossSurface(model, loss, data)."
            )
        start, matvecs = time.perf_counter(), surface.matvecs
        with surface.processes.scope(name):
            estimate = function(surface, *args, **kwargs)
        seconds, spent = time.perf_counter() - start, surface.matvecs - matvecs
        return replace(estimate, seconds=seconds, matvecs=spent)

    return measuring


def _register(
    family: Family,
    name: str,
    symbol: str,
    summary: str,
    function: Callable[..., Estimate],
    from_blocks: Callable[..., Estimate] | None = None,
) -> Callable[..., Estimate]:
    """Add a measure of a family to the registry, and return its function."""
    facts: dict[str, Any] = {"name": name, "symbol": symbol, "definition": summary}
    registry.add(Measure(**vars(family), **facts, function=function, from_blocks=from_blocks))
    return function
