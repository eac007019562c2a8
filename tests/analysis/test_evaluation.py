"""Many points at once: the same numbers as one by one, whatever goes together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import build
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call

from flatgauge import LossSurface
from flatgauge.analysis.landscapes import evaluate
from flatgauge.analysis.landscapes.evaluate import Evaluator


def around(surface: LossSurface, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(count, surface.size, generator=generator, dtype=torch.float64)
    return [surface.point + 0.1 * step.to(surface.point) for step in steps]


@pytest.mark.parametrize(
    "name", ["mlp", "conv and max-pool", "residual with batch-norm", "attention", "tied weights"]
)
def test_stacks_give_what_single_points_give(name):
    case = build(name)
    case.model.eval()
    surface = case.surface(weight_decay=0.1)
    evaluator, points = Evaluator(surface), around(surface, 5)
    assert evaluator.stack > 1
    together, alone = evaluator(points), evaluator(points, alone=True)
    assert together.loss == pytest.approx([surface.value(point) for point in points], rel=1e-11)
    assert alone.loss == [surface.value(point) for point in points]  # to the last bit
    assert together.accuracy == alone.accuracy


def test_loss_and_accuracy_are_the_definition():
    case = build("mlp")
    surface = case.surface()
    (point,) = around(surface, 1)
    output = functional_call(case.model, surface.split(point), (case.inputs,))
    found = Evaluator(surface)([point, surface.point])
    assert found.loss[0] == pytest.approx(float(F.cross_entropy(output, case.targets)), rel=1e-12)
    right = (output.argmax(1) == case.targets).double().mean()
    assert found.accuracy[0] == pytest.approx(float(right), rel=1e-12)


def test_results_do_not_depend_on_chunks_or_company():
    case = build("mlp")
    points = around(case.surface(), 6)
    whole = Evaluator(case.surface())(points)
    small = Evaluator(case.surface(chunk=3), stack=2)
    assert small.stack == 2
    found = small(points)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    assert found.accuracy == whole.accuracy
    assert Evaluator(case.surface())(points[:1]).loss == whole.loss[:1]  # stacks are filled up


def test_ignored_labels_are_no_labels():
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    surface = LossSurface(model, "cross_entropy", (inputs, torch.tensor([0, 0, -100, 1])))
    assert Evaluator(surface)([surface.point]).accuracy == pytest.approx([2 / 3])


@pytest.mark.parametrize("name", ["mse", "outputs per position"])
def test_no_accuracy_without_classes(name):
    if name == "mse":
        model, targets = nn.Linear(3, 2), torch.zeros(4, 2)
        surface = LossSurface(model, "mse", (torch.ones(4, 3), targets))
    else:
        model, targets = nn.Linear(3, 5), torch.zeros(4, 2, dtype=torch.long)
        surface = LossSurface(model, "cross_entropy", (torch.ones(4, 2, 3), targets))
    assert Evaluator(surface)([surface.point]).accuracy is None


class Branching(nn.Module):
    """Its way depends on its numbers, which a stack cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        y = self.linear(x)
        return y if float(self.linear.weight.detach().sum()) > 0 else 2 * y


def test_models_that_cannot_be_stacked_are_called_one_by_one():
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(6, 3, generator=generator), torch.arange(6) % 2)
    torch.manual_seed(0)
    surface = LossSurface(Branching(), "cross_entropy", data)
    evaluator = Evaluator(surface)
    assert evaluator.stack == 1
    points = around(surface, 3)
    assert evaluator(points).loss == [surface.value(point) for point in points]


def test_hooks_never_see_a_stack():
    model, seen = nn.Linear(3, 2), []
    model.register_forward_hook(
        lambda module, inputs, output: seen.append(is_batchedtensor(output))
    )
    surface = LossSurface(model, "cross_entropy", (torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
    seen.clear()
    evaluator = Evaluator(surface)
    evaluator(around(surface, 3))
    assert evaluator.stack == 1
    assert seen
    assert not any(seen)


def test_large_models_and_small_budgets_are_not_stacked(monkeypatch):
    case = build("mlp")
    assert Evaluator(case.surface()).stack > 1
    monkeypatch.setattr(evaluate, "_SMALL_WORK", 1.0)
    assert Evaluator(case.surface()).stack == 1
    monkeypatch.undo()
    surface = case.surface(chunk=4)
    surface.memory = 4 * surface.size  # bytes: not even one point's weights
    evaluator = Evaluator(surface)
    assert (evaluator.stack, evaluator.group) == (1, 1)


def test_a_loss_that_is_no_number_is_infinite():
    surface = LossSurface(nn.Linear(1, 1), "mse", (torch.ones(2, 1), torch.zeros(2, 1)))
    assert Evaluator(surface)([torch.full((2,), float("nan"))]).loss == [float("inf")]


def test_every_batch_is_read_once_for_a_group():
    reads = []

    class Loader:
        def __iter__(self):
            for start in range(0, 8, 2):
                reads.append(start)
                yield torch.ones(2, 3) * start, torch.tensor([0, 1])

    surface = LossSurface(nn.Linear(3, 2), "cross_entropy", Loader(), memory="1MiB")
    surface.data._stored = None  # As if the data were larger than the budget.
    surface.data._mark()
    evaluator = Evaluator(surface)
    reads.clear()
    evaluator(around(surface, evaluator.group))
    assert evaluator.group >= 16
    assert reads == [0, 2, 4, 6]


class Writing(nn.Module):
    """Writes to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x.mul_(2.0))


def test_a_model_that_writes_to_its_inputs_finds_them_as_they_were():
    surface = LossSurface(Writing(), "mse", (torch.ones(4, 3), torch.zeros(4, 2)))
    points = around(surface, 3)
    assert Evaluator(surface)(points).loss == [surface.value(point) for point in points]
