"""Rules of ops that move entries or pass them on: sums move as the entries do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatgauge.path_sums.table import Step, Sums, rule


@rule(
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"),
    *("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "numpy_T", "adjoint"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile", "repeat_interleave"),
    *("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "diagonal"),
    *("flip", "roll", "rot90", "unfold", "tensor_split", "take", "im2col", "col2im", "cumsum"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "diag", "diag_embed"),
    *("tril", "triu", "index", "index_select", "gather", "take_along_dim"),
    *("index_put", "slice_scatter", "select_scatter", "diagonal_scatter"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
    *("clone", "contiguous", "alias", "detach", "lift_fresh", "lift_fresh_copy", "positive"),
)
def moved(step: Step) -> Sums:
    """The op itself, run on the sums; what it puts beside them is like biases."""
    result = step.run()
    return list(result) if isinstance(result, (tuple, list)) else result


@rule("relu", "abs", "neg")
def passed(step: Step) -> Sums:
    """Slopes of size 0 or 1."""
    return step["self"]


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropped(step: Step) -> Sums:
    """Nothing in eval mode."""
    if step.arguments["train"] and step.arguments["p"] > 0:
        step.refuse("it is random")
    return step["input"]


@rule("_to_copy", "to", "type_as")
def cast(step: Step) -> Sums:
    """Between floating kinds a cast changes nothing; to whole numbers it rounds."""
    if not step.node.meta["val"].is_floating_point():
        step.refuse("a cast to whole numbers rounds")
    return step["self"]


@rule("copy")
def copied(step: Step) -> Sums:
    """What a slice is assigned."""
    return step["src"].expand(step.shape)


@rule("where")
def chosen(step: Step) -> Sums:
    """Fixed places of one tensor, the others of another."""
    if "other" not in step.arguments:
        step.refuse("it gives places")
    places = step.value(step.arguments["condition"])
    return torch.where(places, step["self"], step["other"])


@rule("masked_fill")
def filled(step: Step) -> Sums:
    """A number at fixed places."""
    return torch.where(step.value(step.arguments["mask"]), step["value"], step["self"])


@rule("constant_pad_nd", "pad")
def padded(step: Step) -> Sums:
    """Padding with a number is like biases; otherwise entries are repeated."""
    arguments = step.arguments
    if arguments.get("mode", "constant") != "constant":
        return moved(step)
    value = arguments.get("value") or 0.0
    if not math.isfinite(value):
        step.refuse("it pads with infinity")
    filling = float(step.tensor(value))
    return torch.nn.functional.pad(step["self"], arguments["pad"], value=filling)


@rule("getitem")
def item(step: Step) -> Sums:
    """One of several outputs."""
    source, index = step.node.args
    several: list[Tensor | None] = step.paths(source)
    assert isinstance(index, int)
    return several[index]
