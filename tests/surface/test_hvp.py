"""Models in wrappers and precisions, and ways of differentiating twice that go wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import build
from reference import dense_gradient, dense_hessian, directions, error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatgauge import LossSurface


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
