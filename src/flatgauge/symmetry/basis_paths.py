"""Basis paths: the values of m - H paths, from which all weights follow except for their gauge.

In: a model (or a surface), its gauge group and the name of a skeleton. Out: `BasisPaths`, the
values and names of the paths, and back from values to weights by a `PathMap`.

`weight_edges` lines up all weights in one row: the unit that each enters (its head), the unit that
it leaves (its tail) and its value. A batch-norm with stored statistics is folded:
y = γ (x - mean) / √(variance + ε) + β is the weight γ / √(variance + ε) and the bias
β - γ mean / √(variance + ε) of every channel. One whose parameters another one reads too, or that
has no scale and shift, is left as it is. Then `Routes` are followed along the edges of a skeleton.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatgauge.estimators.linalg import as_tensor
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.surface.model import unwrap
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import find_gauge, surface_gauge
from flatgauge.symmetry.gauge import GaugeGroup, list_names
from flatgauge.symmetry.incidence import NO_UNIT, Floats, Integers, Mask, incidence, unit_names
from flatgauge.symmetry.skeletons import SKELETONS, Edge, Routes, Skeleton, follow_routes

#: A path value of a hidden unit that is smaller than the largest by this factor is noted.
_SMALL = 1e-4


def basis_paths(
    model: nn.Module, example_inputs: Any, *, skeleton: str = "strongest"
) -> BasisPaths:
    """The basis paths of a model: coordinates that no rescaling changes.

    For any network of chains and branches: of any widths, with biases, convolutions (a channel is
    a unit), pooling, batch-norms with stored statistics (folded), residual streams (all units that
    share a scale are one) and concatenations.

    Args:
        model: A ``torch.nn.Module``; not changed. It is read in eval mode.
        example_inputs: What to call it with: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. The values do not matter, the shapes do.
        skeleton: ``"strongest"`` takes the path of largest value through every weight, and does
            not depend on the order of the units; ``"diagonal"`` joins unit i to unit i (Meng et
            al. 2019), and does.

    Returns:
        The paths.

    Raises:
        ValueError: If there is no such skeleton.
        UnsupportedGraphError: If the model cannot be exported, or a weight is not an edge from
            unit to unit.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> _ = net[2].weight.data.copy_(torch.tensor([[5.0, -6.0]]))
        >>> paths = basis_paths(net, torch.zeros(1, 2))
        >>> paths.values  # six weights, two hidden units
        tensor([  5.,  10., -18., -24.], dtype=torch.float64)
        >>> paths.names[3]
        '0.weight[1, 1] → 2.weight[0, 1]'
        >>> paths.to_weights(paths.values * 2)["0.weight"]
        tensor([[2., 4.],
                [6., 8.]], dtype=torch.float64)
    """
    check_skeleton(skeleton)
    return _find_paths(unwrap(model), find_gauge(model, example_inputs, frozen="free"), skeleton)


def surface_paths(surface: LossSurface, skeleton: str = "strongest") -> BasisPaths:
    """The basis paths of a surface's model, found once for its current parameters."""
    check_skeleton(skeleton)
    return surface.cache.get(
        ("basis paths", skeleton),
        lambda: _find_paths(surface.model, surface_gauge(surface, frozen="free"), skeleton),
    )


def check_skeleton(skeleton: str) -> None:
    """Refuse a skeleton that does not exist."""
    if not isinstance(skeleton, str) or skeleton not in SKELETONS:
        known = " or ".join(repr(name) for name in SKELETONS)
        raise ValueError(f"`skeleton={skeleton!r}` is unknown; use {known}.")


def _find_paths(model: nn.Module, gauge: GaugeGroup, skeleton: str) -> BasisPaths:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, tensor in (parameters | buffers).items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{name}` holds numbers that are not finite, and paths through them have no "
                "value; load the model again, or see where training diverged."
            )
    edges = weight_edges(gauge, parameters, buffers)
    chosen = SKELETONS[skeleton](gauge, edges)
    return BasisPaths(edges, chosen, parameters, unit_names(gauge), skeleton)


class BasisPaths:
    """Coordinates of a network that no rescaling changes: the values of its basis paths.

    Every hidden unit has one *free* weight, which keeps its value; every other weight e, from
    unit b to unit a, has a path: in along the skeleton to b, over e, and out along free weights
    from a. The values of these m - H paths and the signs of the free weights determine the
    function.

    Attributes:
        skeleton: How the skeleton was chosen.
        values: The values v of the paths, in double precision, on the CPU.
        roots: For every hidden unit b that takes part, the coordinate whose size is
            |u_b| = |P(b) R(b)|. Only these are divided by: where one passes zero, the loss as a
            function of v has a pole.
        m: How many weights take part.
        hidden: How many hidden units H take part.
        dropped: Hidden units on no path of non-zero value; their weights stay as they are.
        tied: Hidden units for which another choice would have done as well.
    """

    def __init__(
        self,
        edges: WeightEdges,
        skeleton_edges: Skeleton,
        parameters: Mapping[str, Tensor],
        units: Sequence[str],
        skeleton: str,
    ) -> None:
        """Follow the routes of `skeleton_edges`, which were chosen as `skeleton` says."""
        self.skeleton, self.edges, self.skeleton_edges = skeleton, edges, skeleton_edges
        routes = follow_routes(edges, skeleton_edges)
        kept = routes.kept[:-1]
        self.places, self.root_of = routes.places, routes.root_of
        self.hidden = int(kept.sum())
        self.m = len(self.places) + self.hidden
        self.map = PathMap(edges, routes, parameters)
        self.values = self.map.values
        self.roots = torch.from_numpy(self.root_of[:-1][kept])
        self.dropped = tuple(units[u] for u in np.flatnonzero(~kept).tolist())
        self.tied = tuple(units[u] for u in skeleton_edges.ties if kept[u])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def smallest(self) -> float:
        """The smallest |u_b|: how far v may move before it can meet a pole."""
        return float(self.values[self.roots].abs().min()) if len(self.roots) else float("inf")

    @property
    def names(self) -> PathNames:
        """Readable names: the weights along every path."""
        return PathNames(self.edges, self.skeleton_edges, self.places)

    @cached_property
    def free(self) -> tuple[Edge, ...]:
        """The free weights, one for every hidden unit that takes part."""
        places = self.skeleton_edges.leaving[self.root_of[:-1] != NO_UNIT]
        return tuple(map(self.edges.edge, places.tolist()))

    @cached_property
    def entries(self) -> list[tuple[str, Tensor]]:
        """The parameters with the flat indices of their entries, in the order of `values`."""
        found = []
        for name in self.edges.shapes:
            span = self.edges.span(name)
            low, high = np.searchsorted(self.places, [span.start, span.stop])
            if high > low:
                found.append((name, torch.from_numpy(self.places[low:high] - span.start)))
        return found

    @property
    def choices(self) -> Integers:
        """For every hidden unit that takes part, how many edges out and in it could have had."""
        return np.asarray(self.skeleton_edges.choices[self.root_of[:-1] != NO_UNIT])

    def to_weights(self, values: Tensor) -> dict[str, Tensor]:
        """The weights that paths of given values belong to.

        Free weights keep their values, so that the result is written as the model is. At `values`
        itself it is the model's own weights, bit for bit. Differentiable.

        Args:
            values: One per path.

        Returns:
            All parameters, by name, in double precision on the device of `values`.

        Raises:
            ValueError: If their number is wrong, or one is not finite.
        """
        values = as_tensor(values, "values")
        if values.shape != (len(self),):
            raise ValueError(
                f"`values` has shape {tuple(values.shape)}, but there are {len(self)} basis paths; "
                f"give a vector ({len(self)},)."
            )
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"`values` holds {int((~values.isfinite()).sum())} numbers that are not finite; "
                "paths have finite values."
            )
        zeros = torch.nonzero(values[self.roots.to(values.device)] == 0)[:, 0]
        if len(zeros):
            name = self.names[int(self.roots[zeros[0]])]
            raise ValueError(
                f"`values` is zero for the path {name}, which a hidden unit's other weights are "
                "divided by: no weights have these values (a pole of the loss)."
            )
        return self.map.split(self.map(values.double()))

    def reaches(self, values: Tensor) -> bool:
        """Whether values are reached from the model's own without meeting a pole on the way.

        Args:
            values: One per path.

        Returns:
            False if the path value of some hidden unit is zero or has changed its sign.
        """
        here, there = self.values[self.roots], values[self.roots].cpu()
        return bool((here.sign() == there.sign()).all())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that belong to every number measured in these coordinates."""
        notes = []
        if self.dropped:
            notes.append(
                f"{len(self.dropped)} hidden units lie on no path of non-zero value and are left "
                f"out with their weights: {list_names(self.dropped, 3)}"
            )
        if self.tied:
            notes.append(
                f"the skeleton is tied at {len(self.tied)} hidden units, where the order of the "
                f"weights decides: {list_names(self.tied, 3)}"
            )
        largest = float(self.values[self.roots].abs().max()) if self.hidden else 0.0
        if self.smallest < _SMALL * largest:
            notes.append(
                f"the path of one hidden unit has a value of {self.smallest:.2g} (of another one "
                f"{largest:.2g}), and values are divided by it: such numbers say more about the "
                f"{self.skeleton} skeleton than about the minimum"
            )
        return tuple(notes)

    def describe(self) -> str:
        """How many paths there are, how large, and how well they say what the weights are."""
        sizes = self.values.abs()
        lines = [
            f"{len(self)} basis paths of {self.m} weights and {self.hidden} hidden units, "
            f"{self.skeleton} skeleton"
        ]
        if len(self):
            lines.append(f"|v| from {float(sizes.min()):.3g} to {float(sizes.max()):.3g}")
        if self.hidden:
            largest = float(self.values[self.roots].abs().max())
            lines.append(
                f"|u_b|, the only divisors, from {self.smallest:.3g} to {largest:.3g}: moves of v "
                "by less than the smallest meet no pole"
            )
        for title, names in (
            ("on no path of non-zero value, left as they are", self.dropped),
            ("with a tied choice, which the order of the weights decides", self.tied),
        ):
            if names:
                lines.append(f"{len(names)} hidden units {title}: {list_names(names, 3)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = f"{len(self)} of m={self.m}, hidden={self.hidden}"
        return f"BasisPaths({counts}, skeleton={self.skeleton!r})"


class PathNames(Sequence[str]):
    """The weights along every basis path, from input to output, written on demand."""

    def __init__(self, edges: WeightEdges, skeleton: Skeleton, places: Integers) -> None:
        self._edges, self._skeleton, self._places = edges, skeleton, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """The name of one path, or of several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        edges, path = self._edges, [int(self._places[index])]
        while (unit := int(edges.tails[path[0]])) != NO_UNIT:
            path.insert(0, int(self._skeleton.entering[unit]))
        while (unit := int(edges.heads[path[-1]])) != NO_UNIT:
            path.append(int(self._skeleton.leaving[unit]))
        return " → ".join(self._weight_name(place) for place in path)

    def _weight_name(self, place: int) -> str:
        """A weight as a reader would write it, such as ``0.weight[1, 2]``."""
        edge = self._edges.edge(place)
        index = np.unravel_index(edge.index, self._edges.shapes[edge.name])
        return f"{edge.name}[{', '.join(map(str, index))}]"


# -- all weights as edges --------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldedNorm:
    """A folded batch-norm: β moves by `slope` times what γ moves; `spread` is √(variance + ε)."""

    weight: str
    bias: str
    slope: Floats
    spread: Floats


@dataclass(frozen=True)
class WeightEdges:
    """Every weight of a network: where it comes from, where it leads, what it is.

    Inputs, constants and outputs are not units: such an end is `NO_UNIT`.
    """

    shapes: dict[str, tuple[int, ...]]  #: Of the parameters, in the order of the model.
    starts: dict[str, int]  #: Where in the row the weights of each begin.
    heads: Integers  #: The unit that every weight enters.
    tails: Integers  #: The unit that it leaves.
    weights: Floats  #: With batch-norms folded, in double precision.
    norms: tuple[FoldedNorm, ...]
    absorbed: frozenset[str]  #: Biases for which that of a folded batch-norm stands.

    @cached_property
    def norm_parameters(self) -> frozenset[str]:
        """The parameters of folded batch-norms."""
        return frozenset(name for norm in self.norms for name in (norm.weight, norm.bias))

    @cached_property
    def in_use(self) -> Mask:
        """All weights but absorbed biases."""
        found = np.ones(self.weights.size, bool)
        for name in self.absorbed:
            found[self.span(name)] = False
        return found

    def span(self, name: str) -> slice:
        """Where in the row the weights of a parameter are."""
        start = self.starts[name]
        return slice(start, start + math.prod(self.shapes[name]))

    def part(self, row: NDArray[Any], name: str) -> NDArray[Any]:
        """The part of a row that belongs to a parameter, in its shape."""
        return row[self.span(name)].reshape(self.shapes[name])

    def edge(self, place: int) -> Edge:
        """The parameter that a place in the row belongs to, and the flat index there."""
        names, starts = list(self.starts), list(self.starts.values())
        name = names[int(np.searchsorted(starts, place, side="right")) - 1]
        return Edge(name, place - self.starts[name])


def weight_edges(
    gauge: GaugeGroup, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> WeightEdges:
    """Read a network's weights as edges; raise `UnsupportedGraphError` if one is not an edge."""
    values = {n: _double(p) for n, p in parameters.items() if n in gauge.inference.scales}
    norms, absorbed = _fold_norms(gauge, values, buffers)
    starts, size = {}, 0
    for name, value in values.items():
        starts[name], size = size, size + value.size
    edges = WeightEdges(
        {name: tuple(value.shape) for name, value in values.items()},
        starts,
        np.full(size, NO_UNIT),
        np.full(size, NO_UNIT),
        np.concatenate([np.zeros(0), *(value.reshape(-1) for value in values.values())]),
        norms,
        absorbed,
    )
    for name in (name for name in values if name in gauge.names):
        ends = incidence(gauge, name).edge_ends()
        if ends is None:
            raise UnsupportedGraphError(
                f"the scale of `{name}` depends on several units at once (products of "
                "activations, or one weight used in several places), so that it is not an edge "
                "from one unit to another and paths through it have no value; basis paths exist "
                "for chains and branches of layers."
            )
        for row, end in zip((edges.heads, edges.tails), ends, strict=True):
            edges.part(row, name)[...] = end
    return edges


def _fold_norms(
    gauge: GaugeGroup, values: dict[str, Floats], buffers: Mapping[str, Tensor]
) -> tuple[tuple[FoldedNorm, ...], frozenset[str]]:
    """Replace the weights and biases of batch-norms by those of every channel, in place."""
    norms, absorbed = [], set()
    read = {norm: {norm.weight, norm.bias, norm.before} - {None} for norm in gauge.inference.norms}
    readers = Counter(name for names in read.values() for name in names)
    for norm, names in read.items():
        if any(readers[name] > 1 for name in names):
            continue
        spread = np.sqrt(_double(buffers[norm.variance]) + norm.epsilon)
        shift = _double(buffers[norm.mean])
        if norm.before is not None:
            shift = shift - values[norm.before]
            absorbed.add(norm.before)
        values[norm.weight] = values[norm.weight] / spread
        values[norm.bias] = values[norm.bias] - values[norm.weight] * shift
        norms.append(FoldedNorm(norm.weight, norm.bias, shift / spread, spread))
    return tuple(norms), frozenset(absorbed)


def _double(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


class PathMap:
    r"""Weights as a function of the values of basis paths, the free weights as they are.

    .. math:: w_e(v) = w_e \cdot \frac{v_e}{v_e^0} \cdot \frac{v_{k(b)}^0}{v_{k(b)}}

    for a weight e that leaves hidden unit b, whose root coordinate is k(b); without the last factor
    for one that leaves an input or a constant. At v⁰ itself all factors are one, exactly. The bias
    of a folded batch-norm moves along with its weight.

    Attributes:
        base: The weights as they are, in one row; `places` says which have a coordinate.
        values: The values v⁰ of the paths.
        slopes: What a weight of zero is per unit of its path's value: 1 / (P(b) R(a)).
        amounts: What is multiplied: the weight, or the folded bias, which moves the real one.
        roots: For every coordinate, the root of the unit that its weight leaves; the number of
            coordinates where it leaves an input or a constant.
    """

    def __init__(
        self, edges: WeightEdges, routes: Routes, parameters: Mapping[str, Tensor]
    ) -> None:
        self._edges = edges
        unread = {n: value for n, value in parameters.items() if n not in edges.starts}
        self._unread = {n: value.detach().double().cpu() for n, value in unread.items()}
        places, tails = routes.places, edges.tails[routes.places]
        inward, outward = routes.inward[tails], routes.outward[edges.heads[places]]
        self.base, self.places = self.to_row(parameters), torch.from_numpy(places)
        self.values = torch.from_numpy(inward * edges.weights[places] * outward)
        roots = routes.root_of[tails]
        self.roots = torch.from_numpy(np.where(roots == NO_UNIT, len(places), roots))
        shifted, coordinate = np.zeros((2, edges.weights.size), bool)
        coordinate[places], stretch = True, np.ones(edges.weights.size)
        weights, biases, couplings = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        for norm in edges.norms:
            weight, bias = edges.span(norm.weight), edges.span(norm.bias)
            shifted[bias], stretch[weight] = True, norm.spread
            channels = np.flatnonzero(coordinate[weight])
            weights.append(weight.start + channels)
            biases.append(bias.start + channels)
            couplings.append(norm.slope[channels])
        self._shifted = torch.from_numpy(shifted[places])
        folded_weights = torch.from_numpy(edges.weights[places])
        self.amounts = torch.where(self._shifted, folded_weights, self.base[self.places])
        self.slopes = torch.from_numpy(1 / (inward * outward) * stretch[places])
        self._weights, self._biases, self._couplings = (
            torch.from_numpy(np.concatenate(rows)) for rows in (weights, biases, couplings)
        )

    def __call__(self, values: Tensor) -> Tensor:
        """All weights in one row, on the device of `values`."""
        known = self.values.to(values)
        ratios = values / torch.where(known == 0, 1.0, known)
        scaled = torch.where(
            known == 0, values * self.slopes.to(values), self.amounts.to(values) * ratios
        )
        roots = self.roots.to(values.device)
        before, now = (torch.cat([one, one.new_ones(1)])[roots] for one in (known, values))
        return self._with_biases(self._with_weights(scaled * (before / now)))

    def relative(self, logs: Tensor) -> Tensor:
        """All weights in one row at values v⁰ exp(t); a path of value zero stays as it is."""
        padded = torch.cat([logs, logs.new_zeros(1)])
        powers = torch.exp(logs - padded[self.roots.to(logs.device)])
        return self._with_biases(self._with_weights(self.amounts.to(logs) * powers))

    def _with_weights(self, amounts: Tensor) -> Tensor:
        """The row with other amounts at the coordinates."""
        base, shifted = self.base.to(amounts), self._shifted.to(amounts.device)
        places = self.places.to(amounts.device)
        shifts = base[places] + (amounts - self.amounts.to(amounts))
        return base.index_copy(0, places, torch.where(shifted, shifts, amounts))

    def _with_biases(self, row: Tensor) -> Tensor:
        """The row with the biases of batch-norms moved along with their weights."""
        if not len(self._weights):
            return row
        weights, biases = self._weights.to(row.device), self._biases.to(row.device)
        moved = self._couplings.to(row) * (row[weights] - self.base.to(row)[weights])
        return row.index_add(0, biases, moved)

    def at_coordinates(self, gradient: Tensor) -> Tensor:
        """A gradient by all weights, as one by those with a coordinate, which biases follow."""
        if len(self._weights):
            moved = self._couplings * gradient[self._biases]
            gradient = gradient.index_add(0, self._weights, moved)
        return gradient[self.places]

    def pull_back(self, gradient: Tensor) -> Tensor:
        """A gradient by all weights, as one by the values of the paths, at the model's own."""
        slopes = self.at_coordinates(gradient)
        shares = self.amounts * slopes
        sums = shares.new_zeros(len(shares) + 1).index_add(0, self.roots, shares)
        known = torch.where(self.values == 0, 1.0, self.values)  # No root is zero.
        return self.slopes * slopes - sums[:-1] / known

    @property
    def moves_a_bias(self) -> Tensor:
        """Which coordinates move a bias along with their weight."""
        return torch.isin(self.places, self._weights)

    def to_row(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Tensors by parameter as one row: in double precision on the CPU."""
        rows = [parts[name].detach().double().cpu().reshape(-1) for name in self._edges.shapes]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *rows])

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """A row as parameters, by name; those that nothing reads are as they were."""
        found = {name: value.to(row) for name, value in self._unread.items()}
        for name, shape in self._edges.shapes.items():
            found[name] = row[self._edges.span(name)].reshape(shape)
        return found
