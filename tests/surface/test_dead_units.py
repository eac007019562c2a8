"""Products that leave out silent units are those of the whole network."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import dense_hessian, directions, error
from torch import nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint

from flatgauge import LossSurface
from flatgauge.surface import derivatives
from flatgauge.surface.derivatives import active_units


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def left_out(monkeypatch) -> list[bool]:
    """Whether units were left out, for every ReLU that was asked."""
    asked: list[bool] = []

    def heard(units):
        found = active_units(units)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(derivatives, "active_units", heard)
    return asked


class Net(nn.Module):
    """Layers that are put together by a function; most of their units are silent."""

    def __init__(self, way, width: int = 48) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 3)
        self.second, self.beside = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.bare = nn.BatchNorm1d(width), nn.Linear(width, width, bias=False)
        self.scale, self.shift = nn.Parameter(torch.rand(width, 1)), nn.Parameter(-torch.rand(1))
        with torch.no_grad():
            for layer in (self.first, self.second, self.beside):
                layer.bias -= 1.2 * layer.weight.norm(dim=1)
            self.second.weight[:] += 0.1  # Enough of the second layer's units speak.
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        return self.way(self, x)


def plain(net, x):
    return net.last(torch.relu(net.second(torch.relu(net.first(x)))))


def module_in_place(net, x):
    rectify = nn.ReLU(inplace=True)
    return net.last(rectify(net.second(rectify(net.first(x)))))


def functional(net, x):
    return net.last(F.relu(net.second(F.relu(net.first(x), inplace=True))))


def methods(net, x):
    return net.last(net.second(net.first(x).relu_()).relu())


def underscored(net, x):
    return net.last(torch.relu_(net.second(F.relu_(net.first(x)))))


def by_name(net, x):
    hidden = torch.relu(input=net.first(x))
    return F.linear(input=hidden, weight=net.last.weight, bias=net.last.bias)


def without_bias(net, x):
    return F.linear(torch.relu(net.bare(torch.relu(net.first(x)))), net.last.weight)


def all_silent(net, x):
    return net.last(torch.relu(net.second(torch.relu(net.first(x))) - 9.0)) + x


def deaf(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(torch.relu(F.linear(hidden, net.second.weight, net.second.bias - 99))) + x


def all_heard(net, x):
    return net.last(torch.relu(F.linear(x, net.first.weight, net.first.bias + 9)))


def residual(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(hidden + torch.relu(net.second(hidden)))


def two_readers(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(torch.relu(net.second(hidden)) * torch.tanh(net.beside(hidden)))


def read_by_another_op(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(hidden) * hidden.square().mean(1, keepdim=True)


def front_without_gradient(net, x):
    with torch.no_grad():  # Else torch itself needs it as it was.
        return torch.relu(net.first(x))


def doubled_in_place(net, x):
    hidden = front_without_gradient(net, x)
    hidden.mul_(2)
    return plain_end(net, hidden)


def raised_in_place(net, x):
    hidden = front_without_gradient(net, x)
    hidden += 1
    return plain_end(net, hidden)


def part_raised_in_place(net, x):
    hidden = front_without_gradient(net, x)
    hidden[:, :20] += 1
    return plain_end(net, hidden)


def raised_in_place_before(net, x):
    before = net.first(x)
    before += 0.5
    return net.last(torch.relu(before))


def sines_before(net, x):
    return net.last(torch.relu(net.first(x).sin_()))


def before_read_again(net, x):
    before = net.first(x)
    return net.last(torch.relu(before)) + net.last(before.sigmoid())


def before_written_later(net, x):
    before = net.first(x)
    hidden = torch.relu(before)
    before.mul_(3)
    return net.last(hidden) + net.last(torch.relu(before))


def twice_rectified(net, x):
    return net.last(torch.relu(torch.relu(net.first(x)) - 0.1))


def tied(net, x):
    hidden = torch.relu(net.second(torch.relu(net.first(x))))
    return net.last(torch.relu(net.second(hidden)))


def tied_and_turned(net, x):
    hidden = torch.relu(net.second(torch.relu(net.first(x))))
    return F.linear(hidden, net.first.weight.T)


def positions(net, x):
    return plain(net, torch.stack([x, x.roll(1, 0), -x], 1)).mean(1)


def positions_turned_in_place(net, x):
    hidden = front_without_gradient(net, torch.stack([x] * 48, 1))
    hidden.transpose_(1, 2)
    return plain_end(net, hidden).mean(1)


def dropout(net, x):
    hidden = F.dropout(torch.relu(net.first(x)), 0.5, training=net.training)
    return net.last(F.dropout1d(hidden, 0.5, training=net.training))


def batch_norm(net, x):
    hidden = torch.relu(net.norm(net.second(torch.relu(net.first(x)))))
    return net.last(net.norm(hidden))


def sliced(net, x):
    hidden = torch.relu(net.first(x))
    return F.linear(hidden[:, 8:40], net.last.weight[:, 8:40])


def viewed(net, x):
    hidden = torch.relu(net.first(x)).view(len(x), 2, 24)
    return F.linear(hidden, net.last.weight[:, ::2]).sum(1)


def computed_weight(net, x):
    weight = torch.tanh(net.scale * net.second.weight)
    hidden = torch.relu(F.linear(torch.relu(net.first(x)), weight, net.second.bias))
    return F.linear(hidden, net.last.weight / net.last.weight.norm())


def one_bias_for_all(net, x):
    return net.last(torch.relu(F.linear(x, net.first.weight, net.shift)))


def row_of_biases(net, x):
    return net.last(torch.relu(F.linear(x, net.first.weight, net.first.bias[None])))


def bias_of_every_sample(net, x):
    biases = net.first.bias + x[:, :1]
    return net.last(torch.relu(F.linear(x, net.first.weight, biases)))


def stacked(net, x):
    hidden = torch.relu(net.first(x))
    return net.last(torch.cat([hidden[:, 24:], hidden[:, :24]], 1))


def clamped_weight(net, x):
    return F.linear(torch.relu(net.first(x)), net.last.weight.clamp_min(0), net.last.bias)


def detached(net, x):
    return net.last(torch.relu(net.second(torch.relu(net.first(x)).detach())))


def detached_in_place(net, x):
    hidden = torch.relu(net.first(x))
    hidden.detach_()
    return net.last(torch.relu(net.second(hidden)))


def detached_in_place_before(net, x):
    before = net.first(x)
    before.detach_()
    return net.last(torch.relu(net.second(torch.relu(before))))


def features_without_gradient(net, x):
    with torch.no_grad():
        hidden = torch.relu(net.first(x))
    return net.last(torch.relu(net.second(hidden)))


def first_map_without_gradient(net, x):
    with torch.no_grad():
        before = net.first(x)
    return net.last(torch.relu(net.second(torch.relu(before))))


def whole_checkpoint(net, x):
    return checkpoint(lambda x: plain(net, x), x, use_reentrant=False)


def checkpoint_from_the_relu_on(net, x):
    rest = nn.Sequential(nn.ReLU(), net.second, nn.ReLU(), net.last)
    return checkpoint(rest, net.first(x), use_reentrant=False)


def checkpoint_behind_the_relu(net, x):
    rest = nn.Sequential(net.second, nn.ReLU(), net.last)
    return checkpoint(rest, torch.relu(net.first(x)), use_reentrant=False)


def checkpoint_up_to_the_relu(net, x):
    front = nn.Sequential(net.first, nn.ReLU())
    return plain_end(net, checkpoint(front, x, use_reentrant=False))


def plain_end(net, hidden):
    return net.last(torch.relu(net.second(hidden)))


def vectorised_behind_the_map(net, x):
    before = net.first(x)
    return torch.vmap(lambda row: F.linear(torch.relu(before), row[None]), out_dims=1)(
        net.last.weight
    )[..., 0]


class Masked(Function):
    """A linear map with half of its weights, and derivatives of its own."""

    @staticmethod
    def forward(ctx, x, weight, mask):
        ctx.save_for_backward(x, weight, mask)
        return F.linear(x, weight * mask)

    @staticmethod
    def backward(ctx, g):
        x, weight, mask = ctx.saved_tensors
        return g @ (weight * mask), (g.T @ x) * mask, None


def map_with_its_own_derivative(net, x):
    mask = torch.ones_like(net.second.weight).tril()
    hidden = torch.relu(net.first(x))
    return net.last(torch.relu(Masked.apply(hidden, net.second.weight, mask) - 0.1))


def own_derivative_before_the_relu(net, x):
    mask = torch.ones_like(net.second.weight).tril()
    hidden = torch.relu(net.first(x))
    return net.last(torch.relu(Masked.apply(hidden, net.second.weight - 0.2, mask)))


@torch.enable_grad()
def slope_by_the_input(net, x):
    x = x.clone().requires_grad_()
    energy = torch.logsumexp(plain(net, x), 1).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@torch.enable_grad()
def slope_by_the_hidden_units(net, x):
    hidden = torch.relu(net.first(x))
    energy = torch.logsumexp(net.last(hidden), 1).sum()
    return net.last(torch.autograd.grad(energy, hidden, create_graph=True)[0])


@torch.enable_grad()
def slope_before_the_relu(net, x):
    before = net.first(x)
    energy = torch.logsumexp(net.last(torch.relu(before)), 1).sum()
    return net.last(torch.autograd.grad(energy, before, create_graph=True)[0])


def hooked(net, x):
    hidden = torch.relu(net.first(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda g: 1 * g)
    return net.last(hidden)


def hooked_before(net, x):
    before = net.first(x)
    if before.requires_grad:
        before.register_hook(lambda g: 1 * g)
    return net.last(torch.relu(before))


#: Some units of the whole batch are left out in these...
SPARSE = [
    *(plain, module_in_place, functional, methods, underscored, by_name, without_bias, deaf),
    *(residual, two_readers, read_by_another_op, doubled_in_place),
    *(before_read_again, before_written_later, tied, tied_and_turned),
    *(positions, dropout, batch_norm, sliced, viewed),
    *(computed_weight, stacked, clamped_weight, detached, detached_in_place),
    *(features_without_gradient, checkpoint_behind_the_relu, map_with_its_own_derivative),
    *(slope_by_the_input, slope_by_the_hidden_units, slope_before_the_relu),
    *(hooked, twice_rectified),
]
#: ...and may or may not be in these.
OTHERS = [
    *(all_silent, all_heard, raised_in_place_before, sines_before, one_bias_for_all),
    *(row_of_biases, bias_of_every_sample, detached_in_place_before, first_map_without_gradient),
    *(whole_checkpoint, checkpoint_from_the_relu_on, checkpoint_up_to_the_relu),
    *(vectorised_behind_the_map, own_derivative_before_the_relu, raised_in_place),
    *(part_raised_in_place, positions_turned_in_place, hooked_before),
]


def data(samples: int = 7):
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(2)).double()
    return inputs, torch.arange(samples) % 3


def torch_products(model, loss, inputs, targets, vectors):
    """H V as torch has it, all samples at once, without a mode."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    value = loss(model.eval()(inputs), targets)
    slopes = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    flat = torch.cat([slope.reshape(-1) for slope in slopes])
    found = [
        torch.autograd.grad(flat, leaves, column, retain_graph=True, materialize_grads=True)
        for column in vectors.T
    ]
    return torch.stack([torch.cat([part.reshape(-1) for part in one]) for one in found], 1)


def compared(model, loss="cross_entropy", torch_loss=F.cross_entropy, targets=None, **options):
    inputs, labels = data()
    targets = labels if targets is None else targets
    vectors = directions(sum(p.numel() for p in model.parameters() if p.requires_grad))
    surface = LossSurface(model, loss, (inputs, targets), products="reverse", **options)
    expected = torch_products(model, torch_loss, inputs, targets, vectors)
    assert expected.norm() > 1e-6
    for _ in range(2):  # The second time with graphs that were kept.
        assert error(surface.hvp(vectors), expected) < 1e-11


@pytest.mark.parametrize("options", [{}, {"chunk": 2, "memory": "1MiB"}], ids=str)
@pytest.mark.parametrize("way", [*SPARSE, *OTHERS], ids=lambda way: way.__name__)
def test_products_are_those_of_torch(way, options, left_out):
    compared(Net(way).double(), **options)
    assert any(left_out) or way in OTHERS


FROZEN = ["first.weight", "first.bias", "second.weight", "second.bias", "last.weight"]


@pytest.mark.parametrize("names", [*([name] for name in FROZEN), FROZEN[:2], FROZEN[2:4]], ids=str)
@pytest.mark.parametrize("way", [plain, residual, module_in_place], ids=lambda way: way.__name__)
def test_frozen_layers(way, names, left_out):
    model = Net(way).double()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    compared(model, chunk=3)
    assert any(left_out)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_squared_errors(chunk, left_out):
    targets = torch.randn(7, 3).double()
    compared(Net(plain).double(), "mse", F.mse_loss, targets, chunk=chunk)
    assert any(left_out)


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_whole_hessian_is_the_dense_one(chunk, left_out):
    model = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 2)).double()
    with torch.no_grad():
        model[0].bias -= 0.8
    inputs, targets = data()
    case = Case(model, "cross_entropy", F.cross_entropy, inputs, targets % 2)
    surface = case.surface(chunk=chunk, products="reverse")
    found = surface.hvp(torch.eye(surface.size).double())
    torch.testing.assert_close(found, dense_hessian(case), rtol=1e-10, atol=1e-13)
    assert any(left_out)


def test_chunks_leave_out_units_of_their_own(monkeypatch):
    sets = set()

    def heard(units):
        found = active_units(units)
        sets.add(None if found is None else tuple(found.tolist()))
        return found

    monkeypatch.setattr(derivatives, "active_units", heard)
    compared(Net(plain).double(), chunk=2)
    assert len(sets) > 4


def test_graphs_are_recomputed_within_a_small_budget(left_out):
    vectors = directions(7492)
    model = Net(plain).double()
    for memory, again in (("1GiB", False), ("1MiB", True)):
        surface = LossSurface(
            *(model, "cross_entropy", data()), products="reverse", chunk=2, memory=memory
        )
        surface.hvp(vectors)
        left_out.clear()
        surface.hvp(vectors)
        assert bool(left_out) == again


@pytest.mark.parametrize("way", [plain, residual, tied, positions], ids=lambda way: way.__name__)
def test_single_precision(way):
    model, (inputs, targets) = Net(way).double(), data()
    vectors = directions(sum(p.numel() for p in model.parameters()))
    expected = torch_products(model, F.cross_entropy, inputs, targets, vectors)
    single = copy.deepcopy(model).float()
    surface = LossSurface(single, "cross_entropy", (inputs.float(), targets), products="reverse")
    assert error(surface.hvp(vectors.float()).double(), expected) < 1e-4


@pytest.mark.parametrize(
    "way",
    [plain, by_name, one_bias_for_all, first_map_without_gradient, checkpoint_from_the_relu_on],
    ids=lambda way: way.__name__,
)
def test_nothing_speaks_against_reverse_mode(way):
    model, (inputs, targets) = Net(way).double(), data()
    vectors = directions(sum(p.numel() for p in model.parameters()))
    surface = LossSurface(model, "cross_entropy", (inputs, targets))
    expected = torch_products(model, F.cross_entropy, inputs, targets, vectors)
    found = surface.hvp(vectors)
    assert not surface._hvp.notes
    assert error(found, expected) < 1e-11


# -- which units speak ---------------------------------------------------------------------------


def units(heard: int, of: int, samples: int = 5) -> torch.Tensor:
    values = torch.zeros(samples, of)
    places = torch.randperm(of)[:heard]
    values[torch.randint(samples, (heard,)), places] = torch.rand(heard) + 1e-3
    return values


@pytest.mark.parametrize("of", [32, 33, 48, 100])
@pytest.mark.parametrize("heard", [0, 1, 15, 16, 17, 28, 29, 32])
def test_those_that_speak_are_among_the_chosen(heard, of):
    values = units(heard, of)
    chosen = active_units(values)
    count = max(-(-heard // 16) * 16, 16)
    if count > 0.9 * of:
        assert chosen is None
    else:
        assert len(chosen) == len(set(chosen.tolist())) == count
        assert set(values.sum(0).nonzero()[:, 0].tolist()) <= set(chosen.tolist())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 5e-324])
def test_what_is_no_number_or_tiny_is_heard(value):
    values = torch.zeros(4, 48).double()
    values[2, 40] = value
    assert active_units(values)[0] == 40


def test_few_units_and_single_samples_are_left_alone():
    assert active_units(torch.zeros(5, 31)) is None
    assert active_units(torch.zeros(64)) is None
    assert len(active_units(torch.zeros(5, 32))) == 16
    assert len(active_units(torch.zeros(2, 3, 48))) == 16


def test_units_of_positions_speak_if_any_does():
    values = torch.zeros(2, 3, 48)
    values[1, 2, 47] = 1.0
    assert active_units(values)[0] == 47


# -- left as found -------------------------------------------------------------------------------


def test_the_users_tensors_are_left_as_found():
    model, (inputs, targets) = Net(plain).double(), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    surface = LossSurface(model, "cross_entropy", (inputs, targets), chunk=3)
    surface.hvp(directions(surface.size))
    for tensor in (*model.parameters(), *model.buffers(), inputs, targets):
        assert not vars(tensor)
        assert tensor.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not vars(model(inputs))  # Nor is anything noted afterwards.
