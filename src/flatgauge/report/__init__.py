"""Results for people and programs: tables, JSON, pages."""

from flatgauge.report.report import Report
from flatgauge.report.run import Facts, facts_of

__all__ = ["Facts", "Report", "facts_of"]
