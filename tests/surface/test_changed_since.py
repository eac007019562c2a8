"""A surface whose data or layers were changed says so: no report mixes old and new."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatgauge as fg

DATA = r"the data have changed since the surface was made.*Make a new LossSurface"
LAYERS = r"trainable parameters are not those that the surface was made for \(.*{}.*make a new"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.arange(6) % 3


def swap(x: Tensor) -> None:
    x.numpy()[[0, 1]] = x.numpy()[[1, 0]]


WRITES = {
    "in place": lambda x: x.mul_(2),
    "through a view": lambda x: x[1:3].zero_(),
    "through .data": lambda x: x.data.mul_(2),
    "through NumPy": lambda x: np.negative(x.numpy(), out=x.numpy()),
    "rows swapped": swap,
}


@pytest.mark.parametrize("write", WRITES)
def test_data_written_to_after_a_first_measure_are_refused(write):
    x, y = samples()
    surface = fg.LossSurface(network(), "cross_entropy", (x, y))
    wanted = ["hessian_trace", "expected_sharpness"]
    fg.measure(surface, measures=wanted)
    WRITES[write](x)
    asked = [lambda: fg.measure(surface), lambda: fg.measure(surface, measures=wanted)]
    for action in (surface.value, surface.gradient, *asked):
        with pytest.raises(ValueError, match=DATA):
            action()
    assert fg.LossSurface(network(), "cross_entropy", (x, y)).value() > 0


def test_products_refuse_data_that_were_written_to():
    x, y = samples()
    surface = fg.LossSurface(network(), "cross_entropy", (x, y))
    surface.hvp(torch.ones(surface.size))
    y.fill_(0)
    with pytest.raises(ValueError, match=DATA):
        surface.hvp(torch.ones(surface.size))


def test_a_surface_of_some_samples_and_a_copy_notice_the_same():
    x, y = samples()
    surface = fg.LossSurface(network(), "cross_entropy", (x, y))
    few, twin = surface.subset(3), surface.copy()
    assert few.value() > 0
    assert twin.value() == pytest.approx(surface.value())
    x.zero_()
    for other in (few, twin):
        with pytest.raises(ValueError, match=DATA):
            other.value()


def test_a_loader_that_is_read_again_must_give_the_same():
    x, y = samples()
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    surface = fg.LossSurface(network(), "cross_entropy", loader)
    before = surface.value(surface.point * 1)
    x.mul_(2)
    assert surface.value(surface.point * 1) == before  # It was read into memory.
    large = fg.LossSurface(network(), "cross_entropy", loader, memory="2MiB")
    large.data._stored = None  # As where the data do not fit.
    large.data._mark()
    assert large.value(large.point * 1) > 0
    x.mul_(2)
    with pytest.raises(ValueError, match=DATA):
        large.value(large.point * 1)


def add(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3))


def widen(model: nn.Module) -> None:
    model[0], model[2] = nn.Linear(4, 6), nn.Linear(6, 3)


CHANGES = {
    "3.weight": add,
    "0.weight": lambda model: model[0].weight.requires_grad_(False),
    "2.bias": lambda model: setattr(model[2], "bias", None),
    "of another shape": widen,
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_trainable_parameters_need_a_new_surface(name):
    model = network()
    surface = fg.LossSurface(model, "cross_entropy", samples())
    vector = torch.ones(surface.size)
    surface.hvp(vector)
    CHANGES[name](model)
    for action in (surface.value, surface.gradient, lambda: surface.hvp(vector)):
        with pytest.raises(ValueError, match=LAYERS.format(name)):
            action()
    new = fg.LossSurface(model, "cross_entropy", samples())
    assert new.size == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_layer_replaced_by_one_of_the_same_shape_is_followed():
    model = network()
    surface = fg.LossSurface(model, "cross_entropy", samples())
    surface.value()
    model[2] = nn.Linear(5, 3)
    expected = fg.LossSurface(model, "cross_entropy", samples())
    assert surface.value() == expected.value()
    assert torch.equal(surface.gradient(), expected.gradient())
