"""Results for people and programs: tables, JSON, pages."""

from flatgauge.report.certificate import Certificate, Kept, Row
from flatgauge.report.comparison import Comparison
from flatgauge.report.report import Report
from flatgauge.report.run import Facts, facts_of

__all__ = ["Certificate", "Comparison", "Facts", "Kept", "Report", "Row", "facts_of"]
