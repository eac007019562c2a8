"""What the shell offers on Tab: names that are known without loading torch, which takes seconds."""

from __future__ import annotations

import ast
from pathlib import Path

#: As in `flatgauge.loading.datasets`, up to where a folder has to be named; a test compares.
DATA = ("digits", "mnist:", "fashion-mnist:", "cifar10:")
LOSSES = ("auto", "binary_cross_entropy", "cross_entropy", "l1", "mse", "nll", "output")
SPLITS = ("train", "test")
DTYPES = ("float32", "float64")
DEVICES = ("cpu", "cuda", "mps")
GAUGES = ("balanced",)
PARTS = ("certificate", "spectrum", "landscape")
SPACES = ("basis_paths", "weights", "filters", "layers", "eigenvectors")
STUDIES = ("random-labels", "batch-size", "init-batch", "mnist-layers", "rescaling")
PRESETS = ("quick", "medium", "paper")
ENGINES = ("local", "ray")
GEOMETRIES = ("weights", "per tensor", "per weight", "basis paths", "balanced")


def measure_names() -> list[str]:
    """The measures, read from the imports of their package."""
    source = Path(__file__).parent.parent / "measures" / "__init__.py"
    imports = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        and node.module not in ("flatgauge.measures", "flatgauge.measures.registry")
    ]
    return sorted(alias.name for node in imports for alias in node.names)


def offered(names: tuple[str, ...], incomplete: str) -> list[str]:
    """The names that begin with what was typed; none lets the shell offer files."""
    return [name for name in names if name.startswith(incomplete)]


def complete_measure(incomplete: str) -> list[str]:
    """Measures, also of the balanced form of the model."""
    names = measure_names()
    if "balanced:".startswith(incomplete) or incomplete.startswith("balanced:"):
        names += [f"balanced:{name}" for name in names]
    return offered(tuple(names), incomplete)


def complete_study(incomplete: str) -> list[str]:
    """Studies by name."""
    return offered(STUDIES, incomplete)


def complete_preset(incomplete: str) -> list[str]:
    """Sizes of a study."""
    return offered(PRESETS, incomplete)


def complete_engine(incomplete: str) -> list[str]:
    """Where a study runs."""
    return offered(ENGINES, incomplete)


def complete_data(incomplete: str) -> list[str]:
    """Data by name."""
    return offered(DATA, incomplete)


def complete_loss(incomplete: str) -> list[str]:
    """Losses by name."""
    return offered(LOSSES, incomplete)


def complete_split(incomplete: str) -> list[str]:
    """Parts of the data."""
    return offered(SPLITS, incomplete)


def complete_dtype(incomplete: str) -> list[str]:
    """Precisions."""
    return offered(DTYPES, incomplete)


def complete_device(incomplete: str) -> list[str]:
    """Devices."""
    return offered(DEVICES, incomplete)


def complete_gauge(incomplete: str) -> list[str]:
    """Gauges."""
    return offered(GAUGES, incomplete)


def complete_part(incomplete: str) -> list[str]:
    """Parts of a page."""
    return offered(PARTS, incomplete)


def complete_space(incomplete: str) -> list[str]:
    """Spaces of landscapes."""
    return offered(SPACES, incomplete)


def complete_geometry(incomplete: str) -> list[str]:
    """Geometries of spectra."""
    return offered(GEOMETRIES, incomplete)
