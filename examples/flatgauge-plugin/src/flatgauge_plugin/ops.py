"""An op of one's own, and its record in flatgauge's table of ops."""

import torch
from torch import Tensor

from flatgauge.graph.ops import Op


@torch.library.custom_op("flatgauge_plugin::rectify", mutates_args=())
def rectify(x: Tensor) -> Tensor:
    """The positive part."""
    return x.clamp(min=0)


@rectify.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


rectify.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] > 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)

#: Slopes of size 0 or 1, so it belongs to the family of `relu`: units may be rescaled, the output
#: is piecewise linear in what enters, and paths can be summed.
OPS = {"flatgauge_plugin::rectify": Op("homogeneous")}
