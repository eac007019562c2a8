"""The vertical and the horizontal space of Rangamani et al. 2019 against their lemmas."""

from __future__ import annotations

import pytest
import torch
from cases import build
from torch import Tensor, nn

from flatgauge import LossSurface
from flatgauge.geometry import horizontal_projection, vertical_basis


def chain(*, bias: bool, depth: int = 3) -> LossSurface:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = [[nn.Linear(4, 4, bias=bias), nn.ReLU()] for _ in range(depth)]
        model = nn.Sequential(*[module for pair in parts for module in pair][:-1]).double()
        data = torch.randn(20, 4).double(), torch.arange(20) % 4
    return LossSurface(model, "cross_entropy", data)


def metric(surface: LossSurface, one: Tensor, other: Tensor) -> float:
    """Propositions 2.3 and 2.5, written out."""
    first, second, point = map(surface.split, (one, other, surface.point))
    terms = [(first[n] * second[n]).sum() / w.square().sum() for n, w in point.items()]
    return float(sum(terms))


def literal_vertical(surface: LossSurface, bias: bool, depth: int = 3) -> Tensor:
    """Lemmas 2.4 and 2.6: β_i with sum zero, γ_i = γ_{i-1} + β_i."""
    found = []
    for k in range(depth - 1):
        beta = torch.zeros(depth)
        beta[k], beta[k + 1] = 1.0, -1.0
        gamma = beta.cumsum(0)
        parts = {}
        for i in range(depth):
            parts[f"{2 * i}.weight"] = beta[i] * surface.params[f"{2 * i}.weight"]
            if bias:
                parts[f"{2 * i}.bias"] = gamma[i] * surface.params[f"{2 * i}.bias"]
        found.append(surface.flatten(parts))
    return torch.stack(found)


@pytest.mark.parametrize("bias", [False, True])
def test_the_vertical_space_is_that_of_the_lemmas(bias):
    surface = chain(bias=bias)
    basis, right = vertical_basis(surface), literal_vertical(surface, bias)
    assert basis.shape == right.shape
    both = torch.cat([basis, right])
    assert torch.linalg.matrix_rank(both, rtol=1e-10) == len(basis) == 2
    gram = [[metric(surface, a, b) for b in basis] for a in basis]
    torch.testing.assert_close(torch.tensor(gram).double(), torch.eye(2).double())


@pytest.mark.parametrize("bias", [False, True])
def test_a_horizontal_vector_is_orthogonal_to_the_orbit_and_what_is_taken_off_lies_in_it(bias):
    surface = chain(bias=bias)
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(1)).double()
    flat = horizontal_projection(surface, vector)
    vertical = literal_vertical(surface, bias)
    for direction in vertical:
        assert abs(metric(surface, flat, direction)) < 1e-12
    taken = torch.cat([vertical, (vector - flat)[None]])
    assert torch.linalg.matrix_rank(taken, rtol=1e-10) == len(vertical)
    torch.testing.assert_close(horizontal_projection(surface, flat), flat)
    if not bias:  # ⟨η_i, θ_i⟩ / ‖θ_i‖² is the same number for all layers.
        parts, point = surface.split(flat), surface.params
        shares = [float((parts[n] * w).sum() / w.square().sum()) for n, w in point.items()]
        assert max(shares) - min(shares) < 1e-12


def test_the_quotient_has_one_dimension_less_per_free_scale():
    surface = chain(bias=True)
    columns = torch.eye(surface.size).double()
    matrix = torch.stack([horizontal_projection(surface, e) for e in columns])
    assert torch.linalg.matrix_rank(matrix) == surface.size - 2


def test_the_projection_moves_with_the_point():
    """Proposition 2.3: a metric of the quotient, so that all is the same along an orbit."""
    surface = chain(bias=False)
    scales = {"0.weight": 8.0, "2.weight": 0.5, "4.weight": 0.25}
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(2)).double()

    def moved(flat: Tensor) -> Tensor:
        return surface.flatten({n: scales[n] * part for n, part in surface.split(flat).items()})

    before, vector_there = moved(horizontal_projection(surface, vector)), moved(vector)
    with torch.no_grad():
        for name, parameter in surface.model.named_parameters():
            parameter.mul_(scales[name])
    torch.testing.assert_close(horizontal_projection(surface, vector_there), before)


@pytest.mark.parametrize("bias", [False, True])
def test_the_riemannian_gradient_is_horizontal_and_the_hessian_only_where_it_vanishes(bias):
    """Remark 2 holds for the gradient; for products its proof needs a critical point."""
    surface = chain(bias=bias)

    def raised(flat: Tensor) -> Tensor:
        """The inverse metric: ‖θ_i‖² times every part."""
        sizes = {n: w.square().sum() for n, w in surface.params.items()}
        return surface.flatten({n: sizes[n] * part for n, part in surface.split(flat).items()})

    gradient = raised(surface.gradient())
    torch.testing.assert_close(horizontal_projection(surface, gradient), gradient)
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(3)).double()
    product = surface.hvp(vector)
    assert (horizontal_projection(surface, raised(product)) - raised(product)).abs().max() > 1e-3
    # With f constant along the orbit, H V = - E∘∇L: what is off is of first order.
    for direction in literal_vertical(surface, bias):
        shares = surface.flatten(
            {
                n: torch.full_like(w, float((d * w).sum() / w.square().sum()))
                for (n, w), d in zip(
                    surface.params.items(), surface.split(direction).values(), strict=True
                )
            }
        )
        torch.testing.assert_close(surface.hvp(direction), -shares * surface.gradient())


def test_a_tensor_of_zeros_has_no_direction():
    surface = chain(bias=True)
    nn.init.zeros_(surface.model[0].bias)
    vector = torch.ones(surface.size).double()
    assert torch.isfinite(horizontal_projection(surface, vector)).all()
    assert vertical_basis(surface).shape[0] == 2


def test_frozen_tensors_and_models_without_a_scale():
    surface = chain(bias=False, depth=2)
    surface.model[0].requires_grad_(False)
    frozen = LossSurface(surface.model, "cross_entropy", (torch.randn(5, 4), torch.arange(5) % 4))
    vector = torch.ones(frozen.size).double()
    assert vertical_basis(frozen).shape == (0, frozen.size)
    assert torch.equal(horizontal_projection(frozen, vector), vector)
    smooth = build("gelu").surface()
    vector = torch.ones(smooth.size).double()
    assert torch.equal(horizontal_projection(smooth, vector), vector)


def test_a_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"`vector` has shape \(3,\), but the surface has 48"):
        horizontal_projection(chain(bias=False), torch.ones(3))
