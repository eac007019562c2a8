"""The demonstration: what the tool is for, on data of its own."""

from flatgauge.cli.demonstration.running import Demonstration, demonstrate

__all__ = ["Demonstration", "demonstrate"]
