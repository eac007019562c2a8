"""Derivatives that are checked before they are trusted, and methods that a kink cannot fool."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import directions, error
from test_hvp import OnceSquare, SilentSquare, Squaring
from torch import Tensor, nn
from torch.func import functional_call

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.measures import hessian_trace


def samples(*shape: int) -> tuple[Tensor, Tensor]:
    """Inputs of a shape and labels of three classes."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).double(), torch.arange(shape[0]) % 3


def dense(model: nn.Module, data: tuple[Tensor, Tensor], loss=F.cross_entropy) -> Tensor:
    """The Hessian in double precision."""
    model = model.double().eval()
    names = {name: p.shape for name, p in model.named_parameters()}

    def total(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in names.values()])
        state = {n: part.view(names[n]) for n, part in zip(names, parts, strict=True)}
        return loss(functional_call(model, state, (data[0],)), data[1])

    point = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return torch.autograd.functional.hessian(total, point)


def made(build, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with parameters of its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().to(dtype)


def check_products(model: nn.Module, data: tuple[Tensor, Tensor]) -> LossSurface:
    """Compare products with the dense Hessian."""
    bound = 1e-11 if next(model.parameters()).dtype is torch.float64 else 1e-5
    surface = LossSurface(model, "cross_entropy", data)
    vectors = directions(surface.size)
    found = surface.hvp(vectors)
    assert error(found, dense(model, data) @ vectors) < bound
    assert surface.product_method.startswith("reverse")
    return surface


# -- units that sit exactly on a kink ----------------------------------------------------------


def pruned_perceptron() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4], model[2].weight[:, :4] = 0, 0, 0
    return model


def pruned_convolutions() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1], model[4].weight[:, 4:8] = 0, 0, 0
    return model


def all_zero() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("build", "shape"),
    [(pruned_perceptron, (9, 5)), (pruned_convolutions, (9, 1, 6, 6)), (all_zero, (10, 5))],
)
def test_products_of_units_that_are_zero_in_and_out(build, shape, dtype):
    check_products(made(build, dtype), samples(*shape))


def test_eigenvalues_of_a_pruned_network():
    model, data = made(pruned_perceptron), samples(9, 5)
    surface = LossSurface(model, "cross_entropy", data)
    found = fg.measure(surface, measures=["hessian_max_eigenvalue"])["hessian_max_eigenvalue"]
    expected = torch.linalg.eigvalsh(dense(model, data))[-1]
    assert found.value == pytest.approx(float(expected), rel=1e-3)


class SquaredAtTheEnd(Squaring):
    """Squares its outputs; two of its hidden units are zero in and out."""

    def __init__(self, square) -> None:
        super().__init__(square)
        with torch.no_grad():
            self.linear.weight[:2], self.linear.bias[:2], self.head.weight[:, :2] = 0, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.head(torch.relu(self.linear(x))))


@pytest.mark.parametrize("square", [OnceSquare.apply, SilentSquare.apply])
def test_differences_are_refused_where_units_sit_on_a_kink(square):
    data = samples(9, 4)
    check_products(SquaredAtTheEnd(torch.square), data)
    surface = LossSurface(SquaredAtTheEnd(square), "cross_entropy", data)
    with pytest.raises(ValueError, match="units sit on a kink"):
        surface.hvp(directions(surface.size))


# -- differences stay within one piece, or are refused -----------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_do_not_cross_kinks(dtype):
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 3))

    model, data = made(build, dtype), samples(60, 5)
    surface = LossSurface(model, "cross_entropy", data, products="differences")
    vectors = directions(surface.size)
    expected = LossSurface(model, "cross_entropy", data, dtype=torch.float64).hvp(vectors)
    assert error(surface.hvp(vectors), expected) < (1e-6 if dtype is torch.float64 else 1e-5)


def test_traces_by_differences_are_not_called_exact():
    data = samples(9, 4)
    once, twice = Squaring(OnceSquare.apply), Squaring(torch.square)
    twice.load_state_dict(once.state_dict())
    found, expected = (
        hessian_trace(surface, method="hutchinson", probes=surface.size)
        for surface in (LossSurface(net, "cross_entropy", data) for net in (once, twice))
    )
    assert found.value == pytest.approx(expected.value, rel=1e-7)
    assert expected.exact
    assert not found.exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_torch_differentiates_once_only(dtype):
    def margins(output: Tensor, target: Tensor) -> Tensor:
        """`nn.MultiMarginLoss`, as it is defined."""
        own = output.gather(1, target[:, None])
        others = (1 - own + output).clamp_min(0)
        return (others.sum(1) - 1).mean() / output.shape[1]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

    model, data = made(build, dtype), samples(9, 5)
    surface = LossSurface(model, nn.MultiMarginLoss(), data)
    found = hessian_trace(surface, method="hutchinson", probes=surface.size)
    hessian, vectors = dense(model, data, margins), directions(surface.size)
    surface = LossSurface(model.to(dtype), nn.MultiMarginLoss(), data)
    assert hessian.trace() == 0
    assert found.value == pytest.approx(0, abs=1e-5)
    assert error(surface.hvp(vectors), hessian @ vectors) < 1e-5


# -- weight normalisation ----------------------------------------------------------------------


def normed_by_itself(model: nn.Module) -> nn.Module:
    """The same network with weights that plain operations compute."""

    class Normed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            parts = dict(layer.named_parameters())
            self.bias = nn.Parameter(parts.pop("bias").detach().clone())
            self.g, self.v = (nn.Parameter(p.detach().clone()) for p in parts.values())

        def forward(self, x: Tensor) -> Tensor:
            size = self.v.square().sum(1, keepdim=True).sqrt()
            return F.linear(x, self.g * self.v / size, self.bias)

    return nn.Sequential(Normed(model[0]), nn.ReLU(), Normed(model[2]))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"]
)
def test_traces_under_weight_normalisation(norm, dtype):
    def build() -> nn.Module:
        return nn.Sequential(norm(nn.Linear(5, 6)), nn.ReLU(), norm(nn.Linear(6, 3)))

    model, data = made(build, dtype), samples(12, 5)
    plain = normed_by_itself(model)
    surface = LossSurface(model, "cross_entropy", data)
    found = hessian_trace(surface, method="hutchinson", probes=surface.size)
    assert surface.product_method.startswith("reverse")
    assert found.exact
    expected = float(dense(plain, data).trace())
    assert found.value == pytest.approx(expected, rel=1e-10 if dtype is torch.float64 else 1e-4)


# -- ways that are asked for by hand -----------------------------------------------------------


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def test_a_wrong_way_that_is_asked_for_is_refused():
    data = samples(9, 5)
    surface = LossSurface(made(layer_norm), "cross_entropy", data, products="forward")
    with pytest.raises(ValueError, match=r"`products='forward'` does not work here.*'auto'"):
        surface.hvp(torch.ones(surface.size))
    net = Squaring(SilentSquare.apply)
    surface = LossSurface(net, "cross_entropy", samples(9, 4), products="reverse")
    with pytest.raises(ValueError, match=r"`products='reverse'` does not work here: its products"):
        surface.hvp(torch.ones(surface.size))
    check_products(made(layer_norm), data)


# -- gradients that are not the derivative -----------------------------------------------------


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def halve_gradient(hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g / 2)
    return hidden


def watch_gradient(hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda g: None)
    return hidden


class Passing(nn.Module):
    """Passes its hidden units through a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.tanh(self.first(x))))


@pytest.mark.parametrize("function", [Reversed.apply, halve_gradient])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_backward_pass_of_another_function_is_refused(function, dtype):
    model = made(lambda: Passing(function), dtype)
    surface = LossSurface(model, "cross_entropy", samples(9, 5))
    message = "gradient that autograd computes is not the derivative of the loss"
    for ask in (surface.gradient, lambda: surface.hvp(torch.ones(surface.size))):
        with pytest.raises(ValueError, match=message):
            ask()
    with pytest.raises(ValueError, match=message):
        fg.measure(surface, measures=["hessian_trace"])
    assert surface.value() > 0


def test_hooks_that_only_watch_gradients_do_no_harm():
    check_products(made(lambda: Passing(watch_gradient)), samples(9, 5))


# -- random numbers in the forward pass --------------------------------------------------------


class Seeded(nn.Module):
    """Adds the same random numbers at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.relu(self.first(x))
        return self.last(hidden + torch.randn(6, generator=generator).to(hidden))


def test_a_forward_pass_with_a_generator_of_its_own_is_not_swept():
    model, data = made(Seeded), samples(9, 5)
    surface = LossSurface(model, "cross_entropy", data)
    found = hessian_trace(surface, probes=surface.size)
    assert found.value == pytest.approx(float(dense(model, data).trace()), rel=1e-10)
    few = hessian_trace(surface, probes=12, generator=torch.Generator().manual_seed(0))
    assert not few.exact
    assert any("draws random numbers (test_hvp_check.py:" in n for n in few.notes)
