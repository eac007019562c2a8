"""Rules of ops that move entries: scales move as the entries do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.nodes import op_name
from flatgauge.symmetry.rules.table import Reading, Result, rule
from flatgauge.symmetry.scale import Ids, Scale, constant, slots, squeezed

#: Marks entries that an op fills with zeros (or infinities): they have every scale.
_ANY = -1


@rule(
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"),
    *("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "numpy_T", "adjoint"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile", "repeat_interleave"),
    *("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "diagonal"),
    *("flip", "roll", "rot90", "unfold", "tensor_split", "take", "as_strided"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
)
def moved(reading: Reading) -> Result:
    """The op itself, run on the array of unknowns."""
    source, *rest = reading.node.args
    assert isinstance(source, fx.Node)
    if "dtype" in reading.arguments:
        reading.pin(*reading.tensors(), reason="it reads the bits of numbers as others")
        return reading.fixed()
    if op_name(reading.node) == "as_strided" and not source.meta["val"].is_contiguous():
        reading.pin(*reading.tensors(), reason="it reads memory in an order of its own")
        return reading.fixed()
    if any(node not in reading.constants for node in _nodes((rest, reading.node.kwargs))):
        if op_name(reading.node) not in ("view_as", "reshape_as", "expand_as"):
            reading.pin(*reading.tensors(), reason="where entries go depends on the data")
            return reading.fixed()
        shape = reading.shape  # The other tensor only lends its shape.
        grown = op_name(reading.node) == "expand_as"
        return _run(
            reading,
            reading.scale(source),
            lambda ids: ids.expand(shape) if grown else ids.reshape(shape),
        )
    rest, keywords = _resolved(reading, (rest, reading.node.kwargs))

    def run(ids: Ids) -> Any:
        return reading.node.target(ids, *rest, **keywords)  # type: ignore[operator]

    return _run(reading, reading.scale(source), run)


@rule("constant_pad_nd", "pad")
def padded(reading: Reading) -> Result:
    """Padding: zeros have every scale; along axes of one scale they take that scale."""
    arguments = reading.arguments
    sides, mode = list(arguments["pad"]), arguments.get("mode", "constant")
    source = reading["self"]
    dims = len(source.shape)
    value = arguments.get("value") or 0.0
    if mode != "constant":
        axes = [dims - 1 - i for i in range(len(sides) // 2)]
        kept = reading.system.tied(source, axes)
        return Scale(reading.shape, kept.terms)
    free = value == 0 or abs(value) == float("inf")
    if not free and any(side > 0 for side in sides):
        reading.pin(source, reason=f"it pads with {value:g}")
    whole = [0] * (2 * dims)
    whole[: len(sides)] = sides

    def change(ids: Ids) -> Ids:
        mine = list(whole)
        for i in range(dims):
            if ids.shape[dims - 1 - i] == 1:  # One scale along this axis: the padding takes it.
                mine[2 * i] = mine[2 * i + 1] = 0
        return torch.nn.functional.pad(ids, mine, value=_ANY if free else 0)

    return _filled(reading, source.apply(reading.shape, change))


@rule("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def joined(reading: Reading) -> Result:
    """Parts keep their scales."""
    parts = [reading.scale(part) for part in reading.arguments["tensors"]]
    parts = [part for part in parts if part.shape != (0,)]
    op, axis = op_name(reading.node), reading.arguments.get("dim", 0)
    if op == "stack":
        axis %= len(reading.shape)
        parts = [
            part.apply((*part.shape[:axis], 1, *part.shape[axis:]), lambda ids: ids.unsqueeze(axis))
            for part in parts
        ]
    elif op == "vstack":
        parts = [part.lifted(max(2, len(part.shape))) for part in parts]
    elif op == "hstack":
        axis = min(1, len(reading.shape) - 1)
    axis %= len(reading.shape)
    terms = []
    for coefficient, row in slots(parts):
        sizes = [
            max(ids.shape[a] for ids in row) if a != axis else 0 for a in range(len(reading.shape))
        ]
        full = [
            ids.expand(*sizes[:axis], part.shape[axis], *sizes[axis + 1 :])
            for part, ids in zip(parts, row, strict=True)
        ]
        terms.append((coefficient, squeezed(torch.cat(full, axis))))
    return Scale(reading.shape, tuple(terms))


@rule("diag", "diag_embed")
def on_diagonal(reading: Reading) -> Result:
    """A diagonal with zeros beside it, or (from a matrix) the diagonal itself."""
    rest, keywords = _resolved(reading, (reading.node.args[1:], reading.node.kwargs))
    moved = reading["self"].move(
        reading.shape,
        lambda ids: reading.node.target(ids + 1, *rest, **keywords) - 1,  # type: ignore[operator]
    )
    return _filled(reading, moved)


@rule("index_put")
def put(reading: Reading) -> Result:
    """Zeros fit anywhere; anything else only at fixed places."""
    base, values = reading["self"], reading["values"]
    places = list(reading.arguments["indices"])
    if reading.is_loose(reading.arguments["values"]):
        return base
    known = all(place is None or place in reading.constants for place in places)
    if reading.arguments["accumulate"] or not known:
        reading.pin(*reading.tensors(), reason="where entries go depends on the data")
        return reading.fixed()
    where = tuple(slice(None) if p is None else reading.constants[p] for p in places)
    terms = []
    for coefficient, (one, other) in slots([base, values]):
        full = one.expand(base.shape).clone()
        full[where] = other.expand(values.shape)
        terms.append((coefficient, squeezed(full)))
    return Scale(reading.shape, tuple(terms))


@rule("slice_scatter", "select_scatter", "diagonal_scatter")
def written(reading: Reading) -> Result:
    """A part is replaced by another tensor."""
    base, part = reading["self"], reading["src"]
    rest, keywords = _resolved(reading, (reading.node.args[2:], reading.node.kwargs))
    terms = []
    for coefficient, (one, other) in slots([base, part]):
        full = reading.node.target(  # type: ignore[operator]
            one.expand(base.shape).clone(), other.expand(part.shape), *rest, **keywords
        )
        terms.append((coefficient, squeezed(full)))
    return Scale(reading.shape, tuple(terms))


@rule("index", "index_select")
def picked(reading: Reading) -> Result:
    """Fixed places move entries; places that depend on data need one scale for all of them."""
    source = reading["self"]
    if op_name(reading.node) == "index_select":
        axis = reading.arguments["dim"] % len(source.shape)
        places: list[Any] = [None] * axis + [reading.arguments["index"]]
    else:
        places = list(reading.arguments["indices"])
    if all(place is None or place in reading.constants for place in places):
        known = [slice(None) if p is None else reading.constants[p] for p in places]
        return source.move(reading.shape, lambda ids: ids[tuple(known)])
    axes = []
    axis = 0
    for place in places:
        mask = isinstance(place, fx.Node) and place.meta["val"].dtype == torch.bool
        width = place.meta["val"].dim() if mask else 1
        if place is not None:
            axes += list(range(axis, axis + width))
        axis += width
    tied = reading.system.tied(source, axes)
    if not any(ids.numel() > 1 for _, ids in tied.terms):
        flat = (1,) * len(reading.shape)
        return tied.apply(reading.shape, lambda ids: ids.reshape(flat))
    if len(axes) == 1 or axes == list(range(axes[0], axes[-1] + 1)):
        # Neighbouring axes are replaced, in place, by those of the indices.
        added = len(reading.shape) - (len(source.shape) - len(axes))
        keep = slice(axes[-1] + 1, None)
        front = tied.shape[: axes[0]]

        def change(ids: Ids) -> Ids:
            return ids.reshape(*ids.shape[: len(front)], *(1,) * added, *ids.shape[keep])

        return tied.apply(reading.shape, change)
    reading.pin(tied, reason="where entries go depends on the data")
    return reading.fixed()


@rule("gather", "take_along_dim")
def gathered(reading: Reading) -> Result:
    """Places depend on data: one scale along the axis."""
    source = reading["self"]
    if reading.arguments["dim"] is None:  # From all entries in a row.
        tied = reading.system.tied(source, range(len(source.shape)))
        return tied.apply(reading.shape, lambda ids: ids.reshape((1,) * len(reading.shape)))
    axis = reading.arguments["dim"] % len(source.shape)
    tied = reading.system.tied(source, [axis])
    others = [a for a in range(len(source.shape)) if source.shape[a] != reading.shape[a]]
    tied = reading.system.tied(tied, [a for a in others if a != axis])
    return Scale(reading.shape, tied.terms)


@rule("embedding")
def embedded(reading: Reading) -> Result:
    """Rows are read by number: all have the same scales."""
    weight = reading.system.tied(reading["weight"], [0])
    dims = len(reading.shape)

    def change(ids: Ids) -> Ids:
        return ids.reshape(*(1,) * (dims - 1), ids.shape[1])

    return reading.settled(weight.apply(reading.shape, change))


@rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def bagged(reading: Reading) -> Result:
    """Sums, means or maxima of rows."""
    if reading.has("per_sample_weights"):
        reading.pin(*reading.tensors(), reason="its rows have weights")
        return reading.fixed()
    rows = reading.system.tied(reading["weight"], [0])
    whole = reading.settled(Scale(reading.shape, rows.terms))
    return [whole, *(constant(shape) for shape in reading.shapes[1:])]


@rule("getitem")
def item(reading: Reading) -> Result:
    """One of several outputs."""
    source, index = reading.node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    found = reading.found[source]
    return found[index] if isinstance(found, list) else found


def _run(reading: Reading, source: Scale, run: Callable[[Ids], Any]) -> Result:
    """Run an op on arrays of unknowns; it may give one tensor or several."""
    several = isinstance(reading.node.meta["val"], (list, tuple))
    if not several:
        return source.move(reading.shape, run)
    results = [
        [squeezed(i) for i in run(ids.expand(source.shape).contiguous())] for _, ids in source.terms
    ]
    return [
        Scale(shape, tuple((c, r[i]) for (c, _), r in zip(source.terms, results, strict=True)))
        for i, shape in enumerate(reading.shapes)
    ]


def _filled(reading: Reading, scale: Scale) -> Scale:
    """Give every entry that was filled with zeros an unknown of its own."""
    if not scale.terms:
        return constant(scale.shape)
    terms = []
    for number, (coefficient, ids) in enumerate(scale.terms):
        loose = ids == _ANY
        ids = ids.clone()
        if number == 0:
            ids[loose] = reading.system.fresh((int(loose.sum()),), reading.site)
        else:
            ids[loose] = 0
        terms.append((coefficient, squeezed(ids)))
    return Scale(scale.shape, tuple(terms))


def _nodes(tree: Any) -> list[fx.Node]:
    """All nodes in a structure of arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]


def _resolved(reading: Reading, tree: Any) -> Any:
    """A structure of arguments with the values of constants in the place of nodes."""
    fixed = fx.node.map_arg(tree, lambda node: reading.constants.get(node, node))
    return pytree.tree_map(lambda x: x.long() if isinstance(x, Tensor) else x, fixed)
