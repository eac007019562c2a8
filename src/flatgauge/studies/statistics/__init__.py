"""Does a measure follow generalization? Correlations over networks, and what may feign them."""

from flatgauge.studies.statistics.comparison import CorrelationDifference, correlation_difference
from flatgauge.studies.statistics.confounding import (
    Confounder,
    Confounding,
    confounding,
    partial_correlation,
)
from flatgauge.studies.statistics.correlation import Correlation, correlate
from flatgauge.studies.statistics.granulated import Granulated, granulated_kendall
from flatgauge.studies.statistics.information import Information, conditional_information
from flatgauge.studies.statistics.rescaling_table import before_after_table
from flatgauge.studies.statistics.sign_error import SignError, sign_error
from flatgauge.studies.statistics.table import correlation_table

__all__ = [
    "Confounder",
    "Confounding",
    "Correlation",
    "CorrelationDifference",
    "Granulated",
    "Information",
    "SignError",
    "before_after_table",
    "conditional_information",
    "confounding",
    "correlate",
    "correlation_difference",
    "correlation_table",
    "granulated_kendall",
    "partial_correlation",
    "sign_error",
]
