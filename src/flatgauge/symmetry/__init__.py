"""The freedom to rewrite a network: found in its graph, moved along, fixed."""

from flatgauge.symmetry.balance import Balance, balance
from flatgauge.symmetry.basis_paths import BasisPaths
from flatgauge.symmetry.find import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup, Generators, Move
from flatgauge.symmetry.inference import Pin, Rule

__all__ = [
    "Balance",
    "BasisPaths",
    "GaugeGroup",
    "Generators",
    "Move",
    "Pin",
    "Rule",
    "balance",
    "find_gauge",
]
