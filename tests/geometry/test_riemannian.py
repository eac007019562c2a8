"""The Riemannian eigenvalues against D H D, written out densely."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, build
from reference import dense_hessian, holds_smallest, theta
from torch import Generator, Tensor, nn

from flatgauge.curvature import Hessian, Scaled
from flatgauge.measures import riemannian_max_eigenvalue, riemannian_max_eigenvalue_nodewise
from flatgauge.surface.examples import two_weights


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def norms(model: nn.Module) -> Tensor:
    """The norm of every entry's own tensor."""
    return torch.cat([p.detach().norm().expand(p.numel()) for p in model.parameters()])


@pytest.mark.parametrize("name", CASES)
def test_they_are_the_top_eigenvalues_of_d_h_d(name):
    case = build(name)
    hessian, surface = dense_hessian(case), case.surface()
    for measure, units in (
        (riemannian_max_eigenvalue, norms(case.model)),
        (riemannian_max_eigenvalue_nodewise, theta(case).abs()),
    ):
        spectrum = torch.linalg.eigvalsh(units[:, None] * hessian * units)
        top = measure(surface, tolerance=1e-6, generator=source())
        assert abs(top.value - spectrum[-1].item()) <= top.bound + 1e-12
        assert top.bound <= 1e-6 * abs(top.value)
        assert holds_smallest(top.details, spectrum[0].item())


def test_by_hand():
    """[[18, 24], [24, 8]] in units of (2, 3): [[72, 144], [144, 72]], eigenvalues 216 and -72."""
    scaled = Scaled(Hessian(two_weights(2.0, 3.0)), by=torch.tensor([2.0, 3.0]))
    expected = torch.tensor([[72.0, 144.0], [144.0, 72.0]]).double()
    torch.testing.assert_close(scaled.dense(), expected)
    torch.testing.assert_close(scaled @ torch.ones(2).double(), expected.sum(1))
    for measure in (riemannian_max_eigenvalue, riemannian_max_eigenvalue_nodewise):
        top = measure(two_weights(2.0, 3.0), generator=source())
        assert top.value == pytest.approx(216.0, rel=1e-12)
        assert top.details["smallest"] == pytest.approx(-72.0, rel=1e-12)


def test_a_tensor_of_zeros_takes_no_part():
    case = build("mlp")
    nn.init.zeros_(case.model[0].bias)
    frozen = build("mlp")
    nn.init.zeros_(frozen.model[0].bias)
    frozen.model[0].bias.requires_grad_(False)
    for measure in (riemannian_max_eigenvalue, riemannian_max_eigenvalue_nodewise):
        whole = measure(case.surface(), tolerance=1e-8, generator=source())
        without = measure(frozen.surface(), tolerance=1e-8, generator=source())
        assert whole.value == pytest.approx(without.value, rel=1e-7)
