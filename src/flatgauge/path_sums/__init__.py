"""Sums over all paths of a network, taken in one pass through its graph."""

from flatgauge.path_sums.walk import path_sum

__all__ = ["path_sum"]
