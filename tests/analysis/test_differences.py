"""Paired differences: the shares are right, the intervals cover, and ranks follow them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import flatgauge as fg
from flatgauge.analysis.comparison import Comparison
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.ranking import SamplingError, difference, rank, sampling_errors
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import aggregate_layers
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.normalized_sharpness import root_of_trace
from flatgauge.report.tables import print_tables
from flatgauge.report.views.comparison import difference_table

NAMES = ("kappa_trace_sum", "matrix_normalized_sharpness")
OPTIONS = {"kappa_trace_sum": {}, "matrix_normalized_sharpness": {"surrogate": None}}


def networks() -> dict[str, nn.Module]:
    """Two networks, the second a little off the first."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    second = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for new, old in zip(second.parameters(), first.parameters(), strict=True):
            new.copy_(old + 0.1 * torch.randn_like(old))
    return {"a": first, "b": second}


@pytest.fixture(scope="module")
def population():
    """All samples there are, and the surfaces of both networks on them."""
    torch.manual_seed(1)
    inputs = torch.randn(3000, 4).double() * torch.rand(3000, 1).double().mul(2).exp() / 2
    targets = torch.randint(3, (3000,))
    models = networks()
    surfaces = {n: fg.LossSurface(m, "cross_entropy", (inputs, targets)) for n, m in models.items()}
    return inputs, targets, models, surfaces


class Sampled:
    """What `matrix_normalized_sharpness` and `kappa_trace_sum` are on any choice of samples.

    They are functions of the layers' traces, and those are means over samples: every sample's
    trace, taken once, gives the values and shares on all choices without another sweep.
    """

    def __init__(self, surface: fg.LossSurface) -> None:
        self.blocks = block_curvature(surface, ("trace",)).layers

    def on(self, index: torch.Tensor) -> dict[str, Estimate]:
        chosen = {}
        for name, block in self.blocks.items():
            shares = block.samples["trace"][index]
            chosen[name] = replace(
                block, values={"trace": shares.mean()}, samples={"trace": shares}
            )
        scaled = {n: b.layer_value("trace", b.squared_norm) for n, b in chosen.items()}
        rooted = {n: root_of_trace(b) for n, b in chosen.items()}
        values = (aggregate_layers(scaled, "sum"), aggregate_layers(rooted, "sum"))
        return dict(zip(NAMES, values, strict=True))


def error_of(first: Estimate, second: Estimate) -> SamplingError:
    shares = first.samples - second.samples
    return SamplingError(float(shares.std() / math.sqrt(len(shares))), len(shares))


# -- shares -----------------------------------------------------------------------------------


def test_shares_are_the_values_of_single_samples_weighted_as_in_the_loss():
    """Class weights make the mean a ratio: the shares are its influence function."""
    torch.manual_seed(2)
    model = networks()["a"]
    inputs, targets = torch.randn(7, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    weights = torch.tensor([1.0, 2.0, 5.0]).double()
    loss = nn.CrossEntropyLoss(weight=weights)
    whole = fg.measure(fg.LossSurface(model, loss, (inputs, targets)), measures=OPTIONS)
    each = []
    for n in range(7):
        alone = fg.LossSurface(model, "cross_entropy", (inputs[n : n + 1], targets[n : n + 1]))
        each.append(fg.measure(alone, measures=["kappa_trace_sum"])["kappa_trace_sum"].value)
    counts = weights[targets].numpy()
    value = np.average(each, weights=counts)
    expected = value + counts * (np.array(each) - value) / counts.mean()
    estimate = whole["kappa_trace_sum"]
    assert estimate.value == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(estimate.samples.numpy(), expected, rtol=1e-10)


def test_shares_average_to_the_value_and_spread_to_the_data_error(population):
    surface = population[3]["a"]
    report = fg.measure(
        surface.subset(200),
        measures=["hessian_trace", "kappa_sum", "kappa_max", "rho_sum", "fisher_rao_norm", *NAMES],
    )
    for estimate in report.values():
        assert len(estimate.samples) == 200
        assert float(estimate.samples.mean()) == pytest.approx(estimate.value, rel=1e-3)
        spread = float(estimate.samples.std()) / math.sqrt(200)
        assert spread == pytest.approx(estimate.data_stderr, rel=1e-6)
    assert "samples" not in report.to_dict()["measures"]["rho_sum"]


# -- intervals --------------------------------------------------------------------------------


def test_intervals_cover_the_difference_of_the_population(population):
    """2,000 choices of 150 samples: 95 % of the intervals hold the truth, to 3 z-scores."""
    inputs, targets, models, surfaces = population
    sampled = {name: Sampled(surface) for name, surface in surfaces.items()}
    everything = {name: each.on(torch.arange(3000)) for name, each in sampled.items()}
    truth = {m: everything["a"][m].value - everything["b"][m].value for m in NAMES}
    generator, rounds = torch.Generator().manual_seed(3), 2000
    held, misled = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0)
    for _ in range(rounds):
        index = torch.randint(3000, (150,), generator=generator)
        found = {name: each.on(index) for name, each in sampled.items()}
        for measure in NAMES:
            one, other = found["a"][measure], found["b"][measure]
            interval = difference(one, other, error_of(one, other))
            held[measure] += interval.low <= truth[measure] <= interval.high
            misled[measure] += interval.sign == -np.sign(truth[measure])
    for measure in NAMES:
        z = (held[measure] - 0.95 * rounds) / math.sqrt(rounds * 0.95 * 0.05)
        assert abs(z) < 3, (measure, held[measure] / rounds)
        assert misled[measure] < 0.025 * rounds
    # What was simulated is what is really measured on such a choice.
    real = fg.compare(
        {
            name: fg.LossSurface(model, "cross_entropy", (inputs[index], targets[index]))
            for name, model in models.items()
        },
        measures=OPTIONS,
    )
    frame = real.differences().set_index("measure")
    for measure in NAMES:
        one, other = (found[name][measure] for name in ("a", "b"))
        interval = difference(one, other, error_of(one, other), rounding=1e-10)
        for column in ("value", "stderr", "low", "high", "p"):
            written = "difference" if column == "value" else column
            assert frame.loc[measure, written] == pytest.approx(getattr(interval, column), rel=1e-6)
        assert frame.loc[measure, "kind"] == "paired"


def test_the_error_is_that_of_a_paired_bootstrap_and_less_than_that_of_both(population):
    sampled = {name: Sampled(surface) for name, surface in population[3].items()}
    generator = torch.Generator().manual_seed(4)
    index = torch.randint(3000, (400,), generator=generator)
    found = {name: each.on(index) for name, each in sampled.items()}
    draws: dict[str, list[float]] = {measure: [] for measure in NAMES}
    for _ in range(1000):
        again = index[torch.randint(400, (400,), generator=generator)]
        drawn = {name: each.on(again) for name, each in sampled.items()}
        for measure in NAMES:
            draws[measure].append(drawn["a"][measure].value - drawn["b"][measure].value)
    for measure in NAMES:
        one, other = found["a"][measure], found["b"][measure]
        stderr = error_of(one, other).stderr
        assert stderr == pytest.approx(np.std(draws[measure], ddof=1), rel=0.1)
        assert stderr < 0.6 * math.hypot(one.data_stderr, other.data_stderr)


def test_an_interval_by_hand():
    """Student's 2.262 for ten samples; bounds of solvers add as they are."""
    error = SamplingError(0.3, samples=10)
    found = difference(Estimate(5.0, stderr=0.4, bound=0.1), Estimate(3.0, bound=0.2), error)
    assert found.stderr == pytest.approx(0.5)
    assert found.high - 2.0 == pytest.approx(2.262157 * 0.5 + 0.3, rel=1e-6)
    assert found.low == pytest.approx(2.0 - (2.262157 * 0.5 + 0.3), rel=1e-6)
    assert found.sign == 1
    # The 0.5 % quantile of nine degrees of freedom, beyond the bounds of 0.3.
    rare = difference(Estimate(3.249836 * 0.5 + 0.3, stderr=0.4, bound=0.3), Estimate(0.0), error)
    assert rare.p == pytest.approx(0.01, rel=1e-5)
    none = difference(Estimate(1.0), Estimate(1.0), SamplingError(0.0, samples=10))
    assert (none.sign, none.p) == (0, 1.0)
    sure = difference(Estimate(1.0), Estimate(2.0), SamplingError(0.0, samples=10))
    assert (sure.sign, sure.p) == (-1, 0.0)


# -- comparisons ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(population) -> Comparison:
    surfaces = {name: surface.subset(60) for name, surface in population[3].items()}
    names = ["kappa_trace_sum", "hessian_trace", "rho_max", "hessian_max_eigenvalue"]
    return fg.compare(surfaces, measures=names)


def test_every_difference_says_how_its_error_is_known(compared):
    frame = compared.differences().set_index("measure")
    kinds = {
        "kappa_trace_sum": "paired",
        "hessian_trace": "paired",
        "rho_max": "unpaired",
        "hessian_max_eigenvalue": "these samples",
    }
    assert frame["kind"].to_dict() == kinds
    assert math.isnan(frame.loc["hessian_max_eigenvalue", "p"])
    both = math.hypot(*(report["rho_max"].data_stderr for report in compared.values()))
    assert frame.loc["rho_max", "stderr"] == pytest.approx(both)
    wide = compared.differences(level=0.999).set_index("measure")
    assert wide.loc["kappa_trace_sum", "low"] < frame.loc["kappa_trace_sum", "low"]
    with pytest.raises(ValueError, match=r"`level=95` must lie between 0 and 1, such as 0\.95"):
        compared.differences(level=95)


def test_ranks_are_shared_where_the_paired_interval_covers_zero():
    values = {"a": Estimate(1.0), "b": Estimate(1.3), "c": Estimate(2.0)}
    errors = {pair: SamplingError(0.2, 100) for pair in (("a", "b"), ("a", "c"), ("b", "c"))}
    assert rank(values, errors=errors) == {"a": 1, "b": 1, "c": 3}
    unpaired = {pair: replace(error, paired=False) for pair, error in errors.items()}
    assert rank(values, errors=unpaired) == {"a": 1, "b": 2, "c": 3}


def test_differences_survive_being_written_and_are_told(compared, tmp_path):
    compared.to_json(tmp_path / "c.json")
    again = Comparison.from_json(tmp_path / "c.json")
    assert again.to_dict() == compared.to_dict()
    assert again.ranks_of("hessian_trace") == compared.ranks_of("hessian_trace")
    page = again.to_html(tmp_path / "c.html").read_text()
    row = compared.differences().set_index("measure").loc["kappa_trace_sum"]
    assert f'data-field="low"><span class="number" title="{float(row["low"])!r}"' in page
    assert "Differences on the same samples" in page
    contents = json.loads(page.split('id="flatgauge">')[1].split("</script>")[0])
    assert contents["differences"][0]["difference"] == compared.differences()["difference"][0]
    text = repr(compared).splitlines()
    head = next(line for line in text if "95 % interval" in line)
    assert text.index(head) > text.index(next(line for line in text if "(1) is flattest" in line))
    assert text[-1] == compared.verdict


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_terminals_of_every_width(compared, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    print_tables(compared.tables(), Console())
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum("a − b" in line for line in lines) == 2  # The two measures that are paired.


def test_of_many_models_the_table_shows_those_to_the_flattest(compared):
    facts = compared["a"].facts
    shares = torch.linspace(-1, 1, 50).double()
    reports = {
        name: Report({"own": Estimate(value, samples=value + 0.01 * shares)}, facts)
        for name, value in (("x", 3.0), ("y", 1.0), ("z", 2.0))
    }
    comparison = Comparison(reports)
    rows = difference_table(comparison).rows
    assert [row[1].text for row in rows] == ["x − y", "y − z"]
    assert [row[6].text for row in rows] == ["y is flatter", "y is flatter"]
    assert len(difference_table(comparison, every=True).rows) == 3


def test_other_samples_are_not_paired(compared):
    shares = torch.randn(10, generator=torch.Generator().manual_seed(0)).double()
    one = Report({"own": Estimate(1.0, samples=shares, data_stderr=0.1)}, compared["a"].facts)
    other = replace(one, facts=replace(one.facts, data_digest="other"))
    assert sampling_errors({"a": one, "b": one})["own"]["a", "b"] == SamplingError(0.0, 10)
    assert not sampling_errors({"a": one, "b": other})["own"]["a", "b"].paired
    (warning,) = Comparison({"a": one, "b": other}).warnings
    assert warning.startswith("not the same data: the samples of b are not those of a")


def test_unlike_losses_and_architectures_are_warned_of(compared):
    report = compared["a"]
    changed = {
        "loss": 4 * report.facts.loss,
        "parameters": 10,
        "model": "Other",
        "seed": 7,
    }
    told = {}
    for name, value in changed.items():
        other = Report(report.estimates, replace(report.facts, **{name: value}))
        comparison = Comparison({"a": report, "b": other})
        told[name] = comparison.warnings
        prefix = "note" if name == "seed" else "warning"
        assert f"\n{prefix}: {comparison.notes[-1]}" in repr(comparison)
    assert told["loss"][0].startswith("the losses are unlike: a ")
    assert "flatter for that alone" in told["loss"][0]
    assert told["parameters"][0].startswith("different architectures, with different numbers")
    assert told["model"][0].startswith("different classes of models: a Sequential of 51, b Other")
    assert told["seed"] == ()
