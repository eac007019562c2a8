"""Initial weights: the four schemes of Petzka et al., and torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

_Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _xavier_normal(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """Normal weights of variance 2 / (fan in + fan out); biases zero."""
    nn.init.xavier_normal_(weight, generator=generator)
    if bias is not None:
        nn.init.zeros_(bias)


def _kaiming_uniform(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """Uniform weights of variance 2 / fan in, He et al.'s for ReLU; biases zero."""
    nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=generator)
    if bias is not None:
        nn.init.zeros_(bias)


def _uniform(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """Weights and biases uniform in (−0.1, 0.1)."""
    for tensor in (weight, bias):
        if tensor is not None:
            nn.init.uniform_(tensor, -0.1, 0.1, generator=generator)


def _normal(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """Weights and biases normal with variance 0.1, that is, standard deviation 0.316."""
    for tensor in (weight, bias):
        if tensor is not None:
            nn.init.normal_(tensor, 0.0, math.sqrt(0.1), generator=generator)


def _default(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
    """Weights and biases uniform in ±1 / √(fan in), as torch draws them in a new layer."""
    bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
    for tensor in (weight, bias):
        if tensor is not None:
            nn.init.uniform_(tensor, -bound, bound, generator=generator)


INITIALISATIONS: Mapping[str, Callable[[Tensor, Tensor | None, Generator], None]] = (
    MappingProxyType(
        {
            "default": _default,
            "xavier_normal": _xavier_normal,
            "kaiming_uniform": _kaiming_uniform,
            "uniform": _uniform,
            "normal": _normal,
        }
    )
)
"""The schemes by name: each sets a layer's weight and bias in place, from a generator."""


@torch.no_grad()
def initialise(model: nn.Module, scheme: str, generator: Generator) -> None:
    """Draw all weights of a network anew, in place.

    The schemes are torch's `default` and the four of Petzka et al. 2019: `xavier_normal`,
    `kaiming_uniform` (both with biases zero), `uniform` in (−0.1, 0.1), and `normal` with mean 0
    and variance 0.1 (so the standard deviation is √0.1 ≈ 0.316; both draw biases like weights,
    which the paper leaves open). Norm layers go back to weight 1, bias 0 and fresh statistics.

    Args:
        model: The network, of linear, convolutional and norm layers.
        scheme: One of `INITIALISATIONS`.
        generator: Source of all randomness.

    Raises:
        ValueError: If there is no such scheme.
        TypeError: If the network has parameters in other kinds of layers.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> initialise(net, "uniform", torch.Generator().manual_seed(0))
        >>> bool(net.weight.abs().max() < 0.1), bool(net.bias.abs().max() < 0.1)
        (True, True)
    """
    if scheme not in INITIALISATIONS:
        known = ", ".join(f"`{one}`" for one in INITIALISATIONS)
        raise ValueError(f"`scheme={scheme!r}` is not known; needed is one of {known}.")
    layers = _layers(model)
    for layer in layers:
        INITIALISATIONS[scheme](layer.weight, layer.bias, generator)
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.reset_parameters()


def _layers(model: nn.Module) -> list[_Layer]:
    """The layers with weights to draw; an error before anything is changed if one is strange."""
    layers: list[_Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, _WEIGHTED):
            layers.append(module)
        elif (
            not isinstance(module, _NORMS)
            and next(module.parameters(recurse=False), None) is not None
        ):
            raise TypeError(
                f"`{name or 'model'}` is a {type(module).__name__} with parameters of its own, for "
                "which no initialisation is defined; needed are linear, convolutional and norm "
                "layers; initialise this network yourself."
            )
    return layers
