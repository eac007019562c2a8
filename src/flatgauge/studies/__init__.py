"""Pools of networks: train or take many, measure all of them, see what flatness follows."""

from flatgauge.studies.pool import Pool
from flatgauge.studies.ray_engine import RayEngine
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.result import PoolResult, PublishedNumber
from flatgauge.studies.study import Study
from flatgauge.studies.tasks import Network

__all__ = ["Network", "Pool", "PoolResult", "PublishedNumber", "RayEngine", "Recipe", "Study"]
