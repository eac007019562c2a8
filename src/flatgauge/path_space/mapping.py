"""From the values of basis paths to weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatgauge.path_space.edges import Edges
from flatgauge.path_space.folding import Folded
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers


class PathMap:
    r"""Weights as a function of the values of basis paths, the free weights as they are.

    .. math:: w_e(v) = w_e \cdot \frac{v_e}{v_e^0} \cdot \frac{v_{k(b)}^0}{v_{k(b)}}

    for a weight e that leaves hidden unit b, whose root coordinate is k(b); without the last factor
    for one that leaves an input or a constant. At v⁰ itself all factors are one, exactly.

    Args:
        edges: The weights.
        folded: Batch-norms.
        parameters: The parameters as they are, by name.
        places: Which of the weights have a coordinate.
        values: The values v⁰ of the paths.
        slopes: What a weight of zero is multiplied with its path's value to give: 1 / (P(b) R(a)).
        roots: For every coordinate, the root of the unit that its weight leaves, or `NOTHING`.
    """

    def __init__(
        self,
        edges: Edges,
        folded: Folded,
        parameters: Mapping[str, Tensor],
        places: Integers,
        values: Floats,
        slopes: Floats,
        roots: Integers,
    ) -> None:
        self._edges = edges
        self._unread = {
            name: value.detach().double().cpu()
            for name, value in parameters.items()
            if name not in edges.starts
        }
        self.base = self.joined(parameters)
        self.places, self.values = torch.from_numpy(places), torch.from_numpy(values)
        # Coordinates beside an input or a constant have no root: theirs is the one behind the end.
        self.roots = torch.from_numpy(np.where(roots == NOTHING, len(places), roots))
        shifted, stretch = np.zeros(edges.weights.size, bool), np.ones(edges.weights.size)
        weights, biases, couplings = [], [], []
        for one in folded.couplings:
            weight, bias = (
                edges.starts[name] + np.arange(one.slope.size) for name in (one.weight, one.bias)
            )
            shifted[bias], stretch[weight] = True, one.spread
            weights.append(weight)
            biases.append(bias)
            couplings.append(one.slope)
        self._shifted = torch.from_numpy(shifted[places])
        # What is multiplied: the weight itself, or the folded bias, which moves the real one.
        folded_weights = torch.from_numpy(edges.weights[places])
        self.amounts = torch.where(self._shifted, folded_weights, self.base[self.places])
        self.slopes = torch.from_numpy(slopes * stretch[places])
        coordinate = np.zeros(edges.weights.size, bool)
        coordinate[places] = True
        moving = coordinate[np.concatenate([[], *weights]).astype(np.int64)]
        self._weights, self._biases, self._couplings = (
            torch.from_numpy(np.concatenate([[], *rows]).astype(kind)[moving])
            for rows, kind in ((weights, np.int64), (biases, np.int64), (couplings, np.float64))
        )

    def __call__(self, values: Tensor) -> Tensor:
        """All weights in one row.

        Args:
            values: The values of the paths.

        Returns:
            The weights, in the order of the model's parameters, on the device of `values`.
        """
        known = self.values.to(values)
        ratios = values / torch.where(known == 0, 1.0, known)
        scaled = torch.where(
            known == 0, values * self.slopes.to(values), self.amounts.to(values) * ratios
        )
        roots = self.roots.to(values.device)
        before, now = (torch.cat([one, one.new_ones(1)])[roots] for one in (known, values))
        return self.coupled(self._placed(scaled * (before / now)))

    def _placed(self, moved: Tensor) -> Tensor:
        """The row with some weights replaced."""
        base, shifted = self.base.to(moved), self._shifted.to(moved.device)
        places = self.places.to(moved.device)
        moved = torch.where(shifted, base[places] + (moved - self.amounts.to(moved)), moved)
        return base.index_copy(0, places, moved)

    def relative(self, logs: Tensor) -> Tensor:
        """All weights in one row, at values v⁰ exp(t).

        Args:
            logs: t, one per path. A path of value zero stays as it is.

        Returns:
            The weights.
        """
        padded = torch.cat([logs, logs.new_zeros(1)])
        powers = torch.exp(logs - padded[self.roots.to(logs.device)])
        return self.coupled(self._placed(self.amounts.to(logs) * powers))

    def coupled(self, row: Tensor) -> Tensor:
        """The row with the biases of batch-norms moved along with their weights."""
        if not len(self._weights):
            return row
        weights, biases = self._weights.to(row.device), self._biases.to(row.device)
        moved = self._couplings.to(row) * (row[weights] - self.base.to(row)[weights])
        return row.index_add(0, biases, moved)

    def pulled(self, gradient: Tensor) -> Tensor:
        """The gradient by the values of the paths, at the model's own.

        Args:
            gradient: By the weights in one row, those of others that follow counted in.

        Returns:
            One number per path.
        """
        slopes = gradient[self.places]
        shares = self.amounts * slopes
        sums = torch.zeros(len(self.values) + 1, dtype=torch.float64)
        sums.index_add_(0, self.roots, shares)
        known = torch.where(self.values == 0, 1.0, self.values)  # No root is zero.
        return self.slopes * slopes - sums[:-1] / known

    def uncoupled(self, gradient: Tensor) -> Tensor:
        """A gradient by all weights as one by those that others follow, too."""
        if not len(self._weights):
            return gradient
        return gradient.index_add(0, self._weights, self._couplings * gradient[self._biases])

    @property
    def follows(self) -> Tensor:
        """Which coordinates move a bias along with their weight."""
        return torch.isin(self.places, self._weights)

    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """What belongs to parameters, by name, as one row: in double precision on the CPU."""
        rows = [parts[name].detach().double().cpu().reshape(-1) for name in self._edges.names]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *rows])

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """A row as parameters, by name; those that nothing reads are as they were."""
        found = {name: value.to(row) for name, value in self._unread.items()}
        for name, shape in zip(self._edges.names, self._edges.shapes, strict=True):
            found[name] = row[self._edges.span(name)].reshape(shape)
        return found
