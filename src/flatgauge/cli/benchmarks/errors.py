"""How far off results are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatgauge.curvature.blocks import Blocks


def joined(blocks: Blocks) -> dict[str, Tensor]:
    """Every part of all blocks as one vector."""
    return {
        part: torch.cat([b.values[part].flatten() for b in blocks.values() if part in b.values])
        for part in blocks.parts
    }


def relative_error(found: float, expected: float) -> float:
    """How far off a number is, relative to what it should be."""
    return abs(found / expected - 1)


def distance(found: Tensor, expected: Tensor) -> float:
    """How far apart vectors are, relative to the second."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
