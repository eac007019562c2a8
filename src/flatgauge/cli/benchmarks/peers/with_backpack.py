"""BackPACK: the exact diagonal of the Gauss-Newton matrix.

It is the Hessian's diagonal, as the output of these networks is linear in every parameter alone.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatgauge.cli.benchmarks.networks import ResidualBlock
from flatgauge.cli.benchmarks.peers.flat import joined
from flatgauge.cli.benchmarks.tool import Batches, Tool


def _diagonal(model: nn.Module, batches: Batches) -> Callable[[], Tensor]:
    backpack = importlib.import_module("backpack")
    extension = importlib.import_module("backpack.extensions").DiagGGNExact()
    # A copy: it leaves what it computes, and its hooks, in the model.
    extended = backpack.extend(_in_modules(copy.deepcopy(model)))
    loss = backpack.extend(nn.CrossEntropyLoss())
    params = list(extended.parameters())
    samples = sum(len(targets) for _, targets in batches)

    def diagonal() -> Tensor:
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in batches:
            extended.zero_grad()
            with backpack.backpack(extension):
                loss(extended(inputs), targets).backward()
            for total, param in zip(sums, params, strict=True):
                total.add_(param.diag_ggn_exact, alpha=len(targets) / samples)
        return joined(sums)

    return diagonal


def _in_modules(model: nn.Module) -> nn.Module:
    """Write residual blocks as BackPACK reads them; its own converter knows no padding."""
    if not any(isinstance(module, ResidualBlock) for module in model.children()):
        return model
    parallel = importlib.import_module("backpack.custom_module.branching").Parallel
    modules = []
    for module in model.children():
        if isinstance(module, ResidualBlock):
            inner = (module.conv1, module.bn1, nn.ReLU(), module.conv2, module.bn2)
            modules += [parallel(nn.Sequential(*inner), _shortcut(module)), nn.ReLU()]
        else:
            modules.append(module)
    return nn.Sequential(*modules).eval()


def _shortcut(block: ResidualBlock) -> nn.Module:
    """What a residual block adds, in BackPACK's modules."""
    if not block.extra:
        return nn.Identity()
    custom = "backpack.custom_module"
    every, some = slice(None), slice(None, None, block.stride)
    sliced = importlib.import_module(f"{custom}.slicing").Slicing((every, every, some, some))
    widths = (0, 0, 0, 0, block.extra // 2, block.extra // 2)
    return nn.Sequential(sliced, importlib.import_module(f"{custom}.pad").Pad(widths))


BACKPACK = Tool("BackPACK", "backpack-for-pytorch", "backpack", diagonal=_diagonal)
