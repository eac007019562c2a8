"""The freedom to rewrite a network: found in its graph, moved along, fixed."""

from flatgauge.symmetry.balancing import Balance, balance
from flatgauge.symmetry.finding import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup, Generators, Move
from flatgauge.symmetry.rules import Pin, rule

__all__ = [
    "Balance",
    "GaugeGroup",
    "Generators",
    "Move",
    "Pin",
    "balance",
    "find_gauge",
    "rule",
]
