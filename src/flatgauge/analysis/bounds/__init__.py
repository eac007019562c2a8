"""Guarantees: what flatness proves about the error on other data."""

from flatgauge.analysis.bounds.api import BOUNDS, bounds

__all__ = ["BOUNDS", "bounds"]
