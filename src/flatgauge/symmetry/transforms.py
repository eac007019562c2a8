"""All transforms of a model that its gauge group, its outputs and its branches allow.

What enters: a model, its gauge group and an example call. What leaves: the groups of transforms
that the model has, each of which draws random members, and for the other groups why they are
absent. A `Transform` rewrites a model in place. The properties of a group (whether it preserves
the outputs, whether it has members by powers of two) are attributes of its class; the classes are
listed by name in `TRANSFORM_GROUPS`. Branches that are added have the same scales, so only such
branches are tried. Hidden units that change places are found by `find_blocks`: candidates
share the same places along the same axes of tensors, and are tried on a copy of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from flatgauge.runtime.isolation import copy_model
from flatgauge.symmetry.find import ModelCall, same_function
from flatgauge.symmetry.gauge import GaugeGroup, Move, multiply
from flatgauge.symmetry.inference.equations import Scale
from flatgauge.symmetry.inference.scales import Inference

#: How well two branches must be proportional.
_PROPORTIONAL = 1e-6

#: Shares tried on a copy; several, as one of them may exchange two layers in a row.
_SHARES = (0.25, 0.6, 0.0, 1.0)

#: New places along the axes of tensors, by name.
Order = dict[str, list[tuple[int, Tensor]]]


class Transform(Protocol):
    """One way to rewrite a model."""

    def apply(self, model: nn.Module) -> None:
        """Rewrite a model in place."""


@dataclass(frozen=True)
class Rescaling:
    """Multiplies tensors, by name."""

    factors: Mapping[str, Tensor]

    def apply(self, model: nn.Module) -> None:
        """Rewrite a model in place."""
        multiply(model, self.factors)


@dataclass(frozen=True)
class Reordering:
    """Puts hidden units in another order."""

    orders: tuple[Order, ...]

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Rewrite a model in place."""
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        for order in self.orders:
            for name, changes in order.items():
                for axis, places in changes:
                    tensor = state[name]
                    tensor.copy_(tensor.index_select(axis, places.to(tensor.device)))


@dataclass(frozen=True)
class OutputShift:
    """Adds an amount to a parameter that is added to all outputs."""

    bias: str
    amount: float

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Rewrite a model in place."""
        model.get_parameter(self.bias).add_(self.amount)


@dataclass(frozen=True)
class Branches:
    """Parallel parts with proportional parameters, as name pairs (Tsuzuku et al. 2019, §7.3)."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class BranchShift:
    """Gives the first of two branches a share of both, between 0 and 1, and the second the rest."""

    branches: tuple[Branches, ...]
    share: float

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Rewrite a model in place."""
        state = dict(model.named_parameters())
        for branches in self.branches:
            for one, other in branches.pairs:
                total = state[one].double() + state[other].double()
                state[one].copy_(self.share * total)
                state[other].copy_((1 - self.share) * total)


class TransformGroup(ABC):
    """A group of transforms that a model has.

    Attributes:
        name: As in `invariant_to` of measures.
        absence: Why a model may not have it.
    """

    name: ClassVar[str]
    preserves_outputs: ClassVar[bool] = True
    has_exact_members: ClassVar[bool] = False
    absence: ClassVar[str]

    @abstractmethod
    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw a member; powers of two are for groups that have such members."""


@dataclass(frozen=True)
class UnitRescalings(TransformGroup):
    """Every independent scale moves."""

    name = "nodewise"
    has_exact_members = True
    absence = "no scale is free"

    gauge: GaugeGroup
    log2_range: float

    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw a rescaling."""
        among = self._coordinates(generator)
        move = self.gauge.sample(
            generator=generator,
            log2_range=self.log2_range,
            powers_of_two=powers_of_two,
            among=among,
        )
        return Rescaling(self.gauge.factors(move))

    def _coordinates(self, generator: Generator) -> list[int] | None:
        """The scales that move; None for all."""
        return None


class LayerRescalings(UnitRescalings):
    """One scale per tensor moves."""

    name = "layerwise"


class RowRescalings(UnitRescalings):
    """The units of one layer at a time move."""

    name = "rows"

    def _coordinates(self, generator: Generator) -> list[int]:
        sites = list(dict.fromkeys(self.gauge.sites))
        site = sites[int(torch.randint(len(sites), (), generator=generator))]
        return [k for k, name in enumerate(self.gauge.sites) if name == site]


@dataclass(frozen=True)
class Permutations(TransformGroup):
    """Hidden units change places."""

    name = "permutation"
    absence = "no hidden units were found to be interchangeable"

    blocks: list[PermutationBlock]

    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw an order of every block."""
        return Reordering(tuple(block.draw(generator) for block in self.blocks))


@dataclass(frozen=True)
class OutputScales(TransformGroup):
    """All outputs are multiplied by a factor between a quarter and four, or by two or a half."""

    name = "output_scale"
    preserves_outputs = False
    has_exact_members = True
    absence = "no rescaling of parameters multiplies all outputs by one factor"

    gauge: GaugeGroup
    exponents: Tensor

    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw a factor of the outputs."""
        column = int(self.exponents.abs().argmax())
        uniform = 2 * torch.rand((), generator=generator, dtype=torch.float64) - 1
        power = torch.sign(uniform) if powers_of_two else 2 * uniform
        log2 = torch.zeros(self.gauge.dim, dtype=torch.float64)
        log2[column] = power / self.exponents[column]
        return Rescaling(self.gauge.factors(Move(log2)))


@dataclass(frozen=True)
class OutputShifts(TransformGroup):
    """One number is added to all outputs."""

    name = "output_shift"
    preserves_outputs = False
    absence = "no parameter is added to all outputs"

    bias: str

    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw an amount between -2 and 2."""
        uniform = torch.rand((), generator=generator, dtype=torch.float64)
        return OutputShift(self.bias, float(4 * uniform - 2))


@dataclass(frozen=True)
class BranchShifts(TransformGroup):
    """Weight moves between parallel branches."""

    name = "branches"
    absence = "there are no parallel branches of proportional weights"

    branches: tuple[Branches, ...]

    def draw(self, generator: Generator, *, powers_of_two: bool = False) -> Transform:
        """Draw a share: all into one branch, as in the paper, or any."""
        uniform = 3 * float(torch.rand((), generator=generator, dtype=torch.float64)) - 1
        return BranchShift(self.branches, min(max(uniform, 0.0), 1.0))


#: All groups by name, in the order in which a certificate tries them.
TRANSFORM_GROUPS: dict[str, type[TransformGroup]] = {
    group.name: group
    for group in (
        *(LayerRescalings, UnitRescalings, RowRescalings, Permutations),
        *(OutputScales, OutputShifts, BranchShifts),
    )
}


class Transforms(dict[str, TransformGroup]):
    """A model's groups of transforms by name, its `gauge`, and why it has no others (`absent`)."""

    def __init__(self, gauge: GaugeGroup, groups: Iterable[TransformGroup]) -> None:
        found = {group.name: group for group in groups}
        super().__init__({name: found[name] for name in TRANSFORM_GROUPS if name in found})
        self.gauge = gauge
        self.absent = {n: kind.absence for n, kind in TRANSFORM_GROUPS.items() if n not in found}


def find_transforms(
    model: nn.Module, gauge: GaugeGroup, call: ModelCall, *, log2_range: float = 6.0
) -> Transforms:
    """Find the transform groups of a model; scales move by up to 2^±log2_range."""
    if gauge.origin is not None:
        call = call.with_samples(gauge.origin.call.samples)
    groups: list[TransformGroup] = []
    if gauge.dim:
        groups += [UnitRescalings(gauge, log2_range), RowRescalings(gauge, log2_range)]
    if (layerwise := gauge.layerwise()).dim:
        groups.append(LayerRescalings(layerwise, log2_range))
    if blocks := find_blocks(gauge.inference, model, call):
        groups.append(Permutations(blocks))
    wider, exponents = gauge.scaling_outputs()
    if bool((exponents != 0).any()):
        groups.append(OutputScales(wider, exponents))
    if (bias := find_shift(model, call)) is not None:
        groups.append(OutputShifts(bias))
    if branches := find_branches(model, call, gauge):
        groups.append(BranchShifts(tuple(branches)))
    return Transforms(gauge, groups)


def find_shift(model: nn.Module, call: ModelCall) -> str | None:
    """Find the bias such that adding a number to all of it adds that number to all outputs."""
    before = call(model)
    if len(before) != 1 or not before[0].is_floating_point():
        return None
    (old,) = before
    sizes = {old.shape[axis] for axis in (1, -1) if old.dim() > 1} or {1}
    far = 1 + 2 * float(old.abs().max())  # Far enough to be cut off by a ReLU at the end.

    def shifts_outputs(name: str, amount: float) -> bool:
        twin = copy_model(model)
        OutputShift(name, amount).apply(twin)
        return bool((call(twin)[0] - old - amount).abs().max() < 1e-3 * abs(amount))

    for name, parameter in reversed(list(model.named_parameters())):
        if (
            parameter.requires_grad
            and parameter.numel() in sizes
            and all(shifts_outputs(name, amount) for amount in (far, -far))
        ):
            return name
    return None


def find_branches(model: nn.Module, call: ModelCall, gauge: GaugeGroup) -> list[Branches]:
    """Find pairs of branches between which weight moves on a copy without a change of outputs."""
    move = gauge.sample(generator=Generator().manual_seed(0), powers_of_two=False)
    factors = gauge.factors(move)
    # In double precision: a share of a rounded weight is rounded once more.
    double, fine = copy_model(model).double(), call.in_float64()
    found = []
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for branches in _proportional(trainable):
        if not all(_same_factor(factors, *pair) for pair in branches.pairs):
            continue
        twins = [copy_model(double) for _ in _SHARES]
        for twin, share in zip(twins, _SHARES, strict=True):
            BranchShift((branches,), share).apply(twin)
        with suppress(RuntimeError):  # A model that insists on its own precision.
            if all(same_function(double, twin, fine)[0] for twin in twins):
                found.append(branches)
    return found


def _same_factor(factors: Mapping[str, Tensor], one: str, other: str) -> bool:
    """Whether a move multiplies two tensors by the same."""
    still = torch.ones((), dtype=torch.float64)
    change = factors.get(one, still) / factors.get(other, still) - 1
    return bool(change.abs().max() < _PROPORTIONAL)


def _proportional(state: Mapping[str, Tensor]) -> Iterator[Branches]:
    """Pairs of modules all of whose own parameters are proportional with one positive factor."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        parent, dot, leaf = name.rpartition(".")
        modules.setdefault(parent + dot, {})[leaf] = tensor.detach()
    by_shapes: dict[object, list[str]] = {}
    for parent, leaves in modules.items():
        kind = tuple((leaf, tuple(t.shape)) for leaf, t in leaves.items())
        by_shapes.setdefault(kind, []).append(parent)
    for parents in by_shapes.values():
        vectors = {}
        for parent in parents:
            flat = torch.cat([t.double().reshape(-1) for t in modules[parent].values()])
            if bool(flat.any()):
                vectors[parent] = flat / flat.norm()
        for i, one in enumerate(vectors):
            for other in list(vectors)[i + 1 :]:
                if float((vectors[one] - vectors[other]).abs().max()) < _PROPORTIONAL:
                    yield Branches(tuple((one + leaf, other + leaf) for leaf in modules[one]))


# -- hidden units whose order does not matter ------------------------------------------------------


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
    Reordering(tuple(block.draw(generator) for block in blocks)).apply(twin)
    return same_function(model, twin, call)[0]


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
