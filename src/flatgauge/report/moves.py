"""What moved when a network was written differently, and what did not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flatgauge.estimators import Estimate
from flatgauge.report.blindness import BLINDNESS, by_blindness
from flatgauge.report.certificate import Certificate, Row
from flatgauge.report.number import Number, value_of
from flatgauge.report.report import Report
from flatgauge.symmetry.rewriting import KEEPING

#: Said where before and after are the same number to the last bit.
STILL = "not by one bit"

#: A relative change below this is written as one, above as a ratio.
_SMALL = 1e-2

#: A relative change below this is what rounding leaves.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Move:
    """One measure before and after.

    Attributes:
        measure: Its name.
        before: As the network was given.
        after: As it was written then.
        change: How far it moved, in words.
        decades: The size of the logarithm of the ratio to base ten; 0 where it stood still, None
            where there is no ratio.
        how: What kind of change it is: "still", "rounding", "noise", "moved", "unmeasured".
        detail: What else there is to say.
        broken: Whether the measure claims not to move there.
    """

    measure: str
    before: Number
    after: Number
    change: str
    decades: float | None
    how: str
    detail: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Moves:
    """All measures before and after, sorted by what they claim not to see.

    Attributes:
        title: What is compared.
        columns: What the two values are called.
        caption: What the table shows.
        groups: For each of `BLINDNESS`, its title and members.
        summary: What moved and what did not, in sentences.
        reach: The largest of all decades, for the length of bars.
    """

    title: str
    columns: tuple[str, str]
    caption: str
    groups: list[tuple[str, str, list[Move]]]
    summary: list[str]
    reach: float


def moves_between(before: Report, after: Report, names: tuple[str, str]) -> Moves:
    """Compare the reports of one network written in two ways.

    Args:
        before: The report of the network as it was.
        after: The report of the network as it was written then.
        names: What both are called.

    Returns:
        The comparison of all measures that both have.
    """
    shared = [name for name in before if name in after.estimates]
    moved = {name: _move(name, before[name], after[name]) for name in shared}
    kinds = by_blindness((name, before[name].options) for name in shared)
    caption = f"Every measure of {names[0]} and of {names[1]}, which is the same function."
    return _gathered(f"{names[0]} → {names[1]}", names, caption, moved, kinds)


def moves_of(certificate: Certificate) -> Moves:
    """How far every measure was pushed by moves that keep every output.

    Args:
        certificate: The certificate.

    Returns:
        For every measure the furthest value that was seen.
    """
    by_measure: dict[str, list[Row]] = {}
    for row in certificate.rows:
        if row.group in KEEPING and row.after is not None:
            by_measure.setdefault(row.measure, []).append(row)
    moved = {name: _pushed(rows) for name, rows in by_measure.items()}
    kinds: dict[str, list[str]] = {key: [] for key in BLINDNESS}
    for name, rows in by_measure.items():
        claimed = {row.group for row in rows if row.claimed}
        key = "layers" if "layerwise" in claimed else "nothing"
        kinds["units" if "nodewise" in claimed else key].append(name)
    columns = ("as it is", "pushed to")
    title = "under every move that keeps all outputs"
    caption = (
        f"Every certified measure on {certificate.samples:,} samples, and the value furthest from "
        "it that the moves led to."
    )
    return _gathered(title, columns, caption, moved, kinds)


def _pushed(rows: list[Row]) -> Move:
    """A measure and the value furthest from its own that no change of any output led to."""
    moved = [row for row in rows if row.verdict in ("moves", "FAILS")]
    furthest = max(moved or rows, key=_distance)
    assert furthest.after is not None
    found = _move(furthest.measure, Estimate(furthest.before), Estimate(furthest.after))
    if moved or found.how == "unmeasured":
        return replace(found, broken=any(row.verdict == "FAILS" for row in rows))
    # Under factors that are no powers of two every number is rounded, also where it is invariant.
    bits = max((row.change or 0.0 for row in rows if row.change_any is not None), default=0.0)
    rest = max((_rounded(row) for row in rows), default=0.0)
    if bits > 0:
        return replace(found, change=f"by {bits:.0e}, within its error", how="noise")
    noise = ", within its error" if rest > _ROUNDING else ""
    detail = f"other factors: {rest:.0e}{noise}" if rest else ""
    return replace(found, change=STILL, decades=0.0, how="still", detail=detail)


def _rounded(row: Row) -> float:
    """The change under moves that round."""
    return (row.change if row.change_any is None else row.change_any) or 0.0


def _distance(row: Row) -> float:
    assert row.after is not None
    gone = abs(row.after - row.before)
    return -1.0 if math.isnan(gone) else gone


def _move(name: str, before: Estimate, after: Estimate) -> Move:
    old, new = value_of(before), value_of(after)
    a, b = before.value, after.value
    if math.isnan(a) or math.isnan(b):
        return Move(name, old, new, "could not be measured", None, "unmeasured")
    if a == b:
        return Move(name, old, new, STILL, 0.0, "still")
    relative = abs(b - a) / abs(a) if a and math.isfinite(a) else math.inf
    comparable = _same_sign(a, b) and math.isfinite(a) and math.isfinite(b)
    decades = abs(math.log10(abs(b)) - math.log10(abs(a))) if comparable else None
    if abs(b - a) <= 2 * math.hypot(before.error, after.error):
        return Move(name, old, new, f"by {relative:.0e}, within its error", decades, "noise")
    if relative < _ROUNDING:
        return Move(name, old, new, f"by {relative:.0e}", decades, "rounding")
    return Move(name, old, new, _ratio(a, b, relative), decades, "moved")


def _ratio(before: float, after: float, relative: float) -> str:
    """How far a number moved that did move."""
    if not (_same_sign(before, after) and math.isfinite(before) and math.isfinite(after)):
        return f"from {before:.3g} to {after:.3g}"
    if relative < _SMALL:
        return f"by {relative:.1%}"
    ratio = after / before
    return f"× {_three(ratio)}" if ratio > 1 else f"÷ {_three(1 / ratio)}"


def _same_sign(one: float, other: float) -> bool:
    # Not by their product, which may underflow.
    return one != 0 and other != 0 and (one > 0) == (other > 0)


def _three(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 1e3 else f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.1e}"


def _gathered(
    title: str,
    columns: tuple[str, str],
    caption: str,
    moved: dict[str, Move],
    kinds: dict[str, list[str]],
) -> Moves:
    order = ("nothing", "units", "layers")  # What moved first, then what stands still.
    groups = [
        (key, BLINDNESS[key], [moved[name] for name in kinds[key]])
        for key in order
        if kinds.get(key)
    ]
    reach = max((move.decades or 0.0 for move in moved.values()), default=0.0)
    return Moves(title, columns, caption, groups, list(_summary(groups)), reach)


def _summary(groups: list[tuple[str, str, list[Move]]]) -> Iterable[str]:
    """What moved and what did not, one sentence for each kind of measure."""
    subjects = {
        "units": "measures blind to the scale of every unit",
        "layers": "measures blind to the scale of whole layers only",
        "nothing": "classical measures",
    }
    for key, _, members in groups:
        seen = [move for move in members if move.how != "unmeasured"]
        still = sum(move.how == "still" for move in seen)
        within = sum(move.how in ("rounding", "noise") for move in seen)
        moved = [move for move in seen if move.how == "moved"]
        subject = subjects[key] if len(seen) != 1 else subjects[key].replace("measures", "measure")
        if seen and still == len(seen):
            yield f"None of the {len(seen)} {subject} moved by one bit."
        elif seen:
            counts = [(still, "did not move by one bit"), (within, "moved within the error")]
            told = [f"{count} {what}" for count, what in counts if count]
            if moved:
                furthest = max(moved, key=lambda move: move.decades or 0.0)
                told.append(f"{len(moved)} moved, up to {furthest.change} ({furthest.measure})")
            yield f"Of {len(seen)} {subject}, {', '.join(told)}."
