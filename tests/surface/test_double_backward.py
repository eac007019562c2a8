"""Convolutions and batch-norms that are cheap to differentiate twice are what torch has."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flatgauge import LossSurface
from flatgauge.surface import hvp
from flatgauge.surface.derivatives import FastDoubleBackward

CONVOLUTIONS = {
    "plain": (torch.conv2d, (2, 3, 6, 5), (4, 3, 3, 2), {}),
    "stride and padding": (torch.conv2d, (2, 3, 7, 6), (4, 3, 3, 3), {"stride": 2, "padding": 1}),
    "uneven": (
        *(torch.conv2d, (2, 2, 8, 7), (3, 2, 2, 3)),
        {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    ),
    "grouped": (torch.conv2d, (2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "padding": [1]}),
    "depthwise": (torch.conv2d, (2, 3, 5, 5), (3, 1, 3, 3), {"groups": 3}),
    "left-over pixels": (torch.conv2d, (1, 2, 6, 6), (2, 2, 3, 3), {"stride": 2}),
    "one axis": (torch.conv1d, (2, 3, 7), (4, 3, 3), {"padding": 1}),
    "three axes": (torch.conv3d, (1, 2, 4, 4, 3), (2, 2, 2, 2, 2), {}),
    "same padding": (torch.conv2d, (2, 2, 5, 5), (3, 2, 3, 3), {"padding": "same"}),
    "no batch": (torch.conv2d, (2, 5, 5), (3, 2, 3, 3), {}),
}


def drawn(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_convolution_and_its_derivatives_are_those_of_torch(case, with_bias):
    op, image, kernel, options = CONVOLUTIONS[case]
    given = [drawn(image), drawn(kernel)] + ([drawn(kernel[:1])] if with_bias else [])
    vectors = [torch.randn_like(tensor) for tensor in given]

    def derivatives():
        value = (op(*given, **options) ** 3).sum()
        first = torch.autograd.grad(value, given, create_graph=True)
        return value, first, torch.autograd.grad(first, given, vectors)

    expected = derivatives()
    with FastDoubleBackward():
        found = derivatives()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_third_derivatives_are_right_too():
    image, kernel = drawn((1, 2, 4, 4)), drawn((2, 2, 3, 3))
    with FastDoubleBackward():
        assert torch.autograd.gradgradcheck(
            lambda x, w: torch.conv2d(x, w, padding=1) ** 2, (image, kernel)
        )


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (4, 3, 5, 2)])
def test_batch_norm_with_stored_statistics(shape, affine):
    mean, variance = torch.randn(3).double(), torch.rand(3).double() + 0.5
    given = [drawn(shape)] + ([drawn(3), drawn(3)] if affine else [])

    def derivatives():
        value = (F.batch_norm(given[0], mean, variance, *given[1:], eps=1e-3) ** 3).sum()
        first = torch.autograd.grad(value, given, create_graph=True)
        return value, first, torch.autograd.grad(sum(part.sum() for part in first), given)

    expected = derivatives()
    with FastDoubleBackward():
        found = derivatives()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_batch_norm_with_statistics_of_the_batch_stays_as_it_is():
    x = drawn((6, 3))
    expected = F.batch_norm(x, None, None, training=True)
    with FastDoubleBackward():
        assert torch.equal(F.batch_norm(x, None, None, training=True), expected)


def test_products_of_a_convolutional_network_are_those_of_its_dense_hessian():
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Conv2d(3, 2, 2, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
    ).double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    inputs, targets = torch.randn(6, 1, 8, 8).double(), torch.arange(6) % 3
    surface = LossSurface(model, "cross_entropy", (inputs, targets))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(flat):
        values = surface.split(flat)
        output = torch.func.functional_call(model.eval(), values, (inputs,))
        return F.cross_entropy(output, targets)

    dense = torch.autograd.functional.hessian(loss, surface.flatten(parameters))
    found = surface.hvp(torch.eye(surface.size).double())
    torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-11)


class Tripled(torch.Tensor):
    """A tensor whose convolutions are three times as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs or {})
        return 3 * output if func is torch.conv2d else output


def _overridden(body, x):
    return body(x.as_subclass(Tripled)).as_subclass(torch.Tensor)


def _complex(body, x):
    weight = torch.complex(body[0].weight, body[0].weight.flip(2))
    return body[1:](torch.conv2d(torch.complex(x, x.flip(1)), weight).abs())


def _cast(body, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return body(x).to(x.dtype)


def _mapped(body, x):
    return torch.vmap(lambda one: body(one[None])[0])(x)


def _pushed(body, x):
    return torch.func.jvp(body, (x,), (x.flip(1),))[1]


def _dual(body, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(body(forward_ad.make_dual(x, x.flip(1)))).tangent


def _checkpointed(body, x):
    return checkpoint(body, x, use_reentrant=False)


class Special(nn.Module):
    """A convolutional network whose convolutions and batch-norm run in a way of their own."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
        self.body[1].running_mean.normal_()
        self.body[1].running_var.uniform_(0.5, 2)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.way(self.body, x).mean((2, 3)))


@pytest.mark.parametrize(
    "way", [_overridden, _complex, _cast, _mapped, _pushed, _dual, _checkpointed]
)
def test_what_runs_in_a_way_of_its_own_is_left_to_torch(way, monkeypatch):
    model, data = Special(way), (torch.randn(6, 3, 6, 6), torch.arange(6) % 3)
    vectors = torch.randn(sum(p.numel() for p in model.parameters()), 2)
    found = LossSurface(model, "cross_entropy", data, products="reverse").hvp(vectors)
    monkeypatch.setattr(hvp, "FastDoubleBackward", lambda **_: nullcontext())
    expected = LossSurface(model, "cross_entropy", data, products="reverse").hvp(vectors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
