"""What users pass by mistake, or in another form than most: taken as meant, or refused clearly."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.analysis.request import resolve_measures

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Wrapped(nn.Module):
    """A network around `net`, called in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()


# -- models -----------------------------------------------------------------------------------

WEIGHT = torch.ones(3, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: F.linear(x, WEIGHT), r"is a function, .* needed is a torch.nn.Module .* Write"),
        (functools.partial(F.linear, weight=WEIGHT), r"is a partial, whose parameters cannot be"),
        (net().forward, "is a method of a Sequential; pass the module itself"),
        (nn.Linear, "is the class Linear; pass an instance of it"),
        (net().state_dict(), "is a OrderedDict; if it is a state dict, load it into"),
        (3, "is a int, not a torch.nn.Module; the order of the arguments is"),
    ],
)
def test_a_model_that_is_not_a_module_is_refused_with_what_to_do(model, message):
    with pytest.raises(TypeError, match=f"`model` {message}"):
        LossSurface(model, "cross_entropy", (X, Y))


class OfDict(Wrapped):
    """A model whose one positional input is a dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"] + batch["shift"])


@pytest.mark.parametrize(
    "data",
    [({"x": X, "shift": X}, Y), [({"x": X, "shift": X}, Y)], [{"x": X, "shift": X, "labels": Y}]],
)
def test_a_dict_may_be_the_one_positional_input(data):
    plain = LossSurface(net(), "cross_entropy", (2 * X, Y))
    surface = LossSurface(OfDict(), "cross_entropy", data, chunk=5)
    assert surface.value() == pytest.approx(plain.value(), rel=1e-6)
    names = ["hessian_trace", "rho_sum"]
    expected = fg.measure(plain, measures=names)
    for name, found in fg.measure(surface, measures=names).items():
        assert found.exact
        assert found.value == pytest.approx(expected[name].value, rel=1e-5)


def test_a_dict_may_be_the_one_positional_input_of_a_gauge():
    assert fg.find_gauge(OfDict(), {"x": X, "shift": X}).dim == 5


# -- data -------------------------------------------------------------------------------------


def test_inputs_that_require_grad_are_measured_as_those_that_do_not():
    names = ["hessian_trace", "hessian_max_eigenvalue", "rho_sum"]
    expected = fg.measure(LossSurface(net(), "cross_entropy", (2 * X, Y)), measures=names)
    leaf = X.clone().requires_grad_()
    found = fg.measure(LossSurface(net(), "cross_entropy", (2 * leaf, Y)), measures=names)
    assert [e.value for e in found.values()] == [e.value for e in expected.values()]
    assert leaf.grad is None


def test_a_model_that_differentiates_by_its_inputs_may_be_given_those_that_require_grad():
    class Slope(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)[0]

    surface = LossSurface(Slope(), "mse", (X.clone().requires_grad_(), X))
    inputs = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net()(inputs).square().sum(), inputs)
    assert surface.value() == pytest.approx(F.mse_loss(slope, X).item(), rel=1e-5)


class Endless(IterableDataset):
    """Gives the same samples over and over."""

    def __iter__(self):
        return itertools.cycle(zip(X, Y, strict=True))


class Long(Endless):
    """Says how long it is, and comes to an end there."""

    def __len__(self) -> int:
        return 60

    def __iter__(self):
        return itertools.islice(super().__iter__(), len(self))


def test_a_loader_without_an_end_is_refused_after_so_many_samples(monkeypatch):
    monkeypatch.setattr("flatgauge.surface.data._MOST_SAMPLES", 50)
    with pytest.raises(ValueError, match=r"not come to an end after 56 samples \(.*\).*islice"):
        LossSurface(net(), "cross_entropy", DataLoader(Endless(), batch_size=8))
    surface = LossSurface(net(), "cross_entropy", DataLoader(Long(), batch_size=8))
    assert surface.samples == 60
    monkeypatch.setattr("flatgauge.surface.data._MOST_BYTES", 1000)
    with pytest.raises(ValueError, match=r"not come to an end after 48 samples"):
        LossSurface(net(), "cross_entropy", DataLoader(Endless(), batch_size=8))


# -- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": "x"}, "`weight_decay='x'` must be a finite number of at least 0"),
        ({"weight_decay": None}, "`weight_decay=None` must be a finite number"),
        ({"weight_decay": 10**400}, "must be a finite number of at least 0"),
        ({"memory": None}, "`memory=None` is a NoneType; give a text such as '2GiB'"),
        ({"memory": 2e9}, r"`memory=2000000000.0` is a float; .* a whole number of bytes"),
        ({"chunk": True}, "`chunk=True` must be a number of samples"),
        ({"check_data": "no"}, "`check_data='no'` is a str; give True or False"),
        ({"sharded": 1}, "`sharded=1` is a int; give True or False"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LossSurface(net(), "cross_entropy", (X, Y), **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("epsilon_sharpness", {"epsilon": 1e300}, r"1e\+300` is too large .* up to 1.8e\+19"),
        ("epsilon_sharpness", {"epsilon": 10**400}, "must be a positive finite number"),
        ("adaptive_sharpness", {"rho": 1e39}, r"`rho=1e\+39` is too large a radius"),
        ("expected_sharpness", {"sigma": 1e39}, r"`sigma=1e\+39` is too large a radius"),
        ("hessian_trace", {"tolerance": "x"}, "needs a number as `tolerance`, but got 'x'"),
        ("hessian_trace", {"probes": 2.5}, "needs a whole number as `probes`, but got 2.5"),
        ("hessian_trace", {"probes": True}, "needs a whole number as `probes`, but got True"),
    ],
)
def test_options_of_measures_that_mean_nothing_are_refused(name, options, message):
    surface = LossSurface(net(), "cross_entropy", (X, Y))
    with pytest.raises(ValueError, match=message):
        fg.measure(surface, measures={name: options})


def test_all_measures_may_be_asked_for_by_that_word():
    wanted = resolve_measures("all")
    assert [item.name for item in wanted] == [item.name for item in resolve_measures(None)]
    with pytest.raises(TypeError, match=r"`measures='rho_sum'` is one string; pass a list"):
        fg.measure(LossSurface(net(), "cross_entropy", (X, Y)), measures="rho_sum")
