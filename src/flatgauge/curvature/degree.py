"""In which parameters a model's output is linear: where the block curvature is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from flatgauge.graph import ModelGraph
from flatgauge.nodes import arguments_of, is_floating, op_name, source_line

Degrees = dict[str, int]

#: Anything above one: a square, or a curve that is no polynomial.
_CURVED = 2

#: Ops whose output moves, selects or adds up their inputs, or that are piecewise linear in all
#: of them together: the degree is the largest of the inputs'.
_LINEAR = frozenset(
    """
    _to_copy _unsafe_view abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add alias amax amin
    as_strided avg_pool1d avg_pool2d avg_pool3d cat channel_shuffle chunk clamp clamp_max
    clamp_min clone col2im constant_pad_nd contiguous copy cumsum diagonal dropout embedding
    expand expand_as feature_dropout flatten flip gather getitem hardshrink hardtanh index
    index_add index_select leaky_relu lift_fresh_copy masked_fill max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices maximum mean median min minimum movedim narrow neg pad permute
    pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d relu relu6 repeat
    repeat_interleave replication_pad1d replication_pad2d reshape roll rsub scatter_add
    select select_scatter slice slice_scatter softshrink sort split split_with_sizes squeeze
    stack sub sum swapaxes swapdims t threshold to topk transpose tril triu type_as unbind
    unflatten unfold unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d view
    view_as where
    """.split()  # noqa: SIM905
)

#: Ops that are constant almost everywhere.
_CONSTANT = ("sign", "sgn", "round", "floor", "ceil", "zeros_like", "ones_like", "full_like")

#: Products: which arguments are multiplied, and which are added to the product.
_PRODUCTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "addcmul": (("tensor1", "tensor2"), ("self",)),
    "addmm": (("mat1", "mat2"), ("self",)),
    "baddbmm": (("batch1", "batch2"), ("self",)),
    "batch_norm": (("input", "weight"), ("bias",)),
    "_native_batch_norm_legit_no_training": (("input", "weight"), ("bias",)),
    "bilinear": (("input1", "input2", "weight"), ("bias",)),
    "bmm": (("self", "mat2"), ()),
    "einsum": (("tensors",), ()),
    "inner": (("self", "other"), ()),
    "linear": (("input", "weight"), ("bias",)),
    "matmul": (("self", "other"), ()),
    "mm": (("self", "mat2"), ()),
    "mul": (("self", "other"), ()),
    "mv": (("self", "vec"), ()),
    "prelu": (("self", "weight"), ()),
}
_PRODUCTS |= {
    name: (("input", "weight"), ("bias",))
    for name in (
        *("conv1d", "conv2d", "conv3d", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
}

#: Ops that are linear in some arguments and curved in the others, which are named here.
_CURVED_IN: dict[str, tuple[str, ...]] = {
    "div": ("other",),
    "group_norm": ("input",),
    "instance_norm": ("input",),
    "layer_norm": ("input",),
    "native_group_norm": ("input",),
    "native_layer_norm": ("input",),
    "rms_norm": ("input",),
    "scaled_dot_product_attention": ("query", "key", "attn_mask"),
}


@dataclass(frozen=True)
class Linearity:
    """What a graph says about the parameters that its output depends on.

    Attributes:
        degrees: The output's degree in every parameter it depends on; 2 for any above 1.
        reasons: For every parameter of degree above 1, the op that made it so.
    """

    degrees: Degrees
    reasons: dict[str, str]


def linearity(graph: ModelGraph, outputs: list[fx.Node]) -> Linearity:
    """Follow every parameter through the graph.

    Args:
        graph: The model's graph.
        outputs: The nodes whose degree is asked for.

    Returns:
        The degrees of the outputs in every parameter.
    """
    names = {node: name for name, node in graph.parameters.items()}
    found: dict[fx.Node, Degrees] = {}
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        degrees = {names[node]: 1} if node in names else _degrees(node, found)
        for name, degree in degrees.items():
            if degree >= _CURVED and name not in reasons:
                line = source_line(node)
                reasons[name] = op_name(node) + (f" ({line})" if line else "")
        found[node] = degrees
    total = _largest([found[node] for node in outputs])
    curved = {name for name, degree in total.items() if degree >= _CURVED}
    return Linearity(total, {name: reasons[name] for name in reasons if name in curved})


def multiplied(node: fx.Node) -> list[fx.Node]:
    """What an op multiplies with each other; nothing if it is no product."""
    given = arguments_of(node) if op_name(node) in _PRODUCTS else {}
    factors = [given.get(role) for role in _PRODUCTS[op_name(node)][0]] if given else []
    return [leaf for leaf in pytree.tree_leaves(factors) if isinstance(leaf, fx.Node)]


def _degrees(node: fx.Node, found: dict[fx.Node, Degrees]) -> Degrees:
    """The degree of one op's output in every parameter."""
    op = op_name(node)
    if not op or not is_floating(node) or op in _CONSTANT:
        return {}  # Whole numbers and truth values are constant almost everywhere.

    def of(arguments: Any) -> list[Degrees]:
        leaves = pytree.tree_leaves(arguments)
        return [found[leaf] for leaf in leaves if isinstance(leaf, fx.Node)]

    everything = of([node.args, node.kwargs])
    if not any(everything):
        return {}
    if op in _LINEAR:
        return _largest(everything)
    arguments = arguments_of(node)
    if op in _PRODUCTS and not arguments.get("training"):
        factors, terms = _PRODUCTS[op]
        product = _sum(of([arguments[name] for name in factors]))
        return _largest([product, *of([arguments[name] for name in terms])])
    if op in _CURVED_IN and arguments.get("rounding_mode") is None:
        curved = {name for d in of([arguments[k] for k in _CURVED_IN[op]]) for name in d}
        rest = [v for k, v in arguments.items() if k not in _CURVED_IN[op]]
        if op.endswith("norm"):
            rest = [arguments.get("weight"), arguments.get("bias")]
        return _largest([*of(rest), dict.fromkeys(curved, _CURVED)])
    return {name: _CURVED for degrees in everything for name in degrees}


def _largest(degrees: list[Degrees]) -> Degrees:
    """The largest degree in every parameter."""
    total: Degrees = {}
    for item in degrees:
        for name, degree in item.items():
            total[name] = max(total.get(name, 0), degree)
    return total


def _sum(degrees: list[Degrees]) -> Degrees:
    """The degree of a product in every parameter."""
    total: Degrees = {}
    for item in degrees:
        for name, degree in item.items():
            total[name] = min(total.get(name, 0) + degree, _CURVED)
    return total
