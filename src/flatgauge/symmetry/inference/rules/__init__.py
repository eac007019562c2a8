"""The rules of scale inference and path sums, one class per family of ops."""

from flatgauge.symmetry.inference.rules import contractions, elementwise, moves, norms, reductions
from flatgauge.symmetry.inference.rules.rule import (
    RULES,
    OpContext,
    Pin,
    Result,
    Rule,
    ScaleContext,
    infer_op,
    rule_of,
)

__all__ = [
    "RULES",
    "OpContext",
    "Pin",
    "Result",
    "Rule",
    "ScaleContext",
    "contractions",
    "elementwise",
    "infer_op",
    "moves",
    "norms",
    "reductions",
    "rule_of",
]
