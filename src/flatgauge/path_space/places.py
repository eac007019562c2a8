"""Where in the graph the weights of runs are read: their roots, and their free edges."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from flatgauge.curvature.plan import Plan
from flatgauge.layers import Layer
from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.runs import Runs
from flatgauge.path_space.single_edges import SingleEdges
from flatgauge.symmetry.pattern import NOTHING, Integers


@dataclass
class Place:
    """An op that reads weights.

    Attributes:
        node: The op.
        layer: Its layer; None for a batch-norm.
        columns: For every input unit, the run it is in; the number of runs where it is in none.
        reads_runs: Whether any of them is in one.
        cut: Whether any weight enters or leaves a unit there: what passes on stops at it.
        roots: The roots of runs among its weights and biases.
        free: The free edges of the runs' units among its weights.
        links: What leads from the first unit of a pair to the second.
        losses: The links that are not free.
    """

    node: fx.Node
    layer: Layer | None
    columns: Tensor
    reads_runs: bool = False
    cut: bool = False
    roots: list[SingleEdges] = field(default_factory=list)
    free: list[SingleEdges] = field(default_factory=list)
    links: list[SingleEdges] = field(default_factory=list)
    losses: list[SingleEdges] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Which of the op's arguments is the activation."""
        return 0 if self.layer is None else self.layer.position

    @property
    def axis(self) -> int:
        """The axis of what goes in and what comes out along which units lie."""
        return -1 if self.layer is not None and self.layer.kind == "linear" else 1


def places_of(paths: BasisPaths, runs: Runs, plan: Plan, device: torch.device) -> list[Place]:
    """Find where the weights of runs are read.

    Args:
        paths: The basis paths.
        runs: The runs.
        plan: How the model is swept.
        device: Where the model is.

    Returns:
        A place for every layer, and for every batch-norm with a root.
    """
    count, units = len(runs.roots), runs.target[:-1]
    taking_part = np.flatnonzero(units != NOTHING)
    free = paths.chosen.leaving[taking_part], units[taking_part]
    roots = paths.places[runs.roots], np.arange(count)
    bound = np.isin(runs.links[0], paths.chosen.leaving)
    losses = runs.links[0][~bound], runs.links[1][~bound]
    found: dict[fx.Node, Place] = {}
    for layer in plan.layers.values():
        columns = torch.zeros(0, dtype=torch.int64, device=device)
        place = found[layer.node] = Place(layer.node, layer, columns)
        site = plan.sites.get(layer.name)
        if site is not None and layer.name in paths.edges.starts:
            place.columns = _columns(paths, runs, layer).to(device)
            place.reads_runs = bool((place.columns < count).any())
            span = paths.edges.span(layer.name)
            ends = paths.edges.heads[span], paths.edges.tails[span]
            place.cut = any(bool((end != NOTHING).any()) for end in ends)
            for listed, chosen in (
                (place.roots, roots),
                (place.free, free),
                (place.links, runs.links),
                (place.losses, losses),
            ):
                edges = _weights(paths, layer, *chosen, place.axis, device)
                if len(edges.weights):
                    listed.append(edges)
    for name, site in plan.sites.items():
        if site.role in ("bias", "norm") and name in paths.edges.starts:
            nothing = torch.zeros(0, dtype=torch.int64, device=device)
            place = found.get(site.node, Place(site.node, None, nothing))
            edges = _biases(paths, name, *roots, place.axis, device)
            if len(edges.weights):
                found[site.node] = place
                place.roots.append(edges)
    return list(found.values())


def _columns(paths: BasisPaths, runs: Runs, layer: Layer) -> Tensor:
    """For every input unit of a layer, the run it is in."""
    span = paths.edges.span(layer.name)
    tails = torch.from_numpy(paths.edges.tails[span].reshape(layer.shape))
    units = layer.canonical(tails)[:, 0, :, 0].reshape(-1)
    found = torch.from_numpy(runs.target)[units]
    return torch.where(found == NOTHING, len(runs.roots), found)


def _weights(
    paths: BasisPaths,
    layer: Layer,
    places: Integers,
    targets: Integers,
    axis: int,
    device: torch.device,
) -> SingleEdges:
    """Those of some edges that are weights of a layer."""
    local, chosen = _local(paths, layer.name, places)
    size = int(np.prod(layer.shape))
    order = layer.canonical(torch.arange(size).reshape(layer.shape))
    position = torch.empty(size, dtype=torch.int64)
    position[order.reshape(-1)] = torch.arange(size)
    group, row, column, tap = torch.unravel_index(position[local], order.shape)
    return SingleEdges(
        layer,
        torch.from_numpy(paths.edges.weights[places[chosen]]).to(device),
        (group * order.shape[1] + row).to(device),
        (group * order.shape[2] + column).to(device),
        tap.to(device),
        torch.from_numpy(targets[chosen]).to(device),
        axis,
    )


def _biases(
    paths: BasisPaths,
    name: str,
    places: Integers,
    targets: Integers,
    axis: int,
    device: torch.device,
) -> SingleEdges:
    """Those of some edges that are entries of a bias."""
    local, chosen = _local(paths, name, places)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return SingleEdges(
        None,
        torch.from_numpy(paths.edges.weights[places[chosen]]).to(device),
        local.to(device),
        none,
        none,
        torch.from_numpy(targets[chosen]).to(device),
        axis,
    )


def _local(paths: BasisPaths, name: str, places: Integers) -> tuple[Tensor, Integers]:
    """Which of some places belong to a parameter: their indices there, and among the places."""
    span = paths.edges.span(name)
    chosen = np.flatnonzero((places >= span.start) & (places < span.stop))
    return torch.from_numpy(places[chosen] - span.start), chosen
