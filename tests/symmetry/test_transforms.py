"""Groups of transforms: units reordered, outputs scaled and shifted, branches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import CASES, build
from torch import Tensor, nn

from flatgauge.symmetry import find_gauge
from flatgauge.symmetry.find import ModelCall, infer_gauge
from flatgauge.symmetry.transforms import (
    Branches,
    BranchShift,
    PermutationBlock,
    Reordering,
    Transforms,
    find_blocks,
    find_branches,
    find_shift,
    find_transforms,
)

GROUPS = {
    *("layerwise", "nodewise", "rows", "permutation", "output_scale", "output_shift", "branches")
}


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def call_of(*inputs: Tensor) -> ModelCall:
    return ModelCall(inputs, {})


def transforms_of(model: nn.Module, inputs: Tensor) -> Transforms:
    call = call_of(inputs)
    return find_transforms(model, infer_gauge(model, call), call)


def blocks_of(model: nn.Module, inputs: Tensor) -> list[PermutationBlock]:
    few = call_of(inputs)
    inference = infer_gauge(model, few).inference
    return find_blocks(inference, model, few)


def places(model: nn.Module, inputs: Tensor) -> list[tuple[int, set[str]]]:
    """For every block its size, and where its units lie: `name.axis`."""
    return [
        (len(block.units), {f"{axis.name}.{axis.axis}" for axis in block.axes})
        for block in blocks_of(model, inputs)
    ]


# -- units in another order ----------------------------------------------------------------------


def linear(*layers: int) -> list[tuple[int, set[str]]]:
    """The blocks of linear layers in a row, with an activation between two."""
    widths = {0: 5, 2: 4}
    return [(widths[i], {f"{i}.weight.0", f"{i}.bias.0", f"{i + 2}.weight.1"}) for i in layers]


BY_HAND: dict[str, list[tuple[int, set[str]]]] = {
    "mlp": linear(0, 2),
    "gelu": linear(0, 2),  # Order needs no homogeneity.
    "conv and max-pool": [
        (3, {"0.weight.0", "0.bias.0", "3.weight.1"}),
        (2, {"3.weight.0", "3.bias.0", "6.weight.1"}),
    ],
    "residual with batch-norm": [
        (
            3,  # One stream: everything reads and writes the same three channels.
            {"stem.weight.0", "conv.weight.0", "conv.weight.1", "head.weight.1"}
            | {f"{n}.{k}.0" for n in ("norm0", "norm") for k in ("weight", "bias")}
            | {f"{n}.running_{k}.0" for n in ("norm0", "norm") for k in ("mean", "var")},
        )
    ],
    "grouped and dilated conv": [],  # Channels of different groups cannot change places.
    "tied weights": [],  # The rows of the one matrix are also the outputs.
}


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_by_hand(name):
    case = build(name)
    assert places(case.model, case.inputs) == BY_HAND[name]


def test_attention_reorders_its_stream():
    case = build("attention")
    ((size, where),) = places(case.model, case.inputs)
    assert size == 4
    assert {"embed.weight.0", "query.weight.1", "key.weight.1", "value.weight.0"} < where
    assert not where & {"query.weight.0", "key.weight.0"}


def test_an_order_is_what_it_says():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    (block,) = blocks_of(model, torch.randn(2, 3))
    order = torch.tensor([2, 0, 3, 1])
    twin = copy.deepcopy(model)
    Reordering((block.order(order.numpy()),)).apply(twin)
    assert torch.equal(twin[0].weight, model[0].weight[order])
    assert torch.equal(twin[0].bias, model[0].bias[order])
    assert torch.equal(twin[2].weight, model[2].weight[:, order])


def test_positions_of_a_flattened_channel_stay_together():
    model = nn.Sequential(nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    (block,) = blocks_of(model, torch.randn(2, 1, 3))
    twin = copy.deepcopy(model)
    Reordering((block.order(torch.tensor([1, 2, 0]).numpy()),)).apply(twin)
    assert torch.equal(twin[3].weight, model[3].weight[:, [2, 3, 4, 5, 0, 1]])


def test_a_draw_never_leaves_all_as_it_was():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    (block,) = blocks_of(model, torch.randn(2, 3))
    for seed in range(10):
        order = block.draw(torch.Generator().manual_seed(seed))
        assert order["0.bias"][0][1].tolist() == [1, 0]


class Marked(nn.Module):
    """A fixed number per channel of the first hidden layer."""

    def __init__(self, marks: list[float]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("marks", torch.tensor(marks))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)) * self.marks
        return self.head(torch.relu(self.second(x)))


def test_blocks_that_change_the_function_are_dropped():
    inputs = torch.randn(3, 3)
    kept = [len(block.units) for block in blocks_of(Marked([1.0, 2.0, 3.0, 4.0]), inputs)]
    assert kept == [5]
    assert {len(block.units) for block in blocks_of(Marked([2.0] * 4), inputs)} == {4, 5}


# -- outputs -------------------------------------------------------------------------------------


class Ending(nn.Module):
    """A network with something done to its outputs."""

    def __init__(self, end: Any, outputs: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, outputs, bias=bias)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.head(torch.relu(self.first(x))))


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (Ending(nn.Identity()), (6, 4), "head.bias"),
        (Ending(nn.Identity(), bias=False), (6, 4), None),
        (Ending(lambda y: y + 7), (6, 4), "head.bias"),
        (Ending(lambda y: 2 * y), (6, 4), None),
        (Ending(lambda y: y.squeeze(1), 1), (6, 4), "head.bias"),  # one number per sample
        (Ending(lambda y: torch.relu(y + 100)), (6, 4), None),  # all positive on the example
        (Ending(lambda y: y.log_softmax(-1)), (6, 4), None),
        (Ending(nn.Identity()), (6, 2, 4), "head.bias"),  # a number per position and class
        (Ending(lambda y: y.transpose(1, 2)), (6, 2, 4), "head.bias"),
        (Ending(lambda y: (y, y)), (6, 4), None),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3)), (2, 1, 6, 6), "2.bias"),
    ],
)
def test_the_parameter_that_shifts_all_outputs(model, shape, expected):
    assert find_shift(model, call_of(torch.randn(*shape))) == expected


@pytest.mark.parametrize("exact", [True, False])
def test_output_scale_multiplies_all_outputs_by_one_factor(exact):
    case = build("mlp")
    found = transforms_of(case.model, case.inputs)
    twin = copy.deepcopy(case.model)
    transform = found["output_scale"].draw(torch.Generator().manual_seed(1), powers_of_two=exact)
    transform.apply(twin)
    ratio = twin(case.inputs) / case.model(case.inputs)
    assert ratio.std() < 1e-12
    factor = ratio.mean().item()
    assert 0.25 <= factor <= 4
    assert (factor in (0.5, 2.0)) == exact


def test_outputs_that_cannot_be_scaled():
    found = transforms_of(Ending(torch.sigmoid), torch.randn(3, 4))
    assert "no rescaling of parameters multiplies all outputs" in found.absent["output_scale"]
    assert "no parameter is added to all outputs" in found.absent["output_shift"]


# -- branches ------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """y = Σ relu(W_k x), then a linear map (Tsuzuku et al. 2019, eq. 26-30)."""

    def __init__(self, *shares: float, bias: bool = False) -> None:
        super().__init__()
        self.branch = nn.ModuleList(nn.Linear(4, 5, bias=bias) for _ in shares)
        self.head = nn.Linear(5, 3)
        for branch, share in zip(self.branch, shares, strict=True):
            for one, first in zip(branch.parameters(), self.branch[0].parameters(), strict=True):
                with torch.no_grad():
                    one.copy_(share / shares[0] * first)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([torch.relu(b(x)) for b in self.branch]).sum(0))


def branches_of(model: nn.Module) -> list[Branches]:
    inputs = torch.randn(6, 4).double()
    return find_branches(model, call_of(inputs), find_gauge(model, inputs))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_proportional_branches_are_found_and_redistributed(share, bias):
    model = Parallel(share, 1 - share, bias=bias).double()
    (found,) = branches_of(model)
    leaves = ["weight", "bias"][: 1 + bias]
    assert found.pairs == tuple((f"branch.0.{leaf}", f"branch.1.{leaf}") for leaf in leaves)
    twin, x = copy.deepcopy(model), torch.randn(7, 4).double()
    BranchShift((found,), 0.125).apply(twin)
    whole = model.branch[0].weight + model.branch[1].weight
    torch.testing.assert_close(twin.branch[0].weight, whole / 8, rtol=1e-15, atol=0)
    torch.testing.assert_close(twin.branch[1].weight, whole * 7 / 8, rtol=1e-15, atol=0)
    torch.testing.assert_close(twin(x), model(x), rtol=1e-13, atol=1e-15)


def test_three_branches_are_three_pairs():
    assert len(branches_of(Parallel(0.2, 0.3, 0.5).double())) == 3


def test_other_branches_are_not_found():
    assert branches_of(Parallel(0.5, -0.5).double()) == []
    model = Parallel(0.5, 0.5).double()
    with torch.no_grad():
        model.branch[1].weight[0, 0] += 1e-3
    assert branches_of(model) == []


def test_proportional_layers_in_a_row_are_no_branches():
    """With W₂ = W₁ / 3, a share of a quarter only exchanges the two."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).double()
    model[1].weight.data = model[0].weight.detach() / 3
    assert branches_of(model) == []


# -- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_group_is_there_or_told_why_not(name):
    case = build(name)
    found = transforms_of(case.model, case.inputs)
    assert found.keys() | found.absent.keys() == GROUPS
    assert not found.keys() & found.absent.keys()
    before = case.model.eval()(case.inputs)
    for name, group in found.items():
        twin = copy.deepcopy(case.model)
        group.draw(torch.Generator().manual_seed(3)).apply(twin)
        assert any(
            not torch.equal(a, b)
            for a, b in zip(twin.parameters(), case.model.parameters(), strict=True)
        )
        change = twin(case.inputs) - before
        if name == "output_shift":
            assert change.std() < 1e-12 < change.abs().min()
        elif group.preserves_outputs:
            assert change.abs().max() < 1e-10 * before.abs().max()


def test_rows_move_one_layer_at_a_time():
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.ReLU())))[:-1]
    found = transforms_of(model, torch.randn(3, 4))
    seen = set()
    for seed in range(8):
        twin = copy.deepcopy(model)
        found["rows"].draw(torch.Generator().manual_seed(seed), powers_of_two=True).apply(twin)
        pairs = zip(twin.named_parameters(), model.parameters(), strict=True)
        seen.add(tuple(name for (name, one), other in pairs if not torch.equal(one, other)))
    assert seen == {("0.weight", "0.bias", "2.weight"), ("2.weight", "2.bias", "4.weight")}
