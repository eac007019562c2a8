"""Watching a training run: measure while it trains, without changing it."""

from flatgauge.watching.history import History, Row
from flatgauge.watching.monitor import Monitor

__all__ = ["History", "Monitor", "Row"]
