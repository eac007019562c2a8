"""Nothing of the user's is changed: model, gradients, modes, hooks, random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import CASES, Case, build
from reference import dense_gradient, dense_hessian, error
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatgauge import LossSurface


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


def everything(surface: LossSurface) -> None:
    surface.value(), surface.gradient(), surface.hvp(torch.ones(surface.size))
    surface.value(surface.point * 2), surface.product_method, surface.params


@pytest.mark.parametrize("products", ["auto", "forward", "differences"])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_left_as_found(name, products):
    case = build(name)
    model = used(case)
    before = everything_of(model)
    pairs = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(pairs, batch_size=3, shuffle=True)
    everything(LossSurface(model, case.loss, loader, products=products))
    assert_same(everything_of(model), before)


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("action", ["value", "gradient", "hvp"])
def test_the_model_is_left_as_found_after_a_failure(problem, action):
    case = build("residual with batch-norm")
    model = used(case)
    surface = case.surface(chunk=4)
    surface.hvp(torch.ones(surface.size))
    surface.release()
    before = everything_of(model)
    calls = []

    def fail(*_) -> None:
        calls.append(1)
        if len(calls) == 2:
            torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
            raise problem("in the middle")

    handle = model.head.register_forward_hook(fail)
    with pytest.raises(problem, match="in the middle"):
        getattr(surface, action)(*([torch.ones(surface.size)] if action == "hvp" else []))
    handle.remove()
    assert_same(everything_of(model), before)
    vector = torch.ones(surface.size).double()
    assert error(surface.hvp(vector), dense_hessian(case) @ vector) < 1e-10


def test_a_loaders_own_generator_is_not_advanced():
    case = build("mlp")
    source = torch.Generator().manual_seed(3)
    pairs = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(pairs, batch_size=3, shuffle=True, generator=source)
    state = source.get_state()
    everything(LossSurface(case.model, case.loss, loader))
    assert torch.equal(source.get_state(), state)


def test_a_buffer_written_in_eval_mode_is_written_in_a_copy():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x)

    model = Counting()
    everything(LossSurface(model, "cross_entropy", (torch.randn(5, 4), torch.arange(5) % 3)))
    assert model.calls == 0


def test_gradients_work_under_no_grad_and_inference_mode():
    case = build("mlp")
    expected = dense_gradient(case)
    with torch.no_grad():
        assert error(case.surface().gradient(), expected) < 1e-10
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert error(case.surface().gradient(), expected) < 1e-10
