"""The experiments of the four papers, by name."""

from flatgauge.studies.published.listing import PRESETS, STUDIES, Published, published_study

__all__ = ["PRESETS", "STUDIES", "Published", "published_study"]
