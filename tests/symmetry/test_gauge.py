"""The public face of the gauge group: moves, samples, rescaled copies, descriptions."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from between import Net, X, generator
from cases import build
from torch import Tensor, nn

from flatgauge.symmetry import Move, find_gauge


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def mlp():
    model = nn.Sequential(
        *(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU()), nn.Linear(3, 2)
    )
    return model.double(), find_gauge(model, X.double())


# -- moves ---------------------------------------------------------------------------------------


def test_rescaling_is_the_one_written_by_hand(mlp):
    model, gauge = mlp
    c, d = torch.rand(5).double() + 0.5, torch.rand(3).double() + 0.5
    twin = gauge.rescale(model, gauge.move(torch.cat([c, d])))
    expected = [
        *(model[0].weight * c[:, None], model[0].bias * c),
        *(model[2].weight * d[:, None] / c, model[2].bias * d),
        *(model[4].weight / d, model[4].bias),
    ]
    for found, wanted in zip(twin.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-14, atol=0)
    assert gauge.sites == ("0.weight",) * 5 + ("2.weight",) * 3
    assert gauge.names == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
    assert repr(gauge) == "GaugeGroup(dim=8, tensors=5, pinned=0)"


@pytest.mark.parametrize("power", [0.5, 1.5, 0.25])
def test_powers_of_two_stay_so_under_roots(power):
    """The head is divided by cᵖ, which must be a power of two, too."""
    model = Net(lambda x: torch.relu(x) ** power)
    gauge = find_gauge(model, X)
    move = gauge.sample(generator=generator(), log2_range=8)
    assert (move.log2 != 0).any()
    assert move.log2.abs().max() <= 8
    for factors in gauge.factors(move).values():
        assert (torch.frexp(factors).mantissa == 0.5).all()
    head, c = gauge.factors(move)["head.weight"], 2**move.log2
    torch.testing.assert_close(head, (c**-power).expand(3, 5), rtol=1e-15, atol=0)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("reach", [1, 2.5, 6])
def test_range_bounds_every_scale_and_is_used(mlp, reach, exact):
    _, gauge = mlp
    draws = torch.stack(
        [
            gauge.sample(generator=generator(s), log2_range=reach, powers_of_two=exact).log2
            for s in range(200)
        ]
    )
    whole = int(reach) if exact else reach
    assert draws.abs().max() <= whole
    assert draws.abs().max() > whole - 0.1
    assert bool((draws == draws.round()).all()) == exact


def test_the_same_generator_draws_the_same(mlp):
    _, gauge = mlp
    one, same, other = (gauge.sample(generator=generator(seed)).log2 for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_only_the_coordinates_asked_for_move(mlp):
    model, gauge = mlp
    move = gauge.sample(generator=generator(), among=[5, 7])
    assert (move.log2[[0, 1, 2, 3, 4, 6]] == 0).all()
    twin = gauge.rescale(model, move)
    assert torch.equal(twin[0].weight, model[0].weight)


def test_generators_are_the_derivative_of_the_factors():
    case = build("attention")
    gauge = find_gauge(case.model, case.inputs)
    assert len(gauge.generators) == gauge.dim
    for k, exponents in enumerate(gauge.generators):
        unit = torch.zeros(gauge.dim, dtype=torch.float64)
        unit[k] = 3.0
        factors = gauge.factors(Move(unit))
        for name in gauge.names:
            shape = case.model.get_parameter(name).shape
            expected = exponents.get(name, torch.zeros(shape, dtype=torch.float64))
            assert torch.equal(factors[name].log2().expand(shape), 3 * expected)
    last = gauge.generators[-1]
    assert all(torch.equal(last[name], exponents[name]) for name in last)
    assert len(gauge.generators[1:3]) == 2
    with pytest.raises(IndexError):
        gauge.generators[gauge.dim]


# One scale per tensor: what is left of the freedom once a weight's entries scale alike.
LAYERWISE = {
    "mlp": 2,  # one per hidden layer
    "mlp without biases": 2,
    "conv and max-pool": 2,
    "residual with batch-norm": 3,  # two convolutions before their norms, one stream
    "gelu": 0,
    "depthwise conv": 1,  # ReLU6 pins the first, the last ReLU is the output
}


@pytest.mark.parametrize("name", LAYERWISE)
def test_layerwise_by_hand(name):
    case = build(name)
    group = find_gauge(case.model, case.inputs).layerwise()
    assert group.dim == LAYERWISE[name]
    if group.dim:
        move = group.sample(generator=generator(), powers_of_two=False)
        for factor in group.factors(move).values():
            assert factor.max() <= factor.min() * (1 + 1e-15)
        twin = group.rescale(case.model.eval(), move)
        torch.testing.assert_close(twin.eval()(case.inputs), case.model(case.inputs))


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual with batch-norm", "attention", "tied weights"])
def test_the_model_is_left_as_it_was(name):
    case = build(name)
    model = case.model.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    gauge = find_gauge(model, case.inputs)
    gauge.rescale(model, gauge.sample(generator=generator()))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert len(model._forward_hooks) == 1
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002


def test_a_model_in_train_mode_is_read_in_eval_mode():
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3)
    model = nn.Sequential(*layers).train()
    gauge = find_gauge(model, X)
    assert gauge.dim == 10  # before and after the norm
    assert "1.running_mean" in gauge.names
    assert "1.running_var" not in gauge.names
    twin = gauge.rescale(model, gauge.sample(generator=generator()))
    assert twin.training
    assert torch.equal(twin.eval()(X), model.eval()(X))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrappers_are_taken_off(wrap):
    model = Net()
    gauge = find_gauge(wrap(model), X)
    twin = gauge.rescale(wrap(model), gauge.sample(generator=generator()))
    assert type(twin) is Net
    assert torch.equal(twin(X), model(X))


def test_tied_tensors_are_scaled_once():
    """One bias under two names, behind two layers with one scale: it is multiplied once."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
            self.norm = nn.BatchNorm1d(5)  # shared by both
            self.two.bias = self.one.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.head(
                torch.relu(self.norm(self.one(x))) + torch.relu(self.norm(self.two(x)))
            )

    model = Twice().eval()
    model.norm.running_mean.normal_()
    gauge = find_gauge(model, X)
    assert gauge.dim == 10
    c, d = 2.0 ** torch.arange(5), 2.0 ** -torch.arange(5)
    twin = gauge.rescale(model, gauge.move(torch.cat([c, d])))
    assert twin.one.bias is twin.two.bias
    assert torch.equal(twin.one.bias, model.one.bias * c)
    assert torch.equal(twin.norm.running_mean, model.norm.running_mean * c)
    assert torch.equal(twin.norm.weight, model.norm.weight * d / c)
    assert torch.equal(twin(X), model(X))


def test_entries_the_example_did_not_read_follow():
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
            self.places = nn.Parameter(torch.randn(9, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.first(x) + self.places[: x.shape[1]]))

    model = Places()
    gauge = find_gauge(model, torch.randn(2, 3, 4))
    twin = gauge.rescale(model, gauge.sample(generator=generator()))
    longer = torch.randn(2, 9, 4)
    assert torch.equal(twin(longer), model(longer))


def test_arguments_by_position_and_by_name():
    class Two(Net):
        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            return super().forward(x) + shift

    assert find_gauge(Two(), {"x": X, "shift": torch.ones(3, 1)}).dim == 5
    assert find_gauge(Net(), (X,)).dim == 5


# -- what is told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "op", "known"),
    [
        (F.gelu, "gelu", True),
        (torch.sigmoid, "sigmoid", True),
        (torch.special.i0, "special_i0", False),
    ],
)
def test_what_is_pinned_is_listed_with_its_place(between, op, known):
    gauge = find_gauge(Net(between), X)
    (pin,) = gauge.pinned
    assert (gauge.dim, pin.op, pin.known, pin.sites) == (0, op, known, ("first.weight",))
    assert pin.source == f"between.py:{Net.forward.__code__.co_firstlineno + 1}"
    title = "pinned:" if known else "without a rule, so pinned:"
    lines = gauge.describe().splitlines()
    assert lines[0].startswith("no scale is free")
    assert lines[1] == title
    assert lines[2].startswith(f"  {op} ({pin.source}) pins `first.weight`: ")
    assert known or "add its record to `OPS` in `graph/ops.py`" in lines[2]


def test_description_is_a_table():
    layers = nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Sigmoid(), nn.Linear(3, 2)
    text = find_gauge(nn.Sequential(*layers), X).describe()
    head, title, row, pinned, pin = text.splitlines()
    assert head == "5 independent scales, moving 3 tensors"
    assert title.split("  ")[0] == "scales of the output of"
    assert row.split() == ["0.weight", "5", "0.weight,", "0.bias", "2.weight"]
    assert [row.index("5"), row.index("0.weight,"), row.index("2.weight")] == [
        title.index(word) for word in ("number", "times", "divided")
    ]
    assert pinned == "pinned:"
    assert "sigmoid" in pin
    assert "`2.weight`" in pin


def test_a_tensor_that_a_scale_multiplies_and_divides_is_listed_on_both_sides():
    loop = nn.Linear(5, 5, bias=False)
    model = Net(lambda h: h + torch.relu(loop(h)))
    model.loop = loop
    gauge = find_gauge(model, X)
    (pattern,) = gauge.patterns()
    assert (pattern.site, pattern.scales) == ("first.weight", 5)
    powers = [(item.name, item.power) for item in pattern.moved if item.name == "loop.weight"]
    assert powers == [("loop.weight", 1.0), ("loop.weight", -1.0)]
    line = gauge.describe().splitlines()[2]
    assert line.count("loop.weight") == 2
