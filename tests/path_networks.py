"""Networks with their graphs of weights, written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case, build
from path_graph import INPUT, OUTPUT, Graph
from torch import Tensor, nn


def names(layer: str, count: int) -> list[str]:
    return [f"{layer}[{i}]" for i in range(count)]


# -- further models ----------------------------------------------------------------------------


class Stream(nn.Module):
    """x + W2 relu(W1 x) on a stream between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(4, 3), nn.Linear(3, 2)
        self.second, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.second(torch.relu(self.first(x))))
        return self.head(x)


class LateBias(Stream):
    """The same with a bias that enters the stream only after the stream has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(2, 3)


class Fork(nn.Module):
    """Two branches of one hidden layer, side by side in front of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        parts = torch.relu(self.left(x)), torch.relu(self.right(x))
        return self.head(torch.cat(parts, 1))


class DeepFork(nn.Module):
    """One branch is two layers deep and comes first: its units are done before the fork is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.left, self.deeper = nn.Linear(3, 2), nn.Linear(2, 2)
        self.right = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.deeper.weight.mul_(4)  # The strongest way leads through it.

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        left = torch.relu(self.deeper(torch.relu(self.left(x))))
        return self.head(torch.cat((left, torch.relu(self.right(x))), 1))


class Dense(nn.Module):
    """Every layer reads all layers before it; the last reader is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)
        self.third, self.head = nn.Linear(4, 2, bias=False), nn.Linear(6, 3)
        with torch.no_grad():
            self.second.weight.mul_(3)  # The strongest way leads through all layers.
            self.third.weight.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.cat((x, torch.relu(self.second(x))), 1)
        x = torch.cat((x, torch.relu(self.third(x))), 1)
        return self.head(x)


class Crossroads(Stream):
    """A stream that an output reads before, and an input enters after, the block around it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(3, 3, bias=False), nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.early.weight.mul_(3)  # Both would be the strongest edges of their units.
            self.late.weight.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        stream = torch.relu(self.stem(x))
        early = self.early(stream)
        stream = stream + self.second(torch.relu(self.first(stream))) + self.late(x)
        return self.head(torch.relu(stream)) + early


class Preactivation(nn.Module):
    """A stream that is normalized where it is read, so that the scales are off the skeleton."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.second, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.second(torch.relu(self.norm(x)))
        return self.head(torch.relu(x))


def _made(make: Callable[[], nn.Module], shape: tuple[int, ...], *, seed: int = 0) -> Case:
    """A model of our own as a case: three classes, eleven samples, float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double()
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.running_mean = torch.randn(module.num_features).double() * 0.3
                module.running_var = torch.rand(module.num_features).double() + 0.5
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
        inputs, targets = torch.randn(11, *shape).double(), torch.randint(0, 3, (11,))
    return Case(model.eval(), "cross_entropy", F.cross_entropy, inputs, targets)


# -- their graphs ------------------------------------------------------------------------------


def equal_width(seed: int = 0) -> Graph:
    """The network of the paper: one width throughout, no biases."""
    graph = Graph(
        _made(
            lambda: nn.Sequential(
                *(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False)),
                *(nn.ReLU(), nn.Linear(3, 3, bias=False)),
            ),
            (3,),
            seed=seed,
        )
    )
    one, two = names("one", 3), names("two", 3)
    graph.linear("0.weight", [INPUT] * 3, one, 0)
    graph.linear("2.weight", one, two, 1)
    graph.linear("4.weight", two, [OUTPUT] * 3, 2)
    return graph


def mlp(case: str = "mlp", widths: tuple[int, ...] = (4, 5, 4, 3), seed: int = 0) -> Graph:
    """Unequal widths, with biases where the case has them."""
    graph = Graph(build(case, seed=seed))
    present = dict(graph.case.model.named_parameters())
    tails = [INPUT] * widths[0]
    for n, width in enumerate(widths[1:]):
        last = n == len(widths) - 2
        heads = [OUTPUT] * width if last else names(f"hidden {n}", width)
        graph.linear(f"{2 * n}.weight", tails, heads, n)
        if f"{2 * n}.bias" in present:
            graph.bias(f"{2 * n}.bias", heads, n)
        tails = heads
    return graph


def conv_pool(seed: int = 0) -> Graph:
    graph = Graph(build("conv and max-pool", seed=seed))
    one, two = names("one", 3), names("two", 2)
    graph.conv("0.weight", [INPUT], one, 0, taps=9)
    graph.bias("0.bias", one, 0)
    graph.conv("3.weight", one, two, 1, taps=9)
    graph.bias("3.bias", two, 1)
    graph.linear("6.weight", two, [OUTPUT] * 3, 2, positions=4)
    graph.bias("6.bias", [OUTPUT] * 3, 2)
    return graph


def conv_norm(seed: int = 0) -> Graph:
    """A strided convolution without bias under a batch-norm with stored statistics."""
    case = _made(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(12, 3)),
        ),
        (2, 4, 4),
        seed=seed,
    )
    graph = Graph(case)
    before, after = names("before", 3), names("after", 3)
    graph.conv("0.weight", [INPUT] * 2, before, 0, taps=9)
    graph.norm("1", case.model[1], before, after, 1)
    graph.linear("4.weight", after, [OUTPUT] * 3, 2, positions=4)
    graph.bias("4.bias", [OUTPUT] * 3, 2)
    return graph


def stream(seed: int = 0, make: type[Stream] = Stream) -> Graph:
    graph = Graph(_made(make, (4,), seed=seed))
    joined, inner = names("stream", 3), names("inner", 2)
    graph.linear("stem.weight", [INPUT] * 4, joined, 0)
    graph.bias("stem.bias", joined, 0)
    graph.linear("first.weight", joined, inner, 1)
    graph.bias("first.bias", inner, 1)
    graph.linear("second.weight", inner, joined, 2)
    if make is LateBias:
        graph.bias("second.bias", joined, 2)
    graph.linear("head.weight", joined, [OUTPUT] * 3, 3)
    graph.bias("head.bias", [OUTPUT] * 3, 3)
    return graph


def late_bias(seed: int = 0) -> Graph:
    return stream(seed, LateBias)


def crossroads(seed: int = 0) -> Graph:
    graph = Graph(_made(Crossroads, (4,), seed=seed))
    joined, inner = names("stream", 3), names("inner", 2)
    graph.linear("stem.weight", [INPUT] * 4, joined, 0)
    graph.bias("stem.bias", joined, 0)
    graph.linear("early.weight", joined, [OUTPUT] * 3, 1)
    graph.linear("first.weight", joined, inner, 2)
    graph.bias("first.bias", inner, 2)
    graph.linear("second.weight", inner, joined, 3)
    graph.linear("late.weight", [INPUT] * 4, joined, 4)
    graph.linear("head.weight", joined, [OUTPUT] * 3, 5)
    graph.bias("head.bias", [OUTPUT] * 3, 5)
    return graph


def preactivation(seed: int = 0) -> Graph:
    graph = Graph(_made(Preactivation, (4,), seed=seed))
    joined, inner = names("stream", 3), names("inner", 3)
    graph.linear("stem.weight", [INPUT] * 4, joined, 0)
    graph.bias("stem.bias", joined, 0)
    graph.norm("norm", graph.case.model.norm, joined, inner, 1)
    graph.linear("second.weight", inner, joined, 2)
    graph.linear("head.weight", joined, [OUTPUT] * 3, 3)
    graph.bias("head.bias", [OUTPUT] * 3, 3)
    return graph


def residual(seed: int = 0) -> Graph:
    """Convolutions and batch-norms around a skip connection, the positions averaged."""
    graph = Graph(build("residual with batch-norm", seed=seed))
    model = graph.case.model
    before, joined, inner = names("before", 3), names("stream", 3), names("inner", 3)
    graph.conv("stem.weight", [INPUT] * 2, before, 0, taps=9)
    graph.norm("norm0", model.norm0, before, joined, 1)
    graph.conv("conv.weight", joined, inner, 2, taps=9)
    graph.norm("norm", model.norm, inner, joined, 3)
    graph.linear("head.weight", joined, [OUTPUT] * 3, 4)
    graph.bias("head.bias", [OUTPUT] * 3, 4)
    return graph


def fork(seed: int = 0) -> Graph:
    graph = Graph(_made(Fork, (4,), seed=seed))
    first, left, right = names("first", 3), names("left", 2), names("right", 3)
    graph.linear("first.weight", [INPUT] * 4, first, 0)
    graph.bias("first.bias", first, 0)
    graph.linear("left.weight", first, left, 1)
    graph.bias("left.bias", left, 1)
    graph.linear("right.weight", first, right, 2)
    graph.linear("head.weight", left + right, [OUTPUT] * 3, 3)
    graph.bias("head.bias", [OUTPUT] * 3, 3)
    return graph


def deep_fork(seed: int = 0) -> Graph:
    graph = Graph(_made(DeepFork, (4,), seed=seed))
    first, left, deeper, right = (names(n, k) for n, k in zip("fldr", (3, 2, 2, 2), strict=True))
    graph.linear("first.weight", [INPUT] * 4, first, 0)
    graph.bias("first.bias", first, 0)
    graph.linear("left.weight", first, left, 1)
    graph.bias("left.bias", left, 1)
    graph.linear("deeper.weight", left, deeper, 2)
    graph.bias("deeper.bias", deeper, 2)
    graph.linear("right.weight", first, right, 3)
    graph.linear("head.weight", deeper + right, [OUTPUT] * 3, 4)
    graph.bias("head.bias", [OUTPUT] * 3, 4)
    return graph


def dense(seed: int = 0) -> Graph:
    graph = Graph(_made(Dense, (3,), seed=seed))
    first, second, third = names("first", 2), names("second", 2), names("third", 2)
    graph.linear("first.weight", [INPUT] * 3, first, 0)
    graph.bias("first.bias", first, 0)
    graph.linear("second.weight", first, second, 1)
    graph.bias("second.bias", second, 1)
    graph.linear("third.weight", first + second, third, 2)
    graph.linear("head.weight", first + second + third, [OUTPUT] * 3, 3)
    graph.bias("head.bias", [OUTPUT] * 3, 3)
    return graph


def grouped(seed: int = 0) -> Graph:
    graph = Graph(build("grouped and dilated conv", seed=seed))
    one, two = names("one", 4), names("two", 4)
    graph.conv("0.weight", [INPUT] * 2, one, 0, taps=9, groups=2)
    graph.bias("0.bias", one, 0)
    graph.conv("2.weight", one, two, 1, taps=9, groups=4)
    graph.bias("2.bias", two, 1)
    graph.linear("5.weight", two, [OUTPUT] * 3, 2, positions=4)
    graph.bias("5.bias", [OUTPUT] * 3, 2)
    return graph


def depthwise(seed: int = 0) -> Graph:
    """A depthwise and a pointwise convolution, and positions averaged."""
    graph = Graph(
        _made(
            lambda: nn.Sequential(
                *(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 2, groups=3), nn.ReLU()),
                *(nn.AvgPool2d(3), nn.Conv2d(3, 3, 1), nn.Flatten()),
            ),
            (2, 4, 4),
            seed=seed,
        )
    )
    one, two = names("one", 3), names("two", 3)
    graph.conv("0.weight", [INPUT] * 2, one, 0, taps=1)
    graph.bias("0.bias", one, 0)
    graph.conv("2.weight", one, two, 1, taps=4, groups=3)
    graph.bias("2.bias", two, 1)
    graph.conv("5.weight", two, [OUTPUT] * 3, 2, taps=1)
    graph.bias("5.bias", [OUTPUT] * 3, 2)
    return graph


def one_dimension(seed: int = 0) -> Graph:
    graph = Graph(build("1-d conv", seed=seed))
    before, one, two = names("before", 4), names("one", 4), names("two", 4)
    graph.conv("0.weight", [INPUT] * 2, before, 0, taps=3)
    model = graph.case.model
    graph.norm("1", model[1], before, one, 1, bias=model[0].bias)
    graph.conv("3.weight", one, two, 2, taps=2, groups=2)
    graph.bias("3.bias", two, 2)
    graph.linear("6.weight", two, [OUTPUT] * 3, 3, positions=2)
    graph.bias("6.bias", [OUTPUT] * 3, 3)
    return graph


def transposed(seed: int = 0) -> Graph:
    graph = Graph(build("transposed conv", seed=seed))
    one, two = names("one", 4), names("two", 2)
    graph.conv("0.weight", [INPUT] * 2, one, 0, taps=9, groups=2, transposed=True)
    graph.bias("0.bias", one, 0)
    graph.conv("2.weight", one, two, 1, taps=2, transposed=True)
    graph.linear("6.weight", two, [OUTPUT] * 3, 2, positions=4)
    graph.bias("6.bias", [OUTPUT] * 3, 2)
    return graph


#: By name; `fork`s have no diagonal that the definition fixes.
GRAPHS: dict[str, Callable[..., Graph]] = {
    "equal width": equal_width,
    "mlp": mlp,
    "mlp without biases": lambda seed=0: mlp("mlp without biases", seed=seed),
    "leaky relu with mse": lambda seed=0: mlp("leaky relu with mse", (3, 5, 4, 2), seed=seed),
    "conv and max-pool": conv_pool,
    "conv and batch-norm": conv_norm,
    "stream": stream,
    "late bias": late_bias,
    "crossroads": crossroads,
    "pre-activation": preactivation,
    "residual with batch-norm": residual,
    "fork": fork,
    "deep fork": deep_fork,
    "dense": dense,
    "grouped and dilated conv": grouped,
    "depthwise conv": depthwise,
    "1-d conv": one_dimension,
    "transposed conv": transposed,
}
FORKED = ("fork", "deep fork", "dense")
#: Units that are entered more than once or read before they are complete.
STREAMS = ("stream", "late bias", "crossroads", "pre-activation", "residual with batch-norm")
