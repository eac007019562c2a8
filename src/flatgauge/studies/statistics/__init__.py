"""Does a measure follow generalization? Correlations over networks, and what may explain them."""

from flatgauge.studies.statistics.confounding import (
    Confounding,
    confounding,
    partial_correlation,
)
from flatgauge.studies.statistics.correlation import Statistic, correlate, correlation_difference
from flatgauge.studies.statistics.design import (
    conditional_information,
    granulated_kendall,
    sign_error,
)
from flatgauge.studies.statistics.tables import before_after_table, correlation_table

__all__ = [
    "Confounding",
    "Statistic",
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
