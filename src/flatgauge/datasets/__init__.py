"""Data sets by name: built-in ones, `.npz` files, and what a user's own function returns."""

from flatgauge.datasets.load import BUILTIN, Builtin, load_dataset
from flatgauge.datasets.samples import Samples

__all__ = ["BUILTIN", "Builtin", "Samples", "load_dataset"]
