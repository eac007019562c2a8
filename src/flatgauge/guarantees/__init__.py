"""Guarantees: what flatness proves about the error on other data."""

from flatgauge.guarantees.bounding import BOUNDS, bounds

__all__ = ["BOUNDS", "bounds"]
