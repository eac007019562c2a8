"""Models and functions that went through torch.compile are measured without it, and it is told."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from reference import error
from torch import Tensor, nn

import flatgauge as fg
from flatgauge.surface.derivatives import GradientGraph

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(12) % 3


def bend(x: Tensor) -> Tensor:
    """Something curved."""
    return torch.tanh(x) * torch.sigmoid(x)


class Net(nn.Module):
    """A network with a function of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 5), nn.Linear(5, 3), function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        return self.last(self.function(self.first(x)))


def network(function: Callable[[Tensor], Tensor] = bend) -> Net:
    torch.manual_seed(0)
    return Net(function)


def surface(model: nn.Module) -> fg.LossSurface:
    return fg.LossSurface(model, "cross_entropy", (INPUTS, LABELS))


def hessian(model: nn.Module) -> Tensor:
    held = surface(model)
    product = held.hvp(torch.eye(held.size, dtype=torch.float64))
    assert held.product_method.startswith("reverse")
    return product


def whole(backend: str) -> nn.Module:
    return torch.compile(network(), backend=backend)


def in_place(backend: str) -> nn.Module:
    model = network()
    model.compile(backend=backend)
    return model


def submodule(backend: str) -> nn.Module:
    model = network()
    model.first = torch.compile(model.first, backend=backend)
    return model


def attribute(backend: str) -> nn.Module:
    return network(torch.compile(bend, backend=backend))


def closure(backend: str) -> nn.Module:
    inner = torch.compile(bend, backend=backend)
    return network(lambda x: inner(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (whole, "the whole"),
        (in_place, "the whole"),
        (submodule, "`first`"),
        (attribute, "`function`"),
    ],
)
def test_what_is_compiled_is_run_without(make, named, backend):
    model = make(backend)
    note = f"compiled by torch.compile: {named}; measured without"
    assert any(text.startswith(note) for text in surface(model).notes)
    assert error(hessian(model), hessian(network())) < 1e-12
    assert error(surface(model).gradient(), surface(network()).gradient()) < 1e-12


def test_a_compiled_model_is_left_compiled():
    calls = []

    def backend(module, inputs):
        calls.append(1)
        return module

    model = torch.compile(network(), backend=backend)
    hessian(model)
    assert not calls
    model(INPUTS)
    assert calls


@pytest.mark.filterwarnings("ignore")  # Of torch's compiler.
def test_a_compiled_part_that_is_not_found_has_no_wrong_derivative():
    """Its reverse mode fails when it is tried out, and another way is taken."""
    held = surface(closure("aot_eager"))
    vectors = torch.eye(held.size, dtype=torch.float64)
    assert error(held.hvp(vectors), hessian(network())) < 1e-6
    assert not held.product_method.startswith("reverse")
    assert any("as reverse mode fails" in note for note in held.notes)


def test_a_wrong_derivative_is_caught_by_differences(monkeypatch):
    """As if the compiler gave a backward pass whose own derivative is half of the right one."""
    product = GradientGraph.product
    monkeypatch.setattr(
        GradientGraph,
        "product",
        lambda self, vector, *, last: [
            None if part is None else part / 2 for part in product(self, vector, last=last)
        ],
    )
    held = surface(network())
    assert not held.product_method.startswith("reverse")
    assert any("differ from differences of the gradient" in note for note in held.notes)


@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler"
)
def test_the_default_backend():
    """Compiled and run by the user first; then measured."""
    model = attribute("inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch's own.
        model(INPUTS).sum().backward()
    assert error(hessian(model), hessian(network())) < 1e-12


def test_no_compiler_is_needed(monkeypatch):
    """A model for a compiler that is not there is measured, as nothing is compiled."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert error(hessian(torch.compile(network())), hessian(network())) < 1e-12
    assert error(hessian(attribute("inductor")), hessian(network())) < 1e-12
