"""One line of the results."""

from __future__ import annotations

from dataclasses import dataclass

#: What flatgauge is called in the lines that targets are held against.
OWN = "flatgauge"

#: What the cost of a product by counting matrix products is called.
LIMIT = "kept-graph limit"

#: Results further apart are not of the same matrix, and eigenvalues are asked for to this.
AGREEMENT = 1e-3

#: A verdict says so if what it is held against is further off: PyHessian's stopping rule for the
#: trace is no bound on its error, and may end after two products.
ROUGH = 0.5


@dataclass(frozen=True)
class TimingRow:
    """One line of the results.

    Attributes:
        workload: On which network and data.
        quantity: What was computed.
        tool: By what.
        cost: In units, the median of all rounds.
        batch: Samples at a time, None where there are none.
        setting: Where in a series, empty outside of them.
        spread: In units, the cheapest and the dearest round; None for what was not timed.
        rounds: How many counted.
        to_best_peer: Cost divided by that of the best peer; None without one.
        yardstick: Whether the best peer is looked for here.
        error: Relative to flatgauge in double precision, or to all columns; None if not known.
        unit_seconds: Processor time of the unit, the median of all rounds.
        sample_seconds: Processor time per sample.
        unit: What costs 1; G is one gradient.
        target: What is aimed at, as text.
        verdict: Whether it was met, as text.
    """

    workload: str
    quantity: str
    tool: str
    cost: float
    batch: int | None = None
    setting: str = ""
    spread: tuple[float, float] | None = None
    rounds: int = 0
    to_best_peer: float | None = None
    yardstick: bool = False
    error: float | None = None
    unit_seconds: float | None = None
    sample_seconds: float | None = None
    unit: str = "G"
    target: str = ""
    verdict: str = ""
