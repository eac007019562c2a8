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
from flatgauge import compiled, trials
from flatgauge.products import GradientGraph

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
        (closure, "`bend`"),
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
def test_a_compiled_part_that_is_not_found_has_no_wrong_derivative(monkeypatch):
    """Its reverse mode fails when it is tried out, and another way is taken."""
    monkeypatch.setattr(compiled, "compiled_parts", lambda model: [])
    held = surface(attribute("aot_eager"))
    vectors = torch.eye(held.size, dtype=torch.float64)
    assert error(held.hvp(vectors), hessian(network())) < 1e-6
    assert not held.product_method.startswith("reverse")
    assert any("as reverse mode fails" in note for note in held.notes)


def test_a_wrong_derivative_is_caught_by_differences(monkeypatch):
    """As if the compiler gave a backward pass whose own derivative is half of the right one."""
    product = GradientGraph.product
    monkeypatch.setattr(
        trials.GradientGraph,
        "product",
        lambda self, vector, *, last: [
            None if part is None else part / 2 for part in product(self, vector, last=last)
        ],
    )
    held = surface(network())
    assert not held.product_method.startswith("reverse")
    assert any("differ from differences of the gradient" in note for note in held.notes)


def test_an_old_torch_says_what_to_do(monkeypatch):
    model = submodule("eager")
    monkeypatch.delattr(torch.compiler, "set_stance")
    with pytest.raises(TypeError, match=r"`first` of the model is compiled .* use torch 2\.6"):
        surface(model)


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


# -- forward passes, where that is asked for ---------------------------------------------------


def valued(model: nn.Module, **options: bool) -> tuple[fg.LossSurface, list[float]]:
    """A surface in chunks of four, four and three, and its values at some points."""
    data = INPUTS[:11], LABELS[:11]
    held = fg.LossSurface(model, "cross_entropy", data, chunk=4, **options)
    return held, [held.value(), held.value(1.1 * held.point), held.value(0.9 * held.point)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's backend needs g++")
def test_values_may_be_compiled_and_derivatives_are_not(monkeypatch):
    shapes = []
    compile_ = torch.compile

    def counted(model):
        compiled = compile_(model)
        return lambda x: shapes.append(len(x)) or compiled(x)

    monkeypatch.setattr(torch, "compile", counted)
    usual, expected = valued(network())
    held, found = valued(network(), compile=True)
    assert shapes == [4] * 6  # Twice for each point; the rest of three samples never.
    assert found == pytest.approx(expected, rel=1e-12)
    assert "values are computed by torch.compile (`compile=True`)" in held.notes
    torch.testing.assert_close(held.gradient(), usual.gradient(), rtol=0, atol=0)
    ones = torch.ones(held.size, dtype=torch.float64)
    torch.testing.assert_close(held.hvp(ones), usual.hvp(ones), rtol=0, atol=0)
    twin = held.twin()
    assert twin.value() == pytest.approx(expected[0], rel=1e-12)


def test_a_model_that_cannot_be_compiled_is_called_as_it_is(monkeypatch):
    def failing(model):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", failing)
    held, found = valued(network(), compile=True)
    assert found == valued(network())[1]
    (note,) = [note for note in held.notes if "compile=True" in note]
    assert note.endswith("computed without, as it fails (RuntimeError: no compiler)")


def test_a_compiled_model_that_gives_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: 1.001 * model(x))
    held, found = valued(network(), compile=True)
    assert found == valued(network())[1]
    assert any(note.endswith("as the compiled model gives others") for note in held.notes)
