"""The table of ops: every record against numbers, and the degrees that follow against Hessians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import dense_blocks
from torch import Tensor, nn

from flatgauge.curvature import block_curvature
from flatgauge.graph.export import ModelGraph
from flatgauge.graph.ops import OPS, UNKNOWN, op_record, parameter_degrees

GENERATOR = torch.Generator().manual_seed(1)


def t(*shape: int) -> Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def u(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9."""
    return 0.1 + 0.8 * torch.rand(shape, generator=GENERATOR, dtype=torch.float64)


def i(*values: int) -> Tensor:
    return torch.tensor(values)


MASK = torch.tensor([[True, False, True, False]] * 3)
NORM = (t(2, 3, 4), t(3), t(3), t(3), u(3))  # input, weight, bias, mean, variance

#: Arguments by op and overload, in the order of the schema.
SAMPLES: dict[str, tuple[Any, ...]] = {
    "linear": (t(3, 4), t(5, 4), t(5)),
    "matmul": (t(3, 4), t(4, 5)),
    "vdot": (t(4), t(4)),
    "mm": (t(3, 4), t(4, 5)),
    "bmm": (t(2, 3, 4), t(2, 4, 5)),
    "mv": (t(3, 4), t(4)),
    "dot": (t(4), t(4)),
    "inner": (t(3, 4), t(5, 4)),
    "tensordot": (t(3, 4), t(4, 5), [1], [0]),
    "outer": (t(3), t(4)),
    "ger": (t(3), t(4)),
    "addmm": (t(3, 5), t(3, 4), t(4, 5)),
    "baddbmm": (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addmv": (t(3), t(3, 4), t(4)),
    "einsum": ("ij,jk->ik", [t(3, 4), t(4, 5)]),
    "bilinear": (t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "conv1d": (t(2, 3, 6), t(4, 3, 2), t(4)),
    "conv2d": (t(2, 3, 4, 4), t(4, 3, 2, 2), t(4)),
    "conv3d": (t(1, 2, 3, 3, 3), t(2, 2, 2, 2, 2), t(2)),
    "convolution": (t(2, 3, 6), t(4, 3, 2), t(4), [1], [0], [1], False, [0], 1),
    "conv_transpose1d": (t(2, 3, 4), t(3, 4, 2), t(4)),
    "conv_transpose2d.input": (t(2, 3, 4, 4), t(3, 4, 2, 2), t(4)),
    "conv_transpose3d.input": (t(1, 2, 2, 2, 2), t(2, 2, 2, 2, 2), t(2)),
    "scaled_dot_product_attention": (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4), t(3, 3)),
    **{
        name: (t(3, 4),)
        for name in (
            *("relu", "abs", "neg", "positive", "clone", "contiguous", "alias", "lift_fresh_copy"),
            *("lift_fresh", "detach", "tril", "triu", "leaky_relu", "hardtanh", "relu6", "t"),
            *("square", "sign", "sgn", "ceil", "floor", "round", "trunc", "frac", "nan_to_num"),
            *("hardshrink", "softshrink", "hardsigmoid", "acosh", "asinh", "atan", "celu", "cos"),
            *("cosh", "elu", "erf", "erfc", "exp", "exp2", "expm1", "gelu", "hardswish", "mish"),
            *("log_sigmoid", "selu", "sigmoid", "silu", "sin", "sinh", "softplus", "tan", "tanh"),
            *("numpy_T", "adjoint", "mean", "sum", "max", "min", "median", "nanmedian", "amax"),
            *("amin", "msort", "squeeze", "diag", "diag_embed", "std", "var", "glu", "diagonal"),
            *("zeros_like", "ones_like", "rand_like", "randn_like"),
        )
    },
    **{
        name: (u(3, 4),)
        for name in (
            *("acos", "asin", "atanh", "digamma", "lgamma", "log", "log10", "log1p", "log2"),
            *("logit", "sqrt", "rsqrt", "reciprocal"),
        )
    },
    "acosh": (1 + u(3, 4),),
    "full_like": (t(3, 4), 2.0),
    "new_zeros": (t(3), [2]),
    "new_ones": (t(3), [2]),
    "new_full": (t(3), [2], 3.0),
    "rrelu": (t(3, 4),),
    "prelu": (t(3, 4), t(4)),
    "_prelu_kernel": (t(3, 4), t(3, 4)),
    "dropout": (t(3, 4), 0.5, False),
    "feature_dropout": (t(3, 4), 0.5, False),
    "alpha_dropout": (t(3, 4), 0.5, False),
    "feature_alpha_dropout": (t(3, 4), 0.5, False),
    "native_dropout": (t(3, 4), 0.5, False),
    "_to_copy": (t(3, 4),),
    "to.dtype": (t(3, 4), torch.float64),
    "type_as": (t(3, 4), t(1)),
    "copy": (t(3, 4), t(4)),
    "clamp.Tensor": (t(3, 4), t(3, 4), t(3, 4)),
    "clamp_min.Tensor": (t(3, 4), t(3, 4)),
    "clamp_max": (t(3, 4), 0.3),
    "threshold": (t(3, 4), 0.1, 0.7),
    "add.Tensor": (t(3, 4), t(4)),
    "sub.Tensor": (t(3, 4), t(4)),
    "subtract.Tensor": (t(3, 4), t(4)),
    "rsub.Tensor": (t(3, 4), t(4)),
    "maximum": (t(3, 4), t(4)),
    "minimum": (t(3, 4), t(4)),
    "fmax": (t(3, 4), t(4)),
    "fmin": (t(3, 4), t(4)),
    "hypot": (t(3, 4), t(4)),
    "lerp.Tensor": (t(3, 4), t(3, 4), t(3, 4)),
    "where.self": (MASK, t(3, 4), t(3, 4)),
    "masked_fill.Tensor": (t(3, 4), MASK, t()),
    "fill.Tensor": (t(3, 4), t()),
    "mul.Tensor": (t(3, 4), t(4)),
    "multiply.Tensor": (t(3, 4), t(4)),
    "div.Tensor": (t(3, 4), u(4)),
    "divide.Tensor": (t(3, 4), u(4)),
    "true_divide.Tensor": (t(3, 4), u(4)),
    "addcmul": (t(3, 4), t(3, 4), t(3, 4)),
    "addcdiv": (t(3, 4), t(3, 4), u(3, 4)),
    "pow.Tensor_Scalar": (u(3, 4), 3),
    "float_power.Tensor_Scalar": (u(3, 4), 3),
    "fmod.Tensor": (t(3, 4), u(4)),
    "remainder.Tensor": (t(3, 4), u(4)),
    "view": (t(3, 4), [4, 3]),
    "reshape": (t(3, 4), [4, 3]),
    "_unsafe_view": (t(3, 4), [4, 3]),
    "flatten.using_ints": (t(3, 4),),
    "unflatten.int": (t(3, 4), 1, [2, 2]),
    "view_as": (t(3, 4), t(4, 3)),
    "reshape_as": (t(3, 4), t(4, 3)),
    "permute": (t(3, 4), [1, 0]),
    "transpose.int": (t(3, 4), 0, 1),
    "movedim.int": (t(3, 4), 0, 1),
    "swapaxes": (t(3, 4), 0, 1),
    "swapdims": (t(3, 4), 0, 1),
    "unsqueeze": (t(3, 4), 0),
    "expand": (t(1, 4), [3, 4]),
    "expand_as": (t(1, 4), t(3, 4)),
    "repeat": (t(3, 4), [2, 1]),
    "tile": (t(3, 4), [2, 1]),
    "repeat_interleave.self_int": (t(3, 4), 2),
    "slice.Tensor": (t(3, 4), 0, 1),
    "select.int": (t(3, 4), 0, 1),
    "narrow": (t(3, 4), 0, 1, 2),
    "split.Tensor": (t(3, 4), 2),
    "split_with_sizes": (t(3, 4), [1, 2]),
    "chunk": (t(3, 4), 2),
    "unbind.int": (t(3, 4),),
    "flip": (t(3, 4), [0]),
    "roll": (t(3, 4), [1]),
    "rot90": (t(3, 4),),
    "unfold": (t(3, 4), 1, 2, 1),
    "tensor_split.sections": (t(3, 4), 2),
    "take": (t(3, 4), i(1, 5)),
    "pixel_shuffle": (t(1, 4, 2, 2), 2),
    "pixel_unshuffle": (t(1, 1, 4, 4), 2),
    "channel_shuffle": (t(1, 4, 2, 2), 2),
    "native_channel_shuffle": (t(1, 4, 2, 2), 2),
    "as_strided": (t(3, 4), [2, 2], [1, 2]),
    "im2col": (t(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": (t(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    "constant_pad_nd": (t(3, 4), [1, 1]),
    "pad": (t(3, 4), [1, 1]),
    "cat": ([t(3, 4), t(2, 4)],),
    "concat": ([t(3, 4), t(2, 4)],),
    "concatenate": ([t(3, 4), t(2, 4)],),
    "stack": ([t(3, 4), t(3, 4)],),
    "hstack": ([t(3, 4), t(3, 2)],),
    "vstack": ([t(3, 4), t(2, 4)],),
    "index_put": (t(3, 4), [i(0, 2)], t(2, 4), True),
    "slice_scatter": (t(3, 4), t(2, 4), 0, 1),
    "select_scatter": (t(3, 4), t(4), 0, 1),
    "diagonal_scatter": (t(3, 4), t(3)),
    "index.Tensor": (t(3, 4), [i(0, 2)]),
    "index_select": (t(3, 4), 0, i(0, 2)),
    "gather": (t(3, 4), 1, torch.tensor([[0], [1], [3]])),
    "take_along_dim": (t(3, 4), torch.tensor([[0], [1], [3]]), 1),
    "index_add": (t(3, 4), 0, i(0, 2), t(2, 4)),
    "scatter_add": (t(3, 4), 0, torch.tensor([[0, 1, 2, 0]]), t(1, 4)),
    "embedding": (t(5, 4), i(0, 3, 3)),
    "embedding_bag": (t(5, 4), i(0, 3, 3), i(0, 2), False, 0, False, t(3)),
    "batch_norm": (*NORM, False, 0.1, 1e-5, False),
    "_native_batch_norm_legit_no_training": (*NORM, 0.1, 1e-5),
    "native_batch_norm": (*NORM, False, 0.1, 1e-5),
    "_native_batch_norm_legit": (*NORM, False, 0.1, 1e-5),
    "_batch_norm_no_update": (*NORM, 0.1, 1e-5),
    "layer_norm": (t(3, 4), [4], t(4), t(4)),
    "native_layer_norm": (t(3, 4), [4], t(4), t(4), 1e-5),
    "rms_norm": (t(3, 4), [4], t(4)),
    "_fused_rms_norm": (t(3, 4), [4], t(4), 1e-5),
    "group_norm": (t(2, 4, 3), 2, t(4), t(4)),
    "native_group_norm": (t(2, 4, 3), t(4), t(4), 2, 4, 3, 2, 1e-5),
    "instance_norm": (*NORM, True, 0.1, 1e-5, False),
    "_weight_norm": (t(3, 4), t(3, 1)),
    "_weight_norm_interface": (t(3, 4), t(3, 1)),
    "aminmax": (t(3, 4),),
    "logsumexp": (t(3, 4), [1]),
    "linalg_vector_norm": (t(3, 4),),
    "linalg_norm": (t(3, 4),),
    "norm.Scalar": (t(3, 4),),
    "var_mean": (t(3, 4),),
    "std_mean": (t(3, 4),),
    "cumsum": (t(3, 4), 1),
    "cummax": (t(3, 4), 1),
    "cummin": (t(3, 4), 1),
    "sort": (t(3, 4),),
    "topk": (t(3, 4), 2),
    "kthvalue": (t(3, 4), 2),
    "mode": (t(3, 4),),
    "avg_pool1d": (t(1, 2, 4), [2]),
    "avg_pool2d": (t(1, 2, 4, 4), [2, 2]),
    "avg_pool3d": (t(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool1d": (t(1, 2, 4), [2]),
    "max_pool2d": (t(1, 2, 4, 4), [2, 2]),
    "max_pool3d": (t(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool1d_with_indices": (t(1, 2, 4), [2]),
    "max_pool2d_with_indices": (t(1, 2, 4, 4), [2, 2]),
    "max_pool3d_with_indices": (t(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_avg_pool1d": (t(1, 2, 4), [3]),
    "adaptive_avg_pool2d": (t(1, 2, 4, 4), [3, 3]),
    "adaptive_avg_pool3d": (t(1, 2, 4, 4, 4), [3, 3, 3]),
    "adaptive_max_pool1d": (t(1, 2, 4), [3]),
    "adaptive_max_pool2d": (t(1, 2, 4, 4), [3, 3]),
    "adaptive_max_pool3d": (t(1, 2, 4, 4, 4), [3, 3, 3]),
    "_adaptive_avg_pool2d": (t(1, 2, 4, 4), [3, 3]),
    "_adaptive_avg_pool3d": (t(1, 2, 4, 4, 4), [3, 3, 3]),
    "upsample_nearest1d": (t(1, 2, 4), [6]),
    "upsample_nearest2d": (t(1, 2, 4, 4), [6, 6]),
    "upsample_nearest3d": (t(1, 1, 2, 2, 2), [3, 3, 3]),
    "_upsample_nearest_exact1d": (t(1, 2, 4), [6]),
    "_upsample_nearest_exact2d": (t(1, 2, 4, 4), [6, 6]),
    "_upsample_nearest_exact3d": (t(1, 1, 2, 2, 2), [3, 3, 3]),
    "upsample_linear1d": (t(1, 2, 4), [6], False),
    "upsample_bilinear2d": (t(1, 2, 4, 4), [6, 6], False),
    "upsample_trilinear3d": (t(1, 1, 2, 2, 2), [3, 3, 3], False),
    "upsample_bicubic2d": (t(1, 2, 4, 4), [6, 6], False),
    "_upsample_bilinear2d_aa": (t(1, 2, 4, 4), [3, 3], False),
    "_upsample_bicubic2d_aa": (t(1, 2, 4, 4), [3, 3], False),
    **{f"{kind}_pad1d": (t(1, 2, 4), [1, 1]) for kind in ("reflection", "replication")},
    **{f"{kind}_pad2d": (t(1, 2, 4, 4), [1] * 4) for kind in ("reflection", "replication")},
    **{f"{kind}_pad3d": (t(1, 2, 4, 4, 4), [1] * 6) for kind in ("reflection", "replication")},
    "linalg_matrix_norm": (t(3, 4), 2),
    "softmax.int": (t(3, 4), -1),
    "_softmax": (t(3, 4), -1, False),
    "log_softmax.int": (t(3, 4), -1),
    "_log_softmax": (t(3, 4), -1, False),
    "l1_loss": (t(3, 4), t(3, 4)),
    "mse_loss": (t(3, 4), t(3, 4)),
    "smooth_l1_loss": (t(3, 4), t(3, 4)),
    "huber_loss": (t(3, 4), t(3, 4)),
    "kl_div": (t(3, 4), u(3, 4)),
    "soft_margin_loss": (t(3, 4), t(3, 4)),
    "binary_cross_entropy": (u(3, 4), u(3, 4)),
    "binary_cross_entropy_with_logits": (t(3, 4), u(3, 4)),
    "cross_entropy_loss": (t(3, 4), i(0, 1, 2)),
}

#: Ops without a sample: they give no real numbers, or run on other devices or inside other ops.
UNTRIED = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "signbit"),
    *("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("isclose", "argmax", "argmin", "argsort", "sym_size", "sym_numel", "sym_stride"),
    *("zeros", "ones", "full", "arange", "new_empty", "empty_like", "getitem", "cudnn_batch_norm"),
    *("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "multi_margin_loss"),
    *("_embedding_bag", "_embedding_bag_forward_only", "nll_loss", "nll_loss_nd", "nll_loss2d"),
    "nll_loss_forward",
}

#: Curved by decree where only some of an op's forms are: a mask that is added to logits and the
#: like; a variance that scales; piecewise linear norms.
CAUTIOUS = {
    ("batch_norm", "running_mean"),
    ("_native_batch_norm_legit_no_training", "running_mean"),
    ("native_batch_norm", "running_mean"),
    ("_native_batch_norm_legit", "running_mean"),
    ("_batch_norm_no_update", "running_mean"),
    ("instance_norm", "running_mean"),
    ("instance_norm", "running_var"),
    ("lerp", "weight"),
    ("cross_entropy_loss", "weight"),
    ("kl_div", "self"),
    ("binary_cross_entropy", "target"),
    ("binary_cross_entropy_with_logits", "target"),
}


def test_every_op_that_gives_real_numbers_is_tried():
    tried = {key.partition(".")[0] for key in SAMPLES}
    assert tried | UNTRIED == set(OPS)
    assert not tried & UNTRIED


@pytest.mark.parametrize("key", SAMPLES)
def test_records_say_where_an_op_is_linear(key):
    """An op is linear in an argument if it has no second difference, and autograd its slope."""
    name, _, overload = key.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        pytest.skip("this torch has no such op")
    op = getattr(packet, overload or "default")
    record = OPS[name]
    given = list(SAMPLES[key])
    names = [argument.name for argument in op._schema.arguments][: len(given)]
    moving = [n for n, v in zip(names, given, strict=True) if _is_real(v)]
    for argument in moving:
        linear = _is_linear(op, names, given, [argument], record.constant)
        claimed = record.linear and argument not in record.curved
        cautious = (name, argument) in CAUTIOUS
        assert linear == (claimed or cautious), (argument, linear)
    single = [n for n in moving if n not in record.factors and n not in record.curved]
    if record.linear and not record.constant:
        for factor in (record.factors if record.factors != ("tensors",) else ()) or single[:1]:
            assert _is_linear(op, names, given, list({*single, factor}), False)
    if len(set(moving) & set(record.factors)) > 1:
        assert not _is_linear(op, names, given, list(record.factors), False)


def _is_real(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_real(item) for item in value)
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_linear(
    op: Any, names: list[str], given: list[Any], moving: list[str], constant: bool
) -> bool:
    """Whether an op is piecewise linear along a random line, and autograd knows its slope."""
    generator = torch.Generator().manual_seed(7)

    def direction(value: Any) -> Any:
        if isinstance(value, list):  # Of a list that is multiplied, one tensor moves.
            return [direction(item) if k == 0 else 0 * item for k, item in enumerate(value)]
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)

    lines = {n: direction(v) for n, v in zip(names, given, strict=True) if n in moving}

    def value(step: Tensor) -> Tensor:
        def moved(argument: Any, line: Any) -> Any:
            if isinstance(argument, list):
                return [moved(a, b) for a, b in zip(argument, line, strict=True)]
            return argument + step * line

        arguments = [
            moved(v, lines[n]) if n in moving else (v.clone() if isinstance(v, Tensor) else v)
            for n, v in zip(names, given, strict=True)
        ]
        torch.manual_seed(0)
        outputs = op(*arguments)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        weights = torch.linspace(0.5, 1.5, first.numel(), dtype=torch.float64) ** 2
        return (first.reshape(-1) * weights).sum()

    size = 1e-4
    low, middle, high = (value(torch.tensor(k * size, dtype=torch.float64)) for k in (-1, 0, 1))
    scale = 1 + float(middle.abs())
    bent = float((high + low - 2 * middle).abs()) > 1e-13 * scale
    slope = (high - low) / (2 * size)
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    found: Tensor | None = None
    try:
        result = value(step)
        if result.requires_grad:
            (found,) = torch.autograd.grad(result, step, allow_unused=True)
    except RuntimeError:  # It cannot be differentiated at all.
        return not bent
    known = 0.0 if found is None else float(found)
    assert not constant or float(slope) == known == 0
    return not bent and abs(float(slope) - known) < 1e-8 * scale


class Between(nn.Module):
    """A linear layer, an op, a linear layer."""

    def __init__(self, op: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(width, 2)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.op(self.first(x)))


def _written(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, [0, 2]] = h[:, [1, 3]]
    return h


#: Piecewise linear ops that were not known to be.
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "rot90": (lambda h: torch.rot90(h.view(-1, 2, 2), 1, (1, 2)).flatten(1), 4),
    "index_put": (_written, 4),
    "im2col": (lambda h: F.unfold(h.view(-1, 1, 2, 2), 2, padding=1).flatten(1), 36),
    "hardsigmoid": (F.hardsigmoid, 4),
    "fmax": (lambda h: torch.fmax(h, h.flip(1)), 4),
    "cummax": (lambda h: torch.cummax(h, 1).values, 4),
    "nan_to_num": (torch.nan_to_num, 4),
    "remainder": (lambda h: torch.remainder(h, 1.0), 4),
    "lerp": (lambda h: torch.lerp(h, torch.relu(h), 0.3), 4),
    "tile": (lambda h: torch.tile(h, (1, 2)), 8),
}


@pytest.mark.parametrize("name", EXACT)
def test_blocks_behind_piecewise_linear_ops_are_exact(name):
    torch.manual_seed(3)
    op, width = EXACT[name]
    model = Between(op, width).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    case = Case(model, "mse", F.mse_loss, x, y)
    blocks = block_curvature(case.surface(), ("trace",), generator=GENERATOR)
    rounding = 1e-10
    if name == "hardsigmoid":  # Torch cannot differentiate it twice, and has its slope in float32.
        model.op, rounding = lambda h: F.relu6(h + 3) / 6, 2e-7
    for key, dense in dense_blocks(case).items():
        assert blocks[key].exact
        assert blocks[key].values["trace"].item() == pytest.approx(
            dense.trace().item(), rel=rounding
        )


def _degrees(op: Callable[[Tensor], Tensor]) -> Any:
    model = Between(op).double()
    graph = ModelGraph(model, (torch.randn(5, 3).double(),), {}, 5)
    return parameter_degrees(graph, graph.outputs)


def test_what_autograd_cuts_is_curved():
    found = _degrees(lambda h: h + (torch.sign(h) - h).detach())
    assert found.degrees == {
        "first.weight": 2, "first.bias": 2, "last.weight": 1, "last.bias": 1,
    }  # fmt: skip
    assert found.reasons["first.weight"].startswith("detach (test_ops.py:")


def test_products_add_degrees():
    found = _degrees(lambda h: h * torch.relu(h))
    assert found.degrees["first.weight"] == 2
    assert found.reasons["first.weight"].startswith("mul (test_ops.py:")
    assert _degrees(torch.relu).reasons == {}


def test_an_unknown_op_is_curved():
    assert op_record(torch.fx.Graph().call_function(torch.ops.aten.special_i0.default)) == UNKNOWN
    assert _degrees(torch.special.i0).degrees["first.weight"] == 2
