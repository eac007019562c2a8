"""Ways of differentiating twice, the checks that they pass first, and those that go wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import build
from reference import dense_gradient, dense_hessian, directions, error
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.measures import hessian_trace


def test_wrapped_models_are_unwrapped():
    case = build("mlp")
    expected = dense_gradient(case)
    for wrapped in (nn.DataParallel(case.model), torch.compile(case.model, backend="eager")):
        surface = LossSurface(wrapped, case.loss, (case.inputs, case.targets))
        assert surface.names[0] == "0.weight"
        assert error(surface.gradient(), expected) < 1e-10


def test_a_model_compiled_in_place_runs_eagerly():
    case = build("mlp")
    case.model.compile(backend="eager")
    vectors = directions(case.surface().size)
    assert error(case.surface().hvp(vectors), dense_hessian(case) @ vectors) < 1e-10


def test_a_distributed_wrapper_is_unwrapped(tmp_path):
    case = build("mlp")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(case.model)
        surface = LossSurface(wrapped, case.loss, (case.inputs, case.targets))
        assert error(surface.gradient(), dense_gradient(case)) < 1e-10
    finally:
        torch.distributed.destroy_process_group()


def test_half_precision_is_measured_in_single():
    case = build("mlp")
    model = copy.deepcopy(case.model).bfloat16()
    surface = LossSurface(model, case.loss, (case.inputs, case.targets))
    assert surface.dtype is torch.float32
    assert surface.notes == ["the parameters are bfloat16; measured in float32"]
    twin = LossSurface(copy.deepcopy(model).float(), case.loss, (case.inputs, case.targets))
    torch.testing.assert_close(surface.gradient(), twin.gradient(), rtol=0, atol=0)
    assert next(model.parameters()).dtype is torch.bfloat16


class OnceSquare(torch.autograd.Function):
    """A square whose backward pass cannot be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_finite_differences_are_the_last_resort():
    class Net(nn.Module):
        def __init__(self, square) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()
            self.square = square

        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.linear(x))

    data = (torch.randn(9, 4).double(), torch.arange(9) % 3)
    net = Net(OnceSquare.apply)
    surface = LossSurface(net, "cross_entropy", data)
    assert surface.product_method == "central differences of the gradient"
    assert any("is marked once_differentiable" in note for note in surface.notes)
    twin = Net(torch.square)
    twin.load_state_dict(net.state_dict())
    vectors = directions(surface.size)
    exact = LossSurface(twin, "cross_entropy", data)
    assert error(surface.hvp(vectors), exact.hvp(vectors)) < 1e-8


class DetachingSquare(torch.autograd.Function):
    """A square whose backward pass cannot even be recorded."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.numpy() * gradient.numpy())


def test_a_backward_pass_that_cannot_be_recorded_falls_back_too():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return DetachingSquare.apply(self.linear(x))

    surface = LossSurface(Net(), "cross_entropy", (torch.randn(9, 4).double(), torch.arange(9) % 3))
    assert surface.value() > 0
    assert surface.product_method == "central differences of the gradient"
    assert torch.isfinite(surface.hvp(torch.ones(surface.size))).all()


class Checkpointed(nn.Module):
    """Runs its first half again in the backward pass."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.checkpointed = checkpointed

    def half(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)).sin()

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return self.second(checkpoint(self.half, x, use_reentrant=False))
        return self.second(self.half(x))


def test_activation_checkpoints_meet_the_parameters_of_the_forward_pass():
    data = (build("mlp").inputs, build("mlp").targets)
    plain, other = (
        LossSurface(Checkpointed(checkpointed=flag), "cross_entropy", data)
        for flag in (False, True)
    )
    elsewhere, vectors = plain.point + 0.3, directions(plain.size)
    assert error(other.gradient(elsewhere), plain.gradient(elsewhere)) < 1e-13
    for _ in range(2):
        assert error(other.hvp(vectors), plain.hvp(vectors)) < 1e-12


def test_a_loss_that_reads_the_model_meets_the_parameters_it_is_measured_at():
    case = build("mlp")

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        squares = sum(p.square().sum() for p in case.model.parameters())
        return case.torch_loss(output, target) + 0.05 * squares

    reading = LossSurface(case.model, penalised, (case.inputs, case.targets))
    decayed = case.surface(weight_decay=0.1)
    vectors, elsewhere = directions(decayed.size), decayed.point + 0.3
    assert reading.value(elsewhere) == pytest.approx(decayed.value(elsewhere), rel=1e-12)
    assert error(reading.gradient(elsewhere), decayed.gradient(elsewhere)) < 1e-12
    assert error(reading.hvp(vectors), decayed.hvp(vectors)) < 1e-12


# -- second derivatives that are wrong without a word ------------------------------------------


class SilentSquare(torch.autograd.Function):
    """A square whose backward pass is cut off from what it was computed from."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * gradient


class Squaring(nn.Module):
    """Squares what a linear map gives, by a function of choice."""

    def __init__(self, square, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear, self.head = nn.Linear(4, 5, dtype=dtype), nn.Linear(5, 3, dtype=dtype)
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.square(torch.relu(self.linear(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_backward_pass_that_detaches_is_found_by_differences(dtype):
    case = build("mlp")
    data = (case.inputs, case.targets)
    model, twin = Squaring(SilentSquare.apply, dtype=dtype), Squaring(torch.square)
    twin.load_state_dict(model.state_dict())
    surface = LossSurface(model, "cross_entropy", data)
    exact = LossSurface(twin, "cross_entropy", data)
    vectors = directions(surface.size)
    assert error(surface.hvp(vectors), exact.hvp(vectors)) < (1e-7 if dtype.itemsize > 4 else 2e-2)
    assert any("differ from differences of the gradient" in note for note in surface.notes)


class Branching(Squaring):
    """Takes another branch for a large input."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.linear(x[:, :4]))
        if (x[:, 4] > 100).any():
            return self.head(self.square(hidden))
        return self.head(hidden**2)


def test_a_dead_end_that_only_late_samples_meet_is_seen():
    case = build("mlp")
    marks = torch.zeros(11, 1).double()
    marks[10] = 200
    data = (torch.cat([case.inputs, marks], 1), case.targets)
    surface = LossSurface(Branching(OnceSquare.apply), "cross_entropy", data, chunk=2)
    exact = LossSurface(Branching(torch.square), "cross_entropy", data, chunk=2)
    vectors = directions(surface.size)
    assert error(surface.hvp(vectors), exact.hvp(vectors)) < 1e-7
    assert any("once_differentiable" in note for note in surface.notes)
    assert error(surface.hvp(vectors), exact.hvp(vectors)) < 1e-7
    asked = LossSurface(
        Branching(OnceSquare.apply), "cross_entropy", data, chunk=2, products="reverse"
    )
    with pytest.raises(ValueError, match=r"`products='reverse'` does not work here"):
        asked.hvp(vectors)


class Reentrant(Checkpointed):
    """Checkpoints as torch once made them, around its first or second half."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(checkpointed=True)
        self.at_first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.at_first:
            return self.second(checkpoint(self.half, x, use_reentrant=True))
        return checkpoint(self.second, self.half(x), use_reentrant=True)


@pytest.mark.parametrize("first", [True, False])
def test_reentrant_checkpoints_are_refused(first):
    case = build("mlp")
    with pytest.raises(ValueError, match="pass `use_reentrant=False`"):
        LossSurface(Reentrant(first=first), "cross_entropy", (case.inputs, case.targets))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("normalised", "size", "direction"),
    [
        (nn.utils.weight_norm, "weight_g", "weight_v"),
        (
            nn.utils.parametrizations.weight_norm,
            "parametrizations.weight.original0",
            "parametrizations.weight.original1",
        ),
    ],
)
def test_weight_normalisation_whose_second_derivative_torch_gets_wrong(normalised, size, direction):
    case = build("gelu")
    model = nn.Sequential(normalised(nn.Linear(4, 5)), nn.Tanh(), normalised(nn.Linear(5, 3)))
    model = model.double()
    before = {name: id(value) for name, value in model[0].__dict__.items()}
    surface = LossSurface(model, "cross_entropy", (case.inputs, case.targets))

    def literal(flat: Tensor) -> Tensor:
        parts, x = surface.split(flat), case.inputs
        for layer in ("0", "2"):
            g, v = parts[f"{layer}.{size}"], parts[f"{layer}.{direction}"]
            weight = g * v / v.square().sum(1, keepdim=True).sqrt()
            x = (torch.tanh(x) if layer == "2" else x) @ weight.T + parts[f"{layer}.bias"]
        return case.torch_loss(x, case.targets)

    vectors = directions(surface.size)
    exact = torch.autograd.functional.hessian(literal, surface.point)
    assert error(surface.hvp(vectors), exact @ vectors) < 1e-7
    assert {name: id(value) for name, value in model[0].__dict__.items()} == before


def test_kinks_do_not_make_products_suspect():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))
        model[0].bias.data.zero_()
    case = build("mlp")
    for loss in ("cross_entropy", lambda o, t: case.torch_loss(o, t)):
        surface = LossSurface(model, loss, (case.inputs, case.targets))
        assert surface.product_method == "reverse over reverse, first-order graphs kept"


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
    assert any("draws random numbers (test_hvp.py:" in n for n in few.notes)
