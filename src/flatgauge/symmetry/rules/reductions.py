"""Rules of ops that gather many entries into one: these must have one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatgauge.nodes import op_name
from flatgauge.symmetry.rules.elementwise import alike
from flatgauge.symmetry.rules.table import Reading, Result, rule
from flatgauge.symmetry.scale import Ids, Scale, constant


def _reduced(reading: Reading, scale: Scale, axes: Any, keep: bool) -> Scale:
    """The scale after entries along some axes became one."""
    dims = len(scale.shape)
    chosen = range(dims) if axes is None or axes == [] else axes
    listed = [chosen] if isinstance(chosen, int) else list(chosen)
    listed = sorted(a % dims for a in listed) if dims else []
    tied = reading.system.tied(scale, listed)
    if keep:
        return tied
    shape = [size for axis, size in enumerate(scale.shape) if axis not in listed]

    def change(ids: Ids) -> Ids:
        return ids.reshape([size for axis, size in enumerate(ids.shape) if axis not in listed])

    return tied.apply(shape, change)


@rule("sum", "mean", "amax", "amin", "max", "min", "median", "nanmedian", "logsumexp", "aminmax")
def reduced(reading: Reading) -> Result:
    """Sums, means and extremes of entries of one scale."""
    arguments = reading.arguments
    if "other" in arguments:  # max and min of two tensors
        return alike(reading)
    if op_name(reading.node) == "logsumexp":
        reading.pin(reading["self"], reason="not positively homogeneous")
    scale = _reduced(reading, reading["self"], arguments.get("dim"), bool(arguments.get("keepdim")))
    return _with_indices(reading, scale)


@rule(
    *("linalg_vector_norm", "linalg_norm", "linalg_matrix_norm", "norm"),
    *("std", "var", "var_mean", "std_mean"),
)
def spread(reading: Reading) -> Result:
    """Norms and deviations scale like the entries, a variance like their squares."""
    arguments = reading.arguments
    op = op_name(reading.node)
    order = arguments.get("ord", arguments.get("p", 2))
    if order == 0:
        reading.pin(*reading.tensors(), reason="it counts")
        return reading.fixed()
    scale = _reduced(reading, reading["self" if "self" in arguments else "x"], arguments.get("dim"),
                     bool(arguments.get("keepdim")))  # fmt: skip
    first = reading.settled(scale.times(2)) if op.startswith("var") else scale
    return [first, scale] if op.endswith("_mean") else first


@rule("cumsum", "cummax", "cummin", "sort", "topk", "msort", "kthvalue", "mode")
def along(reading: Reading) -> Result:
    """Entries along one axis are added to or compared with each other."""
    scale = reading["self"]
    if not scale.shape:
        return _with_indices(reading, scale)
    axis = 0 if op_name(reading.node) == "msort" else reading.arguments.get("dim", -1)
    axis %= len(scale.shape)
    tied = reading.system.tied(scale, [axis])
    if len(reading.shape) < len(scale.shape):
        tied = tied.apply(reading.shape, lambda ids: ids.squeeze(axis))
    return _with_indices(reading, Scale(reading.shape, tied.terms))


@rule("argmax", "argmin", "argsort")
def placed(reading: Reading) -> Result:
    """Which entry is the largest: those compared must scale alike."""
    scale, axis = reading["self"], reading.arguments.get("dim")
    reading.system.tied(scale, range(len(scale.shape)) if axis is None else [axis])
    return reading.fixed()


@rule(
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
)
def pooled(reading: Reading) -> Result:
    """The entries of each window scale alike."""
    arguments = reading.arguments
    scale = reading[next(iter(arguments))]
    count = int(op_name(reading.node).split("pool")[1][0])
    kernel = _each(arguments["kernel_size"], count)
    stride = _each(arguments["stride"] or kernel, count)
    padding = _each(arguments["padding"], count)
    dilation = _each(arguments.get("dilation", 1), count)
    dims = len(scale.shape)
    for i in range(count):
        axis = dims - count + i
        if scale.varies(axis):
            scale = _windows(
                reading, scale, axis, reading.shape[axis], kernel[i], stride[i], padding[i],
                dilation[i],
            )  # fmt: skip
    return _with_indices(reading, Scale(reading.shape, scale.terms))


@rule(
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *("upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d"),
    *("replication_pad2d", "replication_pad3d"),
)
def resized(reading: Reading) -> Result:
    """All entries of an image scale alike."""
    scale = reading[next(iter(reading.arguments))]
    axes = [a for a, size in enumerate(scale.shape) if size != reading.shape[a]]
    spatial = int(next(c for c in reversed(op_name(reading.node)) if c in "123"))
    axes = sorted({*axes, *range(len(scale.shape) - spatial, len(scale.shape))})
    return _with_indices(reading, Scale(reading.shape, reading.system.tied(scale, axes).terms))


@rule("im2col")
def unfolded(reading: Reading) -> Result:
    """Patches: (n, c, h, w) to (n, c · taps, places)."""
    scale = reading.system.tied(reading["self"], [-2, -1])
    channels, rows = scale.shape[-3], reading.shape[-2]

    def change(ids: Ids) -> Ids:
        wide = ids.expand(*ids.shape[:-3], channels, 1, 1).squeeze(-1).squeeze(-1)
        return wide.repeat_interleave(rows // channels, -1).unsqueeze(-1)

    return scale.apply(reading.shape, change)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
def compared(reading: Reading) -> Result:
    """Not homogeneous."""
    scales = reading.tensors()
    reading.pin(*scales, reason="not positively homogeneous")
    return reading.system.shadow(scales[0], reading.site) if scales else reading.fixed()


@rule(
    *("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "multi_margin_loss"),
)
def lost(reading: Reading) -> Result:
    """A loss compares with targets, which cannot be scaled."""
    reading.pin(*reading.tensors(), reason="a loss")
    return reading.fixed()


def _windows(
    reading: Reading,
    scale: Scale,
    axis: int,
    places: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
) -> Scale:
    """Tie the entries of every window along an axis; each window takes its first one's scale."""
    size = scale.shape[axis]
    index = (
        torch.arange(places)[:, None] * stride + torch.arange(kernel)[None, :] * dilation - padding
    )
    inside = (index >= 0) & (index < size)
    first = index[torch.arange(places), inside.int().argmax(1)].clamp(0, size - 1)
    other = torch.where(inside, index, first[:, None])
    shape = (*scale.shape[:axis], places, *scale.shape[axis + 1 :])
    heads, tails = [], []
    for coefficient, ids in scale.terms:
        if ids.shape[axis] == 1:
            heads.append((coefficient, ids))
            continue
        head = ids.index_select(axis, first)
        heads.append((coefficient, head))
        for tap in range(kernel):
            tails.append((coefficient, head, ids.index_select(axis, other[:, tap])))
    for tap in range(kernel):
        terms = [(c, tail) for c, _, tail in tails[tap::kernel]]
        terms += [(-c, head) for c, head, _ in tails[tap::kernel]]
        reading.system.zero(terms)
    return Scale(shape, tuple(heads))


def _with_indices(reading: Reading, scale: Scale) -> Result:
    """A scale, beside constants for the further outputs of an op that also gives places."""
    if len(reading.shapes) == 1 and not isinstance(reading.node.meta["val"], (list, tuple)):
        return scale
    second = scale if op_name(reading.node) == "aminmax" else constant(scale.shape)
    return [scale, second, *(constant(shape) for shape in reading.shapes[2:])]


def _each(value: int | Sequence[int], count: int) -> list[int]:
    """One number per axis."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers
