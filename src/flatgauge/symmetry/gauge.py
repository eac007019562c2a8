"""The gauge group: all rescalings of a model's parameters that leave its function unchanged.

What enters: the inferred scales of a model, and the equations between them. What leaves: the
group's dimension, its members as factors by parameter, and texts on what shares a scale. Every
tensor's log scale is a sum of rows of `basis` times the free log scales. Products are taken in
double precision and rounded once; a number that leaves the range of its precision is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from flatgauge.runtime.isolation import copy_model
from flatgauge.surface.model import unwrap
from flatgauge.symmetry.inference.equations import Scale, ScaleEquations, Solution, solve
from flatgauge.symmetry.inference.scales import Pin

if TYPE_CHECKING:
    from flatgauge.symmetry.find import Origin
    from flatgauge.symmetry.inference.scales import Inference

#: Exponents below this are zero.
_ZERO = 1e-9

#: Parameters and buffers, by name.
State = dict[str, Tensor]


@dataclass(frozen=True)
class Move:
    """A member of a gauge group.

    Attributes:
        log2: The logarithm, to base two, of every independent scale (dim,), in double precision.
    """

    log2: Tensor


@dataclass(frozen=True)
class ScaledTensor:
    """A tensor that a scale multiplies or divides.

    Attributes:
        name: Of the tensor.
        axis: The axis along which the scales differ; None if they do not, or along several.
        power: The exponent of the scale in it: 1 for what enters a unit, -1 for what leaves it.
    """

    name: str
    axis: int | None
    power: float


@dataclass(frozen=True)
class ScalePattern:
    """Scales that move the same tensors in the same way.

    Attributes:
        site: The parameter or op whose output they scale.
        scales: How many there are.
        moved: The tensors; one that is both multiplied and divided stands here twice.
    """

    site: str
    scales: int
    moved: tuple[ScaledTensor, ...]


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

    def __init__(
        self, inference: Inference, equations: ScaleEquations, origin: Origin | None = None
    ) -> None:
        """Solve for the group; `equations` also hold what is required of the outputs."""
        self.inference = inference
        self.origin = origin
        self.notes: tuple[str, ...] = origin.notes if origin is not None else ()
        self.equations = equations
        scales = inference.scales
        self._solution: Solution = solve(equations, scales.values())
        self._rows: dict[str, Any] = {}
        self.dim = self._solution.basis.shape[1]
        self.pinned: tuple[Pin, ...] = tuple(inference.pins)
        starts = np.array(equations.starts)
        places = np.searchsorted(starts, self._solution.free, side="right") - 1
        self.sites: tuple[str, ...] = tuple(equations.sites[place] for place in places)
        self.names: tuple[str, ...] = tuple(name for name in scales if self.rows(name).nnz)

    @classmethod
    def fixing_outputs(cls, inference: Inference, origin: Origin | None = None) -> GaugeGroup:
        """The group that leaves every output unchanged."""
        equations = inference.equations.copy()
        for output in inference.outputs:
            equations.pin(output)
        return cls(inference, equations, origin)

    def scaling_outputs(self) -> tuple[GaugeGroup, Tensor]:
        """The group that may also scale all outputs by one factor, and its exponents in that."""
        equations = self.inference.equations.copy()
        common = equations.fresh((), "the outputs")
        for output in self.inference.outputs:
            one = Scale(output.shape, ((Fraction(1), common.reshape((1,) * len(output.shape))),))
            equations.equal(output, one)
        gauge = GaugeGroup(self.inference, equations)
        row = gauge.basis[[gauge.classes[int(common)]]].toarray()[0]
        return gauge, torch.from_numpy(row)

    def rows(self, name: str) -> Any:
        """A sparse array (entries, dim) whose rows span the exponents of a tensor's entries."""
        if name not in self._rows:
            self._rows[name] = self._solution.rows([self.inference.scales[name]])
        return self._rows[name]

    def terms(self, name: str) -> list[tuple[float, NDArray[np.int64], tuple[int, ...]]]:
        """A tensor's exponents as a sum: coefficients, flat rows of `basis`, and their shape."""
        return [
            (float(c), self._solution.classes[ids.reshape(-1).numpy()], tuple(ids.shape))
            for c, ids in self.inference.scales[name].terms
        ]

    @property
    def classes(self) -> NDArray[np.int64]:
        """For every unknown of `equations`, its row of `basis`."""
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
            raise ValueError("`factors` must be positive and finite: others are not rescalings.")
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
        """How much a move scales every tensor, to base two: terms that broadcast and add up."""
        values = torch.from_numpy(self._solution.basis @ self._log2_of(move).numpy())
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
                with other weights; not changed. A model that is built differently is first tried
                on the example.
            move: A member of this group.

        Returns:
            A copy with rescaled parameters and stored means.

        Raises:
            ValueError: If the move belongs to another group, the model is of another
                architecture, or a number would leave the range of its precision.
        """
        inner = unwrap(model)
        self._check_shapes(inner)
        factors = self.factors(move)
        if self.origin is not None:
            self.origin.check_fits(inner, factors)
        twin = copy_model(inner)
        multiply(twin, factors)
        return twin

    def layerwise(self) -> GaugeGroup:
        """The subgroup with one scale per tensor (Rangamani et al. 2019, §2)."""
        equations = self.equations.copy()
        for scale in self.inference.scales.values():
            equations.constant_along(scale, range(len(scale.shape)))
        return GaugeGroup(self.inference, equations, self.origin)

    @property
    def generators(self) -> Generators:
        """The group's Lie algebra, by tensor: nothing changes along dθ/dt = G_k ∘ θ."""
        return Generators(self)

    def patterns(self) -> list[ScalePattern]:
        """Group the scales by the tensors that they move, and how.

        Returns:
            One pattern per site and set of tensors, in the order of the coordinates.
        """
        if not self.dim:
            return []
        powers = {name: self._extreme_powers(name) for name in self.names}
        numbers = {site: number for number, site in enumerate(dict.fromkeys(self.sites))}
        sites = np.array([[numbers[site] for site in self.sites]], np.float64)
        keys = np.concatenate([sites, *powers.values()]).T
        _, starts, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
        patterns = []
        for group in np.argsort(starts):
            first = starts[group]
            column = self.basis[:, [first]].toarray()[:, 0]
            moved = tuple(
                ScaledTensor(name, self._axis(name, column), float(power))
                for name, extremes in powers.items()
                for power in extremes[:, first]
                if power
            )
            patterns.append(ScalePattern(self.sites[first], int(counts[group]), moved))
        return patterns

    def describe(self) -> str:
        """Which units share a scale, which parameters scale up and which down, what is pinned.

        Returns:
            A table: for every site its number of scales, what they multiply and what they divide;
            then what is pinned, and by what, and what was assumed about the model.
        """
        lines = [f"{self.dim} independent scales, moving {len(self.names)} tensors"]
        if not self.dim:
            lines = [
                "no scale is free: this model can be written in one way only, as far as scales go"
            ]
        counts: dict[str, int] = {}
        signs: dict[str, set[tuple[str, bool]]] = {}
        for pattern in self.patterns():
            site = pattern.site
            counts[site] = counts.get(site, 0) + pattern.scales
            signs.setdefault(site, set()).update((t.name, t.power > 0) for t in pattern.moved)
        rows = [("scales of the output of", "number", "times", "divided")]
        for site, count in counts.items():
            up, down = (
                list_names([name for name in self.names if (name, sign) in signs[site]])
                for sign in (True, False)
            )
            rows.append((site, str(count), up, down))
        if self.dim:
            widths = [max(len(row[i]) for row in rows) for i in range(4)]
            lines += [
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in rows
            ]
        for title, known in (("without a rule, so pinned:", False), ("pinned:", True)):
            pins = [pin for pin in self.pinned if pin.known == known]
            lines += [title, *(f"  {pin}" for pin in pins)] if pins else []
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return f"GaugeGroup(dim={self.dim}, tensors={len(self.names)}, pinned={len(self.pinned)})"

    def _extreme_powers(self, name: str) -> NDArray[np.float64]:
        """The largest positive and negative exponent of every coordinate in a tensor (2, dim)."""
        rows = self.rows(name).tocoo()
        found = np.zeros((2, self.dim))
        values = np.where(np.abs(rows.data) > _ZERO, np.round(rows.data, 6), 0.0)
        np.maximum.at(found[0], rows.col, values)
        np.minimum.at(found[1], rows.col, values)
        return found

    def _axis(self, name: str, column: NDArray[np.float64]) -> int | None:
        """The only axis of a tensor along which a coordinate moves some entries and not others."""
        # Terms alone do not decide: what one of them takes, another may give back.
        parts = [c * column[rows].reshape(shape) for c, rows, shape in self.terms(name)]
        exponents = sum(parts[1:], start=parts[0])
        axes = [a for a in range(exponents.ndim) if np.ptp(exponents, axis=a).max() > _ZERO]
        return axes[0] if len(axes) == 1 else None

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

    def _log2_of(self, move: Move) -> Tensor:
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

    def _check_shapes(self, model: nn.Module) -> None:
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


def list_names(names: Sequence[str], most: int = 4, quote: str = "") -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"{quote}{name}{quote}" for name in names[:most]) + more


# -- the tensors of a model ------------------------------------------------------------------------


def state_of(model: nn.Module) -> State:
    """The parameters and buffers of a model, by name."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items()}


def cloned_state(state: State) -> State:
    """Copies of parameters and buffers."""
    return {name: tensor.clone() for name, tensor in state.items()}


def state_in_float64(state: State) -> State:
    """Copies of parameters and buffers in double precision."""
    return {name: to_double(tensor) for name, tensor in state.items()}


def to_double(tensor: Tensor) -> Tensor:
    """A copy in double precision; integers stay integers."""
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


@torch.no_grad()
def multiply(model: nn.Module, factors: Mapping[str, Tensor]) -> None:
    """Multiply named tensors in place; raise `ValueError` if a number leaves its range."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, factor in factors.items():
        state[name].copy_(_product(name, state[name], factor))


@torch.no_grad()
def rescale_state(state: State, factors: Mapping[str, Tensor]) -> State:
    """Copies of parameters and buffers, some of them multiplied; see `multiply`."""
    return {
        name: _product(name, tensor, factors[name]) if name in factors else tensor.clone()
        for name, tensor in state.items()
    }


def _product(name: str, tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times factors in double precision, rounded once."""
    factor = factor.to(tensor.device)
    coarse = factor.to(tensor.dtype)
    if bool((coarse.frexp().mantissa == 0.5).all()) and torch.equal(coarse.double(), factor):
        new = tensor * coarse  # Powers of two: the product is not rounded.
    else:
        new = (tensor.double() * factor).to(tensor.dtype)
    same_count = torch.count_nonzero(new) == torch.count_nonzero(tensor)
    if not (bool(same_count) and bool(new.sum().isfinite())):  # Rarely: look at every entry.
        lost = (new == 0) & (tensor != 0) | new.isinf() & tensor.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"the move takes {int(lost.sum())} entries of `{name}` out of the range of "
                f"{str(tensor.dtype).removeprefix('torch.')}; use a smaller `log2_range`, or "
                "convert the model with `.double()`."
            )
    return new
