"""Curvature: the Hessian as an operator, and the exact sweep over its diagonal blocks."""

from flatgauge.curvature.blocks import Block, Blocks, block_curvature
from flatgauge.curvature.eigenvalues import block_eigenvalues
from flatgauge.curvature.hessian import Hessian
from flatgauge.curvature.operator import Operator
from flatgauge.curvature.scaled import Scaled

__all__ = [
    "Block",
    "Blocks",
    "Hessian",
    "Operator",
    "Scaled",
    "block_curvature",
    "block_eigenvalues",
]
