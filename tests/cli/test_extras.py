"""What a page shows beside numbers."""

from __future__ import annotations

import pytest
import torch
from cases import build
from torch import nn

from flatgauge import LossSurface
from flatgauge.cli.extras import compute_extras


def test_pictures_are_of_the_first_samples_and_say_so():
    surface = build("mlp").surface()
    told = []
    found = compute_extras(
        {"net": surface},
        parts=["landscape"],
        samples=5,
        progress=lambda name, done, total: told.append((name, done, total)),
    )
    assert found.remarks == ["pictures are of the first 5 samples"]
    assert [one.dims for one in found.landscapes] == [1, 2, 2]
    assert found.landscapes[0].centre == pytest.approx(surface.subset(5).value(), rel=1e-12)
    assert told[-1] == ("landscape (basis_paths)", 2, 3)
    assert not found.certificates
    assert not found.spectra


def test_what_cannot_be_had_is_told():
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x) * (2.0 if float(self.linear.bias.detach().sum()) > 0 else 1.0)

    data = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    surface = LossSurface(Untraceable(), "cross_entropy", data)
    found = compute_extras({"net": surface}, parts=["certificate"])
    (remark,) = found.remarks
    assert remark.startswith("no certificate of net: the model cannot be exported as a graph")
    with pytest.raises(ValueError, match="'sculpture' is not a valid PagePart"):
        compute_extras({"net": surface}, parts=["sculpture"])
