"""Small networks with data, one for every kind of layer and loss; each is built anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge import LossSurface


@dataclass(frozen=True)
class Case:
    """A model, a loss by name and in torch's own words, and data."""

    model: nn.Module
    loss: Any
    torch_loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    curved: tuple[str, ...] = ()  # Parameters that the output is not linear in: glob patterns.

    def surface(self, **options: Any) -> LossSurface:
        return LossSurface(self.model, self.loss, (self.inputs, self.targets), **options)


class Residual(nn.Module):
    """Two convolutions around a skip connection, batch-norm with stored statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.relu(x + self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """One weight matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Attention(nn.Module):
    """One head of attention between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head((x + mixed).mean(1))


class Branches(nn.Module):
    """Two parallel branches of proportional weights (Tsuzuku et al. 2019, eq. 26-30)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)
        with torch.no_grad():
            self.right.weight.copy_(2 * self.left.weight)
            self.right.bias.copy_(2 * self.left.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return torch.relu(self.left(hidden)) + torch.relu(self.right(hidden))


def _mlp(*widths: int, bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = []
    for index, (inner, outer) in enumerate(pairwise(widths)):
        layers += [activation()] if index else []
        layers.append(nn.Linear(inner, outer, bias=bias))
    return nn.Sequential(*layers)


class Squared(nn.Module):
    """A product of two activations of one weight: quadratic in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(hidden * hidden)


class Gated(nn.Module):
    """Two linear maps multiplied, a slope, hand-made scale and shift, a matrix on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(4, 5), nn.Linear(4, 5)
        self.slope = nn.PReLU(5)
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.matrix = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.slope(self.value(x) * self.gate(x))
        return (hidden * self.scale + self.shift) @ self.matrix


class Sequence(nn.Module):
    """Position-wise maps with time in front, a layer norm, positions, and tokens as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.places = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Linear(4, 5)
        self.mix = nn.Conv1d(5, 2, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (n, time, 3)
        x = self.norm(self.embed(x.transpose(0, 1)) + self.places[: x.shape[1], None])
        x = torch.relu(self.wide(x)).permute(1, 2, 0)
        pooled = self.mix(x).reshape(x.shape[0], 2, -1)[:, :, :4]
        return self.head(pooled.reshape(-1, 4)).reshape(x.shape[0], 2, 3).sum(1)


def _case(
    model: nn.Module,
    shape: tuple[int, ...],
    loss: str = "cross_entropy",
    samples: int = 11,
    curved: tuple[str, ...] = (),
) -> Case:
    """Classification into three classes, or regression onto two numbers, in float64."""
    model = model.double()
    for module in model.modules():  # Stored statistics as after some training.
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean = torch.randn(module.num_features).double() * 0.3
            module.running_var = torch.rand(module.num_features).double() + 0.5
            nn.init.uniform_(module.weight, 0.5, 1.5)
    inputs = torch.randn(samples, *shape).double()
    if loss == "mse":
        return Case(model, loss, F.mse_loss, inputs, torch.randn(samples, 2).double(), curved)
    return Case(model, loss, F.cross_entropy, inputs, torch.randint(0, 3, (samples,)), curved)


def _conv_pool() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return _case(model, (1, 8, 8))


def _grouped_dilated() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return _case(model, (2, 6, 6))


_BUILDERS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: _case(_mlp(4, 5, 4, 3), (4,)),
    "mlp without biases": lambda: _case(_mlp(4, 5, 4, 3, bias=False), (4,)),
    "conv and max-pool": _conv_pool,
    "grouped and dilated conv": _grouped_dilated,
    "residual with batch-norm": lambda: _case(Residual(), (2, 4, 4)),
    "leaky relu with mse": lambda: _case(_mlp(3, 5, 4, 2, activation=nn.LeakyReLU), (3,), "mse"),
    "proportional branches": lambda: _case(Branches(), (4,)),
    "gelu": lambda: _case(_mlp(4, 5, 4, 3, activation=nn.GELU), (4,), curved=("[02].*",)),
    "tied weights": lambda: _case(Tied(), (4,), curved=("first.weight",)),
    "attention": lambda: _case(Attention(), (5, 3), curved=("embed.*", "query.*", "key.*")),
}

#: Further kinds of layers, for what is said of layers.
_LAYERS: dict[str, Callable[[], Case]] = {
    "1-d conv": lambda: _case(
        nn.Sequential(
            *(nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.BatchNorm1d(4), nn.ReLU()),
            *(nn.Conv1d(4, 4, 2, dilation=2, groups=2), nn.ReLU(), nn.Flatten()),
            nn.Linear(8, 3),
        ),
        (2, 8),
    ),
    "3-d conv": lambda: _case(
        nn.Sequential(
            *(nn.Conv3d(1, 2, 2, padding="same", dilation=2), nn.ReLU(), nn.AvgPool3d(2)),
            *(nn.Conv3d(2, 2, (1, 2, 1), bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
        ),
        (1, 4, 4, 4),
        samples=7,
    ),
    "depthwise conv": lambda: _case(
        nn.Sequential(
            *(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular", groups=3), nn.ReLU6()),
            *(nn.Conv2d(6, 6, 2, groups=6), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        (3, 4, 4),
    ),
    "transposed conv": lambda: _case(
        nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            nn.LeakyReLU(),
            nn.ConvTranspose2d(4, 2, (2, 1), dilation=2, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (2, 3, 3),
    ),
    "squared": lambda: _case(Squared(), (4,), curved=("first.*",)),
    "gated": lambda: _case(Gated(), (4,)),
    "sequence": lambda: _case(Sequence(), (4, 3), curved=("embed.*", "places")),
    "sigmoid in the middle": lambda: _case(
        nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)),
        (4,),
        "mse",
        curved=("0.*",),
    ),
}

CASES = tuple(_BUILDERS)
LAYER_CASES = (*_BUILDERS, *_LAYERS)


def build(name: str, *, seed: int = 0) -> Case:
    """Build a case, leaving the global random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (_BUILDERS | _LAYERS)[name]()
