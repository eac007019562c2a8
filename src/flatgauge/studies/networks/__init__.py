"""The networks of the papers, by name, and the initialisations that they are started from."""

from flatgauge.studies.networks.architecture import Architecture
from flatgauge.studies.networks.catalogue import NETWORKS, build, find_architecture
from flatgauge.studies.networks.initialisation import INITIALISATIONS, initialise

__all__ = [
    "INITIALISATIONS",
    "NETWORKS",
    "Architecture",
    "build",
    "find_architecture",
    "initialise",
]
