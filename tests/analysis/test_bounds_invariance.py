"""However a network is written, its bounds are the same; and they leave it as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bound_problems import terms
from cases import build

import flatgauge as fg


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


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mlp", torch.float32),
        ("conv and max-pool", torch.float64),
        ("residual with batch-norm", torch.float32),
    ],
)
def test_powers_of_two_change_no_bit(case, dtype):
    one, other = (fg.bounds(s, draws=4) for s in rescaled(build(case), powers=True, dtype=dtype))
    assert one.term.tolist() == other.term.tolist()
    for column in ("value", "lower", "upper"):
        assert np.array_equal(one[column], other[column], equal_nan=True)


def test_other_factors_change_what_the_hyperprior_resolves():
    surfaces = rescaled(build("mlp"), powers=False, log2_range=4)
    one, other = (fg.bounds(surface, draws=4, bits=44) for surface in surfaces)
    assert one.value.to_numpy() == pytest.approx(other.value.to_numpy(), rel=1e-9, nan_ok=True)
    coarse = [terms(fg.bounds(s, only="normalized", draws=4), "normalized") for s in surfaces]
    shift = abs(coarse[0].value["KL of the weights"] / coarse[1].value["KL of the weights"] - 1)
    assert 1e-6 < shift < 1  # With one scale per octave, rounding is seen.


def test_the_same_seed_gives_the_same_bound_and_nothing_is_left_changed():
    case = build("mlp")
    before = {name: p.clone() for name, p in case.model.state_dict().items()}
    state = torch.get_rng_state()
    surface = case.surface()
    one, other, third = (fg.bounds(surface, draws=3, seed=s) for s in (1, 1, 2))
    assert one.equals(other)
    assert not one.equals(third)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], p) for name, p in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())
