"""The trace: unbiased, with error bars that hold, for any seed."""

import numpy as np
import pytest
import torch
from prescribed import SPECTRA, Counted, matrix_with, seeded
from scipy.stats import t as student

from flatgauge.estimators.trace import orthonormal_rows, trace

METHODS = ["hutch++", "hutchinson"]
SPREAD = ["outliers", "network", "repeated", "power law"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_by_hand(method, dtype):
    matrix = torch.tensor([[2.0, 9.0, 0.0], [9.0, -7.0, 1.0], [0.0, 1.0, 4.5]], dtype=dtype)
    estimate = trace(matrix, probes=3, method=method)
    assert (estimate.value, estimate.stderr, estimate.exact) == (-0.5, 0.0, True)
    assert (estimate.matvecs, estimate.converged) == (3, True)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_a_budget_that_covers_the_columns_is_exact(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    estimate = trace(matrix, probes=max(len(matrix), 2))
    assert estimate.exact
    assert estimate.matvecs == len(matrix)
    assert estimate.value == pytest.approx(SPECTRA[spectrum].sum(), abs=1e-11)


def test_one_product_short_of_all_columns_is_an_estimate():
    estimate = trace(matrix_with(SPECTRA["identity"]), probes=49, generator=seeded(0))
    assert not estimate.exact
    assert estimate.matvecs == 49


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spectrum", SPREAD)
def test_a_fixed_budget_agrees_within_its_own_error_for_any_seed(spectrum, method, dtype):
    matrix, exact = matrix_with(SPECTRA[spectrum], dtype), SPECTRA[spectrum].sum()
    for seed in range(100 if dtype == torch.float64 else 10):
        estimate = trace(matrix, probes=60, method=method, generator=seeded(seed))
        assert abs(estimate.value - exact) < 5 * estimate.stderr, seed
        assert estimate.stderr < 0.5 * abs(exact)
        assert abs(estimate.value - exact) < 5 * estimate.details["half_width"]
        assert (estimate.matvecs, estimate.exact, estimate.converged) == (60, False, True)


@pytest.mark.parametrize(("method", "probes"), [("hutch++", 9), ("hutchinson", 4)])
def test_no_bias_and_a_standard_error_of_the_right_size(method, probes):
    matrix, exact = matrix_with(SPECTRA["repeated"]), SPECTRA["repeated"].sum()
    runs = [trace(matrix, probes=probes, method=method, generator=seeded(s)) for s in range(600)]
    values = np.array([run.value for run in runs])
    variances = np.array([run.stderr**2 for run in runs])
    assert abs(values.mean() - exact) < 4 * values.std() / np.sqrt(len(values))
    assert variances.mean() == pytest.approx(values.var(), rel=0.25)


def test_hutchinson_is_the_mean_of_its_samples():
    matrix = matrix_with(SPECTRA["power law"])
    estimate = trace(matrix, probes=7, method="hutchinson", generator=seeded(3))
    drawn = torch.randint(0, 2, (200, 7), dtype=torch.int8, generator=seeded(3))
    signs = (2 * drawn - 1).double().numpy()
    samples = np.diag(signs.T @ matrix.numpy() @ signs)
    assert estimate.value == pytest.approx(samples.mean(), rel=1e-12)
    assert estimate.stderr == pytest.approx(samples.std(ddof=1) / 7**0.5, rel=1e-12)


def test_hutch_plus_plus_leaves_little_of_a_spectrum_that_falls():
    matrix = matrix_with(SPECTRA["outliers"])
    one, two = (trace(matrix, probes=60, method=m, generator=seeded(0)) for m in METHODS)
    assert one.stderr < 0.1 * two.stderr


@pytest.mark.parametrize("probes", [12, 30])
def test_low_rank_is_captured_up_to_rounding(probes):
    matrix = matrix_with(SPECTRA["low rank"])
    estimate = trace(matrix, probes=probes, generator=seeded(0))
    assert estimate.value == pytest.approx(6.0, rel=1e-12)
    assert abs(estimate.value - 6.0) <= estimate.details["half_width"] < 1e-12


@pytest.mark.parametrize("probes", [2, 3, 4, 5, 6, 7, 100])
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_is_spent_to_the_last_product(probes, method):
    operator = Counted(matrix_with(SPECTRA["power law"]))
    estimate = trace(operator, probes=probes, method=method, generator=seeded(0))
    assert estimate.matvecs == operator.columns == probes
    assert estimate.stderr > 0
    assert estimate.options == {"method": method, "probes": probes}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spectrum", ["network", "power law", "linear"])
def test_a_reached_tolerance_is_kept_as_often_as_claimed(spectrum, method):
    values = SPECTRA.get(spectrum, np.linspace(0, 1, 200))
    matrix, exact = matrix_with(values), values.sum()
    outside = missed = converged = 0
    for seed in range(250):
        # 150 products at most: below the 200 columns, so that no run falls back on them
        estimate = trace(
            matrix, tolerance=0.1, max_matvecs=150, method=method, generator=seeded(seed)
        )
        off = abs(estimate.value - exact)
        outside += off > estimate.details["half_width"]
        missed += estimate.converged and off > 0.1 * exact
        converged += estimate.converged
        assert estimate.converged == (estimate.details["half_width"] <= 0.1 * abs(estimate.value))
        assert estimate.converged or estimate.matvecs == 150
    slack = 3 * (0.05 * 0.95 * 250) ** 0.5
    assert outside <= 0.05 * 250 + slack
    assert missed <= 0.05 * 250 + slack
    assert converged > 200 or (spectrum, method) == ("network", "hutchinson")


def test_the_half_width_pays_for_every_look():
    matrix = matrix_with(SPECTRA["network"])
    fixed = trace(matrix, probes=40, method="hutchinson", generator=seeded(0))
    ratio = fixed.details["half_width"] / fixed.stderr
    assert ratio == pytest.approx(student.ppf(0.975, 39), rel=1e-6)
    peeking = trace(matrix, max_matvecs=60, method="hutchinson", generator=seeded(0))
    ratio = peeking.details["half_width"] / peeking.stderr  # at 10, 15, 22, 33, 49, 60
    assert ratio == pytest.approx(student.ppf(1 - 0.025 / 6, 59), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_sign_of_the_matrix_is_the_sign_of_the_trace_and_nothing_else(method):
    matrix = matrix_with(SPECTRA["power law"])
    plus, minus = (
        trace(s * matrix, tolerance=0.1, method=method, generator=seeded(0)) for s in (1, -1)
    )
    assert minus.value == pytest.approx(-plus.value, rel=1e-12)
    assert minus.matvecs == plus.matvecs
    assert minus.converged


def test_the_default_is_five_percent_within_300_products():
    matrix, exact = matrix_with(SPECTRA["power law"]), SPECTRA["power law"].sum()
    estimate = trace(matrix, generator=seeded(0))
    assert estimate.options == {"method": "hutch++", "tolerance": 0.05}
    assert estimate.converged
    assert estimate.details["half_width"] <= 0.05 * estimate.value
    assert abs(estimate.value - exact) <= estimate.details["half_width"]
    assert estimate.matvecs <= 300


def test_a_trace_near_zero_is_told_not_to_converge():
    matrix = matrix_with(np.r_[np.linspace(-1, 1, 400)])
    estimate = trace(matrix, max_matvecs=100, generator=seeded(0))
    assert not estimate.converged
    assert estimate.matvecs == 100
    assert abs(estimate.value) <= estimate.details["half_width"]
    assert "stopped after 100 products with the value known to ±" in estimate.notes[0]


def test_sampling_in_vain_ends_with_the_exact_value_where_the_budget_allows():
    matrix = matrix_with(np.linspace(-1, 1, 80))
    estimate = trace(matrix, tolerance=0.01, max_matvecs=160, generator=seeded(0))
    assert estimate.exact
    assert estimate.matvecs == 160
    assert abs(estimate.value) < 1e-12
    assert trace(matrix, tolerance=0.01, max_matvecs=159, generator=seeded(0)).matvecs == 80


@pytest.mark.parametrize("size", [1, 2, 30])
def test_a_small_matrix_needs_no_generator(size):
    estimate = trace(torch.eye(size))
    assert (estimate.value, estimate.exact, estimate.matvecs) == (size, True, size)


@pytest.mark.parametrize("method", METHODS)
def test_the_zero_matrix_is_settled_at_the_first_look(method):
    estimate = trace(torch.zeros(300, 300), method=method, generator=seeded(0))
    assert (estimate.value, estimate.stderr, estimate.converged) == (0.0, 0.0, True)
    assert estimate.matvecs == (30 if method == "hutch++" else 10)


def test_the_same_generator_gives_the_same_bits():
    matrix = matrix_with(SPECTRA["network"], torch.float32)
    one, two = (trace(matrix, probes=20, generator=seeded(4)) for _ in range(2))
    assert one == two
    assert trace(matrix, probes=20, generator=seeded(5)).value != one.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 8}, r"`trace\(probes=8\)` draws .* needs a generator; pass `generator="),
        ({}, r"`trace\(tolerance=0.05\)` draws .* or `probes=99` for the exact value"),
        ({"probes": 8, "tolerance": 0.1}, "`probes=8` fixes the budget and `tolerance=0.1`"),
        ({"probes": 1}, "`probes` is 1; an error bar needs `probes=2` or more"),
        ({"probes": 0}, "`probes` is 0; an error bar needs"),
        ({"tolerance": 0.0}, "`tolerance` is 0.0; it is a relative error"),
        ({"tolerance": 1.5}, "`tolerance` is 1.5; it is a relative error"),
        ({"max_matvecs": 1}, "`max_matvecs` is 1; a standard error needs at least 2 products"),
        ({"method": "xtrace"}, "`method` is 'xtrace'; pass \"hutch\\+\\+\" or"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        trace(torch.eye(99), **options)


def test_columns_at_a_time_do_not_change_the_value():
    matrix = matrix_with(SPECTRA["network"])
    found = [trace(matrix, probes=30, together=k, generator=seeded(0)) for k in (1, 3, 8)]
    assert [one.matvecs for one in found] == [30, 30, 30]
    assert found[0].value == pytest.approx(found[2].value, rel=1e-12)
    assert found[1].stderr == pytest.approx(found[2].stderr, rel=1e-9)


def test_a_short_basis_leaves_its_products_to_samples():
    matrix, seen = matrix_with(SPECTRA["network"]), []
    for seed in range(200):
        estimate = trace(matrix, probes=30, basis=2, generator=seeded(seed))
        assert estimate.matvecs == 30
        seen.append((estimate.value - SPECTRA["network"].sum()) / estimate.stderr)
    assert abs(np.mean(seen)) < 3 / np.sqrt(200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_made_orthonormal_in_place_and_dependent_ones_dropped(dtype):
    rows = torch.randn(5, 3000, dtype=dtype, generator=seeded(0))
    rows[1] = 1e-5 * rows[1] + rows[0]
    rows[3] = rows[0] - 1e4 * rows[2]
    span = rows.double().clone()
    found = orthonormal_rows(rows)
    assert found.shape == (4, 3000)
    assert found.data_ptr() == rows.data_ptr()
    wide = found.double()
    rounding = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(wide @ wide.T, torch.eye(4).double(), atol=rounding, rtol=0)
    for row in span[[0, 2, 4]]:
        assert (row - wide.T @ (wide @ row)).norm() < 1e-5 * row.norm()
    assert orthonormal_rows(torch.zeros(2, 10, dtype=dtype)).shape == (0, 10)
    assert orthonormal_rows(torch.zeros(0, 10, dtype=dtype)).shape == (0, 10)
