"""Columns of layers, kept from one sweep: what their blocks are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from flatgauge.curvature.factors import Kept, LayerBlock, keeps_gradients
from flatgauge.curvature.summary import rows_of
from flatgauge.curvature.sweep import MOST_COLUMNS, Pass, Sweeper

#: What share of what the budget leaves beside vectors columns may take.
_SHARE = 0.35


class Columns:
    """What was kept of some layers.

    Args:
        names: The layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._kept: dict[str, list[Kept]] = {name: [] for name in names}
        self._counts: list[Tensor] = []

    def add(self, chunk: Pass) -> None:
        """Keep what a chunk's taps have heard."""
        for tap in chunk.taps:
            for name, kept in tap.kept().items():
                if name in self._kept:
                    self._kept[name].append(kept)
        self._counts.append(chunk.shares)

    def blocks(self, sweeper: Sweeper) -> Iterator[tuple[str, LayerBlock]]:
        """The blocks, one after the other; each is let go before the next."""
        counts = rows_of(self._counts, sweeper.surface.device)
        for name in list(self._kept):
            kept = self._kept.pop(name)
            yield name, LayerBlock(sweeper.plan.layers[name], kept, counts, sweeper.surface)


def columns_of(sweeper: Sweeper, names: Sequence[str]) -> Columns:
    """The columns of some layers: those that a sweep has left here, or by a sweep of their own.

    Args:
        sweeper: The sweeper.
        names: The layers, as `groups_of` gives them.

    Returns:
        The columns.
    """
    left = left_behind(sweeper).pop(tuple(names), None)
    if left is not None:
        return left
    columns = Columns(names)
    passes = sweeper.passes(
        frozenset(names), frozenset({"columns"}), all_columns=True, generator=None
    )

    def keep() -> None:
        for chunk in passes:
            chunk.pass_back(chunk.columns)
            columns.add(chunk)

    sweeper.surface.processes.attempt("columns", keep)
    return columns


def left_behind(sweeper: Sweeper) -> dict[tuple[str, ...], Columns]:
    """Columns that a sweep has kept beside its other work, to be taken by whoever needs them."""
    return sweeper.surface.recall("columns", dict)


def groups_of(sweeper: Sweeper, names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Which layers' columns are kept together.

    Args:
        sweeper: The sweeper.
        names: The layers.

    Returns:
        Groups that fit the memory budget, one after the other, and the layers that cannot be swept
        or do not fit.
    """
    surface, plan = sweeper.surface, sweeper.plan
    room = _SHARE * surface.budget.free
    columns = plan.outputs_per_sample()
    groups: list[list[str]] = [[]]
    rest, used = [], 0.0
    for name in reversed(list(names)):
        needed = column_bytes(sweeper, name)
        if name not in plan.exact or columns > MOST_COLUMNS + 1 or needed > room:
            rest.append(name)
            continue
        if used + needed > room:
            groups.append([])
            used = 0.0
        groups[-1].append(name)
        used += needed
    return [group for group in groups if group], rest


def column_bytes(sweeper: Sweeper, name: str) -> int:
    """What the columns of a layer take for all samples.

    Args:
        sweeper: The sweeper.
        name: The layer.

    Returns:
        The number of bytes.
    """
    surface, plan = sweeper.surface, sweeper.plan
    layer, columns = plan.layers[name], plan.outputs_per_sample()
    outputs = plan.numbers(layer.node)
    each = columns * outputs + plan.numbers(layer.input)
    if keeps_gradients(layer, outputs):
        each = columns * math.prod(layer.shape)
    return each * surface.dtype.itemsize * surface.largest_share
