"""The reference of basis paths against the paper's own statements and against itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from path_networks import FORKED, GRAPHS, STREAMS, equal_width
from path_reference import Paths, every_path, rescaled
from torch import Generator, Tensor

BOTH = [
    (name, skeleton)
    for name in GRAPHS
    for skeleton in ("strongest", "diagonal")
    if not (skeleton == "diagonal" and name in FORKED)
]
SMALL = (
    *("equal width", "mlp", "fork", "deep fork", "dense", "depthwise conv"),
    *("stream", "late bias", "crossroads", "pre-activation"),
)


def vectors(paths: list[list[int]], count: int) -> np.ndarray:
    """One row per path: which weights it passes."""
    rows = np.zeros((len(paths), count))
    for row, path in zip(rows, paths, strict=True):
        row[path] = 1
    return rows


@pytest.mark.parametrize(("name", "skeleton"), BOTH)
def test_there_are_m_less_h_independent_paths(name, skeleton):
    graph = GRAPHS[name]()
    paths = Paths(graph, skeleton)
    basis = [paths.path(n) for n in paths.coordinates]
    assert not paths.dropped
    assert len(basis) == len(graph.edges) - len(graph.units)
    assert np.linalg.matrix_rank(vectors(basis, len(graph.edges))) == len(basis)
    for path in basis:  # A signal can take it.
        steps = [graph.edges[n] for n in path]
        assert all(a.head == b.tail and a.time < b.time for a, b in pairwise(steps))


@pytest.mark.parametrize("name", SMALL)
def test_no_set_of_paths_has_a_larger_rank(name):
    graph = GRAPHS[name]()
    everything = vectors(list(every_path(graph)), len(graph.edges))
    assert np.linalg.matrix_rank(everything) == len(graph.edges) - len(graph.units)


@pytest.mark.parametrize("name", SMALL)
def test_strongest_paths_are_the_largest_through_their_edge(name):
    """On graphs without shared streams; on these a larger path may be off the skeleton."""
    graph = GRAPHS[name]()
    paths = Paths(graph, "strongest")
    largest: Counter[int] = Counter()
    for path in every_path(graph):
        for n in path:
            largest[n] = max(largest[n], abs(paths.product(path)))
    for n, value in zip(paths.coordinates, paths.values.abs().tolist(), strict=True):
        if name in STREAMS:
            assert value <= largest[n] * (1 + 1e-12)
        else:
            assert value == pytest.approx(largest[n], rel=1e-12)


@pytest.mark.parametrize(("name", "skeleton"), BOTH)
def test_values_go_back_to_the_weights_and_the_loss(name, skeleton):
    graph = GRAPHS[name]()
    paths = Paths(graph, skeleton)
    weights = torch.tensor(paths.weights, dtype=torch.float64)
    torch.testing.assert_close(paths.to_weights(paths.values), weights, rtol=1e-12, atol=0)
    case = graph.case
    loss = case.torch_loss(case.model.eval()(case.inputs), case.targets)
    torch.testing.assert_close(paths.loss(paths.values), loss, rtol=1e-12, atol=0)
    moved = paths.values * (1 + 0.1 * torch.rand(len(paths.values), generator=source()).double())
    there = Paths(graph, skeleton, paths.to_weights(moved).tolist())
    there.leaves, there.enters, there.free = paths.leaves, paths.enters, paths.free
    there.coordinates = paths.coordinates
    torch.testing.assert_close(there.values, moved, rtol=1e-12, atol=0)


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize(("name", "skeleton"), BOTH)
def test_a_hidden_unit_shares_its_size_with_its_root(name, skeleton):
    paths = Paths(GRAPHS[name](), skeleton)
    place = {n: i for i, n in enumerate(paths.coordinates)}
    for unit in paths.kept:
        root = paths.values[place[paths.root(unit)]].item()
        assert root == pytest.approx(paths.u(unit), rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "pre-activation", "stream"])
@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
def test_rescaling_changes_neither_values_nor_curvature(name, skeleton):
    graph = GRAPHS[name]()
    here, there = Paths(graph, skeleton), Paths(graph, skeleton, rescaled(graph, source()))
    assert here.coordinates == there.coordinates
    torch.testing.assert_close(there.values, here.values, rtol=1e-12, atol=0)
    torch.testing.assert_close(there.hessian(), here.hessian(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    ["equal width", "mlp", "conv and batch-norm", "crossroads", "pre-activation", "fork"],
)
@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
def test_the_formulas_of_roots_and_others_are_the_dense_diagonal(name, skeleton):
    if skeleton == "diagonal" and name in FORKED:
        return
    paths = Paths(GRAPHS[name](), skeleton)
    dense = paths.hessian().diagonal()
    found, first_order = paths.second_derivatives()
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), dense, rtol=1e-9, atol=1e-9 * dense.abs().max()
    )
    assert first_order != 0


def test_the_way_back_is_the_papers_projection():
    """Equations (20) and (21), word for word, on the paper's own network."""
    graph = equal_width()
    paths = Paths(graph, "diagonal")
    change = 0.1 * torch.randn(len(paths.values), generator=source()).double() * paths.values
    first = {n for n, e in enumerate(graph.edges) if e.name == "0.weight"}
    alone = {n for n in paths.coordinates if n in first and graph.edges[n].diagonal_in}
    weights, delta = torch.tensor(paths.weights, dtype=torch.float64), {}
    values = dict(zip(paths.coordinates, paths.values.tolist(), strict=True))
    epsilon = dict(zip(paths.coordinates, change.tolist(), strict=True))
    for i in alone:  # (20): only skeleton weights on the path
        delta[i] = paths.weights[i] * (values[i] + epsilon[i]) / values[i] - paths.weights[i]
    for j in set(paths.coordinates) - alone:  # (21): one weight off the skeleton
        updated = [i for i in paths.path(j) if i in alone]
        ratio = 1 + delta[updated[0]] / paths.weights[updated[0]] if updated else 1.0
        w = paths.weights[j]
        delta[j] = (w + epsilon[j] * w / values[j]) / ratio - w
    for n, shift in delta.items():
        weights[n] += shift
    torch.testing.assert_close(paths.to_weights(paths.values + change), weights, rtol=1e-12, atol=0)
    assert len(alone) == 3
    assert len(paths.values) == 27 - 6
    assert {n for n, e in enumerate(graph.edges) if e.diagonal_out} - first == paths.free


def test_other_paths_follow_from_the_basis_as_lemma_5_1_says():
    """With L the number of *hidden* layers: L + 1 values above, L below.

    The first weight of a path is one value over free weights, every later one a ratio of two; a
    free weight is the value of its unit's root over itself. Free weights cancel along the path.
    """
    graph = equal_width()
    hidden = 2
    for skeleton in ("diagonal", "strongest"):
        paths = Paths(graph, skeleton)
        values = dict(zip(paths.coordinates, paths.values.tolist(), strict=True))
        basis = [paths.path(n) for n in paths.coordinates]
        others = [path for path in every_path(graph) if path not in basis]
        assert len(others) == 3**4 - len(basis)
        for path in others:
            above: list[int] = []
            below: list[int] = []
            for n in path:
                tail = graph.edges[n].tail
                below += [] if tail == "input" else [paths.root(tail)]
                above += [paths.root(tail)] if n in paths.free else [n]
            assert (len(above), len(below)) == (hidden + 1, hidden)
            expected = np.prod([values[n] for n in above]) / np.prod([values[n] for n in below])
            assert paths.product(path) == pytest.approx(expected, rel=1e-10)


def _dense(name: str) -> tuple[Paths, Tensor]:
    paths = Paths(GRAPHS[name](), "strongest")
    return paths, paths.hessian()


def test_logarithms_of_values_give_the_chain_rule():
    paths, hessian = _dense("mlp")
    values, gradient = paths.values, paths.gradient()
    expected = values[:, None] * hessian * values + torch.diag(values * gradient)
    torch.testing.assert_close(paths.relative_hessian(), expected, rtol=1e-9, atol=1e-12)
