"""The loss surface against dense float64 derivatives, in every way of reading and chunking."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import CASES, Case, build
from reference import dense_gradient, dense_hessian, directions, error, loss_function, theta
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatgauge import LossSurface


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_definition(name):
    case = build(name)
    surface = case.surface()
    assert surface.value() == pytest.approx(loss_function(case)(theta(case)).item(), rel=1e-12)
    assert error(surface.gradient(), dense_gradient(case)) < 1e-10
    elsewhere = surface.point + 0.1
    assert surface.value(elsewhere) == pytest.approx(
        loss_function(case)(elsewhere).item(), rel=1e-12
    )
    moved = torch.autograd.functional.jacobian(loss_function(case), elsewhere)
    assert error(surface.gradient(surface.split(elsewhere)), moved) < 1e-10


@pytest.mark.parametrize(
    ("products", "bound"), [("auto", 1e-10), ("forward", 1e-10), ("differences", 1e-4)]
)
@pytest.mark.parametrize("name", CASES)
def test_products_are_the_dense_hessian(name, products, bound):
    case = build(name)
    surface = case.surface(products=products)
    vectors = directions(surface.size)
    expected = dense_hessian(case) @ vectors
    assert error(surface.hvp(vectors), expected) < bound
    assert error(surface.hvp(vectors[:, 0]), expected[:, 0]) < bound
    assert surface.matvecs == 4


@pytest.mark.parametrize("name", CASES)
def test_reverse_over_reverse_is_chosen_and_said(name):
    surface = build(name).surface()
    assert surface.product_method == "reverse over reverse, first-order graphs kept"
    assert surface.notes == []


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 11, 1000])
def test_no_answer_depends_on_the_chunk(name, chunk):
    case = build(name)
    whole, parts = case.surface(chunk=11), case.surface(chunk=chunk)
    vectors = directions(whole.size)
    assert parts.value() == pytest.approx(whole.value(), rel=1e-13)
    assert error(parts.gradient(), whole.gradient()) < 1e-13
    assert error(parts.hvp(vectors), whole.hvp(vectors)) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "leaky relu with mse"])
def test_float32_agrees_to_its_own_precision(name):
    case = build(name)
    single = copy.deepcopy(case.model).float()
    vectors = directions(theta(case).numel())
    exact = dense_hessian(case) @ vectors
    surface = LossSurface(single, case.loss, (case.inputs, case.targets))
    assert surface.dtype is torch.float32
    assert surface.hvp(vectors.float()).dtype is torch.float32
    assert error(surface.hvp(vectors.float()).double(), exact) < 1e-5
    double = LossSurface(
        single.half().float(), case.loss, (case.inputs, case.targets), dtype=torch.float64
    )
    assert double.gradient().dtype is torch.float64


def test_the_first_product_is_remembered_and_later_ones_call_no_model():
    case = build("conv and max-pool")
    surface = case.surface(chunk=4)
    vector = directions(surface.size)[:, 0]
    calls = count_calls(case.model, lambda: surface.hvp(vector))
    assert calls >= 3  # three chunks, and a few samples tried out
    assert count_calls(case.model, lambda: surface.hvp(vector)) == 0
    surface.release()
    assert count_calls(case.model, lambda: surface.hvp(vector)) == 3


def test_graphs_beyond_the_budget_are_computed_anew():
    case = build("conv and max-pool")
    inputs, targets = case.inputs.repeat(300, 1, 1, 1), case.targets.repeat(300)
    tight = LossSurface(case.model, case.loss, (inputs, targets), memory="4MiB")
    roomy = LossSurface(case.model, case.loss, (inputs, targets), memory="4GiB", chunk=tight.chunk)
    vectors = directions(tight.size)
    assert error(tight.hvp(vectors), roomy.hvp(vectors)) < 1e-13
    chunks = -(-len(inputs) // tight.chunk)
    again = count_calls(case.model, lambda: tight.hvp(vectors))
    assert 0 < again < chunks  # some are kept, the others recomputed once for all columns
    assert count_calls(case.model, lambda: roomy.hvp(vectors)) == 0


def count_calls(model: nn.Module, action) -> int:
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    action()
    handle.remove()
    return len(calls)


def reading(case: Case) -> dict[str, object]:
    """One data set in every form it can be given in."""
    pairs = TensorDataset(case.inputs, case.targets)
    batches = [(case.inputs[i : i + 4], case.targets[i : i + 4]) for i in range(0, 11, 4)]
    return {
        "list of uneven batches": batches,
        "list of lists": [list(batch) for batch in batches],
        "numpy pair": (case.inputs.numpy(), case.targets.numpy()),
        "data set": pairs,
        "loader": DataLoader(pairs, batch_size=4),
        "shuffling loader": DataLoader(pairs, batch_size=4, shuffle=True),
        "loader that drops its last batch": DataLoader(
            pairs, batch_size=4, shuffle=True, drop_last=True
        ),
        "two workers": DataLoader(pairs, batch_size=3, num_workers=2),
        "uneven batches of one": DataLoader(pairs, batch_size=1),
    }


@pytest.mark.parametrize("form", list(reading(build("mlp"))))
def test_every_way_of_giving_the_data_is_the_same_surface(form):
    case = build("mlp")
    whole, other = case.surface(), LossSurface(case.model, case.loss, reading(case)[form])
    assert other.samples == whole.samples == 11
    assert other.value() == pytest.approx(whole.value(), rel=1e-13)
    vectors = directions(whole.size)
    assert error(other.hvp(vectors), whole.hvp(vectors)) < 1e-12


def test_a_loader_too_large_to_hold_is_read_anew_in_every_pass():
    inputs, targets = torch.randn(4000, 100), torch.randint(0, 3, (4000,))
    model = nn.Linear(100, 3)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=500)
    held = LossSurface(model, "cross_entropy", (inputs, targets))
    streamed = LossSurface(model, "cross_entropy", loader, memory="2MiB")
    assert not streamed.data.in_memory
    assert streamed.samples == 4000
    vector = torch.ones(held.size)
    assert error(streamed.hvp(vector), held.hvp(vector)) < 1e-5
    assert streamed.value() == pytest.approx(held.value(), rel=1e-6)


class Refilling:
    """Gives every batch in the same tensors, as fast loaders do."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __iter__(self):
        inputs, targets = torch.zeros(4, 4).double(), torch.zeros(4).long()
        for i in range(0, 8, 4):
            inputs[:], targets[:] = self.case.inputs[i : i + 4], self.case.targets[i : i + 4]
            yield inputs, targets


def test_a_loader_that_refills_its_tensors_is_copied():
    case = build("mlp")
    surface = LossSurface(case.model, case.loss, Refilling(case))
    whole = LossSurface(case.model, case.loss, (case.inputs[:8], case.targets[:8]))
    assert surface.value() == pytest.approx(whole.value(), rel=1e-13)


def test_weight_decay_is_part_of_the_loss():
    case = build("mlp")
    plain, decayed = case.surface(), case.surface(weight_decay=0.3)
    point, vectors = plain.point, directions(plain.size)
    assert decayed.value() == pytest.approx(plain.value() + 0.15 * point.square().sum().item())
    torch.testing.assert_close(decayed.gradient(), plain.gradient() + 0.3 * point)
    torch.testing.assert_close(decayed.hvp(vectors), plain.hvp(vectors) + 0.3 * vectors)
    differences = case.surface(weight_decay=0.3, products="differences")
    assert error(differences.hvp(vectors), decayed.hvp(vectors)) < 1e-4


def test_split_and_flatten_are_inverse():
    surface = build("residual with batch-norm").surface()
    parts = surface.split(surface.point)
    assert list(parts) == [name for name, _ in surface.model.named_parameters()]
    assert parts["stem.weight"].shape == (3, 2, 3, 3)
    assert torch.equal(surface.flatten(parts), surface.point)
    assert surface.split(torch.ones(surface.size, 2))["head.bias"].shape == (3, 2)
    with pytest.raises(ValueError, match=r"differ in head\.bias"):
        surface.flatten({k: v for k, v in parts.items() if k != "head.bias"})


def test_a_changed_model_is_noticed():
    case = build("mlp")
    surface = case.surface()
    vectors = directions(surface.size)
    surface.hvp(vectors)
    with torch.no_grad():
        case.model[0].weight.mul_(1.5)
    assert error(surface.hvp(vectors), dense_hessian(case) @ vectors) < 1e-10
    case.model[2].bias.data += 0.2  # not seen by autograd's version counters
    assert error(surface.hvp(vectors), dense_hessian(case) @ vectors) < 1e-10
    assert error(surface.gradient(), dense_gradient(case)) < 1e-10
    assert surface.value() == pytest.approx(loss_function(case)(theta(case)).item())


def test_a_changed_buffer_is_noticed():
    case = build("residual with batch-norm")
    surface = case.surface()
    surface.gradient()
    case.model.norm.running_var *= 2
    assert error(surface.gradient(), dense_gradient(case)) < 1e-10


def test_progress_is_told_sample_by_sample():
    surface = build("mlp").surface(chunk=4)
    seen: list[int] = []
    with surface.on_progress(seen.append):
        surface.gradient(surface.point)
    assert seen == [4, 3, 4]
    surface.gradient(surface.point)
    assert sum(seen) == 11


def test_the_model_can_take_several_inputs_or_keywords():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.linear(left * right)

    case, model = build("mlp"), Two()
    x, y = case.inputs, case.targets
    expected = LossSurface(model, "cross_entropy", ((x, x), y)).gradient()
    by_name = LossSurface(model, "cross_entropy", {"left": x, "right": x, "labels": y})
    listed = LossSurface(
        model, "cross_entropy", DataLoader(TensorDataset(x, y), 4, collate_fn=_doubled)
    )
    torch.testing.assert_close(by_name.gradient(), expected)
    torch.testing.assert_close(listed.gradient(), expected)


def _doubled(samples):
    x = torch.stack([sample[0] for sample in samples])
    return (x, x), torch.stack([sample[1] for sample in samples])


def test_inputs_that_the_model_overwrites_stay_as_they_are():
    case = build("mlp")
    before = case.inputs.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), case.model)
    surface = LossSurface(model, case.loss, (case.inputs, case.targets))
    surface.value(), surface.gradient()
    assert torch.equal(case.inputs, before)


@pytest.mark.parametrize("loader", [False, True])
def test_the_first_samples_alone(loader):
    inputs, targets = torch.randn(10, 4), torch.arange(10) % 3
    model = nn.Linear(4, 3)
    data = DataLoader(TensorDataset(inputs, targets), batch_size=4) if loader else (inputs, targets)
    whole = LossSurface(model, "cross_entropy", data)
    few, same = whole.subset(6), LossSurface(model, "cross_entropy", (inputs[:6], targets[:6]))
    assert (few.samples, whole.samples, whole.subset(99).samples) == (6, 10, 10)
    assert few.value() == pytest.approx(same.value(), rel=1e-6)
    torch.testing.assert_close(few.hvp(torch.ones(15)), same.hvp(torch.ones(15)))
    assert few.model is not model
    with pytest.raises(ValueError, match="`samples=0` must be a whole number of at least 1"):
        whole.subset(0)
