"""Extreme eigenvalues: right, within their bounds, for any seed and any spectrum."""

import numpy as np
import pytest
import torch
from prescribed import CLUSTERED, SPECTRA, Counted, eigenvalues, matrix_with, seeded

from flatgauge.estimators.eigenvalues import chance_of_missing, top_eigenvalues
from flatgauge.estimators.lanczos import lanczos, unseen_distance

SMALL = ["zero", "identity", "one", "two", "three"]
REFERENCE = 1e-14  # what the dense decomposition itself is good for, relative to the norm


def allowed(pairs, expected):
    """The claimed bounds, and what the reference needs for itself."""
    return pairs.bounds.numpy() + REFERENCE * np.abs(expected).max() * len(expected)


def is_within_bounds(pairs, expected):
    """Whether the values are the first of the expected ones, as nearly as claimed."""
    off = np.abs(pairs.values.numpy() - expected[: len(pairs.values)])
    return bool((off <= allowed(pairs, expected)).all())


def test_by_hand():
    pairs = top_eigenvalues(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), count=2, generator=seeded(0))
    assert pairs.values.tolist() == pytest.approx([3.0, 1.0], rel=1e-6)
    assert pairs.vectors.abs().flatten().tolist() == pytest.approx([0.5**0.5] * 4, rel=1e-6)
    assert pairs.opposite == pytest.approx(1.0, rel=1e-6)
    assert (pairs.converged, pairs.matvecs) == (True, 2)


@pytest.mark.parametrize(("which", "value", "other"), [("largest", 1, -1), ("smallest", -1, 1)])
def test_a_swap_by_hand(which, value, other):
    pairs = top_eigenvalues(np.array([[0, 1], [1, 0]]), which=which, generator=seeded(0))
    assert pairs.values.tolist() == pytest.approx([value])
    assert pairs.opposite == pytest.approx(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_largest_is_within_its_bound_and_the_tolerance_for_any_seed(spectrum, dtype):
    tolerance = 1e-4 if spectrum == "network" else 1e-3  # its largest two are 5 % apart
    matrix = matrix_with(SPECTRA[spectrum], dtype)
    expected = eigenvalues(matrix)
    for seed in range(100 if dtype == torch.float64 else 20):
        pairs = top_eigenvalues(matrix, tolerance=tolerance, generator=seeded(seed))
        assert pairs.converged
        assert is_within_bounds(pairs, expected), seed
        assert pairs.bounds.item() <= 1.01 * tolerance * abs(expected[0])


@pytest.mark.parametrize("spectrum", ["network", "low rank", *SMALL])
def test_the_smallest_are_the_largest_of_the_negative(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    for seed in range(3):
        smallest = top_eigenvalues(matrix, which="smallest", generator=seeded(seed))
        largest = top_eigenvalues(-matrix, generator=seeded(seed))
        assert is_within_bounds(smallest, eigenvalues(matrix)[::-1])
        torch.testing.assert_close(smallest.values, -largest.values, atol=1e-12, rtol=1e-12)
        assert smallest.matvecs == largest.matvecs


#: Of the first 1,500 starts, those that show 9.5 to a thousandth before anything of 10.
UNLUCKY = [251, 451, 597, 793, 833, 857, 995, 1021, 1027, 1045]


def test_a_value_hidden_behind_another_is_found():
    spectrum = np.r_[10, 9.5, np.linspace(0, 1, 98)]
    matrix = torch.diag(torch.from_numpy(spectrum))
    spent = []
    for seed in [*UNLUCKY, *range(100)]:
        pairs = top_eigenvalues(matrix, generator=seeded(seed))
        assert is_within_bounds(pairs, spectrum), seed
        spent.append(pairs.matvecs)
    assert np.mean(spent) <= 7.2


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("spectrum", ["network", "repeated", "power law", "negative dominant"])
def test_what_is_unseen_lies_no_further_than_said_but_for_the_chance(spectrum, steps):
    """One start in five may be wrong where one in five is allowed: ends of the spectrum."""
    matrix = torch.diag(torch.from_numpy(SPECTRA[spectrum]))
    largest, smallest = SPECTRA[spectrum].max(), SPECTRA[spectrum].min()
    wrong = np.zeros(2)
    for seed in range(100):
        start = torch.randn(len(matrix), generator=seeded(seed), dtype=torch.float64)
        space = lanczos(matrix, start, steps)
        values = space.ritz().values
        wrong[0] += largest > values[-1] + unseen_distance(space, 1.0, chance=0.2)
        wrong[1] += smallest < values[0] - unseen_distance(space, -1.0, chance=0.2)
    assert (wrong <= 100 * 0.2 + 2 * np.sqrt(100 * 0.2 * 0.8)).all()


def test_what_is_unseen_by_hand():
    """One product from (1, 1): θ = 2, β = 1, P(λ) = λ - 2 = √(4 / π) / chance."""
    space = lanczos(np.diag([1.0, 3.0, 3.0, 1.0]), torch.ones(4).double(), 1)
    expected = np.sqrt(8 / np.pi) / 0.1
    assert unseen_distance(space, 1.0, chance=0.1) == pytest.approx(expected, rel=1e-12)
    assert unseen_distance(space, -1.0, chance=0.1) == pytest.approx(expected, rel=1e-12)
    closed = lanczos(np.diag([1.0, 3.0, 3.0, 1.0]), torch.ones(4).double(), 4)
    assert unseen_distance(closed, 1.0) == 0.0


@pytest.mark.parametrize(
    ("spectrum", "basis"), [*((name, None) for name in SPECTRA), ("network", 12), ("repeated", 6)]
)
def test_the_other_end_is_found_on_request_and_lies_within_its_bound(spectrum, basis):
    matrix = matrix_with(SPECTRA[spectrum])
    expected = eigenvalues(matrix)
    rounding = REFERENCE * np.abs(expected).max() * len(expected)
    for seed in range(2):
        for asked in (None, 0.1):
            pairs = top_eigenvalues(
                matrix, opposite=asked, basis=basis, max_matvecs=1000, generator=seeded(seed)
            )
            assert pairs.converged
            assert expected[-1] <= pairs.opposite + rounding
            assert expected[-1] >= pairs.opposite - pairs.opposite_bound - rounding
        size = abs(pairs.opposite)
        zero = size + pairs.opposite_bound <= 1e-3 * np.abs(expected).max()
        assert zero or pairs.opposite_bound <= 0.1 * size


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("spectrum", ["outliers", "network", "repeated", "low rank", "power law"])
def test_several_values_are_within_their_bounds_for_any_seed(spectrum, count):
    matrix = matrix_with(SPECTRA[spectrum])
    expected = eigenvalues(matrix)
    for seed in range(30 if count == 4 else 10):
        pairs = top_eigenvalues(matrix, count=count, generator=seeded(seed))
        assert pairs.converged
        assert is_within_bounds(pairs, expected), seed


@pytest.mark.parametrize("spectrum", SMALL)
def test_all_values_of_a_small_matrix(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    size = len(matrix)
    pairs = top_eigenvalues(matrix, count=size, generator=seeded(0))
    assert pairs.converged
    assert pairs.matvecs == size
    torch.testing.assert_close(pairs.values, torch.from_numpy(eigenvalues(matrix)))
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(size).double())
    torch.testing.assert_close(matrix @ pairs.vectors, pairs.vectors * pairs.values)


def test_a_cluster_narrower_than_the_tolerance_is_met_to_twice_the_tolerance():
    matrix = matrix_with(CLUSTERED)
    for seed in range(100):
        pairs = top_eigenvalues(matrix, count=1, generator=seeded(seed))
        assert pairs.converged
        assert 0 <= 10 - pairs.values.item() + 1e-12 <= 2e-2
    pairs = top_eigenvalues(matrix, count=5, tolerance=1e-7, generator=seeded(0))
    assert pairs.values.tolist() == pytest.approx(CLUSTERED[:5].tolist(), rel=1e-9)


def test_repeated_values_are_all_found():
    matrix = matrix_with(SPECTRA["repeated"])
    pairs = top_eigenvalues(matrix, count=6, tolerance=1e-6, generator=seeded(0))
    assert pairs.values.tolist() == pytest.approx([5, 5, 5, 3, 3, 1], rel=1e-9)


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize(("count", "basis"), [(1, 4), (3, 20), (4, 8)])
def test_restarts_lead_to_the_same_values(which, count, basis):
    spectrum = np.r_[-40, -39, -37, -36, np.linspace(-30, 30, 492), 35, 36, 38, 40]
    matrix = matrix_with(spectrum)
    expected = eigenvalues(matrix)[:: 1 if which == "largest" else -1][:count]
    pairs = top_eigenvalues(
        matrix,
        count=count,
        which=which,
        basis=basis,
        tolerance=1e-5,
        max_matvecs=2000,
        generator=seeded(0),
    )
    assert pairs.converged
    assert pairs.matvecs > 2 * basis
    np.testing.assert_allclose(pairs.values.numpy(), expected, rtol=1e-7)
    assert abs(pairs.opposite) == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_are_those_of_the_returned_vectors(dtype):
    matrix = matrix_with(SPECTRA["network"], dtype)
    pairs = top_eigenvalues(matrix, count=3, basis=10, generator=seeded(0))
    vectors = pairs.vectors.double()
    residuals = (matrix.double() @ vectors - vectors * pairs.values).norm(dim=0)
    rounding = 8 * torch.finfo(dtype).eps * 10
    torch.testing.assert_close(pairs.residuals, residuals, rtol=1e-4, atol=rounding)
    torch.testing.assert_close(
        pairs.vectors.T @ pairs.vectors, torch.eye(3, dtype=dtype), rtol=0, atol=rounding
    )
    assert pairs.vectors.dtype == dtype
    assert pairs.values.dtype == torch.float64


def test_the_opposite_end_is_an_inner_estimate():
    matrix = matrix_with(SPECTRA["negative dominant"])
    pairs = top_eigenvalues(matrix, generator=seeded(0))
    assert -100 - 1e-9 <= pairs.opposite <= -90
    assert abs(pairs.opposite + 100) <= pairs.opposite_residual + 1e-9
    assert abs(pairs.opposite + 100) <= pairs.opposite_bound + 1e-9


def test_few_products_are_needed_where_values_stand_out():
    matrix = matrix_with(SPECTRA["outliers"])
    spent = [top_eigenvalues(matrix, generator=seeded(s)).matvecs for s in range(50)]
    assert max(spent) <= 10
    assert np.mean(spent) <= 7.7


@pytest.mark.parametrize("count", [1, 4])
def test_the_zero_matrix_is_settled_at_once(count):
    pairs = top_eigenvalues(torch.zeros(1000, 1000), count=count, generator=seeded(0))
    assert pairs.values.tolist() == [0.0] * count
    assert pairs.bounds.tolist() == [0.0] * count
    assert (pairs.converged, pairs.opposite, pairs.asymmetry) == (True, 0.0, 0.0)
    assert pairs.matvecs == (1 if count == 1 else count + 1)


def test_a_zero_value_is_zero_on_the_scale_of_the_matrix():
    matrix = matrix_with(np.r_[np.zeros(100), np.linspace(1, 50, 50)])
    pairs = top_eigenvalues(matrix, which="smallest", generator=seeded(0))
    assert pairs.converged
    assert abs(pairs.values.item()) + pairs.bounds.item() <= 1e-3 * 50


@pytest.mark.parametrize("power", [-80, -1, 7, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"count": 3, "basis": 9}, {"which": "smallest"}])
def test_scaling_by_a_power_of_two_scales_every_bit(power, dtype, options):
    matrix = matrix_with(SPECTRA["repeated"], dtype)
    one = top_eigenvalues(matrix, **options, generator=seeded(0))
    two = top_eigenvalues(matrix * 2.0**power, **options, generator=seeded(0))
    assert torch.equal(one.values * 2.0**power, two.values)
    assert torch.equal(one.bounds * 2.0**power, two.bounds)
    assert torch.equal(one.vectors, two.vectors)
    assert (one.matvecs, one.opposite * 2.0**power) == (two.matvecs, two.opposite)
    assert one.opposite_bound * 2.0**power == two.opposite_bound


def test_the_same_products_give_the_same_bits():
    matrix = matrix_with(SPECTRA["network"], torch.float32)
    one = top_eigenvalues(matrix, count=3, generator=seeded(5))
    two = top_eigenvalues(Counted(matrix.clone()), count=3, generator=seeded(5))
    assert torch.equal(one.values, two.values)
    assert torch.equal(one.vectors, two.vectors)


def test_start_is_the_first_direction():
    matrix = torch.diag(torch.arange(1.0, 101.0))
    start = torch.zeros(100)
    start[[7, 99]] = 1.0
    pairs = top_eigenvalues(matrix, start=3 * start, max_matvecs=2)
    assert pairs.values.item() == pytest.approx(100.0)
    assert pairs.opposite == pytest.approx(8.0)


@pytest.mark.parametrize("seen", [[0], [0, 3], [1, 2, 5]])
def test_a_start_that_sees_little_is_cured_once_its_space_closes(seen):
    matrix = torch.diag(torch.arange(1.0, 41.0))
    start = torch.zeros(40)
    start[seen] = 1.0
    pairs = top_eigenvalues(matrix, start=start)
    assert pairs.converged
    assert pairs.values.item() == pytest.approx(40.0, rel=1e-3)


def test_running_out_of_products_is_told():
    matrix = matrix_with(np.linspace(0, 1, 400))
    pairs = top_eigenvalues(matrix, max_matvecs=12, generator=seeded(0))
    assert (pairs.converged, pairs.matvecs) == (False, 12)
    assert pairs.bounds.item() > 1e-3


def test_a_tolerance_below_rounding_stops_early_and_is_told():
    matrix = matrix_with(SPECTRA["outliers"], torch.float32)
    pairs = top_eigenvalues(matrix, tolerance=1e-9, generator=seeded(0))
    assert not pairs.converged
    assert pairs.matvecs < 30
    assert is_within_bounds(pairs, eigenvalues(matrix))


def test_a_matrix_that_is_not_symmetric_is_told():
    crooked = torch.randn(100, 100, generator=seeded(0))
    pairs = top_eigenvalues(crooked, max_matvecs=60, generator=seeded(0))
    assert not pairs.converged
    assert pairs.asymmetry > 0.1
    straight = top_eigenvalues(crooked + crooked.T, generator=seeded(0))
    assert straight.converged
    assert straight.asymmetry < 1e-6


def test_a_matrix_that_changes_between_products_is_told():
    class Restless(Counted):
        def __matmul__(self, block):
            noise = torch.randn(self.shape, generator=seeded(self.columns), dtype=self.dtype)
            return super().__matmul__(block) + 0.1 * (noise + noise.T) @ block

    operator = Restless(matrix_with(SPECTRA["network"]))
    pairs = top_eigenvalues(operator, max_matvecs=60, generator=seeded(0))
    assert not pairs.converged
    assert pairs.asymmetry > 0.01


def test_chance_of_missing_by_hand():
    assert chance_of_missing(4.0, 4.0, 0.0, steps=50, size=9) == 1.0
    assert chance_of_missing(0.0, 0.0, 0.0, steps=1, size=9) == 1.0
    # a quarter of the width short after 8 steps: 1.648 * 3 * exp(-0.5 * 15)
    expected = 1.648 * 3 * np.exp(-7.5)
    assert chance_of_missing(4.0, 3.0, 0.0, steps=8, size=9) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a generator; pass `generator="),
        ({"which": "both"}, '`which` is \'both\'; pass "largest" or "smallest"'),
        ({"count": 0}, "`count` is 0; the matrix has 9 eigenvalues, ask for 1 to 9"),
        ({"count": 10}, "`count` is 10; the matrix has 9 eigenvalues"),
        ({"tolerance": 0.0}, "`tolerance` is 0.0; it is a relative error"),
        ({"tolerance": float("nan")}, "`tolerance` is nan"),
        ({"count": 4, "max_matvecs": 3}, "`max_matvecs` is 3; 4 eigenvalue"),
        ({"count": 2, "basis": 4}, "`basis` is 4; a search for 2 .* at least 5 vectors"),
        ({"opposite": 2.0}, "`opposite=2.0` is a relative error at the other end"),
        ({"opposite": 0.1, "count": 2}, "with `count=1` and without `start`"),
        ({"start": torch.zeros(9)}, "length 0 gives no direction"),
        ({"start": torch.full((9,), torch.nan)}, "length nan gives no direction"),
        ({"start": torch.ones(3)}, r"shape \(3,\) .* vector of shape \(9,\)"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    if "start" not in options and options:
        options = options | {"generator": seeded(0)}
    with pytest.raises(ValueError, match=message):
        top_eigenvalues(torch.eye(9), **options)
