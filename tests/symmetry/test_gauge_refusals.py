"""What `find_gauge` and the gauge group refuse, and what they say then."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from between import Net, X, generator
from torch import nn

from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.graph.ops import OPS
from flatgauge.symmetry import find_gauge


def test_wrong_moves_are_refused():
    layers = nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)
    model = nn.Sequential(*layers)
    gauge = find_gauge(model, X)
    with pytest.raises(ValueError, match="has 2 entries, but the group has 8 independent scales"):
        gauge.move([1.0, 2.0])
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be positive and finite"):
            gauge.move([bad] + [1.0] * 7)
    with pytest.raises(TypeError, match=r"`move` is a list; make one with `gauge.sample"):
        gauge.rescale(model, [1.0] * 8)
    with pytest.raises(ValueError, match="has 2 scales, but this group has 8; a move belongs"):
        gauge.rescale(model, gauge.layerwise().sample(generator=generator()))
    for reach, exact in ((0, False), (-1, True), (0.5, True), (float("nan"), False)):
        with pytest.raises(
            ValueError, match="must be positive and finite, and at least 1 for powers of two"
        ):
            gauge.sample(generator=generator(), log2_range=reach, powers_of_two=exact)


def test_another_architecture_is_refused():
    gauge = find_gauge(Net(), X)
    move = gauge.sample(generator=generator())
    with pytest.raises(ValueError, match=r"`first.weight` has shape \(5, 4\).*shape \(6, 4\)"):
        gauge.rescale(Net(width=6), move)
    with pytest.raises(ValueError, match=r"`first.weight` .* has nothing there; find its own"):
        gauge.rescale(nn.Linear(4, 5), move)


@pytest.mark.parametrize("exact", [True, False])
def test_another_model_of_the_same_shapes_is_refused(exact):
    torch.manual_seed(0)
    gauge = find_gauge(Net(), X)
    move = gauge.sample(generator=generator(), powers_of_two=exact)
    with pytest.raises(ValueError, match=r"has other settings\), and .* outputs change by [01]"):
        gauge.rescale(Net(torch.tanh), move)
    layers = nn.Linear(4, 5), nn.Linear(5, 3)
    gauge = find_gauge(nn.Sequential(layers[0], nn.ReLU(), layers[1]), X)
    with pytest.raises(ValueError, match=r"`1` was a ReLU and is a Tanh\), and .* change by [01]"):
        gauge.rescale(nn.Sequential(layers[0], nn.Tanh(), layers[1]), move)
    with pytest.raises(ValueError, match="unknown; use 'fixed' or 'free'"):
        find_gauge(Net(), X, frozen="yes")


@pytest.mark.parametrize("exact", [True, False])
def test_copies_and_models_that_the_group_fits_are_taken(exact):
    gauge = find_gauge(Net(), X)
    move = gauge.sample(generator=generator(), powers_of_two=exact)
    trained = Net().requires_grad_(False)
    for model in (trained, copy.deepcopy(trained).double(), Net(nn.LeakyReLU()), Net(torch.abs)):
        twin = gauge.rescale(model, move)
        x = X.to(model.first.weight.dtype)
        torch.testing.assert_close(twin(x), model(x), rtol=1e-4, atol=1e-5)


def test_constants_that_cease_to_be_zero_are_noticed():
    class Shifted(Net):
        def __init__(self, shift):
            super().__init__()
            self.register_buffer("shift", torch.full((5,), shift))

        def forward(self, x):
            return self.head(torch.relu(self.first(x)) + self.shift)

    gauge = find_gauge(Shifted(0.0), X)
    assert gauge.dim == 5
    move = gauge.sample(generator=generator())
    gauge.rescale(Shifted(0.0), move)
    with pytest.raises(ValueError, match="are zero at other places"):
        gauge.rescale(Shifted(1.0), move)


def test_numbers_out_of_range_name_their_tensor():
    model = Net().half()
    gauge = find_gauge(model, X.half())
    with pytest.raises(ValueError, match=r"entries of `first.weight` out of the range of float16"):
        gauge.rescale(model, gauge.move([2.0**20] * 5))


@pytest.mark.parametrize("example", [None, 3, "x", (), {"x": 1}])
def test_an_example_without_tensors_is_refused(example):
    with pytest.raises(TypeError, match="without any tensor; pass what the model is called with"):
        find_gauge(Net(), example)


def test_models_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="`model` has no parameters; there is nothing to rescale"):
        find_gauge(nn.ReLU(), X)
    with pytest.raises(TypeError, match=r"`model` is a function, not a torch.nn.Module"):
        find_gauge(lambda x: x, X)
    with pytest.raises(ValueError, match="cannot be called with `example_inputs`: RuntimeError: "):
        find_gauge(Net(), torch.randn(3, 7))
    with pytest.raises(UnsupportedGraphError, match="export"):
        find_gauge(Net(lambda x: x if x.sum() > 0 else -x), X)


def test_a_wrong_rule_is_caught(monkeypatch):
    monkeypatch.setitem(OPS, "sigmoid", OPS["relu"])
    with pytest.raises(UnsupportedGraphError, match="a rescaled copy of the model gives other out"):
        find_gauge(Net(torch.sigmoid), X)


def test_a_model_that_answers_differently_every_time_is_caught():
    count = itertools.count(1)
    with pytest.raises(UnsupportedGraphError, match=r"gives other outputs.*the model is random"):
        find_gauge(Net(lambda x: torch.relu(x) * next(count)), X)


def test_noise_from_the_global_state_is_the_same_for_every_copy():
    gauge = find_gauge(Net(lambda x: torch.relu(x) * (1 + torch.rand(1))), X)
    assert gauge.dim == 5  # a random factor scales along
    assert (
        find_gauge(Net(lambda x: torch.relu(x) + torch.rand(1)), X).dim == 0
    )  # a summand does not


def test_a_torch_that_cannot_export_whole_operations_is_refused(monkeypatch):
    monkeypatch.delattr(torch.export.Dim, "AUTO")
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 2))  # No graph of it is kept.
    with pytest.raises(UnsupportedGraphError, match=r"cannot export .* need torch 2.6 or later"):
        find_gauge(model, X)
