"""The freedom to rewrite a network: found in its graph, moved along, fixed."""

from flatgauge.symmetry.finding import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup, Generators, Move
from flatgauge.symmetry.rules import Pin, rule

__all__ = ["GaugeGroup", "Generators", "Move", "Pin", "find_gauge", "rule"]
