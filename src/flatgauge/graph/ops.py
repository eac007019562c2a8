"""One record for every op: which family of rules it belongs to, and where it is linear.

What enters: the name of an op, or a graph. What leaves: the op's record, or the degree of the
graph's output in every parameter. The records are data. Scale inference and path sums look up the
rule class of an op's family (`symmetry/inference`); the degree follows from the record
alone: arguments that are multiplied add their degrees, all others contribute the largest, and an
argument in which the op is not even piecewise linear has degree two. An op without a record is
curved in everything it reads. Other packages add records (see `graph/export.py`).
Functions of single nodes give an op's name, arguments and shape.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from flatgauge.graph.export import ModelGraph

#: What ops that read no more than a shape fill it with.
_FILLINGS = {"zeros_like": 0, "new_zeros": 0, "zero": 0, "ones_like": 1, "new_ones": 1}

#: The file from which models are called when they are exported: no code of the user's.
_CALLER = os.path.join(os.path.dirname(__file__), "export.py")


@dataclass(frozen=True)
class Op:
    """What every analysis needs to know of an op."""

    family: str  # Of the rule class that handles it; "" if there is none.
    factors: tuple[str, ...] = ()  # Arguments that are multiplied with each other.
    curved: tuple[str, ...] = ()  # Arguments in which it is not even piecewise linear.
    linear: bool = True  # Whether it is piecewise linear in all other arguments together.
    unless: str = ""  # An argument that makes it curved in everything if it is given and not false.
    constant: bool = False  # Whether it is constant almost everywhere.


#: The records by the name of the op, without overload; with its namespace if that is not torch's.
OPS: dict[str, Op] = {}

#: The record of every other op.
UNKNOWN = Op("", linear=False)


def _add(names: str, record: Op) -> None:
    for name in names.split():
        assert name not in OPS, name
        OPS[name] = record


# -- contractions: products that are summed -------------------------------------------------------
_add("linear", Op("linear", factors=("input", "weight")))
_add("matmul vdot", Op("matmul", factors=("self", "other")))
_add("mm bmm", Op("matmul", factors=("self", "mat2")))
_add("mv", Op("matmul", factors=("self", "vec")))
_add("dot", Op("matmul", factors=("self", "tensor")))
_add("inner tensordot", Op("tensordot", factors=("self", "other")))
_add("outer ger", Op("tensordot", factors=("self", "vec2")))
_add("addmm", Op("addmm", factors=("mat1", "mat2")))
_add("baddbmm", Op("addmm", factors=("batch1", "batch2")))
_add("addmv", Op("addmm", factors=("mat", "vec")))
_add("einsum", Op("einsum", factors=("tensors",)))
_add("bilinear", Op("bilinear", factors=("input1", "input2", "weight")))
_add(
    """conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d""",
    Op("convolution", factors=("input", "weight")),
)
_add("scaled_dot_product_attention", Op("attention", curved=("query", "key", "attn_mask")))

# -- entry by entry -------------------------------------------------------------------------------
_add("relu abs neg positive clone contiguous alias lift_fresh lift_fresh_copy", Op("homogeneous"))
_add("tril triu", Op("triangle"))
_add("detach", Op("homogeneous", linear=False))  # Autograd does not see what depends on it.
_add("leaky_relu", Op("leaky"))
_add("rrelu", Op("leaky", unless="training"))
_add("prelu _prelu_kernel", Op("prelu", factors=("self", "weight")))
_add(
    "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout",
    Op("dropout"),
)
_add("_to_copy to type_as", Op("cast"))
_add("copy", Op("copy"))
_add("clamp clamp_min clamp_max hardtanh relu6 threshold", Op("clamp"))
_add("add sub subtract rsub maximum minimum fmax fmin", Op("sum"))
_add("hypot", Op("sum", linear=False))
_add("lerp", Op("lerp", curved=("weight",)))
_add("where", Op("where"))
_add("masked_fill", Op("masked_fill"))
_add("fill", Op("fill"))
_add("mul multiply", Op("mul", factors=("self", "other")))
_add("div divide true_divide", Op("div", curved=("other",), unless="rounding_mode"))
_add("addcmul", Op("addcmul", factors=("tensor1", "tensor2")))
_add("addcdiv", Op("addcmul", curved=("tensor2",)))
_add("square sqrt rsqrt reciprocal pow float_power", Op("power", linear=False))
_add("glu", Op("glu", linear=False))
_add("eq ne lt le gt ge", Op("comparison", constant=True))
_add("sign sgn isnan isinf isfinite logical_not signbit", Op("sign", constant=True))
_add("ceil floor round trunc", Op("curve", constant=True))
_add("hardshrink softshrink nan_to_num frac fmod remainder", Op("curve"))
_add("hardsigmoid", Op("hardsigmoid"))
_add(
    """
    acos acosh asin asinh atan atanh celu cos cosh digamma elu erf erfc exp exp2 expm1 gelu
    hardswish isclose lgamma log log10 log1p log2 log_sigmoid logit mish selu sigmoid silu sin
    sinh softplus tan tanh
    """,
    Op("curve", linear=False),
)
_add(
    """
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_not zeros_like ones_like
    full_like new_zeros new_ones new_full new_empty empty_like rand_like randn_like zeros ones
    full arange sym_size sym_numel sym_stride _assert_tensor_metadata _assert_scalar
    _assert_async
    """,
    Op("shape", constant=True),
)

# -- moves: entries go to other places ------------------------------------------------------------
_add(
    """
    view reshape _unsafe_view flatten unflatten view_as reshape_as permute transpose t movedim
    swapaxes swapdims numpy_T adjoint unsqueeze squeeze expand expand_as repeat tile
    repeat_interleave slice select narrow split split_with_sizes chunk unbind diagonal flip roll
    rot90 unfold tensor_split take pixel_shuffle pixel_unshuffle channel_shuffle
    native_channel_shuffle
    """,
    Op("move", unless="dtype"),
)
_add("as_strided", Op("as_strided"))
_add("im2col", Op("im2col"))
_add("col2im", Op("col2im"))
_add("constant_pad_nd pad", Op("pad"))
_add("cat concat concatenate stack hstack vstack", Op("cat"))
_add("diag diag_embed", Op("diag"))
_add("index_put", Op("index_put"))
_add("slice_scatter select_scatter diagonal_scatter", Op("scatter"))
_add("index index_select", Op("index"))
_add("gather take_along_dim", Op("gather"))
_add("index_add scatter_add", Op("", linear=True))
_add("embedding", Op("embedding"))
_add(
    "embedding_bag _embedding_bag _embedding_bag_forward_only",
    Op("embedding_bag", factors=("weight", "per_sample_weights")),
)
_add("getitem", Op("getitem"))

# -- norms ----------------------------------------------------------------------------------------
_add(
    """
    batch_norm _native_batch_norm_legit_no_training native_batch_norm _native_batch_norm_legit
    cudnn_batch_norm _batch_norm_no_update
    """,
    Op(
        "batch_norm",
        factors=("input", "weight"),
        curved=("running_mean", "running_var"),
        unless="training",
    ),
)
_add("layer_norm native_layer_norm rms_norm _fused_rms_norm", Op("layer_norm", curved=("input",)))
_add(
    "group_norm native_group_norm instance_norm",
    Op("group_norm", curved=("input", "running_mean", "running_var")),
)
_add("_weight_norm _weight_norm_interface", Op("weight_norm", curved=("v",)))

# -- reductions: many entries become one ----------------------------------------------------------
_add("sum mean amax amin max min", Op("reduction"))
_add("median nanmedian aminmax", Op("selection"))
_add("logsumexp", Op("selection", linear=False))
_add(
    "linalg_vector_norm linalg_norm linalg_matrix_norm norm std var var_mean std_mean",
    Op("spread", linear=False),
)
_add("cumsum", Op("cumsum"))
_add("cummax cummin sort topk msort kthvalue mode", Op("order"))
_add("argmax argmin argsort", Op("argmax", constant=True))
_add("avg_pool1d avg_pool2d avg_pool3d", Op("avg_pool"))
_add(
    """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices
    """,
    Op("max_pool"),
)
_add(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    """,
    Op("adaptive_pool"),
)
_add(
    """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    """,
    Op("resize"),
)
_add("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", Op("interpolation"))
_add("upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa", Op("smooth_resize"))
_add("softmax _softmax log_softmax _log_softmax", Op("softmax", linear=False))
_add("l1_loss", Op("loss"))
_add(
    """
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward binary_cross_entropy
    binary_cross_entropy_with_logits mse_loss smooth_l1_loss huber_loss kl_div soft_margin_loss
    multi_margin_loss
    """,
    Op("loss", linear=False),
)


# -- single nodes ----------------------------------------------------------------------------------


def op_name(node: fx.Node) -> str:
    """The name of a node's operation as in `OPS`, "" for no operation."""
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    return str(schema.name).removeprefix("aten::")


def call_op(node: fx.Node, *arguments: Any, **keywords: Any) -> Any:
    """Call a node's operation."""
    assert callable(node.target)
    return node.target(*arguments, **keywords)


def filling(node: fx.Node) -> float | None:
    """What an operation that reads no more than a shape fills it with; None for others."""
    if not all(isinstance(size, int) for size in shape_of(node)):
        return None
    if op_name(node) not in ("full_like", "new_full", "fill"):
        return _FILLINGS.get(op_name(node))
    arguments = arguments_of(node)
    given = arguments.get("fill_value", arguments.get("value"))
    return given if isinstance(given, (int, float)) else None


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments_of(node)  # Attention, dropout and the like may draw nothing.
    return given.get("dropout_p") != 0 and given.get("train", given.get("training")) is not False


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names of the operation's schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(node.args)} | dict(node.kwargs)
    named = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        else:
            default = argument.default_value if argument.has_default_value() else None
            named[argument.name] = node.kwargs.get(argument.name, default)
    return named


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The shape of a node's (first) output, sizes possibly symbolic; () where it has none."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def is_floating(node: fx.Node) -> bool:
    """Whether a node gives numbers that can be differentiated."""
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return any(value.is_floating_point() or value.is_complex() for value in values)


def source_line(node: fx.Node) -> str:
    """Where in the user's code an operation stands: ``file.py:12``, "" where unknown."""
    home = os.path.dirname(torch.__file__)
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [place for place in frames if not place[0].startswith(home) and place[0] != _CALLER]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


# -- degrees --------------------------------------------------------------------------------------

Degrees = dict[str, int]

#: Anything above one: a square, or a curve that is not a polynomial.
_CURVED = 2


class ParameterDegrees(NamedTuple):
    """The degree of a graph's output in its parameters: where the block curvature is exact."""

    degrees: Degrees  # By parameter that the output depends on; 2 for any above 1.
    reasons: dict[str, str]  # For every parameter of degree above 1, the op that made it so.


def op_record(node: fx.Node) -> Op:
    """The record of a node's op."""
    return OPS.get(op_name(node), UNKNOWN)


def multiplied_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that an op multiplies with each other; none if it is not a product."""
    factors = op_record(node).factors
    given = arguments_of(node) if factors else {}
    leaves = pytree.tree_leaves([given.get(name) for name in factors])
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def parameter_degrees(graph: ModelGraph, outputs: list[fx.Node]) -> ParameterDegrees:
    """Follow every parameter through a graph to its outputs."""
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
    total: Degrees = {}
    for node in outputs:
        _raise_to(total, found[node])
    curved = {name for name, degree in total.items() if degree >= _CURVED}
    return ParameterDegrees(total, {name: reasons[name] for name in reasons if name in curved})


def _degrees(node: fx.Node, found: dict[fx.Node, Degrees]) -> Degrees:
    """The degree of one op's output in every parameter."""
    op = op_record(node)
    if not op_name(node) or not is_floating(node) or op.constant:
        return {}  # Whole numbers and truth values are constant almost everywhere.
    if not any(found[source] for source in node.all_input_nodes):
        return {}
    arguments = arguments_of(node)
    linear = op.linear and not (op.unless and arguments.get(op.unless))
    total: Degrees = {}
    product: Degrees = {}
    for name, value in arguments.items():
        for leaf in pytree.tree_leaves(value):
            degrees = found[leaf] if isinstance(leaf, fx.Node) else {}
            if not linear or name in op.curved:
                _raise_to(total, dict.fromkeys(degrees, _CURVED))
            elif name in op.factors:
                for parameter, degree in degrees.items():
                    product[parameter] = min(product.get(parameter, 0) + degree, _CURVED)
            else:
                _raise_to(total, degrees)
    _raise_to(total, product)
    return total


def _raise_to(total: Degrees, degrees: Degrees) -> None:
    """Raise degrees to at least some others."""
    for name, degree in degrees.items():
        total[name] = max(total.get(name, 0), degree)
