"""The perceptron at the end of a model, whose columns go back all together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import block_parts, error, placed_handlers
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from flatgauge import LossSurface
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.blocks import Blocks
from flatgauge.curvature.sweep import linear
from flatgauge.curvature.sweep import plan as plan_module
from flatgauge.curvature.sweep.accumulate import PARTS
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.curvature.sweep.linear import MLPHead
from flatgauge.measures import fisher_rao_norm, rho_max, rho_sum
from flatgauge.measures.fisher_rao import squared_gradients
from flatgauge.surface.losses import NormalizedCrossEntropy

SAMPLES = 9


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(1), dtype=torch.float64)


def hushed(model: nn.Module) -> nn.Module:
    """Push biases down, and a third of the rows below zero: other units speak for every sample."""
    hidden = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][:-1]
    with torch.no_grad():
        for layer in hidden:
            rows = layer.weight[::3]
            rows.copy_(-rows.abs())
            if layer.bias is not None:
                layer.bias -= 0.4 * layer.weight.norm(dim=1)
    return model


def perceptron(*widths: int, bias: bool = True, outputs: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs, bias=bias))


def silenced(model: nn.Sequential, place: int) -> nn.Sequential:
    """No unit of a layer ever speaks."""
    nn.init.constant_(model[place].bias, -99.0)
    return model


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def convolutional() -> nn.Module:
    front = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*front, *hushed(perceptron(32, 48)))


class Turned(nn.Module):
    """Matrices on the right, (in, out) as in GPT-2."""

    def __init__(self, way: str) -> None:
        super().__init__()
        plain = hushed(perceptron(3, 48, 48))
        weights = [layer.weight.detach().T.clone() for layer in (plain[0], plain[2], plain[4])]
        self.first, self.second, self.last = map(nn.Parameter, weights)
        self.bias = nn.Parameter(plain[0].bias.detach())
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "addmm":
            x = torch.addmm(self.bias, x, self.first)
        else:
            x = x @ self.first + self.bias
        return torch.relu(torch.relu(x) @ self.second) @ self.last


class Woven(nn.Module):
    """Layers put together by a function."""

    def __init__(self, way: Callable[[Woven, Tensor], Tensor]) -> None:
        super().__init__()
        plain = hushed(perceptron(3, 48, 48))
        self.first, self.second, self.last = plain[0], plain[2], plain[4]
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def residual(net: Woven, x: Tensor) -> Tensor:
    hidden = torch.relu(net.first(x))
    return net.last(hidden + torch.relu(net.second(hidden)))


def before_read_again(net: Woven, x: Tensor) -> Tensor:
    before = net.first(x)
    return net.last(torch.relu(net.second(torch.relu(before)) + before))


def one_bias_for_all(net: Woven, x: Tensor) -> Tensor:
    hidden = torch.relu(F.linear(x, net.first.weight, net.first.bias[:1]))
    return net.last(torch.relu(net.second(hidden)))


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output / output.std(1, correction=0, keepdim=True), target)


LABELS = torch.arange(SAMPLES) % 3
NUMBERS = drawn(SAMPLES, 3).flip(0)
ENTROPY = "cross_entropy", F.cross_entropy, LABELS

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "two hidden": lambda: hushed(perceptron(3, 48, 48)),
    "one input": lambda: hushed(perceptron(1, 64)),
    "no bias": lambda: hushed(perceptron(3, 48, 48, bias=False)),
    "nobody silent": lambda: perceptron(3, 48, 48),
    "first all silent": lambda: silenced(perceptron(3, 48, 48), 0),
    "second all silent": lambda: silenced(hushed(perceptron(3, 48, 48)), 2),
    "frozen first": lambda: frozen(hushed(perceptron(3, 48, 48)), "0.weight", "0.bias"),
    "frozen middle": lambda: frozen(hushed(perceptron(3, 48, 48)), "2.weight", "2.bias"),
    "frozen weight": lambda: frozen(hushed(perceptron(3, 48, 48)), "2.weight"),
    "frozen biases": lambda: frozen(hushed(perceptron(3, 48, 48)), "0.bias", "2.bias"),
    "no relu between": lambda: hushed(
        nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 3))
    ),
    "no relu at the end": lambda: hushed(
        nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 8), nn.Linear(8, 3))
    ),
    "gelu in front": lambda: hushed(nn.Sequential(nn.Linear(3, 8), nn.GELU(), *perceptron(8, 48))),
    "conv front": convolutional,
    "addmm": lambda: Turned("addmm"),
    "matmul": lambda: Turned("matmul"),
    "residual": lambda: Woven(residual),
    "before": lambda: Woven(before_read_again),
    "one bias": lambda: Woven(one_bias_for_all),
    "log-softmax": lambda: nn.Sequential(*hushed(perceptron(3, 48)), nn.LogSoftmax(1)),
}
#: How many of the last layers are taken together.
TOGETHER = {
    **dict.fromkeys(["two hidden", "no bias", "nobody silent", "frozen biases"], 3),
    **dict.fromkeys(["first all silent", "second all silent", "addmm"], 3),
    **dict.fromkeys(["one input", "frozen first", "no relu between", "gelu in front"], 2),
    **dict.fromkeys(["conv front", "matmul", "one bias", "log-softmax"], 2),
}


def inputs_of(name: str) -> Tensor:
    if name == "conv front":
        return drawn(SAMPLES, 1, 6, 6)
    return drawn(SAMPLES, 1 if name == "one input" else 3)


def built(name: str, loss: tuple = ENTROPY) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NETWORKS[name]().double()
    inputs = inputs_of(name).abs() if name == "no bias" else inputs_of(name)
    if name == "log-softmax":
        loss = F.nll_loss, F.nll_loss, LABELS
    kind, torch_loss, targets = loss
    return Case(model, kind, torch_loss, inputs, targets)


def dense_block(case: Case, name: str) -> Tensor:
    """The Hessian's block of one parameter."""
    case.model.eval()
    weight = case.model.get_parameter(name).detach().requires_grad_()
    value = case.torch_loss(functional_call(case.model, {name: weight}, case.inputs), case.targets)
    size = weight.numel()
    (slope,) = torch.autograd.grad(value, weight, create_graph=True)
    directions = torch.eye(size).double().view(size, *weight.shape)
    (block,) = torch.autograd.grad(
        slope, weight, directions, is_grads_batched=True, materialize_grads=True
    )
    return block.detach().reshape(size, size)


def spreads(case: Case) -> dict[str, Tensor]:
    """How much the input units of every matrix vary, their size where they do not."""
    owners = {parameter.data_ptr(): name for name, parameter in case.model.named_parameters()}
    found: dict[str, Tensor] = {}

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (F.linear, torch.addmm, Tensor.matmul, Tensor.__matmul__):
                rows, weight = args[-2:] if func is torch.addmm else args[:2]
                values = rows.detach()
                size, deviation = values.abs().amax(0), values.std(0, correction=0)
                varies = deviation > 1e-13 * size
                found[owners[weight.data_ptr()]] = deviation.where(varies, size)
            return func(*args, **(kwargs or {}))

    with Listening():
        case.model.eval()(case.inputs)
    return found


@cache
def expected(name: str) -> dict[str, dict[str, Tensor]]:
    case = built(name)
    found = spreads(case)
    return {
        n: block_parts(case.model, n, dense_block(case, n), found.get(n), layer=n in found)
        for n, p in case.model.named_parameters()
        if p.requires_grad
    }


@cache
def surface_of(name: str, loss: tuple = ENTROPY) -> LossSurface:
    return built(name, loss).surface()


def measured(surface: LossSurface, chunk: int | None = None, **options) -> Blocks:
    """Blocks that are measured anew, some samples at a time."""
    surface.release(static=False)  # Reading the model takes longest.
    surface.most_samples = chunk
    return block_curvature(surface, generator=seeded(), **options)


def together(surface: LossSurface, *parts: str, record: bool = False) -> int:
    """How many layers go back together."""
    owners = placed_handlers(surface, *parts, record=record)
    return sum(isinstance(owner, MLPHead) for owner in owners)


def close(found: Tensor, right: Tensor, rtol: float, atol: float, what: str) -> None:
    assert found.shape == right.shape, what
    assert torch.isclose(found, right, rtol=rtol, atol=atol, equal_nan=True).all(), what


def same(found: Blocks, right: Blocks, tolerance: float = 1e-11) -> None:
    assert list(found) == list(right)
    for name, block in found.items():
        other = right[name]
        for kind in ("values", "stderr", "data_stderr", "samples"):
            first, second = getattr(block, kind), getattr(other, kind)
            assert first.keys() == second.keys(), (name, kind)
            for part, values in first.items():
                close(values, second[part], tolerance, tolerance, f"{kind} {part} of {name}")
        assert (block.rounding is None) == (other.rounding is None)
        if block.rounding is not None:
            torch.testing.assert_close(block.rounding, other.rounding, rtol=1e-9, atol=1e-30)


@pytest.mark.parametrize("chunk", [None, 4, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_part_is_the_definition(name, chunk):
    blocks = measured(surface_of(name), chunk, estimate=False)
    assert len(blocks) > 1
    for parameter, block in blocks.items():
        right = expected(name)[parameter]
        for part, values in block.values.items():
            if part not in right:
                continue  # Units of a convolution.
            close(values, right[part], 1e-9, 1e-13, f"{part} of {parameter}")
            if part != "diagonal":
                mean = block.samples[part].mean()
                torch.testing.assert_close(mean, values.sum(), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_last_layers_are_taken_together_where_nothing_else_reads_them(name):
    surface, expected_layers = surface_of(name), TOGETHER.get(name, 0)
    for parts in (PARTS, ("weighted_diagonal",)):
        assert together(surface, *parts) == expected_layers
    assert together(surface, record=True) == expected_layers


# -- the same without a tail, and with all units ---------------------------------------------------


def without_head(monkeypatch) -> None:
    """Every layer by itself."""
    monkeypatch.setattr(plan_module, "find_mlp_head", lambda plan, read: ([], []))


def all_units(monkeypatch) -> None:
    """No unit is left out."""
    monkeypatch.setattr(linear, "active_units", lambda units: None)


WAYS = [without_head, all_units]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["two hidden", "no bias", "second all silent", "conv front"])
def test_errors_are_those_of_all_units(name, way, monkeypatch):
    found = [measured(surface_of(name), chunk) for chunk in (None, 2)]
    way(monkeypatch)
    for blocks in found:
        same(blocks, measured(surface_of(name)))


LOSSES = {
    "mse": ("mse", F.mse_loss, NUMBERS),
    "no curvature": (F.l1_loss, F.l1_loss, NUMBERS),
    "several labels": (
        *(nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
        (NUMBERS > 0).double(),
    ),
    "weighted": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 0.0]).double()),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 0.0]).double()),
        LABELS,
    ),
    "any function": (scaled, scaled, LABELS),
}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss(loss, chunk, monkeypatch):
    case = built("two hidden", LOSSES[loss])
    surface = case.surface()
    assert together(surface, *PARTS) == 3
    blocks = measured(surface, chunk)
    for name in ("0.weight", "0.bias", "4.weight"):
        right = dense_block(case, name)
        torch.testing.assert_close(
            blocks[name].values["diagonal"].reshape(-1), right.diagonal(), rtol=1e-9, atol=1e-12
        )
    without_head(monkeypatch)
    same(blocks, measured(surface, chunk))


def test_the_normalized_loss_keeps_its_signs(monkeypatch):
    case = built("no bias", (scaled, scaled, LABELS))
    case.inputs[3] = 0.0  # Its logits are all zero.
    kept = [place for place in range(SAMPLES) if place != 3]
    part = Case(case.model, scaled, scaled, case.inputs[kept], LABELS[kept])
    whole = LossSurface(case.model, "cross_entropy", (case.inputs, LABELS))
    surface = whole.with_loss(NormalizedCrossEntropy())
    for chunk in (None, 2):
        blocks = measured(surface, chunk)
        assert blocks.left_out == 1
        assert min(block.values["diagonal"].min() for block in blocks.values()) < -1e-6
        for name, block in blocks.items():
            right = dense_block(part, name).diagonal()
            assert error(block.values["diagonal"].reshape(-1), right) < 1e-9
    without_head(monkeypatch)
    same(blocks, measured(surface), 1e-9)


CLASSES = 80


@cache
def many_classes() -> LossSurface:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hushed(perceptron(3, 48, 64, outputs=CLASSES)).double()
    targets = torch.arange(SAMPLES) * 8
    return LossSurface(model, "cross_entropy", (drawn(SAMPLES, 3), targets))


@pytest.mark.parametrize("all_columns", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
def test_many_classes(all_columns, chunk, monkeypatch):
    blocks = measured(many_classes(), chunk, all_columns=all_columns)
    for name, block in blocks.items():
        assert block.exact == all_columns, name
        for part, errors in block.stderr.items():
            assert errors.shape == block.values[part].shape, (name, part)
    without_head(monkeypatch)
    same(blocks, measured(many_classes(), chunk, all_columns=all_columns))


def test_mixtures_agree_within_their_own_error():
    right = measured(many_classes(), all_columns=True)
    for name, block in measured(many_classes()).items():
        for part, errors in block.stderr.items():
            difference = (block.values[part] - right[name].values[part]).abs()
            assert (difference.sum() <= 6 * errors.sum() + 1e-12).all(), (name, part)


def test_single_precision():
    case = built("two hidden")
    model = copy.deepcopy(case.model).float()
    single = LossSurface(model, "cross_entropy", (case.inputs.float(), case.targets))
    found, right = measured(single, 4), measured(surface_of("two hidden"))
    for name, block in found.items():
        for part, values in block.values.items():
            assert error(values.reshape(-1), right[name].values[part].reshape(-1)) < 1e-4


def test_weight_decay_counts_for_silent_units_too():
    case = built("two hidden")
    plain, decayed = measured(surface_of("two hidden")), measured(case.surface(weight_decay=0.7), 2)
    for name, weight in case.model.named_parameters():
        before, after = plain[name].values, decayed[name].values
        torch.testing.assert_close(after["diagonal"], before["diagonal"] + 0.7)
        torch.testing.assert_close(after["trace"], before["trace"] + 0.7 * weight.numel())
        if weight.dim() == 2:
            squares = 0.7 * weight.detach().square()
            torch.testing.assert_close(after["incoming"], before["incoming"] + squares.sum(1))
            torch.testing.assert_close(after["outgoing"], before["outgoing"] + squares.sum(0))


# -- what else is swept ------------------------------------------------------------------------


@cache
def top(name: str, layer: str) -> float:
    block = dense_block(built(name), layer)
    heard = block.any(0)  # The others add eigenvalues of zero.
    return torch.linalg.eigvalsh(block[heard][:, heard])[-1].item()


SOLVER = {"tolerance": 1e-10, "max_matvecs": 400}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", ["two hidden", "no bias", "addmm", "conv front", "residual"])
def test_top_eigenvalues_are_those_of_the_dense_block(name, chunk, beside):
    surface = surface_of(name)
    measured(surface, chunk, keep_factors=beside, estimate=False)
    layers = list(sweep_of(surface).plan.layers)
    for layer, found in block_eigenvalues(surface, layers, **SOLVER, generator=seeded()).items():
        assert found.value == pytest.approx(top(name, layer), rel=1e-8), layer
        if found.samples is not None:
            assert found.samples.mean().item() == pytest.approx(found.value, rel=1e-8)


@pytest.mark.parametrize("layers", ["24", "0", "04", "2"])
def test_top_eigenvalues_of_some_layers(layers):
    surface, names = surface_of("two hidden"), [f"{place}.weight" for place in layers]
    surface.release(static=False)
    surface.most_samples = 2
    for layer, found in block_eigenvalues(surface, names, **SOLVER, generator=seeded()).items():
        assert found.value == pytest.approx(top("two hidden", layer), rel=1e-8), layer


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", ["two hidden", "no bias", "conv front", "second all silent"])
def test_slopes_of_single_samples(name, chunk):
    case, surface = built(name), surface_of(name)
    surface.release(static=False)
    surface.most_samples = chunk
    counts, found = squared_gradients(surface, surface.names)
    assert (counts == 1).all()
    right: dict[str, list[float]] = {parameter: [] for parameter in surface.names}
    for x, y in zip(case.inputs, case.targets, strict=True):
        case.model.zero_grad()
        case.torch_loss(case.model(x[None]), y[None]).backward()
        for parameter, values in right.items():
            weight = case.model.get_parameter(parameter)
            values.append((weight * weight.grad).square().sum().item())
    for parameter, values in right.items():
        expected_values = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(found[parameter], expected_values, rtol=1e-10, atol=1e-15)
    total = sum(sum(values) for values in right.values()) / SAMPLES
    assert fisher_rao_norm(surface).value == pytest.approx(total, rel=1e-10)


# -- symmetries --------------------------------------------------------------------------------


def rescaled(model: nn.Sequential, factors: Tensor) -> nn.Sequential:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight *= factors[:, None]
        twin[0].bias *= factors
        twin[2].weight /= factors
    return twin


def permuted(model: nn.Sequential, order: Tensor) -> nn.Sequential:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.copy_(model[0].weight[order])
        twin[0].bias.copy_(model[0].bias[order])
        twin[2].weight.copy_(model[2].weight[:, order])
    return twin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("measure", [rho_max, rho_sum])
@pytest.mark.parametrize("chunk", [None, 2])
def test_factors_of_two_change_no_bit_of_rho(measure, chunk, dtype):
    case = built("two hidden")
    factors = 2.0 ** torch.randint(-9, 9, (48,), generator=seeded())
    values = []
    for model in (case.model, rescaled(case.model, factors)):
        data = case.inputs.to(dtype), case.targets
        values.append(measure(LossSurface(model.to(dtype), "cross_entropy", data, chunk=chunk)))
    assert values[0].value == values[1].value
    assert values[0].data_stderr == values[1].data_stderr


@pytest.mark.parametrize("measure", [rho_max, rho_sum])
def test_the_order_of_units_does_not_matter(measure):
    case = built("two hidden")
    twin = permuted(case.model, torch.randperm(48, generator=seeded()))
    other = LossSurface(twin, "cross_entropy", (case.inputs, case.targets), chunk=4)
    right = measure(surface_of("two hidden")).value
    assert measure(other).value == pytest.approx(right, rel=1e-10)
