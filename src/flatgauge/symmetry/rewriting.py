"""Everything that can be rewritten in a model, group by group, as moves to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, nn

from flatgauge.symmetry.finding import group_of
from flatgauge.symmetry.gauge import GaugeGroup, Move, opened
from flatgauge.symmetry.outputs import find_branches, find_shift
from flatgauge.symmetry.permutation import find_blocks, reorder
from flatgauge.symmetry.rescaling import Call, multiply

#: Rewrites a model in place.
Rewriting = Callable[[nn.Module], None]

#: Draws a member of a group; the flag asks for powers of two.
Draw = Callable[[Generator, bool], Rewriting]

#: The groups whose members multiply parameters: these can be powers of two.
RESCALINGS = ("layerwise", "nodewise", "rows", "output_scale")

#: The groups whose members keep every output.
KEEPING = ("layerwise", "nodewise", "rows", "permutation", "branches")


@dataclass(frozen=True)
class Rewritings:
    """The groups of rewritings that a model has.

    Attributes:
        gauge: Its gauge group.
        draws: How to draw a member, by group.
        absent: Why it has none of the other groups, by group.
    """

    gauge: GaugeGroup
    draws: dict[str, Draw]
    absent: dict[str, str]


def find_rewritings(model: nn.Module, call: Call, *, log2_range: float = 6.0) -> Rewritings:
    """Find every group of rewritings of a model.

    Args:
        model: The model.
        call: An example call.
        log2_range: How far scales are moved, in powers of two.

    Returns:
        The groups.
    """
    gauge, few = group_of(model, call)
    inference = gauge.inference
    draws: dict[str, Draw] = {}
    absent: dict[str, str] = {}
    for name, group in (("layerwise", gauge.layerwise()), ("nodewise", gauge)):
        if group.dim:
            draws[name] = _rescaling(group, log2_range)
        else:
            absent[name] = "no scale is free"
    if gauge.dim:
        draws["rows"] = _rows(gauge, log2_range)
    else:
        absent["rows"] = "no scale is free"
    blocks = find_blocks(inference, model, few)
    if blocks:

        def permute(generator: Generator, exact: bool) -> Rewriting:
            orders = [block.draw(generator) for block in blocks]

            def rewrite(twin: nn.Module) -> None:
                for order in orders:
                    reorder(twin, order)

            return rewrite

        draws["permutation"] = permute
    else:
        absent["permutation"] = "no hidden units were found to be interchangeable"
    wider, share = opened(inference)
    if bool((share != 0).any()):
        draws["output_scale"] = _scaled(wider, share)
    else:
        absent["output_scale"] = "no rescaling of parameters multiplies all outputs by one factor"
    shift = find_shift(model, few)
    if shift is not None:
        draws["output_shift"] = _shifted(shift)
    else:
        absent["output_shift"] = "no parameter is added to all outputs"
    branches = find_branches(model, few, gauge)
    if branches:

        def redistribute(generator: Generator, exact: bool) -> Rewriting:
            # All into one branch, as in the paper, or any share.
            uniform = 3 * float(torch.rand((), generator=generator, dtype=torch.float64)) - 1
            share = min(max(uniform, 0.0), 1.0)

            def rewrite(twin: nn.Module) -> None:
                for pair in branches:
                    pair.redistribute(twin, share)

            return rewrite

        draws["branches"] = redistribute
    else:
        absent["branches"] = "there are no parallel branches of proportional weights"
    return Rewritings(gauge, draws, absent)


def _rescaling(gauge: GaugeGroup, log2_range: float) -> Draw:
    def draw(generator: Generator, exact: bool) -> Rewriting:
        move = gauge.sample(generator=generator, log2_range=log2_range, powers_of_two=exact)
        factors = gauge.factors(move)
        return lambda twin: multiply(twin, factors)

    return draw


def _rows(gauge: GaugeGroup, log2_range: float) -> Draw:
    """Moves the units of one layer at a time."""
    sites = list(dict.fromkeys(gauge.sites))

    def draw(generator: Generator, exact: bool) -> Rewriting:
        site = sites[int(torch.randint(len(sites), (), generator=generator))]
        among = [k for k, name in enumerate(gauge.sites) if name == site]
        move = gauge.sample(
            generator=generator, log2_range=log2_range, powers_of_two=exact, among=among
        )
        factors = gauge.factors(move)
        return lambda twin: multiply(twin, factors)

    return draw


def _scaled(gauge: GaugeGroup, share: torch.Tensor) -> Draw:
    """Multiplies all outputs by a factor between a quarter and four, or by two or a half."""
    column = int(share.abs().argmax())

    def draw(generator: Generator, exact: bool) -> Rewriting:
        uniform = 2 * torch.rand((), generator=generator, dtype=torch.float64) - 1
        power = torch.sign(uniform) if exact else 2 * uniform
        log2 = torch.zeros(gauge.dim, dtype=torch.float64)
        log2[column] = power / share[column]
        factors = gauge.factors(Move(log2))
        return lambda twin: multiply(twin, factors)

    return draw


def _shifted(name: str) -> Draw:
    def draw(generator: Generator, exact: bool) -> Rewriting:
        amount = float(4 * torch.rand((), generator=generator, dtype=torch.float64) - 2)

        @torch.no_grad()
        def rewrite(twin: nn.Module) -> None:
            twin.get_parameter(name).add_(amount)

        return rewrite

    return draw
