"""The networks of the papers, by name, and the initialisations that they are started from."""

from flatgauge.networks.architecture import Architecture
from flatgauge.networks.catalogue import NETWORKS, build, find_architecture
from flatgauge.networks.initialisation import INITIALISATIONS, initialise

__all__ = [
    "INITIALISATIONS",
    "NETWORKS",
    "Architecture",
    "build",
    "find_architecture",
    "initialise",
]
