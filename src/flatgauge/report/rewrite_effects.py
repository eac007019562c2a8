"""What moved when a network was written differently, and what did not.

Two reports of one function enter (`effects_between`), or a certificate (`certified_effects`).
Every measure's change is classified, put into a few characters, and grouped by what the measure
claims not to see.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flatgauge.analysis.ranking import INVARIANCE_CLASSES, by_invariance_class, claimed_groups
from flatgauge.estimators.estimate import Estimate
from flatgauge.report.tables import Cell
from flatgauge.report.views.report import value_cell
from flatgauge.symmetry.transforms import TRANSFORM_GROUPS

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate, CertificateRow
    from flatgauge.analysis.measurement import Report

#: Where before and after are the same number to the last bit.
STILL = "not by one bit"

#: A relative change below this is what rounding leaves; up to the second it is written as a
#: relative change, above as a ratio.
_ROUNDING, _SMALL = 1e-4, 1e-2


@dataclass(frozen=True)
class RewriteEffect:
    """One measure before and after.

    Attributes:
        change: How far it moved, as text.
        decades: The size of the logarithm of the ratio to base ten; 0 where it stood still, None
            where there is no ratio.
        how: What kind of change it is: "still", "rounding", "noise", "moved", "unmeasured".
        broken: Whether the measure claims not to move there.
    """

    measure: str
    before: Cell
    after: Cell
    change: str
    decades: float | None
    how: str
    detail: str = ""
    broken: bool = False


@dataclass(frozen=True)
class RewriteEffects:
    """All measures before and after, grouped by what they claim not to see.

    Attributes:
        columns: What the two values are called.
        groups: For each of `INVARIANCE_CLASSES`, its key, title and members.
        reach: The largest of all decades, for the length of bars.
    """

    title: str
    columns: tuple[str, str]
    caption: str
    groups: list[tuple[str, str, list[RewriteEffect]]]
    summary: list[str]
    reach: float


def effects_between(before: Report, after: Report, names: tuple[str, str]) -> RewriteEffects:
    """Compare the reports of one network written in two ways, which have these names."""
    found = {name: _effect(name, e, after[name]) for name, e in before.items() if name in after}
    claims = {name: claimed_groups(name, before[name].options) for name in found}
    caption = f"Every measure of {names[0]} and of {names[1]}, which is the same function."
    return _group_effects(f"{names[0]} → {names[1]}", names, caption, found, claims)


def certified_effects(certificate: Certificate) -> RewriteEffects:
    """How far transforms that keep every output pushed each measure of a certificate."""
    by_measure: dict[str, list[CertificateRow]] = {}
    for row in certificate.rows:
        if TRANSFORM_GROUPS[row.group].preserves_outputs and row.after is not None:
            by_measure.setdefault(row.measure, []).append(row)
    found = {name: _furthest(rows) for name, rows in by_measure.items()}
    claims = {name: [row.group for row in rows if row.claimed] for name, rows in by_measure.items()}
    title = "under every move that keeps all outputs"
    caption = (
        f"Every certified measure on {certificate.samples:,} samples, and the value furthest from "
        "it that the moves led to."
    )
    return _group_effects(title, ("as it is", "pushed to"), caption, found, claims)


def _furthest(rows: list[CertificateRow]) -> RewriteEffect:
    """A measure and its most different value under transforms that leave every output unchanged."""
    moved = [row for row in rows if row.verdict in ("moves", "FAILS")]
    furthest = max(moved or rows, key=_distance)
    assert furthest.after is not None
    found = _effect(furthest.measure, Estimate(furthest.before), Estimate(furthest.after))
    if moved or found.how == "unmeasured":
        return replace(found, broken=any(row.verdict == "FAILS" for row in rows))
    # Factors that are not powers of two round every number, also where it is invariant.
    bits = max((row.change or 0.0 for row in rows if row.change_any is not None), default=0.0)
    rest = max((row.change if row.change_any is None else row.change_any) or 0.0 for row in rows)
    if bits > 0:
        return replace(found, change=f"by {bits:.0e}, within its error", how="noise")
    noise = ", within its error" if rest > _ROUNDING else ""
    detail = f"other factors: {rest:.0e}{noise}" if rest else ""
    return replace(found, change=STILL, decades=0.0, how="still", detail=detail)


def _distance(row: CertificateRow) -> float:
    assert row.after is not None
    gone = abs(row.after - row.before)
    return -1.0 if math.isnan(gone) else gone


def _effect(name: str, before: Estimate, after: Estimate) -> RewriteEffect:
    """Classify the change of one measure."""
    old, new = value_cell(before), value_cell(after)
    a, b = before.value, after.value
    if math.isnan(a) or math.isnan(b):
        return RewriteEffect(name, old, new, "could not be measured", None, "unmeasured")
    if a == b:
        return RewriteEffect(name, old, new, STILL, 0.0, "still")
    relative = abs(b - a) / abs(a) if a and math.isfinite(a) else math.inf
    decades = abs(math.log10(abs(b)) - math.log10(abs(a))) if _have_ratio(a, b) else None
    if abs(b - a) <= 2 * math.hypot(before.error, after.error):
        text = f"by {relative:.0e}, within its error"
        return RewriteEffect(name, old, new, text, decades, "noise")
    if relative < _ROUNDING:
        return RewriteEffect(name, old, new, f"by {relative:.0e}", decades, "rounding")
    return RewriteEffect(name, old, new, _change_text(a, b, relative), decades, "moved")


def _change_text(before: float, after: float, relative: float) -> str:
    """How far a number moved that did move."""
    if not _have_ratio(before, after):
        return f"from {before:.3g} to {after:.3g}"
    if relative < _SMALL:
        return f"by {relative:.1%}"
    ratio = after / before
    return f"× {_ratio_text(ratio)}" if ratio > 1 else f"÷ {_ratio_text(1 / ratio)}"


def _have_ratio(one: float, other: float) -> bool:
    """Whether two numbers are finite and of one sign; their product may underflow."""
    same = one != 0 and other != 0 and (one > 0) == (other > 0)
    return same and math.isfinite(one) and math.isfinite(other)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 1e3 else f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.1e}"


def _group_effects(
    title: str,
    columns: tuple[str, str],
    caption: str,
    found: dict[str, RewriteEffect],
    claims: Mapping[str, Collection[str]],
) -> RewriteEffects:
    """All effects, first those of measures that may move."""
    classes = by_invariance_class(claims)
    groups: list[tuple[str, str, list[RewriteEffect]]] = [
        (key, INVARIANCE_CLASSES[key], [found[name] for name in classes[key]])
        for key in ("nothing", "units", "layers")
        if key in classes
    ]
    reach = max((effect.decades or 0.0 for effect in found.values()), default=0.0)
    return RewriteEffects(title, columns, caption, groups, list(_summary(groups)), reach)


def _summary(groups: list[tuple[str, str, list[RewriteEffect]]]) -> Iterable[str]:
    """What moved and what did not, one sentence for each class of measures."""
    subjects = {
        "units": "measures blind to the scale of every unit",
        "layers": "measures blind to the scale of whole layers only",
        "nothing": "classical measures",
    }
    for key, _, members in groups:
        seen = [effect for effect in members if effect.how != "unmeasured"]
        still = sum(effect.how == "still" for effect in seen)
        within = sum(effect.how in ("rounding", "noise") for effect in seen)
        moved = [effect for effect in seen if effect.how == "moved"]
        subject = subjects[key] if len(seen) != 1 else subjects[key].replace("measures", "measure")
        if seen and still == len(seen):
            yield f"None of the {len(seen)} {subject} moved by one bit."
        elif seen:
            counts = [(still, "did not move by one bit"), (within, "moved within the error")]
            parts = [f"{count} {what}" for count, what in counts if count]
            if moved:
                furthest = max(moved, key=lambda effect: effect.decades or 0.0)
                parts.append(f"{len(moved)} moved, up to {furthest.change} ({furthest.measure})")
            yield f"Of {len(seen)} {subject}, {', '.join(parts)}."
