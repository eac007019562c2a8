"""Every library's matrices are the same matrix, and bad products are refused."""

import numpy as np
import pytest
import scipy.sparse
import torch
from prescribed import SPECTRA, Counted, matrix_with, seeded

from flatgauge.estimators.density import spectral_density
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.linalg import Matrix
from flatgauge.estimators.trace import trace

DENSE = matrix_with(SPECTRA["power law"])
KINDS = {
    "torch": lambda a: a,
    "torch with graph": lambda a: a.clone().requires_grad_(),
    "torch sparse": lambda a: a.to_sparse(),
    "own operator": Counted,
    "numpy": lambda a: a.numpy(),
    "numpy matrix": lambda a: a.numpy().view(np.matrix),
    "scipy array": lambda a: scipy.sparse.csr_array(a.numpy()),
    "scipy matrix": lambda a: scipy.sparse.csr_matrix(a.numpy()),
    "scipy operator": lambda a: scipy.sparse.linalg.aslinearoperator(a.numpy()),
}


class Bare:
    """Nothing but a shape and products."""

    shape = (3, 3)

    def __matmul__(self, block):
        return 2 * block


class Broken:
    """A shape, and products that are whatever they are told to be."""

    shape = (4, 4)
    dtype = torch.float64

    def __init__(self, product):
        self.product = product

    def __matmul__(self, block):
        return self.product


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_and_blocks_are_multiplied_alike_in_every_library(kind, dtype):
    dense = DENSE.to(dtype)
    block = torch.randn(200, 3, generator=seeded(0), dtype=dtype)
    matrix = Matrix(KINDS[kind](dense))
    assert (matrix.size, matrix.dtype, matrix.device) == (200, dtype, torch.device("cpu"))
    for vectors in (block, block[:, 0].contiguous()):
        product = matrix @ vectors
        assert isinstance(product, torch.Tensor)
        assert not product.requires_grad
        torch.testing.assert_close(product, dense @ vectors)
    assert matrix.matvecs == 4


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_agree_in_every_library(kind):
    operator = KINDS[kind](DENSE)
    top = top_eigenvalues(operator, tolerance=1e-8, generator=seeded(0))
    assert top.values.item() == pytest.approx(1.0, rel=1e-10)
    assert trace(operator, probes=200).value == pytest.approx(SPECTRA["power law"].sum())
    spectrum = spectral_density(operator, probes=2, steps=5, generator=seeded(0))
    assert spectrum.extremes[1] == pytest.approx(1.0, rel=0.05)


def test_a_bare_operator_is_worked_on_in_float64():
    matrix = Matrix(Bare())
    assert matrix.dtype == torch.float64
    assert (matrix @ torch.ones(3, dtype=torch.float64)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("integers", [np.eye(3, dtype=int), torch.eye(3, dtype=torch.int32)])
def test_integers_are_worked_on_in_float64(integers):
    assert Matrix(integers).dtype == torch.float64
    assert trace(integers, probes=3).value == 3.0


@pytest.mark.parametrize("shape", [(2, 3), (3,), (0, 0), (2, 2, 2)])
def test_a_shape_that_is_not_square_is_refused(shape):
    with pytest.raises(ValueError, match=r"`operator` has shape .*; a square matrix \(p, p\)"):
        Matrix(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_number_types_are_refused(dtype):
    with pytest.raises(ValueError, match="float32 or float64 is needed"):
        Matrix(torch.eye(2, dtype=dtype))


def test_numpy_longdouble_is_refused():
    with pytest.raises(ValueError, match="float32 or float64 is needed"):
        Matrix(np.eye(2, dtype=np.longdouble))


@pytest.mark.parametrize(
    "estimate",
    [
        lambda a: top_eigenvalues(a, generator=seeded(0)),
        lambda a: trace(a, probes=4),
        lambda a: spectral_density(a, generator=seeded(0)),
    ],
)
def test_a_product_that_is_not_finite_is_refused(estimate):
    matrix = torch.eye(4)
    matrix[1, 2] = np.nan
    with pytest.raises(ValueError, match=r"product with the 4 × 4 `Tensor` is not finite \(nan"):
        estimate(matrix)


def test_an_infinite_product_is_called_so():
    with pytest.raises(ValueError, match=r"is not finite \(inf; 4 of 4 entries, product 1\)"):
        Matrix(Broken(torch.full((4,), -np.inf))) @ torch.zeros(4, dtype=torch.float64)


def test_a_product_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"has shape \(3,\); `@` must return the shape"):
        Matrix(Broken(torch.zeros(3))) @ torch.zeros(4, dtype=torch.float64)


@pytest.mark.parametrize(
    "estimate",
    [
        lambda a: top_eigenvalues(a, count=3, generator=seeded(1)),
        lambda a: top_eigenvalues(a, count=2, basis=8, which="smallest", generator=seeded(1)),
        lambda a: top_eigenvalues(a, max_matvecs=3, generator=seeded(1)),
        lambda a: trace(a, generator=seeded(1)),
        lambda a: trace(a, probes=31, generator=seeded(1)),
        lambda a: trace(a, probes=31, method="hutchinson", generator=seeded(1)),
        lambda a: trace(a, probes=200),
        lambda a: spectral_density(a, probes=3, steps=7, generator=seeded(1)),
    ],
)
def test_counted_products_are_the_products_made_and_no_global_state_moves(estimate):
    operator = Counted(DENSE)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    result = estimate(operator)
    assert result.matvecs == operator.columns
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
