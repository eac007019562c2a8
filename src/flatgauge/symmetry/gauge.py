"""The gauge group: all rescalings of a model's parameters that leave its function unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from flatgauge.subject import unwrapped
from flatgauge.symmetry.inference import Inference
from flatgauge.symmetry.origin import Origin
from flatgauge.symmetry.rescaling import multiplied
from flatgauge.symmetry.rules import Pin
from flatgauge.symmetry.scale import Scale
from flatgauge.symmetry.solution import Solution, solve
from flatgauge.symmetry.system import System


@dataclass(frozen=True)
class Move:
    """A member of a gauge group.

    Attributes:
        log2: The logarithm, to base two, of every independent scale (dim,), in double precision.
    """

    log2: Tensor


class GaugeGroup:
    """The rescalings of parameters (and stored means) that leave a model's function unchanged.

    Its coordinates are scales of activations: coordinate k multiplies what enters one hidden
    unit (or all units that must scale together) and divides what leaves it.

    Attributes:
        dim: How many independent scales there are.
        pinned: The ops that allow no scaling, with what they pin and why.
        names: The parameters and stored means that the group moves.
        sites: For every coordinate, the parameter or op whose output it scales.
        notes: What was assumed about the model: which parameters are held, what of its output
            does not count.
    """

    def __init__(self, inference: Inference, system: System, origin: Origin | None = None) -> None:
        """Solve for the group.

        Args:
            inference: The scales of all parameters.
            system: The equations, with those for the model's outputs.
            origin: The model that the group belongs to.
        """
        self.inference = inference
        self.origin = origin
        self.notes: tuple[str, ...] = origin.notes if origin is not None else ()
        self.system = system
        scales = inference.scales
        self._solution: Solution = solve(system, scales.values())
        self.dim = self._solution.basis.shape[1]
        self.pinned: tuple[Pin, ...] = tuple(inference.pins)
        starts = np.array(system.starts)
        places = np.searchsorted(starts, self._solution.free, side="right") - 1
        self.sites: tuple[str, ...] = tuple(system.sites[place] for place in places)
        self.names: tuple[str, ...] = tuple(name for name in scales if self.rows(name).nnz)

    def rows(self, name: str) -> Any:
        """The exponents of a tensor's distinct entries, one sparse row each.

        Args:
            name: Of a parameter or stored mean.

        Returns:
            A scipy array (entries, dim) whose rows span those of all entries.
        """
        return self._solution.rows([self.inference.scales[name]])

    def terms(self, name: str) -> list[tuple[float, NDArray[np.int64], tuple[int, ...]]]:
        """A tensor's exponents as a sum: coefficients with arrays of rows of `basis`.

        Args:
            name: Of a parameter or stored mean.

        Returns:
            Coefficients, rows of `basis` as a flat array, and its shape, which broadcasts to
            the tensor's.
        """
        return [
            (float(c), self._solution.classes[ids.reshape(-1).numpy()], tuple(ids.shape))
            for c, ids in self.inference.scales[name].terms
        ]

    @property
    def classes(self) -> NDArray[np.int64]:
        """For every unknown of `system`, its row of `basis`."""
        return self._solution.classes

    @property
    def basis(self) -> Any:
        """The exponents of all distinct scales in the model: a scipy array (scales, dim)."""
        return self._solution.basis

    def move(self, factors: Sequence[float] | Tensor) -> Move:
        """The member that multiplies each independent scale by a factor of your own.

        Args:
            factors: Positive, one per coordinate; see `sites` for which is which.

        Returns:
            The move.

        Raises:
            ValueError: If their number is not `dim`, or one is not positive.
        """
        values = torch.as_tensor(factors, dtype=torch.float64).reshape(-1)
        if len(values) != self.dim:
            raise ValueError(
                f"`factors` has {len(values)} entries, but the group has {self.dim} independent "
                "scales; give one factor for each (`gauge.sites` names them)."
            )
        if not bool((values > 0).all() and values.isfinite().all()):
            raise ValueError(
                "`factors` must be positive and finite: a negative or zero factor is no rescaling."
            )
        return Move(values.log2())

    def sample(
        self,
        *,
        generator: Generator,
        log2_range: float = 6.0,
        powers_of_two: bool = True,
        among: Sequence[int] | None = None,
    ) -> Move:
        """Draw a random member.

        Args:
            generator: Source of randomness.
            log2_range: Every independent scale is between 2**-this and 2**this.
            powers_of_two: Whether all factors are powers of two, which lose no bit. A scale whose
                root appears moves by 4, 16, ...: by one such step even if that is out of range.
            among: The coordinates to move; None for all.

        Returns:
            The move.

        Raises:
            ValueError: If `log2_range` is not positive and finite, or no power of two lies in it.
        """
        if not 0 < log2_range < float("inf") or (powers_of_two and log2_range < 1):
            raise ValueError(
                f"`log2_range={log2_range}` must be positive and finite, and at least 1 for powers "
                "of two."
            )
        if powers_of_two:
            steps = torch.from_numpy(self._steps)
            reach = (log2_range / steps).floor().clamp(min=1)
            uniform = torch.rand(self.dim, generator=generator, dtype=torch.float64)
            values = ((uniform * (2 * reach + 1)).floor() - reach) * steps
        else:
            uniform = torch.rand(self.dim, generator=generator, dtype=torch.float64)
            values = (2 * uniform - 1) * log2_range
        if among is not None:
            chosen = torch.zeros(self.dim, dtype=torch.bool)
            chosen[list(among)] = True
            values = torch.where(chosen, values, 0.0)
        return Move(values)

    def exponents(self, move: Move) -> dict[str, list[Tensor]]:
        """How much a move scales every tensor, as logarithms to base two.

        Args:
            move: The move.

        Returns:
            For every tensor that it moves, terms that broadcast to its shape and add up.
        """
        values = torch.from_numpy(self._solution.basis @ self._checked(move).numpy())
        return {
            name: [
                coefficient * values[torch.from_numpy(rows)].reshape(shape)
                for coefficient, rows, shape in self.terms(name)
            ]
            for name in self.names
        }

    def factors(self, move: Move) -> dict[str, Tensor]:
        """By how much a move multiplies every tensor.

        Args:
            move: The move.

        Returns:
            For every tensor that it moves, factors that broadcast to its shape.
        """
        return {
            name: torch.exp2(sum(terms[1:], start=terms[0]))
            for name, terms in self.exponents(move).items()
        }

    def rescale(self, model: nn.Module, move: Move) -> nn.Module:
        """The same function written differently.

        Args:
            model: The model this group was found for, a copy, or another of the same architecture
                with other weights; not changed. A model that is built differently is tried out on
                the example.
            move: A member of this group.

        Returns:
            A copy with rescaled parameters and stored means.

        Raises:
            ValueError: If the move belongs to another group, the model is of another
                architecture, or a number would leave the range of its precision.
        """
        inner = unwrapped(model)
        self._fits(inner)
        factors = self.factors(move)
        if self.origin is not None:
            self.origin.demand_like(inner, factors)
        return multiplied(inner, factors)

    def layerwise(self) -> GaugeGroup:
        """The subgroup with one scale per tensor (Rangamani et al. 2019, §2)."""
        system = self.system.copy()
        for scale in self.inference.scales.values():
            system.tied(scale, range(len(scale.shape)))
        return GaugeGroup(self.inference, system, self.origin)

    @property
    def generators(self) -> Generators:
        """The group's Lie algebra, by tensor: nothing changes along dθ/dt = G_k ∘ θ."""
        return Generators(self)

    def describe(self) -> str:
        """Which units share a scale, which parameters scale up and which down, what is pinned.

        Returns:
            A readable table.
        """
        from flatgauge.symmetry.description import description

        return description(self)

    def __repr__(self) -> str:
        return f"GaugeGroup(dim={self.dim}, tensors={len(self.names)}, pinned={len(self.pinned)})"

    @cached_property
    def _steps(self) -> NDArray[np.float64]:
        """The smallest step of every coordinate that keeps all exponents whole."""
        steps = np.ones(self.dim)
        for name in self.names:
            rows = self.rows(name).tocoo()
            odd = np.abs(rows.data - np.round(rows.data)) > 1e-9
            for column, value in zip(rows.col[odd], rows.data[odd], strict=True):
                bottom = Fraction(float(value)).limit_denominator(64).denominator
                steps[column] = np.lcm(int(steps[column]), bottom)
        return steps

    def _checked(self, move: Move) -> Tensor:
        if not isinstance(move, Move):
            raise TypeError(
                f"`move` is a {type(move).__name__}; make one with `gauge.sample(generator=...)` "
                "or `gauge.move(factors)`."
            )
        if move.log2.shape != (self.dim,):
            raise ValueError(
                f"`move` has {len(move.log2)} scales, but this group has {self.dim}; a move "
                "belongs to the group that made it."
            )
        return move.log2

    def _fits(self, model: nn.Module) -> None:
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        for name in self.names:
            shape = self.inference.scales[name].shape
            if name not in state or tuple(state[name].shape) != shape:
                found = f"shape {tuple(state[name].shape)}" if name in state else "nothing"
                raise ValueError(
                    f"this group was found for a model whose `{name}` has shape {shape}, but the "
                    f"model given has {found} there; find its own with "
                    "`find_gauge(model, example_inputs)`."
                )


class Generators(Sequence[dict[str, Tensor]]):
    """The generators of a gauge group, made when they are asked for."""

    def __init__(self, gauge: GaugeGroup) -> None:
        self._gauge = gauge

    def __len__(self) -> int:
        return self._gauge.dim

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """The exponents of one coordinate: by name, of every tensor that it moves."""
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        unit = torch.zeros(len(self), dtype=torch.float64)
        unit[k] = 1.0
        found = {}
        for name, terms in self._gauge.exponents(Move(unit)).items():
            exponents = sum(terms[1:], start=terms[0])
            if bool((exponents != 0).any()):
                shape = self._gauge.inference.scales[name].shape
                found[name] = exponents.expand(shape).clone()
        return found


def closed(inference: Inference, origin: Origin | None = None) -> GaugeGroup:
    """The group that leaves every output unchanged.

    Args:
        inference: The scales of a model.
        origin: The model.

    Returns:
        The group.
    """
    system = inference.system.copy()
    for output in inference.outputs:
        system.pin(output)
    return GaugeGroup(inference, system, origin)


def opened(inference: Inference) -> tuple[GaugeGroup, Tensor]:
    """The group that may also multiply all outputs by one factor.

    Args:
        inference: The scales of a model.

    Returns:
        The group, and the exponents (dim,) of its coordinates in the factor of the outputs.
    """
    system = inference.system.copy()
    common = system.fresh((), "the outputs")
    for output in inference.outputs:
        one = Scale(output.shape, ((Fraction(1), common.reshape((1,) * len(output.shape))),))
        system.equal(output, one)
    gauge = GaugeGroup(inference, system)
    row = gauge.basis[[gauge.classes[int(common)]]].toarray()[0]
    return gauge, torch.from_numpy(row)
