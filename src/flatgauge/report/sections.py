"""Sections of a page: what to know first, where numbers come from, the gauge, the glossary.

Reports, certificates and gauge groups enter, by name of the model; records and tables leave that
the templates write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.formatting import kind
from flatgauge.measures import registry
from flatgauge.measures.registry import GROUPS, Measure
from flatgauge.report.formulas import mathml, unicode_formula
from flatgauge.report.tables import Cell, Column, Table, number_cell
from flatgauge.runtime.resources import duration
from flatgauge.symmetry.gauge import GaugeGroup, ScaledTensor, ScalePattern

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate
    from flatgauge.analysis.measurement import Report, RunInfo

#: More patterns than this are counted, not listed; more tensors are counted in a cell.
MOST_PATTERNS = 200
_MOST_TENSORS = 6


# -- caveats ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caveat:
    """Something to know, and the models or measures it holds for; none for the whole page."""

    text: str
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Caveats:
    """What holds for all numbers, and what holds for single ones.

    Attributes:
        run: Of the runs: no minimum, pinned ops, what was dropped or did not converge.
        notes: Of single numbers, in the order of their footnotes.
    """

    run: list[Caveat]
    notes: list[Caveat]

    def number_of(self, text: str) -> int:
        """The number of the footnote with this text, from 1."""
        return 1 + [caveat.text for caveat in self.notes].index(text)


def caveats_of(
    reports: Mapping[str, Report],
    certificates: Mapping[str, Certificate],
    gauges: Mapping[str, GaugeGroup],
) -> Caveats:
    """Collect what a page must warn of, each thing once."""
    run: dict[str, dict[str, None]] = {}
    single: dict[str, dict[str, None]] = {}
    several = len(reports) > 1
    for model, report in reports.items():
        for note in report.facts.notes:
            run.setdefault(note, {})[model] = None
        for mark, text in (("failed", "could not be measured"), ("not converged", "not converged")):
            names = [name for name, e in report.items() if kind(e) == mark]
            if names:
                run.setdefault(f"{text}: {', '.join(names)}", {})[model] = None
        for name, estimate in report.items():
            for note in estimate.notes:
                single.setdefault(note, {})[f"{model}: {name}" if several else name] = None
    for name, certificate in certificates.items():
        for row in certificate.failures:
            text = f"the certificate failed: {row.measure} moves under {row.group}"
            run.setdefault(text, {})[name] = None
    pins = [(name, pin) for name, certificate in certificates.items() for pin in certificate.pinned]
    pins += [(name, str(pin)) for name, gauge in gauges.items() for pin in gauge.pinned]
    for name, pin in pins:
        run.setdefault(f"pinned: {pin}", {})[name] = None
    for name, certificate in certificates.items():
        for note in certificate.notes:
            run.setdefault(note, {})[name] = None
    return Caveats(
        [Caveat(text, tuple(holders) if several else ()) for text, holders in run.items()],
        [Caveat(text, tuple(holders)) for text, holders in single.items()],
    )


def shorten(holders: Sequence[str], most: int = 4) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(holders[:most])
    return shown + (f" and {len(holders) - most} more" if len(holders) > most else "")


# -- provenance -------------------------------------------------------------------------------


def provenance_table(facts: Mapping[str, Mapping[str, Cell]]) -> Table:
    """Facts by what they are of, as a table with a row for each; empty ones are left out."""
    names = dict.fromkeys(name for found in facts.values() for name in found)
    rows = (
        (Cell(name), *(found.get(name, Cell("")) for found in facts.values())) for name in names
    )
    shown = tuple(row for row in rows if any(cell.text for cell in row[1:]))
    return Table("Where the numbers come from.", (Column("fact"), *map(Column, facts)), shown)


def run_facts(facts: RunInfo) -> dict[str, Cell]:
    """The facts of a run, by name."""
    software = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    written: dict[str, str | Cell] = {
        "model": facts.model,
        "trainable parameters": f"{facts.parameters:,}",
        "data": facts.data,
        "samples": f"{facts.samples:,}",
        "loss": facts.loss_name,
        "value of the loss": number_cell(facts.loss),
        "length of the gradient": number_cell(facts.gradient_norm, f"{facts.gradient_norm:.3g}"),
        "weight decay": f"{facts.weight_decay:g}" if facts.weight_decay else "",
        "precision": facts.dtype,
        "device": facts.device,
        "Hessian products": facts.products or "",
        "sweeps": facts.sweep or "",
        "seed": str(facts.seed),
        "time": "" if facts.seconds is None else duration(facts.seconds),
        "finished": facts.finished,
        "software": software,
        "platform": f"{facts.platform}, {facts.threads} threads" if facts.platform else "",
    }
    return {name: Cell(item) if isinstance(item, str) else item for name, item in written.items()}


# -- the gauge --------------------------------------------------------------------------------


def gauge_tables(gauge: GaugeGroup) -> list[Table]:
    """Which tensors share a scale, and which ops allow none."""
    patterns = gauge.patterns()
    title = f"{gauge.dim:,} independent scales, moving {len(gauge.names)} tensors."
    if not gauge.dim:
        title = "No scale is free: as far as scales go, this model can be written in one way only."
    columns = (
        Column("scales of the output of"),
        Column("scales", "right"),
        Column("multiply"),
        Column("divide"),
    )
    more = len(patterns) - MOST_PATTERNS
    scales = Table(
        title,
        columns if patterns else (),
        tuple(_pattern_row(pattern) for pattern in patterns[:MOST_PATTERNS]),
        (f"and {more} more; the JSON has all.",) if more > 0 else (),
        style="",
    )
    if not gauge.pinned:
        return [scales]
    pins = tuple(str(pin) for pin in gauge.pinned)
    return [scales, Table("Ops that allow no scaling of what they read:", notes=pins, style="")]


def gauge_contents(gauge: GaugeGroup) -> dict[str, Any]:
    """A gauge group as plain contents: dim, patterns of scales, what is pinned."""
    patterns = [
        {"site": p.site, "scales": p.scales, "moved": [vars(moved) for moved in p.moved]}
        for p in gauge.patterns()
    ]
    pinned = [str(pin) for pin in gauge.pinned]
    return {"dim": gauge.dim, "patterns": patterns, "pinned": pinned}


def _pattern_row(pattern: ScalePattern) -> tuple[Cell, ...]:
    """What a scale belongs to, how many there are, what they multiply and divide."""
    times = [_tensor_text(moved) for moved in pattern.moved if moved.power > 0]
    over = [_tensor_text(moved) for moved in pattern.moved if moved.power < 0]
    return (
        Cell(pattern.site),
        Cell(str(pattern.scales), pattern.scales),
        Cell(shorten(times, _MOST_TENSORS)),
        Cell(shorten(over, _MOST_TENSORS)),
    )


def _tensor_text(moved: ScaledTensor) -> str:
    """A tensor and its axis, with the exponent where it is not one."""
    axis = "" if moved.axis is None else f" [axis {moved.axis}]"
    power = "" if abs(moved.power) == 1 else f"^{abs(moved.power):g}"
    return f"{moved.name}{axis}{power}"


# -- glossary ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlossaryEntry:
    """What a measure is: its formula, as MathML and as text, and what it declares."""

    name: str
    symbol: str
    definition: str
    mathml: str | None
    formula: str
    invariant_to: list[str]
    geometry: str
    functional: str
    cost: str
    paper: str


def glossary_of(names: Iterable[str]) -> list[GlossaryEntry]:
    """Explain the measures that the registry knows, in its order, balanced ones last."""
    wanted = [name for name in dict.fromkeys(names) if name in registry]
    order = {item.name: place for place, item in enumerate(registry)}
    wanted.sort(key=lambda name: order.get(name, len(order)))
    return [_entry(registry[name]) for name in wanted]


def skeletons_of(reports: Mapping[str, Report]) -> dict[str, str]:
    """By measure the skeletons that its values were taken with, where it has one."""
    found: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, estimate in report.items():
            if "skeleton" in estimate.options:
                found.setdefault(name, {})[str(estimate.options["skeleton"])] = None
    return {name: " or ".join(names) for name, names in found.items()}


def glossary_links(names: Iterable[str], skeletons: Mapping[str, str]) -> dict[str, str]:
    """The measures that a page links to its glossary, each with its skeleton or ""."""
    return {entry.name: skeletons.get(entry.name, "") for entry in glossary_of(names)}


def formula_of(item: Measure) -> str:
    """The first formula in a measure's docstring, "" where it has none."""
    found = re.search(r"\.\. math:: (.*?)(?:\n\n|\Z)", inspect.getdoc(item.function) or "", re.S)
    return " ".join(found[1].split()) if found else ""


def _entry(item: Measure) -> GlossaryEntry:
    latex = formula_of(item)
    return GlossaryEntry(
        name=item.name,
        symbol=item.symbol,
        definition=item.definition,
        mathml=mathml(latex) if latex else None,
        formula=unicode_formula(latex),
        invariant_to=[group for group in GROUPS if group in item.invariant_to],
        geometry=item.geometry,
        functional=item.functional,
        cost=item.cost,
        paper=item.paper,
    )
