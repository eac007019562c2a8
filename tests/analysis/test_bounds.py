"""Bounds on the 0-1 error: by hand, on problems of known risk, and however a network is written."""

from __future__ import annotations

import math

import pytest
import torch
from bound_problems import OneWeight, one_weight, signs, terms
from cases import build
from scipy.stats import norm
from torch import nn

import flatgauge as fg
from flatgauge.analysis.bounds.terms import COLUMNS

PARTS = ["normalized", "basis paths"]


def test_one_weight_by_hand():
    weight, m, delta = 3.0, 400, 0.1
    surface = one_weight(weight, m)
    frame = fg.bounds(surface, only="normalized", delta=delta, bits=48, draws=500)
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
    held, runs, delta, informative = 0, 5, 0.5, 0
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
    for seed in range(20):
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
    assert missed / 20 <= 0.5


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
