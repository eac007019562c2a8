"""Watching a training run: measure while it trains, without changing it."""

from flatgauge.analysis.monitor.history import History, HistoryRow
from flatgauge.analysis.monitor.monitor import Monitor

__all__ = ["History", "HistoryRow", "Monitor"]
