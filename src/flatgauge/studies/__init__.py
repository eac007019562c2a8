"""Studies: train a pool of networks, measure all of them, see what flatness follows."""

from flatgauge.studies.findings import Findings
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

__all__ = ["Findings", "Recipe", "Study"]
