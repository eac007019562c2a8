"""Curvature: the Hessian as an operator, and the exact sweep over its diagonal blocks."""

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.blocks import Block, Blocks
from flatgauge.curvature.operators import Hessian, Operator, Scaled

__all__ = [
    "Block",
    "Blocks",
    "Hessian",
    "Operator",
    "Scaled",
    "block_curvature",
    "block_eigenvalues",
]
