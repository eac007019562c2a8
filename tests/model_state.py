"""Everything of the user's that measuring must leave as it was."""

from __future__ import annotations

import random

import numpy as np
import torch
from cases import Case
from torch import nn


def everything_of(model: nn.Module) -> dict[str, object]:
    return {
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        "gradients": {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: list(m._forward_hooks) for n, m in model.named_modules()},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "python": random.getstate(),
        "mode": torch.is_grad_enabled(),
    }


def assert_same(left, right) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def used(case: Case) -> nn.Module:
    """A model as it comes out of a training loop, half of it in train mode."""
    model = case.model.train()
    next(model.children()).eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    model.register_forward_hook(lambda *_: None)
    return model
