"""Spectra against dense eigenvalues, before and after rescaling, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cases import build
from model_state import assert_same, everything_of, used
from reference import dense_hessian

import flatgauge as fg
from flatgauge.surface.examples import bowl, two_weights

UNITS = {
    "weights": lambda parameter: torch.ones_like(parameter),
    "per tensor": lambda parameter: torch.full_like(parameter, parameter.norm().item()),
    "per weight": lambda parameter: parameter.abs(),
}


def dense_eigenvalues(case, geometry) -> np.ndarray:
    """All eigenvalues of D H D where D is not zero, falling, from the definitions."""
    scale = torch.cat([UNITS[geometry](p.detach()).reshape(-1) for p in case.model.parameters()])
    scaled = scale[:, None] * dense_hessian(case) * scale
    moving = scale != 0
    return torch.linalg.eigvalsh(scaled[moving][:, moving]).flip(0).numpy()


def rescaled(case, *, seed: int = 0, powers_of_two: bool = True):
    gauge = fg.find_gauge(case.model, case.inputs[:2])
    generator = torch.Generator().manual_seed(seed)
    move = gauge.sample(generator=generator, powers_of_two=powers_of_two)
    twin = gauge.rescale(case.model, move)
    return fg.LossSurface(twin, case.loss, (case.inputs, case.targets))


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        *(("mlp", geometry) for geometry in UNITS),
        ("conv and max-pool", "per tensor"),
        ("gelu", "weights"),
    ],
)
def test_against_dense_eigenvalues(name, geometry):
    case = build(name)
    case.model.eval()
    expected = dense_eigenvalues(case, geometry)
    found = fg.spectrum(case.surface(), geometry=geometry, probes=10, steps=16, top=3)
    assert found.size == len(expected)
    for estimate, value in zip(found.top, expected, strict=False):
        assert estimate.converged
        assert abs(estimate.value - value) <= estimate.bound
        assert estimate.bound <= 1e-3 * abs(value)
    slack = 1e-12 * np.abs(expected).max()
    smallest = found.smallest
    assert smallest.value >= expected[-1] - slack
    assert np.abs(expected - smallest.value).min() <= smallest.bound + slack
    assert abs(found.trace.value - expected.sum()) < 5 * found.trace.stderr
    for edge in (0.3 * expected[0], 0.01 * expected[0], 0.5 * expected[-1]):
        share = found.share(-math.inf, edge)
        assert abs(share.value - (expected <= edge).mean()) < 5 * share.stderr + share.bound + 0.02


def test_by_hand():
    found = fg.spectrum(bowl([4.0, 1.0, 1.0, 0.0, 0.0, 0.0]), top=3, probes=100)
    assert [item.value for item in found.top] == pytest.approx([4.0, 1.0, 1.0])  # repeated: twice
    assert found.smallest.value == pytest.approx(0.0, abs=1e-12)
    assert abs(found.trace.value - 6.0) < 5 * found.trace.stderr
    assert abs(found.near_zero.value - 0.5) < 5 * found.near_zero.stderr
    assert found.near_zero.bound == found.negative.value == 0.0
    assert found.axis.unit == 1.0
    # The Hessian [[2b², 4ab], [4ab, 2a²]] in units of |a| = 2, |b| = 3 is [[72, 144], [144, 72]].
    found = fg.spectrum(two_weights(2.0, 3.0), geometry="per weight")
    assert [item.value for item in found.top] == pytest.approx([216.0, -72.0])
    assert found.options["top"] == found.options["steps"] == 2


@pytest.mark.parametrize(
    ("name", "dtype", "geometries"),
    [
        ("mlp", torch.float32, ("per weight", "basis paths", "balanced")),
        ("conv and max-pool", torch.float64, ("per weight",)),
    ],
)
def test_powers_of_two_leave_every_bit_of_invariant_spectra(name, dtype, geometries):
    case = build(name)
    case.model.to(dtype).eval()
    inputs = case.inputs.to(dtype)
    gauge = fg.find_gauge(case.model, inputs[:2])
    move = gauge.sample(generator=torch.Generator().manual_seed(3), powers_of_two=True)
    models = {"as it is": case.model, "rescaled": gauge.rescale(case.model, move)}
    pair = {n: fg.LossSurface(m, case.loss, (inputs, case.targets)) for n, m in models.items()}
    for geometry in geometries:
        one, other = fg.spectrum(pair, geometry=geometry, probes=2, steps=12, top=3).values()
        assert torch.equal(one.density.nodes, other.density.nodes)
        assert torch.equal(one.density.weights, other.density.weights)
        assert [item.value for item in one.top] == [item.value for item in other.top]
        assert one.to_frame().equals(other.to_frame())


def test_rescaling_moves_the_spectrum_of_the_hessian_and_not_per_weight():
    case = build("mlp")
    pair = {"as it is": case.surface(), "rescaled": rescaled(case, seed=1, powers_of_two=False)}
    plain = fg.spectrum(pair, probes=2, steps=20, top=2)
    one, other = (item.top[0].value for item in plain.values())
    assert other > 10 * one
    weighted = fg.spectrum(pair, geometry="per weight", probes=2, steps=20, top=2)
    first, second = weighted.values()
    for before, after in zip(first.top, second.top, strict=True):
        assert after.value == pytest.approx(before.value, rel=1e-9)
    curves = [item.to_frame()["per_decade"] for item in (first, second)]
    assert np.abs(curves[0] - curves[1]).max() < 1e-6 * curves[0].max()


def test_spectra_share_axis_and_grid():
    case = build("mlp")
    found = fg.spectrum({"a": case.surface(), "b": rescaled(case)}, probes=2, steps=20, top=2)
    assert list(found) == ["a", "b"]
    assert found.axis.unit == min(item.axis.unit for item in found.values())
    frame = found.to_frame()
    grids = [part["eigenvalue"].to_numpy() for _, part in frame.groupby("model")]
    np.testing.assert_array_equal(*grids)
    for line in found.lines():
        assert np.trapezoid(line.values, line.places) == pytest.approx(found["a"].size, rel=1e-3)
    with pytest.raises(KeyError, match="there is no spectrum of 'c'; there are a, b"):
        found["c"]


def test_measures_of_the_same_geometry_agree():
    surface = build("mlp").surface()
    report = fg.measure(surface, measures=["psi_max_eigenvalue", "balanced:hessian_max_eigenvalue"])
    for geometry, measured in zip(("basis paths", "balanced"), report.values(), strict=True):
        found = fg.spectrum(surface, geometry=geometry, probes=2, steps=10, top=1)
        assert found.top[0].value == pytest.approx(measured.value, rel=2e-3)
    assert found.geometry == "balanced"


def test_options_of_a_geometry_reach_it():
    surface = build("mlp").surface()
    found = fg.spectrum(surface, geometry="basis paths", skeleton="diagonal", probes=2, steps=5)
    assert found.options["skeleton"] == "diagonal"
    with pytest.raises(
        ValueError, match=r"'weights' has no option 'skeleton'; its options are none"
    ):
        fg.spectrum(surface, skeleton="diagonal")


def test_what_does_not_move_is_left_out_and_told():
    case = build("mlp")
    with torch.no_grad():
        case.model[0].bias.zero_()
    surface = case.surface()
    found = fg.spectrum(surface, geometry="per weight", probes=2, steps=10, top=1)
    assert found.size == surface.size - 5
    assert "5 of 64 coordinates do not move (weights of zero) and are left out" in found.notes
    layers = fg.spectrum(surface, parameters="layers", probes=2, steps=10, top=1)
    weights = sum(p.numel() for n, p in case.model.named_parameters() if n.endswith("weight"))
    assert layers.size == weights
    assert layers.options["parameters"] == "layers"
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="none of the 64 coordinates moves the weights"):
        fg.spectrum(surface, geometry="per weight")


def test_products_are_counted_and_not_spent_twice():
    surface = build("mlp").surface()
    found = fg.spectrum(surface, probes=3, steps=7, top=2)
    assert surface.matvecs == found.matvecs
    assert found.density.matvecs == 21
    again = fg.spectrum(surface, probes=3, steps=7, top=2)
    assert surface.matvecs == found.matvecs == again.matvecs
    assert again.density is found.density
    with torch.no_grad():
        surface.model[0].weight.mul_(2)
    assert fg.spectrum(surface, probes=3, steps=7, top=2).top[0].value != found.top[0].value


def test_no_top_eigenvalues():
    found = fg.spectrum(build("mlp").surface(), probes=2, steps=5, top=0)
    assert found.top == ()
    assert found.matvecs == 10
    assert "λ1" not in repr(found)


def test_progress_is_told():
    seen = []
    surface = build("mlp").surface()
    fg.spectrum(surface, probes=2, steps=5, top=1, progress=lambda *step: seen.append(step))
    assert seen[:10] == [("spectral density", done, 10) for done in range(1, 11)]
    assert {name for name, _, _ in seen[10:]} == {"top eigenvalues"}


def test_the_model_is_left_as_found():
    case = build("residual with batch-norm")
    model = used(case)
    surface = case.surface()
    before = everything_of(model)
    for geometry in ("weights", "per weight"):
        fg.spectrum(surface, geometry=geometry, probes=2, steps=4, top=1).plot()
    assert_same(everything_of(model), before)


def test_a_seed_is_a_spectrum():
    surface = build("mlp").surface()
    one, other = (fg.spectrum(build("mlp").surface(), probes=2, steps=5, seed=4) for _ in "ab")
    assert torch.equal(one.density.nodes, other.density.nodes)
    third = fg.spectrum(surface, probes=2, steps=5, seed=5)
    assert not torch.equal(one.density.nodes, third.density.nodes)


def test_numbers_in_text_json_and_frame_are_the_same(tmp_path):
    found = fg.spectrum(build("mlp").surface(), probes=3, steps=10, top=2)
    contents = json.loads(found.to_json(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text()) == contents == found.to_dict()
    assert contents["top"][0]["value"] == found.top[0].value
    assert contents["trace"] == {
        "value": found.trace.value,
        "stderr": found.trace.stderr,
        "bound": None,
    }
    assert contents["facts"]["samples"] == 11
    assert contents["curve"]["per_decade"] == found.to_frame()["per_decade"].tolist()
    assert (np.array(contents["nodes"]) == found.density.nodes.numpy()).all()
    text = repr(found)
    assert f"λ1             {found.top[0]}" in text
    assert f"trace          {found.trace}" in text
    both = fg.spectrum({"a": build("mlp").surface()}, probes=3, steps=10, top=2)
    assert both.to_dict()["spectra"]["a"]["nodes"] == contents["nodes"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"geometry": "flat"}, "there is no geometry 'flat'; the geometries are weights"),
        ({"probes": 1}, r"`probes=1` must be a whole number of at least 2"),
        ({"steps": 0}, r"`steps=0` must be a whole number of at least 1"),
        ({"steps": 2.5}, r"`steps=2.5` must be a whole number"),
        ({"top": -1}, r"`top=-1` must be a whole number of at least 0"),
        ({"top": True}, r"`top=True` must be a whole number"),
        ({"seed": -1}, r"`seed=-1` must be a whole number from 0"),
        ({"parameters": "some"}, r"`parameters='some'` must be 'all'"),
    ],
)
def test_settings_that_mean_nothing(settings, message):
    with pytest.raises(ValueError, match=message):
        fg.spectrum(two_weights(2.0, 3.0), **settings)


def test_what_is_no_surface():
    with pytest.raises(TypeError, match=r"needs a LossSurface, or a dict of them by name"):
        fg.spectrum(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"got a Linear; make one with LossSurface"):
        fg.spectrum({"a": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="there is no surface to compute a spectrum of"):
        fg.spectrum({})


def test_runs_that_do_not_fit_say_what_does():
    model, data = torch.nn.Linear(399, 1).double(), torch.ones(3, 399).double()
    surface = fg.LossSurface(model, "mse", (data, data[:, :1]), memory="1MiB")
    with pytest.raises(MemoryError, match=r"400 steps keep as many vectors of 400 .*`steps=327`"):
        fg.spectrum(surface, steps=1000)


def test_top_eigenvalues_that_are_not_settled_are_told(monkeypatch):
    monkeypatch.setattr("flatgauge.analysis.spectra.MAX_MATVECS", 4)
    found = fg.spectrum(build("mlp").surface(), probes=2, steps=4, top=3)
    assert not all(item.converged for item in found.top)
    assert any("not all of the 3 largest eigenvalues are known to 0.1%" in n for n in found.notes)
    assert "note: after 4 products" in repr(found)
