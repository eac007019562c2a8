"""Counting the multiplications of matrix products: what a Hessian product must cost."""

from __future__ import annotations

from torch import nn


def linear_sizes(model: nn.Module) -> list[int] | None:
    """The number of weights of every layer of a perceptron.

    Args:
        model: The model.

    Returns:
        From the input on; None if it is no sequence of linear layers and what has no weights.
    """
    if not isinstance(model, nn.Sequential):
        return None
    sizes = []
    for module in model:
        if isinstance(module, nn.Linear):
            sizes.append(module.weight.numel())
        elif any(True for _ in module.parameters()):
            return None
    return sizes or None


def gradient_count(sizes: list[int]) -> int:
    """Multiplications per sample of a gradient.

    Every layer is multiplied by forward, by its weight's gradient and by its input's, but for the
    first, whose input needs none.

    Args:
        sizes: Weights of every layer.

    Returns:
        The number.
    """
    return 3 * sum(sizes) - sizes[0]


def product_count(sizes: list[int]) -> int:
    """Multiplications per sample of a Hessian product where activations and gradients are kept.

    Each of a gradient's products becomes two by the product rule: one with the vector's weights (or
    the kept activation), one with what comes from the layer before. The first layer's input is not
    moved, which saves one of two forward, one of two at its weight, and its input's gradient.

    Args:
        sizes: Weights of every layer.

    Returns:
        The number.
    """
    return 6 * sum(sizes) - 4 * sizes[0]


def kept_graph_limit(model: nn.Module) -> float | None:
    """What a product with a kept graph costs in gradients if nothing but matrix products counted.

    Args:
        model: The model.

    Returns:
        The ratio; None if the model is no perceptron.
    """
    sizes = linear_sizes(model)
    return None if sizes is None else product_count(sizes) / gradient_count(sizes)
