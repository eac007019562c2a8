"""Does a measure follow generalization? Correlations over networks, and what may feign them."""

from flatgauge.statistics.comparison import Difference, correlation_difference
from flatgauge.statistics.confounding import (
    Confounder,
    Confounding,
    confounding,
    partial_correlation,
)
from flatgauge.statistics.correlation import Correlation, correlate
from flatgauge.statistics.granulated import Granulated, granulated_kendall
from flatgauge.statistics.information import Information, conditional_information
from flatgauge.statistics.rescaling_table import before_after_table
from flatgauge.statistics.sign_error import SignError, sign_error
from flatgauge.statistics.table import correlation_table

__all__ = [
    "Confounder",
    "Confounding",
    "Correlation",
    "Difference",
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
