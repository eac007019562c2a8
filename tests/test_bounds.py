"""Bounds on the 0-1 error: by hand, on problems of known risk, and however a network is written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import build
from scipy.stats import norm
from torch import nn

import flatgauge as fg
from flatgauge.guarantees.terms import COLUMNS

PARTS = ["normalized", "basis paths"]


class OneWeight(nn.Module):
    """Two classes, one weight: the first class where w x > 0."""

    def __init__(self, weight):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.line.weight, weight)

    def forward(self, x):
        score = self.line(x)
        return torch.cat([score, torch.zeros_like(score)], 1)


def signs(samples, *, flipped=0.0, seed=0):
    """Inputs of both signs, labelled by their sign, some labels flipped."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    wrong = torch.rand(samples, generator=generator) < flipped
    return inputs, ((inputs[:, 0] < 0) ^ wrong).long()


def one_weight(weight, samples, **options):
    return fg.LossSurface(OneWeight(weight), "cross_entropy", signs(samples, **options))


def terms(frame, bound):
    return frame[frame.bound == bound].set_index("term")


def test_one_weight_by_hand():
    weight, m, delta = 3.0, 400, 0.1
    surface = one_weight(weight, m)
    frame = fg.bounds(surface, only="normalized", delta=delta, bits=48, draws=1000)
    found = terms(frame, "normalized").value
    inputs = signs(m)[0]
    p = torch.sigmoid(weight * inputs)
    curvature = float((p * (1 - p) * inputs**2).mean())
    lam = found["λ"]
    assert any(lam == pytest.approx(math.sqrt(2 * m) * 2**k) for k in range(5))
    variance = weight / math.sqrt(curvature) / math.sqrt(2 * lam)
    divergence = weight**2 / (2 * variance)
    assert found["KL of the weights"] == pytest.approx(divergence, rel=1e-9)
    assert found["(B) weights / λ"] == pytest.approx(divergence / lam, rel=1e-9)
    assert found["scales"] == 2
    assert found["(B) scales / λ"] == pytest.approx(2 * 48 * math.log(2) / lam)
    assert found["(B) told outright / λ"] == 0.0
    assert found["ln(1/δ) / λ"] == pytest.approx(math.log(20) / lam)
    assert found["price of the grid / λ"] == pytest.approx(math.log(5) / lam)
    assert found["Ψ / λ"] == pytest.approx(lam / 800)
    assert (found["m"], found["L_S(f)"]) == (m, 0.0)
    # Noise flips the sign of the weight, and then every sample is wrong.
    row = terms(frame, "normalized").loc["(C) L_S(Q) - L_S(f)"]
    assert row.lower < norm.cdf(-weight / math.sqrt(variance)) < row.upper


def test_parts_add_up_to_the_total():
    frame = fg.bounds(build("mlp").surface(), draws=3)
    sums = frame[frame.part].groupby("bound").value.sum()
    assert tuple(frame.columns) == COLUMNS
    for bound, name in (
        ("normalized", "L_D(Q) at most"),
        ("basis paths", "E_u l(v+u) at most"),
        ("theorem 5.1", "max l(v') - l(v) at most"),
    ):
        assert terms(frame, bound).value[name] == pytest.approx(sums[bound], rel=1e-12)
    for bound in PARTS:
        assert terms(frame, bound).value["vacuous"] == 1.0
        assert "unknown without held-out data" in terms(frame, bound).note["(A) L_D(f) - L_D(Q)"]


def test_assumptions_are_stated_where_the_bound_is():
    frame = fg.bounds(build("residual with batch-norm").surface(), draws=2)
    for bound, name in (("normalized", "L_D(Q) at most"), ("basis paths", "E_u l(v+u) at most")):
        note = terms(frame, bound).note[name]
        for words in ("training set", "i.i.d.", "confidence 0.95", "without looking", "picked"):
            assert words in note
    told = terms(frame, "normalized").note["(B) told outright / λ"]
    assert told == "15 trained parameters and 12 stored numbers: without noise"
    # The numbers a batch-norm stores come from the data.
    assert terms(frame, "basis paths").value["KL told outright"] == 12 * 64 * math.log(2)


def test_kl_of_the_skeleton_and_signs_by_hand():
    surface = build("mlp without biases").surface()
    strong = terms(fg.bounds(surface, only="basis paths", draws=2), "basis paths").value
    # 4-5-4-3: five units with 4 edges out and 4 in, four with 3 out and 5 in.
    edges = 5 * math.log(4 * 4) + 4 * math.log(3 * 5)
    assert strong["KL of the skeleton"] == pytest.approx(edges)
    assert strong["KL of the signs"] == pytest.approx(9 * math.log(2) + math.log(2))
    assert strong["KL of σ_P"] == pytest.approx(8 * math.log(2))
    frame = fg.bounds(surface, only="basis paths", draws=2, skeleton="diagonal")
    assert terms(frame, "basis paths").value["KL of the skeleton"] == 0.0


def test_the_path_bound_is_formula_8():
    surface = build("mlp without biases").surface()
    found = terms(fg.bounds(surface, only="basis paths", draws=4, delta=0.2), "basis paths").value
    names = ["KL of the paths", "KL of the signs", "KL of the skeleton", "KL told outright"]
    kl = sum(found[name] for name in [*names, "KL of σ_P"])
    n = found["n"]
    root = 4 * math.sqrt((kl + math.log(2 * n / 0.1)) / n)
    assert found["4 √((KL + ln(2n/δ)) / n)"] == pytest.approx(root, rel=1e-12)
    values = fg.basis_paths(build("mlp without biases").model, torch.zeros(2, 4).double()).values
    assert found["KL of the paths"] > float((values**2).sum()) / (2 * found["σ_P"] ** 2)


@pytest.mark.parametrize("delta", [0.2, 0.5])
def test_the_allowance_for_draws_covers_as_often_as_it_says(delta):
    """Each draw of the one-weight net is all right or all wrong, with a probability known."""
    surface, missed, runs = one_weight(0.5, 60), 0, 100
    for seed in range(runs):
        found = terms(
            fg.bounds(surface, only="normalized", draws=6, delta=delta, seed=seed, bits=20),
            "normalized",
        ).value
        variance = 0.25 / (2 * found["KL of the weights"])
        chance = norm.cdf(-0.5 / math.sqrt(variance))
        said = found["L_S(f)"] + found["(C) L_S(Q) - L_S(f)"] + found["allowance for the draws"]
        missed += said < chance
    assert missed / runs <= delta / 2 + 3 * math.sqrt(delta / 2 / runs)


@pytest.mark.parametrize("flipped", [0.0, 0.3])
def test_the_risk_under_noise_is_below_the_bound_on_problems_of_known_risk(flipped):
    """The weight is "trained": its sign is the one with fewer errors on the sample."""
    held, runs, delta, informative = 0, 8, 0.5, 0
    for seed in range(runs):
        inputs, labels = signs(300, flipped=flipped, seed=seed)
        better = (labels == (inputs[:, 0] < 0)).double().mean() > 0.5
        model = OneWeight(2.0 if better else -2.0)
        surface = fg.LossSurface(model, "cross_entropy", (inputs, labels))
        found = terms(
            fg.bounds(surface, only="normalized", draws=30, delta=delta, seed=seed), "normalized"
        ).value
        variance = 4.0 / (2 * found["KL of the weights"])
        turned = norm.cdf(-2.0 / math.sqrt(variance))
        error = flipped if better else 1 - flipped
        risk = (1 - turned) * error + turned * (1 - error)
        held += risk <= found["L_D(Q) at most"]
        informative += found["L_D(Q) at most"] < 1
    assert held / runs >= 1 - delta
    assert informative == runs


def test_heldout_data_tell_the_rest():
    surface = one_weight(2.0, 300, flipped=0.2)
    fresh = signs(2000, flipped=0.2, seed=1)
    frame = terms(fg.bounds(surface, only="normalized", holdout=fresh), "normalized")
    a = frame.loc["(A) L_D(f) - L_D(Q)"]
    variance = 4.0 / (2 * frame.value["KL of the weights"])
    turned = norm.cdf(-2.0 / math.sqrt(variance))
    true = 0.2 - ((1 - turned) * 0.2 + turned * 0.8)
    assert a.lower < true < a.upper
    assert a.lower < a.value < a.upper
    own = frame.loc["L_D(f) on held-out data"]
    assert own.lower < 0.2 < own.upper
    bound = frame.value["L_D(Q) at most"] + a.upper
    assert frame.value["L_D(f) at most"] == pytest.approx(bound)
    other = fg.LossSurface(surface.model, "cross_entropy", fresh)
    again = terms(fg.bounds(surface, only="normalized", holdout=other), "normalized")
    assert again.value.equals(frame.value)


def test_intervals_of_heldout_data_cover():
    """(A) is known exactly here; the intervals are wide, so they never fail."""
    surface, missed = one_weight(0.5, 60, flipped=0.2), 0
    for seed in range(30):
        fresh = signs(50, flipped=0.2, seed=100 + seed)
        found = terms(
            fg.bounds(surface, only="normalized", holdout=fresh, draws=8, delta=0.5, seed=seed),
            "normalized",
        )
        variance = 0.25 / (2 * found.value["KL of the weights"])
        turned = norm.cdf(-0.5 / math.sqrt(variance))
        true = 0.2 - ((1 - turned) * 0.2 + turned * 0.8)
        row = found.loc["(A) L_D(f) - L_D(Q)"]
        missed += not row.lower <= true <= row.upper
    assert missed / 30 <= 0.5


def rescaled(case, *, powers, dtype=torch.float64, log2_range=6):
    model = case.model.to(dtype)
    inputs = case.inputs.to(dtype)
    gauge = fg.find_gauge(model, inputs[:4])
    move = gauge.sample(
        generator=torch.Generator().manual_seed(5), log2_range=log2_range, powers_of_two=powers
    )
    return [
        fg.LossSurface(net, "cross_entropy", (inputs, case.targets))
        for net in (model, gauge.rescale(model, move))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_powers_of_two_change_no_bit(case, dtype):
    one, other = (fg.bounds(s, draws=4) for s in rescaled(build(case), powers=True, dtype=dtype))
    assert one.term.tolist() == other.term.tolist()
    for column in ("value", "lower", "upper"):
        assert np.array_equal(one[column], other[column], equal_nan=True)


@pytest.mark.parametrize("case", ["mlp", "mlp without biases"])
def test_other_factors_change_what_the_hyperprior_resolves(case):
    surfaces = rescaled(build(case), powers=False, log2_range=4)
    one, other = (fg.bounds(surface, draws=4, bits=44) for surface in surfaces)
    assert one.value.to_numpy() == pytest.approx(other.value.to_numpy(), rel=1e-9, nan_ok=True)
    coarse = [terms(fg.bounds(s, only="normalized", draws=4), "normalized") for s in surfaces]
    shift = abs(coarse[0].value["KL of the weights"] / coarse[1].value["KL of the weights"] - 1)
    assert 1e-6 < shift < 1  # With one scale per octave, rounding is seen.


def test_the_same_seed_gives_the_same_bound_and_nothing_is_left_changed():
    case = build("mlp")
    before = {name: p.clone() for name, p in case.model.state_dict().items()}
    state = torch.get_rng_state()
    one, other, third = (fg.bounds(case.surface(), draws=3, seed=s) for s in (1, 1, 2))
    assert one.equals(other)
    assert not one.equals(third)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())


def test_ties_and_broken_outputs_are_wrong():
    model = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(model.weight)
    surface = fg.LossSurface(model, "cross_entropy", (torch.ones(9, 2), torch.arange(9) % 3))
    found = terms(fg.bounds(surface, only="normalized", draws=2), "normalized")
    assert "constant logits" in found.note["KL of the weights"]
    assert found.value["L_S(f)"] == 1.0
    assert found.value["KL of the weights"] == 0.0


def test_ignored_labels_do_not_count():
    inputs, labels = signs(300)
    labels[:40] = -100
    surface = fg.LossSurface(OneWeight(2.0), "cross_entropy", (inputs, labels))
    found = terms(fg.bounds(surface, only="normalized", draws=2), "normalized").value
    assert (found["m"], found["L_S(f)"]) == (260, 0.0)


def test_a_bound_that_is_not_there_is_told_and_refused_by_name():
    surface = build("attention").surface()
    frame = fg.bounds(surface, draws=2)
    assert terms(frame, "basis paths").index.tolist() == ["not available"]
    assert "no edge from one unit to another" in terms(frame, "basis paths").note.iloc[0]
    with pytest.raises(ValueError, match="no edge from one unit to another"):
        fg.bounds(surface, only="basis paths", draws=2)


def test_frozen_parameters():
    case = build("mlp")
    case.model[0].requires_grad_(False)
    told = fg.bounds(case.surface(), draws=2)
    assert "is frozen" in terms(told, "basis paths").note.iloc[0]
    given = fg.bounds(case.surface(), only="normalized", draws=2, frozen="given")
    numbers = [terms(f, "normalized").value["numbers told outright"] for f in (told, given)]
    assert numbers == [25 + 7, 7]


def test_regression_is_refused():
    surface = build("leaky relu with mse").surface()
    with pytest.raises(ValueError, match="0-1 loss needs class labels, but the targets are"):
        fg.bounds(surface)


def test_one_output_is_refused():
    inputs, labels = signs(20)
    model = nn.Linear(1, 1).double()
    surface = fg.LossSurface(model, "binary_cross_entropy", (inputs, labels[:, None].double()))
    with pytest.raises(ValueError, match="one output per class"):
        fg.bounds(surface)
    surface = fg.LossSurface(model, lambda o, t: (o[:, 0] * t).mean(), (inputs, labels))
    with pytest.raises(ValueError, match="at least two classes"):
        fg.bounds(surface)


def test_labels_per_position_are_refused():
    inputs = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(6, 4, dtype=torch.long)
    surface = fg.LossSurface(nn.Linear(3, 5), "cross_entropy", (inputs, labels))
    with pytest.raises(ValueError, match="one per independent sample"):
        fg.bounds(surface)


def test_a_model_without_layers_is_refused():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return x + self.shift

    inputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    surface = fg.LossSurface(Shift(), "cross_entropy", (inputs, torch.arange(9) % 3))
    with pytest.raises(ValueError, match="no layers"):
        fg.bounds(surface, only="normalized")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "between 0 and 1"),
        ({"draws": 0}, "`draws=0` must be a whole number from 1"),
        ({"bits": 4}, "from 8 to 48"),
        ({"seed": -1}, "`seed=-1`"),
        ({"frozen": "no"}, "use 'told'"),
        ({"only": "pac"}, "the bounds are normalized, basis paths, theorem 5.1"),
        ({"skeleton": "weakest"}, "`skeleton='weakest'` is unknown"),
        ({"surrogate": "hinge"}, "`surrogate='hinge'` is unknown"),
        ({"epsilon": -1.0}, "`epsilon=-1.0` must be"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fg.bounds(one_weight(1.0, 20), **options)


def test_what_is_no_surface_or_no_holdout_is_refused():
    with pytest.raises(TypeError, match="needs a LossSurface, but got a Linear"):
        fg.bounds(nn.Linear(2, 2))
    surface = one_weight(1.0, 20)
    with pytest.raises(ValueError, match="data that it has not seen"):
        fg.bounds(surface, holdout=surface)
