"""Judge whether a measure stood still where it claims to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from flatgauge.estimators import Estimate
from flatgauge.precision import DOUBLE, SINGLE
from flatgauge.report import Row
from flatgauge.retrial import Outcome, Retrial, relative

#: What a change must exceed to count as one: below it, an unclaimed invariance "did not show".
MOVED = 1e-3

#: How many of its own standard errors a random estimate may move; where that is more than the
#: estimate itself, standing still shows nothing.
_ERRORS, _MOST = 5.0, 1.0

#: How well a search from random starts finds its maximum again when the units change places.
_SEARCH = 0.05


def judge(row: Row, retrial: Retrial, exact: list[Outcome], other: list[Outcome]) -> Row:
    """Judge one measure under one group.

    Powers of two must not change one bit; everything else may change what rounding changes. In
    single precision rounding can push a ReLU over its kink, and the measure then jumps although
    it is invariant: such a move is measured again in double precision and judged there.

    Args:
        row: The measure, the group, and whether it is claimed.
        retrial: The measures before.
        exact: What powers of two did.
        other: What other members did.

    Returns:
        The row with its verdict.
    """
    name, before = row.measure, retrial.before[row.measure]
    estimates = [outcome.estimates[name] for outcome in (*exact, *other)]
    broken = next((e for e in (before, *estimates) if math.isnan(e.value)), None)
    if broken is not None:
        verdict = "FAILS" if row.claimed and broken is not before else "unmeasured"
        return replace(row, verdict=verdict, note="; ".join(broken.notes))
    rounding = DOUBLE if retrial.double else SINGLE
    bits = _worst((before, e) for e in _of(exact, name))
    search = row.group == "permutation" and before.lower_bound
    loose = _worst(
        ((before, e) for e in _of(other, name)),
        rounding,
        solver=retrial.double or not exact,
        search=search,
    )
    if row.claimed and not retrial.double and loose[0] > loose[1]:
        pairs = [retrial.confirmed(outcome, name) for outcome in other]
        fine = _worst(pairs, DOUBLE, solver=True, search=search)
        if fine[0] <= fine[1]:
            signs = sum(outcome.flipped for outcome in other) if exact else 0
            flips = f" ({signs} ReLU signs flipped)" if signs else ""
            note = f"moved by {loose[0]:.0e} in float32{flips}; judged in float64"
            row, loose = replace(row, note=note), fine
    held = bits[0] <= bits[1] and loose[0] <= loose[1]
    furthest = max(estimates, key=lambda e: relative(before.value, e.value))
    moved = relative(before.value, furthest.value) > MOVED
    verdict = ("holds" if held else "FAILS") if row.claimed else ("moves" if moved else "still")
    # Random numbers are drawn alike before and after, but for units that change places.
    noisy = [change > MOVED and limit > _MOST for change, limit in (bits, loose)]
    if verdict == "holds" and row.group != "permutation" and any(noisy):
        verdict = "unproven"
        row = replace(row, note="its own error is larger than the value: nothing is shown")
    row = replace(row, verdict=verdict, after=furthest.value)
    if not exact:
        return replace(row, change=loose[0], allowed=loose[1])
    row = replace(row, change=bits[0], allowed=bits[1])
    return replace(row, change_any=loose[0], allowed_any=loose[1]) if other else row


def _of(outcomes: list[Outcome], name: str) -> list[Estimate]:
    return [outcome.estimates[name] for outcome in outcomes]


def _worst(
    pairs: Iterable[tuple[Estimate, Estimate]],
    rounding: float = 0.0,
    *,
    solver: bool = False,
    search: bool = False,
) -> tuple[float, float]:
    """The relative change that exceeds most what is allowed for it, and what is allowed."""
    worst, allowed = 0.0, math.inf
    for before, after in pairs:
        change, size = relative(before.value, after.value), abs(before.value) or 1.0
        # What stands still keeps its error, too: a larger one afterwards excuses nothing.
        error = math.hypot(before.stderr, min(after.stderr, 2 * before.stderr))
        noise = 0.0 if math.isnan(error) else _ERRORS * error / size
        bound = 10 * max(before.bound or 0.0, after.bound or 0.0) / size if solver else 0.0
        spread = max(_SEARCH, _spread(before) / size, _spread(after) / size) if search else 0.0
        limit = max(rounding, bound, spread) + noise
        if change - limit >= worst - allowed:
            worst, allowed = change, limit
    return worst, allowed


def _spread(estimate: Estimate) -> float:
    """How far the starts of a search ended apart."""
    # The start along the gradient moves with the units: only what others find beyond it changes.
    rises = [value for key, value in estimate.details.items() if key.startswith("start ")]
    return max(rises) - min(rises) if rises else 0.0
