"""How a network from elsewhere is built, filled with numbers and fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Wild:
    """A network, what it is fed, and the dimension of its gauge group."""

    build: Callable[[], nn.Module]
    feed: Callable[[Generator], Inputs]
    dim: int
    pins: tuple[str, ...] = ()  # the operations that stop scales, if there are any

    def model(self) -> nn.Module:
        """The network in eval mode with random weights, always the same."""
        with torch.random.fork_rng(devices=[]):
            model = self.build()
        randomise(model, Generator().manual_seed(0))
        return model.eval()

    def inputs(self, seed: int) -> Inputs:
        return self.feed(Generator().manual_seed(seed))


@torch.no_grad()
def randomise(model: nn.Module, generator: Generator) -> None:
    """Draw every parameter and stored statistic, so that no zero or one hides an error."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(generator=generator).mul_(sqrt(2 / parameter[0].numel()))
        elif name.endswith("bias"):
            parameter.normal_(generator=generator).mul_(0.2)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator).mul_(0.2)
            module.running_var.uniform_(0.5, 2.0, generator=generator)


def images(size: int, batch: int = 2) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randn(batch, 3, size, size, generator=generator)


def vision(where: str, size: int, dim: int, pins: tuple[str, ...] = (), **options: Any) -> Wild:
    """A model of pytorchcv, `where` being its module and function or class.

    The module is imported by itself: the package's list of all models wants torchvision.
    """

    def build() -> nn.Module:
        reason = "needs `pip install --no-deps pytorchcv`"
        pytest.importorskip("pytorchcv", reason=reason)
        module, name = where.split(".")
        return getattr(import_module(f"pytorchcv.models.{module}"), name)(
            in_size=(size, size), num_classes=10, **options
        )

    return Wild(build, images(size), dim, pins)


def normed(*channels: int) -> int:
    """Convolutions with batch-norms: a scale per channel before each norm and one after."""
    return 2 * sum(channels)
