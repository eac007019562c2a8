"""The Krylov basis: what it says about the matrix is what the matrix does."""

import numpy as np
import pytest
import torch
from prescribed import SPECTRA, matrix_with, seeded

from flatgauge.estimators.lanczos import KrylovBasis, lanczos
from flatgauge.estimators.linalg import Matrix


def random_vector(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=seeded(seed), dtype=torch.float64)


def assert_residuals_are_true(space: KrylovBasis, dense: torch.Tensor) -> None:
    ritz = space.ritz()
    vectors = space.vectors(ritz.coefficients).T
    values = torch.from_numpy(ritz.values)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(space.size).double())
    residuals = (dense @ vectors - vectors * values).norm(dim=0)
    torch.testing.assert_close(torch.from_numpy(ritz.residuals), residuals, atol=1e-12, rtol=0)


def test_lanczos_is_the_krylov_space_of_its_start():
    dense, start = matrix_with(SPECTRA["power law"]), random_vector(200, 0)
    space = lanczos(dense, start, 6)
    powers = [start]
    while len(powers) < 6:
        powers.append(dense @ powers[-1])
    krylov, _ = torch.linalg.qr(torch.stack(powers, dim=1))
    projected = np.linalg.eigvalsh((krylov.T @ dense @ krylov).numpy())
    assert (space.size, space.matrix.matvecs) == (6, 6)
    np.testing.assert_allclose(space.ritz().values, projected, atol=1e-9)
    assert_residuals_are_true(space, dense)


def test_lanczos_by_hand():
    space = lanczos(np.diag([1.0, 3.0]), torch.tensor([1.0, 1.0]), 1)
    # from (1, 1): mean 2, and the product misses 2 (1, 1) / sqrt(2) by (-1, 1) / sqrt(2)
    assert space.ritz().values.tolist() == pytest.approx([2.0])
    assert space.ritz().residuals.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("spectrum", ["low rank", "identity", "zero", "three", "one"])
def test_lanczos_stops_where_the_space_closes(spectrum):
    dense = np.diag(SPECTRA[spectrum])  # repeated to the last bit
    space = lanczos(dense, random_vector(len(dense), 0), 64)
    assert space.size == len(np.unique(SPECTRA[spectrum]))
    np.testing.assert_allclose(
        space.ritz().values, np.unique(SPECTRA[spectrum]), atol=1e-12, rtol=1e-12
    )
    assert not space.pending


def test_residuals_stay_true_through_fresh_directions_and_restarts():
    dense = matrix_with(SPECTRA["repeated"])
    space = KrylovBasis(Matrix(dense), 12)
    for seed in range(3):
        assert space.add(random_vector(200, seed))
    for step in range(9):
        space.extend(pick=step % 3)
    assert_residuals_are_true(space, dense)
    ritz, kept = space.ritz(), [0, 4, 7, 8]
    space.compress(ritz.coefficients[:, kept], np.delete(ritz.values, kept))
    assert space.size == 4
    assert_residuals_are_true(space, dense)
    for _ in range(5):
        space.extend()
    assert_residuals_are_true(space, dense)
    assert len(space.pending) == 3


def test_residuals_of_a_crooked_matrix_are_true_too():
    crooked = torch.randn(30, 30, generator=seeded(0), dtype=torch.float64)
    space = lanczos(crooked, random_vector(30, 1), 8)
    assert_residuals_are_true(space, crooked)
    assert space.asymmetry > 0.1


def test_a_block_of_the_basis_is_judged_alone():
    space = KrylovBasis(Matrix(np.diag([1.0, 2.0, 3.0, 4.0])), 4)
    for axis in (0, 3):
        unit = torch.zeros(4)
        unit[axis] = 1.0
        space.add(unit)
        space.extend()
    assert space.ritz().values.tolist() == [1.0, 4.0]
    assert space.ritz(slice(1, 2)).values.tolist() == [4.0]


def test_nothing_is_added_to_a_full_space():
    space = KrylovBasis(Matrix(torch.eye(2)), 2)
    assert space.add(torch.tensor([1.0, 0.0]))
    assert space.add(torch.tensor([1.0, 1.0]))
    assert not space.add(torch.tensor([0.0, 1.0]))
    assert len(space.pending) == 2


def test_a_start_without_direction_is_refused():
    with pytest.raises(ValueError, match="length 0 gives no direction; a finite vector of shape"):
        lanczos(torch.eye(3), torch.zeros(3), 2)
