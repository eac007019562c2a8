"""Second derivatives in path space where units feed themselves, or lead through ones left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatgauge as fg
from flatgauge.geometry import chart
from flatgauge.measures import psi_trace
from flatgauge.symmetry.basis_paths import surface_paths
from flatgauge.symmetry.path_curvature import path_second_derivatives


class Channelwise(nn.Module):
    """A stream whose channels each read themselves: no rescaling changes those weights."""

    shape = (2, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.own = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.own(x)).mean((2, 3)))


class Narrow(nn.Module):
    """The same with one unit and a matrix."""

    shape = (2,)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.own, self.head = nn.Linear(2, 1), nn.Linear(1, 1), nn.Linear(1, 3)
        nn.init.ones_(self.stem.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.own(x)))


class Detour(nn.Module):
    """A block whose inner units cannot be scaled, as one is added to them."""

    shape = (4,)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(4, 3), nn.Linear(3, 2)
        self.second, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.second(torch.relu(self.first(x) + 1))))


def surface(model: nn.Module, shape: tuple[int, ...]) -> tuple[fg.LossSurface, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, *shape, generator=generator).double()
    targets = torch.randint(0, 3, (9,), generator=generator)
    return fg.LossSurface(model, "cross_entropy", (inputs, targets)), inputs, targets


@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
@pytest.mark.parametrize("kind", [Channelwise, Narrow, Detour])
def test_units_that_feed_themselves_unseen(kind, skeleton):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind().double()
    here, inputs, targets = surface(model, kind.shape)
    paths = surface_paths(here, skeleton)

    def loss(values: Tensor) -> Tensor:
        weights = paths.to_weights(values)
        return F.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), targets)

    wanted = torch.autograd.functional.hessian(loss, paths.values).diagonal()
    found = path_second_derivatives(here, paths)
    assert found.known.any()
    torch.testing.assert_close(found.values[found.known], wanted[found.known])
    trace = psi_trace(here, skeleton=skeleton, generator=torch.Generator().manual_seed(0))
    assert trace.exact
    torch.testing.assert_close(trace.value, float(wanted.sum()))


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_route_through_a_unit_left_out_is_no_route(side):
    # Widths 2 and 3: the third unit's route in leads through the first one, whose own way on is
    # zero; or the other way round.
    widths = (3, 2, 3, 3) if side == "in" else (3, 3, 2, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*layers[:-1]).double()
    with torch.no_grad():
        model[2].weight[0, 0] = 0
    here, *_ = surface(model, (3,))
    paths = surface_paths(here, "diagonal")
    assert paths.dropped
    assert len(paths) == paths.m - paths.hidden
    assert (paths.roots >= 0).all()
    weights = paths.to_weights(paths.values)
    assert all(torch.equal(weights[n], p.detach()) for n, p in model.named_parameters())
    for index in range(len(paths)):
        product = 1.0
        for weight in paths.names[index].split(" → "):
            name, _, place = weight.rstrip("]").partition("[")
            value = model.get_parameter(name).detach()[tuple(map(int, place.split(", ")))]
            product *= float(value)
        assert product == pytest.approx(float(paths.values[index]), rel=1e-12)


@pytest.mark.parametrize("relative", [False, True])
def test_the_part_of_first_order_where_biases_stay(relative):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(5.0)  # The roots are biases.
    here, *_ = surface(model, (3,))
    space = chart(here, "basis paths", "layers", relative=relative)
    slopes = space.to_row(here.gradient())
    bends = torch.autograd.functional.hessian(lambda u: (space.row(u) * slopes).sum(), space.origin)
    found = psi_trace(here, parameters="layers", relative=relative)
    assert found.details["first order"] == pytest.approx(float(bends.diagonal().sum()))


def test_a_model_without_paths_says_so():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    here, *_ = surface(model.double(), (3,))
    with pytest.raises(ValueError, match="no path of the model has a value other than zero"):
        psi_trace(here)


class Recurrent(nn.Module):
    """Three steps of a recurrent layer: its weights are read again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.keep = nn.Linear(2, 3), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.relu(self.read(x[:, 0]))
        for step in (1, 2):
            state = torch.relu(self.read(x[:, step]) + self.keep(state))
        return self.head(state)


@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
def test_weights_read_at_every_step_have_paths(skeleton):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Recurrent().double()
    here, inputs, targets = surface(model, (3, 2))
    paths = surface_paths(here, skeleton)
    assert (paths.m, paths.hidden, paths.dropped) == (30, 3, ())

    def loss(values: Tensor) -> Tensor:
        weights = paths.to_weights(values)
        return F.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), targets)

    wanted = torch.autograd.functional.hessian(loss, paths.values)
    found = chart(here, "basis paths", skeleton=skeleton).curvature().dense()
    torch.testing.assert_close(found, wanted)
