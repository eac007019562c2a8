"""Rules of ops that move entries: scales and sums over paths move as the entries do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.symmetry.inference.equations import Ids, Scale, align_terms, constant, squeeze
from flatgauge.symmetry.inference.scales import Result, Rule, ScaleContext

if TYPE_CHECKING:
    from flatgauge.symmetry.path_sums import PathContext, PathSums

_DATA_DEPENDENT = "where entries go depends on the data"

#: Marks entries that an op fills with zeros (or infinities): they have every scale.
_ANY = -1


class MovingRule(Rule):
    """Base of rules whose paths move by the op itself; what it puts next to them is like biases."""

    path_by_op = True


class MoveRule(MovingRule, family="move"):
    """Another shape, order or part of the entries, or copies of them."""

    def scale(self, at: ScaleContext) -> Result:
        """The op itself, run on the array of unknowns."""
        source, *rest = at.node.args
        assert isinstance(source, fx.Node)
        if "dtype" in at.arguments:
            return at.pin_everything("it reads the bits of numbers as others")
        if any(node not in at.constants for node in _nodes((rest, at.node.kwargs))):
            if at.op not in ("view_as", "reshape_as", "expand_as"):
                return at.pin_everything(_DATA_DEPENDENT)
            shape = at.shape  # The other tensor only lends its shape.
            if at.op == "expand_as":
                return _run(at, at.scale(source), lambda ids: ids.expand(shape))
            return _run(at, at.scale(source), lambda ids: ids.reshape(shape))
        return _run(at, at.scale(source), _op_on_unknowns(at, 1))


class AsStridedRule(MoveRule, family="as_strided"):
    """Memory read in another order."""

    def scale(self, at: ScaleContext) -> Result:
        """As a move, if the memory is in the order of the entries."""
        source = at.node.args[0]
        assert isinstance(source, fx.Node)
        if not source.meta["val"].is_contiguous():
            return at.pin_everything("it reads memory in an order of its own")
        return super().scale(at)

    def path_sum(self, at: PathContext) -> PathSums:
        """Refuse: sums may lie in memory in another order."""
        at.refuse(self.path_refusal)


class Im2colRule(MovingRule, family="im2col"):
    """Patches: (n, c, h, w) to (n, c · taps, places)."""

    def scale(self, at: ScaleContext) -> Result:
        scale = at.equations.constant_along(at["self"], [-2, -1])
        channels, rows = scale.shape[-3], at.shape[-2]

        def change(ids: Ids) -> Ids:
            wide = ids.expand(*ids.shape[:-3], channels, 1, 1).squeeze(-1).squeeze(-1)
            return wide.repeat_interleave(rows // channels, -1).unsqueeze(-1)

        return scale.apply(at.shape, change)


class Col2imRule(MovingRule, family="col2im"):
    """Sums of overlapping patches; scales are not followed through it."""


class PadRule(Rule, family="pad"):
    """Entries added around a tensor."""

    def scale(self, at: ScaleContext) -> Result:
        """Zeros have every scale; along axes of one scale they take that scale."""
        arguments = at.arguments
        sides, mode = list(arguments["pad"]), arguments.get("mode", "constant")
        source = at["self"]
        dims = len(source.shape)
        value = arguments.get("value") or 0.0
        if mode != "constant":
            axes = [dims - 1 - i for i in range(len(sides) // 2)]
            return Scale(at.shape, at.equations.constant_along(source, axes).terms)
        free = value == 0 or abs(value) == float("inf")
        if not free and any(side > 0 for side in sides):
            at.pin(source, reason=f"it pads with {value:g}")
        whole = [0] * (2 * dims)
        whole[: len(sides)] = sides

        def change(ids: Ids) -> Ids:
            mine = list(whole)
            for i in range(dims):
                if ids.shape[dims - 1 - i] == 1:  # The padding takes the one scale of this axis.
                    mine[2 * i] = mine[2 * i + 1] = 0
            return torch.nn.functional.pad(ids, mine, value=_ANY if free else 0)

        return _fill_marked(at, source.apply(at.shape, change))

    def path_sum(self, at: PathContext) -> PathSums:
        """Padding with a number is like biases; otherwise entries are repeated."""
        arguments = at.arguments
        if arguments.get("mode", "constant") != "constant":
            return at.run_op()
        value = arguments.get("value") or 0.0
        if not math.isfinite(value):
            at.refuse("it pads with infinity")
        filling = float(at.tensor(value))
        return torch.nn.functional.pad(at["self"], arguments["pad"], value=filling)


class CatRule(MovingRule, family="cat"):
    """Tensors put side by side."""

    def scale(self, at: ScaleContext) -> Result:
        parts = [at.scale(part) for part in at.arguments["tensors"]]
        parts = [part for part in parts if part.shape != (0,)]
        axis = at.arguments.get("dim", 0)
        if at.op == "stack":
            axis %= len(at.shape)
            parts = [
                p.apply((*p.shape[:axis], 1, *p.shape[axis:]), lambda ids: ids.unsqueeze(axis))
                for p in parts
            ]
        elif at.op == "vstack":
            parts = [part.lift(max(2, len(part.shape))) for part in parts]
        elif at.op == "hstack":
            axis = min(1, len(at.shape) - 1)
        axis %= len(at.shape)
        terms = []
        for coefficient, row in align_terms(parts):
            sizes = [max(ids.shape[a] for ids in row) for a in range(len(at.shape))]
            full = [
                ids.expand(*sizes[:axis], part.shape[axis], *sizes[axis + 1 :])
                for part, ids in zip(parts, row, strict=True)
            ]
            terms.append((coefficient, squeeze(torch.cat(full, axis))))
        return Scale(at.shape, tuple(terms))


class DiagRule(MovingRule, family="diag"):
    """A diagonal with zeros around it, or (from a matrix) the diagonal itself."""

    def scale(self, at: ScaleContext) -> Result:
        run = _op_on_unknowns(at, 1)
        return _fill_marked(at, at["self"].move(at.shape, lambda ids: run(ids + 1) - 1))


class IndexPutRule(MovingRule, family="index_put"):
    """Numbers written to some places."""

    def scale(self, at: ScaleContext) -> Result:
        """Zeros fit anywhere; anything else only at fixed places."""
        base, values = at["self"], at["values"]
        places = list(at.arguments["indices"])
        if at.has_every_scale(at.arguments["values"]):
            return base
        if at.arguments["accumulate"] or not all(p is None or p in at.constants for p in places):
            return at.pin_everything(_DATA_DEPENDENT)
        where = tuple(slice(None) if p is None else at.constants[p] for p in places)

        def write(one: Ids, other: Ids) -> Ids:
            full = one.clone()
            full[where] = other
            return full

        return _write(at, base, values, write)


class ScatterRule(MovingRule, family="scatter"):
    """A part is replaced by another tensor."""

    def scale(self, at: ScaleContext) -> Result:
        return _write(at, at["self"], at["src"], _op_on_unknowns(at, 2))


class IndexRule(MovingRule, family="index"):
    """Entries at some places."""

    def scale(self, at: ScaleContext) -> Result:
        """Fixed places move entries; places that depend on data need one scale for all of them."""
        source = at["self"]
        if at.op == "index_select":
            axis = at.arguments["dim"] % len(source.shape)
            places: list[Any] = [None] * axis + [at.arguments["index"]]
        else:
            places = list(at.arguments["indices"])
        if all(place is None or place in at.constants for place in places):
            known = [slice(None) if p is None else at.constants[p] for p in places]
            return source.move(at.shape, lambda ids: ids[tuple(known)])
        axes = []
        axis = 0
        for place in places:
            mask = isinstance(place, fx.Node) and place.meta["val"].dtype == torch.bool
            width = place.meta["val"].dim() if mask else 1
            if place is not None:
                axes += list(range(axis, axis + width))
            axis += width
        tied = at.equations.constant_along(source, axes)
        if not any(ids.numel() > 1 for _, ids in tied.terms):
            return tied.apply(at.shape, lambda ids: ids.reshape((1,) * len(at.shape)))
        if axes == list(range(axes[0], axes[-1] + 1)):
            # Neighbouring axes are replaced, in place, by those of the indices.
            added = (1,) * (len(at.shape) - (len(source.shape) - len(axes)))
            front, behind = axes[0], axes[-1] + 1
            return tied.apply(
                at.shape, lambda ids: ids.reshape(*ids.shape[:front], *added, *ids.shape[behind:])
            )
        at.pin(tied, reason=_DATA_DEPENDENT)
        return at.fixed_outputs()


class GatherRule(MovingRule, family="gather"):
    """Entries at places that depend on data."""

    def scale(self, at: ScaleContext) -> Result:
        source = at["self"]
        if at.arguments["dim"] is None:  # From all entries in a row.
            tied = at.equations.constant_along(source, range(len(source.shape)))
            return tied.apply(at.shape, lambda ids: ids.reshape((1,) * len(at.shape)))
        axis = at.arguments["dim"] % len(source.shape)
        tied = at.equations.constant_along(source, [axis])
        others = [a for a in range(len(source.shape)) if source.shape[a] != at.shape[a]]
        tied = at.equations.constant_along(tied, [a for a in others if a != axis])
        return Scale(at.shape, tied.terms)


class TriangleRule(MovingRule, family="triangle"):
    """The entries on one side of a diagonal."""

    def scale(self, at: ScaleContext) -> Result:
        return at.first


class GetitemRule(Rule, family="getitem"):
    """One of several outputs."""

    def scale(self, at: ScaleContext) -> Result:
        source, index = at.node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        found = at.found[source]
        return found[index] if isinstance(found, list) else found

    def path_sum(self, at: PathContext) -> PathSums:
        source, index = at.node.args
        several: list[Tensor | None] = at.paths(source)
        assert isinstance(index, int)
        return several[index]


def _run(at: ScaleContext, source: Scale, run: Callable[[Ids], Any]) -> Result:
    """Run an op on arrays of unknowns; it may give one tensor or several."""
    if not at.has_several_outputs:
        return source.move(at.shape, run)
    results = [
        [squeeze(i) for i in run(ids.expand(source.shape).contiguous())] for _, ids in source.terms
    ]
    return [
        Scale(shape, tuple((c, r[i]) for (c, _), r in zip(source.terms, results, strict=True)))
        for i, shape in enumerate(at.shapes)
    ]


def _op_on_unknowns(at: ScaleContext, count: int) -> Callable[..., Any]:
    """The op with its first arguments left open, and constants in the place of other nodes."""
    tree = fx.node.map_arg(
        (at.node.args[count:], at.node.kwargs), lambda node: at.constants.get(node, node)
    )
    rest, keywords = pytree.tree_map(lambda x: x.long() if isinstance(x, Tensor) else x, tree)
    return lambda *ids: at.node.target(*ids, *rest, **keywords)  # type: ignore[operator]


def _write(at: ScaleContext, base: Scale, part: Scale, write: Callable[[Ids, Ids], Ids]) -> Scale:
    """Write unknowns of one tensor into those of another, term by term."""
    terms = []
    for coefficient, (one, other) in align_terms([base, part]):
        full = write(one.expand(base.shape).clone(), other.expand(part.shape))
        terms.append((coefficient, squeeze(full)))
    return Scale(at.shape, tuple(terms))


def _fill_marked(at: ScaleContext, scale: Scale) -> Scale:
    """Give every entry that was filled with zeros an unknown of its own."""
    if not scale.terms:
        return constant(scale.shape)
    terms = []
    for number, (coefficient, ids) in enumerate(scale.terms):
        marked = ids == _ANY
        ids = ids.clone()
        ids[marked] = 0 if number else at.equations.fresh((int(marked.sum()),), at.site)
        terms.append((coefficient, squeeze(ids)))
    return Scale(scale.shape, tuple(terms))


def _nodes(tree: Any) -> list[fx.Node]:
    """All nodes in a structure of arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]
