"""What flatgauge is to cost: all targets in one table, and whether they were met.

They are meant for workloads of full size on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.results import LIMIT, OWN, TimingRow
from benchmarks.workloads import MANY_CLASSES, STANDARD

#: Stands for the best of the peers that are eligible.
BEST = "the best peer"

#: A verdict says so if the other result is further off: PyHessian's stopping rule for the trace is
#: no bound on its error, and may end after two products.
_ROUGH = 0.5


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        workload: On which workload.
        quantity: For what.
        kind: "share": the cost over that of another line, at most; "times cheaper": the reverse,
            at least; "cost": in gradients, at most; "error": at most.
        bound: What is aimed at.
        against: The other line's tool, or `BEST`.
    """

    workload: str
    quantity: str
    kind: str
    bound: float
    against: str = ""

    def __str__(self) -> str:
        if self.kind == "share":
            return f"≤ {self.bound:g} × {self.against}"
        if self.kind == "times cheaper":
            return f"≥ {self.bound:g} × cheaper than {self.against}"
        return f"≤ {self.bound:g} G" if self.kind == "cost" else f"error ≤ {self.bound:.0e}"

    def judge(self, row: TimingRow, rows: Sequence[TimingRow]) -> str:
        """The verdict on flatgauge's line, given all lines."""
        if self.kind == "cost":
            return self.verdict(row.cost)
        if self.kind == "error":
            return self.verdict(row.error)
        other = self._other(row, rows)
        if other is None:
            return self.verdict(None)
        times = self.kind == "times cheaper"
        verdict = self.verdict(other.cost / row.cost if times else row.cost / other.cost)
        rough = other.error is not None and not other.error <= _ROUGH
        return f"{verdict} (of an answer off by {other.error:.0e})" if rough else verdict

    def _other(self, row: TimingRow, rows: Sequence[TimingRow]) -> TimingRow | None:
        """The line that this one is held against; None if there is none."""
        where = (row.workload, row.quantity, row.setting)
        beside = [
            other for other in rows if (other.workload, other.quantity, other.setting) == where
        ]
        if self.against == BEST:
            found = [other for other in beside if other.eligible]
        else:
            found = [other for other in beside if other.tool == self.against]
        return min(found, key=lambda other: other.cost, default=None)

    def verdict(self, value: float | None) -> str:
        """Whether the target is met, or by how much it is missed, and what was reached."""
        if value is None:
            return "nothing to compare with"
        excess = self.bound / value if self.kind == "times cheaper" else value / self.bound
        reached = f"{value:.1e}" if self.kind == "error" else f"{value:.2f}"
        if excess <= 1:
            return f"met: {reached}"
        by = f"{excess:.1f} ×" if not excess < 2 else f"{100 * (excess - 1):.2g} %"
        return f"missed by {by}: {reached}"


def _each(quantity: str, kind: str, bounds: Sequence[float], against: str = "") -> list[Target]:
    """A target for every standard workload."""
    pairs = zip(STANDARD, bounds, strict=True)
    return [Target(name, quantity, kind, bound, against) for name, bound in pairs]


TARGETS = (
    *_each("product", "share", (0.65, 0.65, 0.65), BEST),
    Target("W1", "product", "share", 1.1, LIMIT),
    *_each("trace", "times cheaper", (20, 12, 8), "PyHessian"),
    *_each("all parts", "times cheaper", (2, 1.3, 1.3), "BackPACK, diagonal alone"),
    *_each("outgoing forms", "cost", (3.0, 2.3, 4.0)),
    *_each("incoming forms", "cost", (3.0, 2.3, 4.0)),
    *_each("top eigenvalue", "share", (0.55, 0.55, 0.55), BEST),
    *_each("layers' top eigenvalues", "times cheaper", (5, 2.5, 7), "curvlinops"),
    Target(MANY_CLASSES, "trace", "cost", 8),
    Target(MANY_CLASSES, "trace", "error", 1e-3),
    Target(MANY_CLASSES, "diagonal", "cost", 8),
    Target(MANY_CLASSES, "diagonal", "error", 1e-2),
    *_each("measures together", "share", (0.6, 0.6, 0.6), "PyHessian"),
)


def judge_rows(rows: Sequence[TimingRow]) -> list[TimingRow]:
    """The lines, those of flatgauge with targets and verdicts."""
    judged = []
    for row in rows:
        where = (row.workload, row.quantity)
        targets = [t for t in TARGETS if (t.workload, t.quantity) == where]
        if row.tool == OWN and not row.setting and targets:
            verdict = "; ".join(target.judge(row, rows) for target in targets)
            row = replace(row, target="; ".join(map(str, targets)), verdict=verdict)
        judged.append(row)
    return judged
