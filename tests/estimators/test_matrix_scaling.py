"""The smallest sum over row and column scales, against literal minimisation and the dual."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from flatgauge.estimators import matrix_scaling
from flatgauge.estimators.matrix_scaling import minimize_scaled_sum


def total(forward, backward, x, y):
    """The sum itself, at logarithms x and y of the scales."""
    logs = x[:, None] + y[None, :]
    return float((forward * np.exp(logs) + backward * np.exp(-logs)).sum())


def literal(forward, backward, *, box=None, starts=3, seed=0):
    """The smallest sum that a general minimiser finds on the logarithms, within a box."""
    rows = len(forward)
    random = np.random.default_rng(seed)

    def value_and_gradient(point):
        logs = point[:rows, None] + point[None, rows:]
        out, back = forward * np.exp(logs), backward * np.exp(-logs)
        gradient = np.concatenate([(out - back).sum(1), (out - back).sum(0)])
        return (out + back).sum(), gradient

    bounds = None if box is None else [(-box, box)] * sum(forward.shape)
    options = {"maxiter": 20_000, "maxfun": 200_000, "ftol": 1e-16, "gtol": 1e-12, "maxcor": 50}
    found = [
        minimize(
            value_and_gradient,
            random.normal(size=sum(forward.shape)),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options=options,
        ).fun
        for _ in range(starts)
    ]
    return min(found)


def cycles(forward, backward):
    """Every simple cycle of the graph row i -> column ~j (A > 0), column ~j -> row i (B > 0)."""
    weights = {(int(i), ~int(j)): forward[i, j] for i, j in zip(*np.nonzero(forward), strict=True)}
    weights |= {(~int(j), int(i)): backward[i, j] for i, j in np.argwhere(backward)}
    found = []

    def extend(path):
        for tail, head in weights:
            if tail == path[-1] and head == path[0]:
                found.append([*zip(path, [*path[1:], path[0]], strict=True)])
            elif tail == path[-1] and head > path[0] and head not in path:
                extend([*path, head])

    for node in {node for edge in weights for node in edge}:
        extend([node])
    return weights, found


def dual(forward, backward):
    """A bound from below: the largest Σ f (1 + log(w / f)) over sums f of cycles, as found."""
    weights, found = cycles(forward, backward)
    if not found:
        return 0.0
    edges = list(weights)
    on = np.array([[edge in cycle for cycle in found] for edge in edges], dtype=float)
    on, w = on[on.any(1)], np.array(list(weights.values()))[on.any(1)]

    def negative(amounts):
        flow = on @ amounts
        return -(flow * (1 + np.log(w / flow))).sum(), -np.log(w / flow) @ on

    start = np.full(len(found), 1.0 / len(found))
    bounds = [(1e-12, None)] * len(found)
    options = {"maxiter": 20_000, "maxfun": 200_000, "ftol": 1e-15, "gtol": 1e-10}
    result = minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return -result.fun


def pair(shape, seed, *, density=1.0, spread=1.0):
    """A random pair with zeros."""
    random = np.random.default_rng(seed)
    both = np.exp(spread * random.normal(size=(2, *shape)))
    return both * (random.random(both.shape) < density)


# -- by hand -----------------------------------------------------------------------------------


def test_one_entry_costs_twice_the_geometric_mean():
    assert minimize_scaled_sum([[9.0]], [[4.0]]).value == 12.0
    assert minimize_scaled_sum([[9.0]], [[4.0]]).products.item() == pytest.approx(2 / 3)


def test_terms_between_components_can_be_driven_to_zero():
    found = minimize_scaled_sum([[1.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]])
    assert (found.value, found.gap, found.converged) == (4.0, 0.0, True)
    assert found.products.tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("turn", [False, True])
def test_a_single_row_or_column_is_a_sum_of_geometric_means(turn):
    forward, backward = pair((1, 7), 3, density=0.7)
    expected = 2 * np.sqrt(forward * backward).sum()
    found = (
        minimize_scaled_sum(forward.T, backward.T)
        if turn
        else minimize_scaled_sum(forward, backward)
    )
    assert found.value == pytest.approx(expected, rel=1e-15)


def test_one_scale_for_all_where_every_row_and_column_is_alike():
    # By symmetry x y is one number: n² (A s + B / s).
    found = minimize_scaled_sum(np.full((5, 5), 3.0), np.full((5, 5), 12.0))
    assert found.value == pytest.approx(25 * 2 * 6, rel=1e-14)
    np.testing.assert_allclose(found.products, 2.0, rtol=1e-12)


def test_a_rank_one_pair_is_balanced_exactly():
    random = np.random.default_rng(0)
    x, y = random.exponential(size=6), random.exponential(size=4)
    common = random.exponential(size=(6, 4))
    found = minimize_scaled_sum(common / np.outer(x, y), common * np.outer(x, y))
    assert found.value == pytest.approx(2 * common.sum(), rel=1e-13)
    np.testing.assert_allclose(found.products, np.outer(x, y), rtol=1e-9)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (200, 100)])
def test_nothing_costs_nothing(shape):
    found = minimize_scaled_sum(np.zeros(shape), np.ones(shape))
    assert (found.value, found.gap, found.converged) == (0.0, 0.0, True)
    assert found.products.shape == shape
    assert not found.products.any()


def test_rows_without_weight_and_columns_without_curvature_cost_nothing():
    forward, backward = pair((5, 6), 1)
    whole = minimize_scaled_sum(forward, backward).value
    forward = np.pad(forward, ((0, 1), (0, 2)), constant_values=3.0)
    backward = np.pad(backward, ((0, 1), (0, 2)), constant_values=3.0)
    backward[5], forward[:, 6], forward[:, 7] = 0, 0, 0
    found = minimize_scaled_sum(forward, backward)
    assert found.value == pytest.approx(whole, rel=1e-12)
    assert not found.products[5].any()
    assert not found.products[:, 6:].any()


# -- against other ways ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2), (3, 5), (7, 4), (12, 12)])
@pytest.mark.parametrize("seed", range(3))
def test_value_is_that_of_a_general_minimiser(shape, seed):
    forward, backward = pair(shape, seed, spread=2.0)
    found = minimize_scaled_sum(forward, backward)
    assert found.value == pytest.approx(literal(forward, backward), rel=1e-8)
    assert found.gap <= 1e-10 * found.value


@pytest.mark.parametrize("seed", range(12))
def test_unattained_infima_are_approached_from_above_and_met_from_below(seed):
    forward, backward = pair((3, 4), seed, density=0.55)
    found = minimize_scaled_sum(forward, backward)
    near, far = (literal(forward, backward, box=box, starts=5) for box in (6.0, 40.0))
    assert near * (1 + 1e-9) >= far >= found.value * (1 - 1e-7) - 1e-7
    assert far == pytest.approx(found.value, rel=1e-4, abs=1e-4)
    below = dual(forward, backward)
    assert below <= found.value * (1 + 1e-12)
    assert below == pytest.approx(found.value, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_the_products_give_the_value(seed):
    forward, backward = pair((9, 6), seed, density=0.5)
    found = minimize_scaled_sum(forward, backward)
    used = found.products > 0
    s = found.products[used]
    assert (forward[used] * s + backward[used] / s).sum() == pytest.approx(found.value, rel=1e-13)


@pytest.mark.parametrize("sweeps", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_gap_is_honest_wherever_it_stops(sweeps, seed, monkeypatch):
    forward, backward = pair((6, 8), seed, spread=0.5)
    best = minimize_scaled_sum(forward, backward)
    monkeypatch.setattr(matrix_scaling, "_SWEEPS", sweeps)
    monkeypatch.setattr(matrix_scaling, "_STEPS", 1)
    rough = minimize_scaled_sum(forward, backward)
    assert rough.value >= best.value * (1 - 1e-14)
    assert rough.value - rough.gap <= best.value * (1 + 1e-14)
    assert rough.converged == (rough.gap <= 1e-8 * rough.value)
    assert rough.gap > 0


def test_groups_are_problems_of_their_own():
    forward, backward = pair((5, 3, 4), 0, density=0.8)
    found = minimize_scaled_sum(forward, backward)
    each = [minimize_scaled_sum(a, b) for a, b in zip(forward, backward, strict=True)]
    assert found.value == pytest.approx(sum(one.value for one in each), rel=1e-13)
    products = np.stack([one.products for one in each])
    np.testing.assert_allclose(found.products, products, rtol=1e-4)


def test_a_block_diagonal_matrix_is_the_sum_of_its_blocks():
    first, second = pair((60, 90), 1), pair((70, 80), 2)
    zero = np.zeros((60, 80)), np.zeros((70, 90))
    whole = [np.block([[a, zero[0]], [zero[1], b]]) for a, b in zip(first, second, strict=True)]
    apart = minimize_scaled_sum(*first).value + minimize_scaled_sum(*second).value
    assert minimize_scaled_sum(*whole).value == pytest.approx(apart, rel=1e-12)


@pytest.mark.parametrize("density", [1.0, 0.3, 0.02])
def test_large_pairs_agree_whichever_way_components_and_steps_are_found(density, monkeypatch):
    forward, backward = pair((150, 120), 0, density=density)
    found = minimize_scaled_sum(forward, backward)
    monkeypatch.setattr("flatgauge.estimators.matrix_scaling._MANY_ENTRIES", 10**9)
    monkeypatch.setattr(matrix_scaling, "_DENSE", 10**9)
    other = minimize_scaled_sum(forward, backward)
    assert found.value == pytest.approx(other.value, rel=1e-12)
    np.testing.assert_array_equal(found.products > 0, other.products > 0)


def test_conjugate_gradients_alone_where_there_are_too_many_rows(monkeypatch):
    forward, backward = pair((40, 50), 0, spread=2.0)
    right = minimize_scaled_sum(forward, backward)
    monkeypatch.setattr(matrix_scaling, "_DENSE", 0)
    monkeypatch.setattr(matrix_scaling, "_MOST_DENSE", 0)
    found = minimize_scaled_sum(forward, backward)
    assert found.converged
    assert found.value == pytest.approx(right.value, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("density", [1.0, 0.4])
def test_sixty_orders_of_magnitude(seed, density):
    random = np.random.default_rng(seed)
    forward, backward = 10 ** random.uniform(-30, 30, (2, 8, 9))
    forward, backward = (m * (random.random(m.shape) < density) for m in (forward, backward))
    found = minimize_scaled_sum(forward, backward)
    assert np.isfinite(found.value)
    assert found.converged
    used = found.products > 0
    s = found.products[used]
    assert (forward[used] * s + backward[used] / s).sum() == pytest.approx(found.value, rel=1e-12)


# -- invariances -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "density"),
    [((4, 6), 1.0), ((7, 5), 0.5), ((6, 6), 0.3), ((130, 110), 1.0), ((9, 3, 3), 0.8)],
)
@pytest.mark.parametrize("seed", range(3))
def test_powers_of_two_change_no_bit(shape, density, seed):
    forward, backward = pair(shape, seed, density=density, spread=2.0)
    random = np.random.default_rng(seed)
    rows = random.integers(-30, 30, shape[:-1])[..., :, None]
    columns = random.integers(-30, 30, (*shape[:-2], shape[-1]))[..., None, :]
    powers = 2 * (rows + columns)
    before = minimize_scaled_sum(forward, backward)
    after = minimize_scaled_sum(np.ldexp(forward, -powers), np.ldexp(backward, powers))
    assert (after.value, after.gap) == (before.value, before.gap)
    np.testing.assert_array_equal(after.products, np.ldexp(before.products, powers))


@pytest.mark.parametrize("seed", range(3))
def test_any_factors_change_rounding_only(seed):
    forward, backward = pair((6, 7), seed)
    random = np.random.default_rng(seed)
    factors = np.outer(np.exp(9 * random.normal(size=6)), np.exp(9 * random.normal(size=7)))
    before = minimize_scaled_sum(forward, backward).value
    after = minimize_scaled_sum(forward / factors, backward * factors).value
    assert after == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize("density", [1.0, 0.4])
def test_permutations_and_transposition_change_rounding_only(density):
    forward, backward = pair((8, 11), 2, density=density)
    random = np.random.default_rng(0)
    order = np.ix_(random.permutation(8), random.permutation(11))
    before = minimize_scaled_sum(forward, backward).value
    assert minimize_scaled_sum(forward[order], backward[order]).value == pytest.approx(
        before, rel=1e-12
    )
    assert minimize_scaled_sum(forward.T, backward.T).value == pytest.approx(before, rel=1e-12)
    assert minimize_scaled_sum(backward, forward).value == pytest.approx(before, rel=1e-12)


def test_value_grows_with_the_root_of_both():
    forward, backward = pair((8, 11), 2)
    before = minimize_scaled_sum(forward, backward).value
    assert minimize_scaled_sum(9 * forward, 4 * backward).value == pytest.approx(
        6 * before, rel=1e-12
    )


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_entries_must_be_finite_and_not_negative(bad):
    with pytest.raises(ValueError, match="finite and at least zero"):
        minimize_scaled_sum([[bad]], [[1.0]])


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"A has shape \(2, 2\), but B has shape \(2, 3\)"):
        minimize_scaled_sum(np.ones((2, 2)), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"shape \(2,\) is neither"):
        minimize_scaled_sum(np.ones(2), np.ones(2))
