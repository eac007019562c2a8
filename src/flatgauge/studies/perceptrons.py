"""Perceptrons of one shape side by side: their losses and gradients at once, bit for bit.

A step of a small network costs torch far more in bookkeeping than in arithmetic. Here the
bookkeeping is done once for all members: their weights lie in one tensor per layer, one product
serves all of them, and the gradient is written out by hand. Every member gets the bits that it
would get alone, by torch's own layers and `backward()`: everything but the products works on
single numbers or single rows, and whether products taken together have the bits of products
taken alone depends on the library below torch, the shape, and where numbers lie in memory.
That is tried before a shape is used, and where it does not hold, products are taken alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten

#: Draws by which products taken together are compared with products taken alone.
_DRAWS = 4


@dataclass(frozen=True)
class Product:
    """A product of matrices, of all members together or of one.

    Attributes:
        together: Of tensors whose first dimension counts the members.
        alone: Of the same of one member, as torch's layers and their gradients take it.
    """

    together: Callable[..., Tensor]
    alone: Callable[..., Tensor]

    def of(self, *operands: Tensor, out: Tensor | None = None) -> Tensor:
        """The products of all members, with the bits of products taken alone.

        Args:
            *operands: Tensors whose first dimension counts the members.
            out: Where to put them; None for a new tensor.

        Returns:
            The products.
        """
        shapes = tuple(tuple(operand.shape) for operand in operands)
        if agree(self, shapes, operands[0].dtype, torch.get_num_threads()):
            return self.together(*operands, out=out)
        products: Tensor = torch.stack(self.each(*operands), out=out)
        return products

    def each(self, *operands: Tensor) -> list[Tensor]:
        """The products of all members, one after the other.

        Args:
            *operands: Tensors whose first dimension counts the members.

        Returns:
            One product per member.
        """
        # Copies, as a member that is alone has its numbers where memory begins.
        return [
            self.alone(*(part.clone() for part in parts)) for parts in zip(*operands, strict=True)
        ]


@lru_cache(maxsize=4096)
def agree(
    product: Product, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, threads: int
) -> bool:
    """Whether products taken together have the bits of products taken alone, by trying it.

    Args:
        product: Which.
        shapes: Of the operands.
        dtype: Of the operands.
        threads: That torch computes with, on which it may depend.

    Returns:
        Whether no bit differed.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS):
        drawn = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
        both = zip(product.together(*drawn), product.each(*drawn), strict=True)
        if not all(torch.equal(one, other) for one, other in both):
            return False
    return True


def _outputs(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.mT)


#: A layer's outputs: of its inputs, weight and bias.
OUTPUTS = Product(_outputs, lambda x, weight, bias: torch.addmm(bias, x, weight.t()))

#: The gradient by a layer's inputs: of that by its outputs, and its weight.
BACK = Product(torch.bmm, torch.mm)

#: The gradient by a layer's weight: of that by its outputs, and its inputs.
BY_WEIGHT = Product(
    lambda slope, x, out=None: torch.bmm(slope.mT, x, out=out),
    lambda slope, x: torch.mm(slope.t(), x),
)


def linear_layers(model: nn.Module) -> list[nn.Linear] | None:
    """The layers of a multilayer perceptron with ReLU.

    Args:
        model: Any network.

    Returns:
        Its linear layers; None if it is no such network.
    """
    if not isinstance(model, nn.Sequential):
        return None
    parts = list(model)
    if (
        parts
        and isinstance(parts[0], nn.Flatten)
        and (parts[0].start_dim, parts[0].end_dim) == (1, -1)
    ):
        parts = parts[1:]
    linear = [part for part in parts[::2] if type(part) is nn.Linear and part.bias is not None]
    between = [part for part in parts[1::2] if type(part) is nn.ReLU]
    alternating = len(linear) == len(between) + 1 and len(linear) + len(between) == len(parts)
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    return linear if alternating and not hooked else None


class Perceptrons:
    """The weights of some perceptrons of one shape, and their gradients.

    Args:
        models: The perceptrons; their weights are copied.

    Attributes:
        parameters: Of every member, in the order of its model's; `gradients` writes to `.grad`.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        layers = [linear_layers(model) or [] for model in models]
        each = list(zip(*layers, strict=True))
        self._weights = [torch.stack([one.weight.detach() for one in same]) for same in each]
        self._biases = [torch.stack([one.bias.detach() for one in same]) for same in each]
        self._by_weight = [torch.empty_like(weight) for weight in self._weights]
        self._by_bias = [torch.empty_like(bias) for bias in self._biases]
        self.parameters = [
            [
                part
                for place in range(len(each))
                for part in (
                    _parameter(self._weights[place][member], self._by_weight[place][member]),
                    _parameter(self._biases[place][member], self._by_bias[place][member]),
                )
            ]
            for member in range(len(models))
        ]

    @torch.no_grad()
    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute every member's mean cross-entropy and its gradient.

        Args:
            inputs: Of shape (members, samples, features).
            targets: Class numbers of shape (members, samples).

        Returns:
            The losses, of shape (members,). The gradients are in `parameters`.
        """
        entering, last = [inputs], len(self._weights) - 1
        for place, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            outputs = OUTPUTS.of(entering[-1], weight, bias)
            entering.append(outputs if place == last else outputs.relu_())
        losses, slope = _cross_entropy(entering.pop(), targets)
        for place in range(last, -1, -1):
            x = entering[place]
            BY_WEIGHT.of(slope, x, out=self._by_weight[place])
            torch.sum(slope, 1, out=self._by_bias[place])
            if place:
                slope = aten.threshold_backward(BACK.of(slope, self._weights[place]), x, 0)
        return losses

    @torch.no_grad()
    def unload(self, member: int, model: nn.Module) -> None:
        """Copy a member's weights into a network.

        Args:
            member: Which.
            model: Changed in place.
        """
        for own, part in zip(model.parameters(), self.parameters[member], strict=True):
            own.copy_(part)


def _parameter(values: Tensor, gradient: Tensor) -> nn.Parameter:
    """A parameter that shares memory with a stack, and its gradient with another."""
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return parameter


def _cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of every member, and its gradient by the outputs."""
    logs = torch.log_softmax(outputs.flatten(0, 1), 1)
    losses = [
        aten.nll_loss_forward(one, right, None, 1, -100)[0]
        for one, right in zip(logs.view_as(outputs), targets, strict=True)
    ]
    slope = torch.zeros_like(logs)
    slope.scatter_(1, targets.reshape(-1, 1), -1.0 / targets.shape[1])
    by_outputs: Any = aten._log_softmax_backward_data(slope, logs, 1, logs.dtype)
    return torch.stack(losses), by_outputs.view_as(outputs)
