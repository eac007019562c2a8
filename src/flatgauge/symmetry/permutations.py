"""Hidden units whose order does not matter.

What enters: inferred scales, whose equations also record which entries belong to one unit. What
leaves: blocks of interchangeable units, each with all the axes of tensors along which they lie.
Candidates share the same places along the same axes; they are tried on a copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from flatgauge.runtime.isolation import copy_model
from flatgauge.symmetry.inference.equations import Scale
from flatgauge.symmetry.inference.walk import Inference
from flatgauge.symmetry.model_call import ModelCall, same_function

#: New places along the axes of tensors, by name.
Order = dict[str, list[tuple[int, Tensor]]]


@dataclass(frozen=True)
class UnitAxis:
    """An axis of a tensor, by name, and the unit of every place along it."""

    name: str
    axis: int
    units: NDArray[np.int64]


@dataclass(frozen=True)
class PermutationBlock:
    """Units that can change places, by number, and all axes of tensors along which they lie."""

    units: NDArray[np.int64]
    axes: tuple[UnitAxis, ...]

    def draw(self, generator: Generator) -> Order:
        """Draw an order other than the present one."""
        count = len(self.units)
        order = torch.randperm(count, generator=generator)
        if torch.equal(order, torch.arange(count)):
            order = order.roll(1)
        return self.order(order.numpy())

    def order(self, order: NDArray[np.int64]) -> Order:
        """New places for every axis: unit i goes where unit order[i] was taken from."""
        found: Order = {}
        for axis in self.axes:
            places = np.arange(len(axis.units))
            sources = {unit: np.flatnonzero(axis.units == unit) for unit in self.units}
            for i, unit in enumerate(self.units):
                places[sources[unit]] = sources[self.units[order[i]]]
            found.setdefault(axis.name, []).append((axis.axis, torch.from_numpy(places)))
        return found


def find_blocks(inference: Inference, model: nn.Module, call: ModelCall) -> list[PermutationBlock]:
    """Find the sets of hidden units whose order does not change the outputs of an example call."""
    candidates = _candidates(inference)
    generator = Generator().manual_seed(0)
    if candidates and _holds(model, call, candidates, generator):
        return candidates
    return [block for block in candidates if _holds(model, call, [block], generator)]


def _holds(
    model: nn.Module, call: ModelCall, blocks: list[PermutationBlock], generator: Generator
) -> bool:
    """Whether a model stays the same with some blocks in another order."""
    twin = copy_model(model)
    for block in blocks:
        reorder(twin, block.draw(generator))
    return same_function(model, twin, call)[0]


@torch.no_grad()
def reorder(model: nn.Module, order: Order) -> None:
    """Put units of a model in another order, in place."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, changes in order.items():
        for axis, places in changes:
            tensor = state[name]
            tensor.copy_(tensor.index_select(axis, places.to(tensor.device)))


def _candidates(inference: Inference) -> list[PermutationBlock]:
    """Sets of units that lie along the same axes of the same tensors."""
    units = _units(inference)
    axes, barred = _axes(inference.scales | inference.followers, units)
    for scale in inference.outputs:
        for _, ids in scale.terms:
            barred |= set(np.unique(units[ids.reshape(-1).numpy()]).tolist())
    where: dict[int, list[tuple[int, int]]] = {}
    for number, axis in enumerate(axes):
        found, counts = np.unique(axis.units, return_counts=True)
        for unit, times in zip(found.tolist(), counts.tolist(), strict=True):
            where.setdefault(unit, []).append((number, times))
    together: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for unit, places in where.items():
        if unit not in barred and len(places) > 1:
            together.setdefault(tuple(places), []).append(unit)
    return [
        PermutationBlock(np.array(members), tuple(axes[number] for number, _ in places))
        for places, members in together.items()
        if len(members) > 1
    ]


def _units(inference: Inference) -> NDArray[np.int64]:
    """For every unknown, the number of its unit."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = []
    for left, right in inference.equations.links:
        one, other = torch.broadcast_tensors(left, right)
        pairs.append(torch.stack([one.reshape(-1), other.reshape(-1)], 1))
    edges = torch.cat([torch.zeros(0, 2, dtype=torch.long), *pairs]).numpy()
    edges = edges[(edges != 0).all(1)]  # What is pinned to zero is not a unit.
    count = inference.equations.count
    graph = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(count, count))
    _, units = connected_components(graph, directed=False)
    return units.astype(np.int64)


def _axes(scales: Mapping[str, Scale], units: NDArray[np.int64]) -> tuple[list[UnitAxis], set[int]]:
    """The axes of tensors along which units lie, and units that lie in any other way."""
    axes: list[UnitAxis] = []
    barred: set[int] = set()
    for name, scale in scales.items():
        seen: dict[int, NDArray[np.int64]] = {}
        for _, ids in scale.terms:
            varying = [a for a, size in enumerate(ids.shape) if size > 1]
            labels = units[ids.reshape(-1).numpy()]
            if len(varying) != 1 or (
                varying[0] in seen and not np.array_equal(seen[varying[0]], labels)
            ):
                if varying:  # A grouped kernel, or two kinds of units along one axis.
                    barred |= set(labels.tolist())
                    barred |= set(np.concatenate([labels[:0], *seen.values()]).tolist())
                continue
            seen[varying[0]] = labels
        axes += [UnitAxis(name, axis, labels) for axis, labels in seen.items()]
    return axes, barred
