"""The rules of scale inference, one file per family of ops."""

from flatgauge.symmetry.rules import contractions, elementwise, moves, norms, reductions
from flatgauge.symmetry.rules.table import RULES, Pin, Reading, apply_rule, rule

__all__ = [
    "RULES",
    "Pin",
    "Reading",
    "apply_rule",
    "contractions",
    "elementwise",
    "moves",
    "norms",
    "reductions",
    "rule",
]
