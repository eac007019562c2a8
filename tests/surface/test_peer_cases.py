"""The kinds of models, losses and shapes that other curvature libraries test, dense in float64.

Small networks of the kinds that curvlinops and BackPACK try out: every Hessian product is compared
with the dense Hessian, and every block that the sweep calls exact with its trace and diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import directions, error
from torch import Tensor, nn
from torch.func import functional_call

from flatgauge import LossSurface
from flatgauge.curvature import block_curvature


class Shared(nn.Module):
    """One linear map that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


class Skip(nn.Module):
    """A residual block with a projection, then global pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.by, self.norm = nn.Conv2d(2, 3, 1, bias=False), nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.two(torch.relu(self.norm(self.one(x)))) + self.by(x)
        return self.head(torch.relu(hidden).mean((2, 3)))


class ByName(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(x)))


def flat_head(*layers: nn.Module, width: int) -> nn.Sequential:
    """Layers, and a linear map of all they give."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def perceptron(activation: type[nn.Module], last: int = 3) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, last))


def normed() -> nn.Sequential:
    """Batch-norms with stored statistics, one of them without weights."""
    layers = [nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, affine=False)]
    for norm in (layers[1], layers[3]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    return flat_head(*layers, width=12)


def frozen() -> nn.Sequential:
    """A network whose first layer and last bias are not trained."""
    model = perceptron(nn.ReLU)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Problem:
    """A model, a loss and the shapes of the data.

    Attributes:
        build: Makes the model.
        shape: Of the inputs.
        exact: How many parameters the sweep measures exactly; None where it is left out.
        loss: As it is given to the surface.
        literal: The same as a function.
        target: Shape of targets that are numbers; None for class labels.
        labels: Shape of the class labels.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    exact: int | None = None
    loss: Any = "cross_entropy"
    literal: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    target: tuple[int, ...] | None = None
    labels: tuple[int, ...] = ()

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.target is not None:
            return inputs, torch.rand(self.target, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, 3, (len(inputs), *self.labels), generator=generator)

    def model(self) -> nn.Module:
        """The model, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().double().eval()


def regression(build: Callable[[], nn.Module], shape: tuple[int, ...], exact: int | None, **more):
    """A problem with the squared error."""
    return Problem(build, shape, exact, "mse", F.mse_loss, **more)


IMAGES, VOLUMES, SEQUENCES, ROWS = (6, 2, 6, 6), (4, 1, 4, 4, 4), (6, 2, 5), (7, 4)

PROBLEMS: dict[str, Problem] = {
    "linear": Problem(lambda: nn.Linear(4, 3), ROWS, 2),
    "relu": Problem(lambda: perceptron(nn.ReLU), ROWS, 4),
    "leaky relu": Problem(lambda: perceptron(nn.LeakyReLU), ROWS, 4),
    "sigmoid": Problem(lambda: perceptron(nn.Sigmoid), ROWS),
    "tanh": Problem(lambda: perceptron(nn.Tanh), ROWS),
    "elu": Problem(lambda: perceptron(nn.ELU), ROWS),
    "selu": Problem(lambda: perceptron(nn.SELU), ROWS),
    "log sigmoid": Problem(lambda: perceptron(nn.LogSigmoid), ROWS),
    "silu": Problem(lambda: perceptron(nn.SiLU), ROWS),
    "conv1d": Problem(
        lambda: flat_head(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.MaxPool1d(2), width=6), SEQUENCES, 4
    ),
    "conv2d": Problem(
        lambda: flat_head(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), width=12), IMAGES, 4
    ),
    "conv2d, groups": Problem(
        lambda: flat_head(
            nn.Conv2d(2, 4, 3, padding=1, dilation=2, groups=2),
            nn.ReLU(),
            nn.AvgPool2d(2),
            width=16,
        ),
        IMAGES,
        4,
    ),
    "conv3d": Problem(
        lambda: flat_head(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AvgPool3d(3), width=2), VOLUMES, 4
    ),
    "transposed 1d": Problem(
        lambda: flat_head(nn.ConvTranspose1d(2, 2, 2, stride=2), nn.Sigmoid(), width=20), SEQUENCES
    ),
    "transposed 2d": Problem(
        lambda: flat_head(
            nn.ConvTranspose2d(2, 2, 2, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), width=8
        ),
        IMAGES,
    ),
    "transposed 3d": Problem(
        lambda: flat_head(nn.ConvTranspose3d(1, 2, 2), nn.ReLU(), nn.MaxPool3d(3), width=2), VOLUMES
    ),
    "batch-norm": Problem(normed, SEQUENCES, 6),
    "residual": Problem(Skip, IMAGES, 9),
    "padding": Problem(
        lambda: flat_head(nn.ZeroPad2d(1), nn.Conv2d(2, 2, 4), nn.PReLU(), width=50), IMAGES
    ),
    "shared": Problem(Shared, ROWS),
    "frozen": Problem(frozen, ROWS, 1),
    "classes at positions": Problem(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.ReLU(), nn.Conv1d(4, 3, 1)),
        SEQUENCES,
        4,
        loss=nn.CrossEntropyLoss(),
        labels=(4,),
    ),
    "classes at pixels": Problem(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 5)),
        IMAGES,
        2,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        literal=lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1),
        labels=(2, 2),
    ),
    "weighted classes": Problem(
        lambda: perceptron(nn.ReLU),
        ROWS,
        4,
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double()),
        literal=lambda output, target: F.cross_entropy(
            output, target, weight=torch.tensor([1.0, 2.0, 0.5]).double()
        ),
    ),
    "regression": regression(lambda: perceptron(nn.ReLU, 2), ROWS, 4, target=(7, 2)),
    "regression of maps": regression(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.ConvTranspose2d(3, 1, 3)),
        IMAGES,
        None,
        target=(6, 1, 6, 6),
    ),
    "binary": Problem(
        lambda: perceptron(nn.ReLU, 2),
        ROWS,
        4,
        loss="binary_cross_entropy",
        literal=F.binary_cross_entropy_with_logits,
        target=(7, 2),
    ),
    "squares by hand": Problem(
        lambda: perceptron(nn.ReLU, 2),
        ROWS,
        4,
        loss=lambda output, target: (output - target).square().sum(1).mean() / 2,
        literal=lambda output, target: (output - target).square().sum(1).mean() / 2,
        target=(7, 2),
    ),
}


def dense(problem: Problem, model: nn.Module) -> Tensor:
    """The Hessian by the trainable parameters, all samples at once."""
    inputs, targets = problem.data()
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes.values()])
        state = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return problem.literal(functional_call(model, state, (inputs,)), targets)

    named = dict(model.named_parameters())
    point = torch.cat([named[name].detach().reshape(-1) for name in shapes])
    return torch.autograd.functional.hessian(loss, point)


@pytest.mark.parametrize("name", PROBLEMS)
def test_products_and_blocks_are_those_of_the_dense_hessian(name):
    problem = PROBLEMS[name]
    model = problem.model()
    surface = LossSurface(model, problem.loss, problem.data())
    hessian, vectors = dense(problem, model), directions(surface.size)
    assert error(surface.hvp(vectors), hessian @ vectors) < 1e-10
    if problem.exact is None:
        return
    blocks = block_curvature(surface, {"trace", "diagonal"}, estimate=False)
    assert len(blocks) == problem.exact
    diagonals = surface.split(hessian.diagonal())
    for key, block in blocks.items():
        assert block.exact
        torch.testing.assert_close(block.values["diagonal"], diagonals[key], rtol=1e-10, atol=1e-12)
        assert float(block.values["trace"]) == pytest.approx(float(diagonals[key].sum()), rel=1e-10)


@pytest.mark.parametrize("kind", ["pairs", "dicts"])
def test_batches_of_unequal_size(kind):
    problem = Problem(ByName, ROWS)
    inputs, targets = problem.data()
    batches: list[Any] = [
        (inputs[part], targets[part]) for part in (slice(3), slice(3, 4), slice(4, 7))
    ]
    if kind == "dicts":
        batches = [{"x": x, "labels": y} for x, y in batches]
    model = problem.model()
    surface = LossSurface(model, "cross_entropy", batches)
    hessian, vectors = dense(problem, model), directions(surface.size)
    assert error(surface.hvp(vectors), hessian @ vectors) < 1e-10


@pytest.mark.parametrize("products", ["reverse", "forward"])
def test_ways_that_are_asked_for_agree(products):
    problem = PROBLEMS["conv2d"]
    model = problem.model()
    surface = LossSurface(model, "cross_entropy", problem.data(), products=products)
    hessian, vectors = dense(problem, model), directions(surface.size)
    assert error(surface.hvp(vectors), hessian @ vectors) < 1e-10
