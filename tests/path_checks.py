"""What tests of basis paths share: find them, and compare them with their definition."""

from __future__ import annotations

import pytest
import torch
from path_graph import Graph
from path_reference import Paths, numbers
from torch import Generator, Tensor

import flatgauge as fg
from flatgauge.symmetry.basis_paths import BasisPaths

SKELETONS = ("strongest", "diagonal")


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def found(graph: Graph, skeleton: str = "strongest") -> BasisPaths:
    return fg.basis_paths(graph.case.model, graph.case.inputs, skeleton=skeleton)


def assert_the_definition(graph: Graph, skeleton: str = "strongest") -> tuple[BasisPaths, Paths]:
    paths = found(graph, skeleton)
    return paths, compared(graph, paths, skeleton)


def compared(graph: Graph, paths: BasisPaths, skeleton: str) -> Paths:
    """Same coordinates, same values, same units left out."""
    reference = Paths(graph, skeleton)
    place = numbers(reference, paths.entries)
    torch.testing.assert_close(paths.values, reference.values[place], rtol=1e-12, atol=0)
    assert paths.values.isfinite().all()
    assert len(paths) == len(paths.values) == len(paths.names) == paths.m - paths.hidden
    assert len(paths.dropped) == len(reference.dropped)
    assert len(paths.roots) == len(reference.kept)
    assert paths.smallest == pytest.approx(reference.smallest, rel=1e-12)
    sizes = sorted(abs(reference.u(unit)) for unit in reference.kept)
    assert sorted(paths.values[paths.roots].abs().tolist()) == pytest.approx(sizes, rel=1e-12)
    return reference


def moved(values: Tensor, seed: int = 0) -> Tensor:
    """Values nearby, of the same signs."""
    return values * (1 + 0.2 * torch.rand(len(values), generator=source(seed)).double())
