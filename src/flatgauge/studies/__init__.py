"""Studies: train a pool of networks, measure all of them, see what flatness follows."""

from flatgauge.studies.figure import Figure
from flatgauge.studies.findings import Findings
from flatgauge.studies.ray_engine import RayEngine
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.study import Study

__all__ = ["Figure", "Findings", "RayEngine", "Recipe", "Study"]
