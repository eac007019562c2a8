"""Images with their channels last: chosen by the model alone, and never another number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from flatgauge import LossSurface
from flatgauge.curvature import block_curvature
from flatgauge.curvature.sweep.accumulate import PARTS
from flatgauge.surface.model import FunctionalModel, gains_by_channels_last


class Residual(nn.Module):
    """Strides, padding, dilation, groups, a branch and batch-norm, all with many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.wide = nn.Conv2d(24, 24, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(24, 24, 3, padding=1, groups=3)
        self.point = nn.Conv2d(24, 16, 1)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.down(torch.relu(self.stem(x)))))
        x = torch.relu(x + self.grouped(torch.relu(self.wide(x))))
        x = torch.relu(self.up(torch.max_pool2d(torch.relu(self.point(x)), 2)))
        return self.last(x.mean((2, 3)))


class Viewing(Residual):
    """Flattens by `view`, which contiguous images alone allow."""

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.last(x.view(len(x), -1)[:, :16])


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 3, 8, 8, generator=generator)
    return images, torch.arange(7) % 4


def made(kind):
    torch.manual_seed(0)
    model = kind()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model


def images_of(surface):
    return next(surface.risk.chunks(4)).inputs


def test_images_have_their_channels_last_where_convolutions_are_wide(data):
    found = images_of(LossSurface(made(Residual), "cross_entropy", data))
    assert not found.is_contiguous()
    assert found.is_contiguous(memory_format=torch.channels_last)
    few = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
    assert images_of(LossSurface(few, "cross_entropy", data)).is_contiguous()
    assert not gains_by_channels_last(nn.Linear(3, 3), torch.device("cpu"))


def test_a_model_that_cannot_read_them_gets_them_as_they_are(data):
    surface = LossSurface(made(Viewing), "cross_entropy", data)
    assert gains_by_channels_last(surface.model, surface.device)
    assert images_of(surface).is_contiguous()
    assert surface.hvp(torch.ones(surface.size)).isfinite().all()


def test_a_model_that_reads_them_differently_gets_them_as_they_are(data):
    class Memory(Residual):
        def forward(self, x):
            order = torch.as_strided(x, (len(x), 3 * 64), (3 * 64, 1))
            return super().forward(x) + order[:, :4]

    surface = LossSurface(made(Memory), "cross_entropy", data)
    assert images_of(surface).is_contiguous()


def test_small_outputs_are_told_apart_as_well(data):
    class Faint(Residual):
        def forward(self, x):
            return 1e-6 * torch.as_strided(x, x.shape, (192, 64, 8, 1)).mean((2, 3))

    class Checking(Residual):
        def forward(self, x):
            assert x.is_contiguous()
            return super().forward(x)

    for kind in (Faint, Checking):
        model = made(kind)
        subject = FunctionalModel(model.eval(), None)
        batch = next(LossSurface(made(Residual), "cross_entropy", data).risk.chunks(4))
        batch = replace(batch, inputs=batch.inputs.contiguous())
        subject.lay_out(batch, lambda few, of=model: of(few.inputs))
        assert subject.place(batch).inputs.is_contiguous()


def test_a_loss_that_views_the_outputs_gets_them_as_they_are(data):
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    images = torch.randn(6, 16, 6, 6)

    def loss(outputs, targets):
        return (outputs.view(len(outputs), -1) - targets.view(len(targets), -1)).square().mean()

    surface = LossSurface(model, loss, (images, images[:, :, :2, :2]))
    assert images_of(surface).is_contiguous()
    assert surface.hvp(torch.ones(surface.size)).isfinite().all()
    assert not images_of(LossSurface(model, "mse", (images, images[..., :2, :2]))).is_contiguous()


def test_every_part_is_that_of_double_precision(data):
    model = made(Residual)
    precise = LossSurface(model, "cross_entropy", data, dtype=torch.float64)
    assert images_of(precise).is_contiguous()
    expected = block_curvature(precise, PARTS)
    found = block_curvature(LossSurface(model, "cross_entropy", data, chunk=3), PARTS)
    assert found.keys() == expected.keys()
    for name, block in expected.items():
        assert found[name].exact == block.exact
        for part, values in block.values.items():
            torch.testing.assert_close(
                found[name].values[part], values, rtol=2e-3, atol=2e-4 * float(values.abs().max())
            )


def test_products_and_gradients_are_those_of_contiguous_images(data, monkeypatch):
    model = made(Residual)
    last = LossSurface(model, "cross_entropy", data)
    vector = torch.randn(last.size, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(FunctionalModel, "lay_out", lambda self, few, evaluate: None)
    usual = LossSurface(model, "cross_entropy", data)
    assert images_of(usual).is_contiguous()
    torch.testing.assert_close(last.gradient(), usual.gradient(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(last.hvp(vector), usual.hvp(vector), rtol=1e-3, atol=1e-4)
