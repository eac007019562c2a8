"""Scale inference: which rescalings leave the function of a graph unchanged."""

from flatgauge.symmetry.inference import arithmetic, layers, moves
from flatgauge.symmetry.inference.scales import Inference, Pin, Rule, infer_scales

__all__ = ["Inference", "Pin", "Rule", "arithmetic", "infer_scales", "layers", "moves"]
