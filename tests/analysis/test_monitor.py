"""A monitor changes nothing, keeps to its share of the time, and never ends the training."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatgauge as fg
from flatgauge.analysis.monitor.monitor import TimeBudget, read_subset

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(96, 1, 6, 6), torch.arange(96) % 3
HELD_OUT = torch.randn(40, 1, 6, 6), torch.arange(40) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def small() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))


class Noisy(Dataset):
    """Augments with the random numbers of Python, NumPy and torch."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return INPUTS[index] + 0.1 * noise, TARGETS[index]


def trained(watch, *, epochs: int = 2, workers: int = 2):
    """Weights, buffers, momenta and random states after a training that a monitor may watch."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    model = network()
    torch.manual_seed(6)
    loader = DataLoader(Noisy(), batch_size=24, shuffle=True, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, loader)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if monitor is not None:
                before = [p.grad.clone() for p in model.parameters()]
                monitor.step(loss)
                assert model.training
                assert all(
                    torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True)
                )
        if monitor is not None:
            monitor.epoch()
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    randomness = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    return {**model.state_dict()}, momenta, randomness, monitor


def test_a_training_with_a_monitor_ends_in_the_same_bits():
    *plain, _ = trained(lambda model, loader: None)
    names = ["hessian_trace", "kappa_sum", "rho_sum", "expected_sharpness"]
    *watched, monitor = trained(
        lambda model, loader: fg.Monitor(
            model, "cross_entropy", loader, measures=names, every=2, share=None, strict=True
        )
    )
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)
    assert monitor.history.steps == [2, 4, 6, 8, 8]
    assert {row.status for row in monitor.history} == {"measured"}
    # What is measured is what `fg.measure` gives on these samples at these weights.
    model = network()
    model.load_state_dict(watched[0])
    batch = next(iter(monitor.surface.risk.chunks(96)))
    assert monitor.surface.samples == 96
    fixed = fg.LossSurface(model, "cross_entropy", (batch.inputs, batch.target))
    report = fg.measure(fixed, measures=names)
    last = monitor.history[-1]
    assert {n: e.value for n, e in last.estimates.items()} == {
        n: pytest.approx(e.value, rel=1e-5) for n, e in report.items()
    }
    assert last.loss == pytest.approx(report.facts.loss)
    assert last.gradient_norm == pytest.approx(report.facts.gradient_norm, rel=1e-5)


def test_the_history_as_frame_layers_json_and_picture(tmp_path):
    model, told = small(), []
    monitor = fg.Monitor(
        model,
        "cross_entropy",
        HELD_OUT,
        samples=30,
        share=None,
        log=lambda values, step: told.append((step, values)),
    )
    for step in (3, 7):
        with torch.no_grad():
            model[1].weight.mul_(1.1)
        monitor.step(0.25, step=step)
    history = monitor.history
    frame = history.to_frame()
    assert list(frame.index) == [3, 7]
    assert list(frame["training_loss"]) == [0.25, 0.25]
    assert list(frame["rho_sum"]) == history.values("rho_sum")
    assert (frame["cost"] > 0).all()
    assert frame["seconds"].is_monotonic_increasing
    layers = history.layers("kappa_trace_sum")
    assert list(layers) == ["1.weight", "3.weight"]
    assert layers.loc[7].sum() == pytest.approx(frame.loc[7, "kappa_trace_sum"])
    step, values = told[1]
    assert step == 7
    assert values["kappa_trace_sum_by_layer/1.weight"] == layers.loc[7, "1.weight"]
    assert values["gradient_norm"] == frame.loc[7, "gradient_norm"]
    history.to_json(tmp_path / "history.json")
    contents = json.loads((tmp_path / "history.json").read_text())
    assert contents["rows"][1]["estimates"]["rho_sum"]["value"] == frame.loc[7, "rho_sum"]
    ax = history.plot()
    assert [line.get_label() for line in ax.lines] == [*history.measures, "loss"]
    assert ax.lines[0].get_ydata()[0] == 1.0
    by_layer = history.plot("kappa_trace_sum")
    assert [line.get_label() for line in by_layer.lines] == list(layers)
    assert repr(history).splitlines()[0].split()[:3] == ["step", "epoch", "loss"]
    with pytest.raises(KeyError, match="`psi_trace` is not in this history; there are hessian_tr"):
        history.layers("psi_trace")


# -- the share of the time --------------------------------------------------------------------


def test_measuring_keeps_to_its_share_whatever_it_costs():
    """A clock by hand: costs vary threefold, and the share holds once the first is paid for."""
    now, generator, taken = [0.0], random.Random(0), 0
    pace = TimeBudget(0.05, clock=lambda: now[0])
    costs = [generator.uniform(1.0, 3.0) for _ in range(2000)]
    for step in range(2000):
        now[0] += 1.0
        if pace.allows():
            with pace.measuring():
                now[0] += costs[step]
            taken += 1
            # More by at most what this one took longer than the one before it.
            assert pace.spent <= max(0.05 * pace.training + 2.0, costs[step])
    assert 0.9 * 0.05 < pace.spent / pace.training <= 0.05
    assert taken == pytest.approx(2000 * 0.05 / 2.0, rel=0.1)
    assert pace.elapsed_seconds == pytest.approx(2000 + pace.spent)


def test_what_was_saved_up_is_not_spent_at_once():
    """A first measurement that takes long, and others that do not: they come evenly."""
    now, steps = [0.0], []
    pace = TimeBudget(0.1, clock=lambda: now[0])
    for step in range(1000):
        now[0] += 1.0
        if pace.allows():
            with pace.measuring():
                now[0] += 10.0 if not steps else 1.0
            steps.append(step)
    gaps = np.diff(steps)
    assert gaps[0] == 199  # The first step is free; two long ones take 200 steps to pay for.
    assert set(gaps[1:]) == {10}


def test_what_is_skipped_is_counted_and_told_once():
    monitor = fg.Monitor(small(), "cross_entropy", HELD_OUT, share=1e-6)
    with pytest.warns(UserWarning, match="skips measurements, first at step 1: one takes about"):
        monitor.step()
    monitor.step()  # A second warning would be an error here.
    monitor.epoch()
    assert (len(monitor.history), monitor.history.skipped) == (0, 3)
    monitor.measure()
    assert monitor.history[0].skipped == 3
    assert "3 more were due, and skipped" in repr(monitor.history)
    assert "at most 0.0001 % of the training time): 1 rows" in repr(monitor)


# -- trouble ----------------------------------------------------------------------------------


def test_a_training_that_diverges_leaves_a_marked_row():
    model = small()
    monitor = fg.Monitor(model, "cross_entropy", HELD_OUT, share=None)
    monitor.step(1.0)
    with pytest.warns(UserWarning, match="the measurement at step 2 has diverged, and the train"):
        monitor.step(torch.tensor(math.nan))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    monitor.step(1.0)
    rows = monitor.history
    assert [row.status for row in rows] == ["measured", "diverged", "diverged"]
    assert rows[1].note == "the training loss is nan"
    assert math.isfinite(rows[1].loss)  # The weights were still good.
    assert "`1.weight` of the model holds 1 of 180 values that are nan" in rows[2].note
    assert math.isnan(rows[2].loss)
    assert "diverged" in [line.get_label() for line in rows.plot().lines]
    assert rows.to_frame()["status"].tolist() == [row.status for row in rows]


def test_an_error_is_recorded_and_warned_about_once():
    model = small()
    monitor = fg.Monitor(model, "cross_entropy", HELD_OUT, share=None)
    strict = fg.Monitor(model, "cross_entropy", HELD_OUT, share=None, strict=True)
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="at step 1 has failed, and the training goes on: .*divis"):
        monitor.step()
    monitor.step()
    assert [row.status for row in monitor.history] == ["failed", "failed"]
    with pytest.raises(ZeroDivisionError):
        strict.step()
    handle.remove()
    monitor.step()
    assert monitor.history[-1].status == "measured"


def test_one_measure_that_fails_loses_no_other():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3))
    monitor = fg.Monitor(
        model, "cross_entropy", HELD_OUT, measures=["path_norm", "expected_sharpness"], share=None
    )
    with pytest.warns(UserWarning, match="path_norm could not be measured"):
        monitor.step()
    (row,) = monitor.history
    assert row.status == "failed"
    assert math.isnan(row.estimates["path_norm"].value)
    assert row.estimates["expected_sharpness"].value > 0


def test_a_tracker_that_fails_is_told_once():
    def log(values, step):
        raise OSError("disk full")

    monitor = fg.Monitor(small(), "cross_entropy", HELD_OUT, share=None, log=log)
    with pytest.warns(UserWarning, match=r"could not log step 1: OSError\('disk full'\)"):
        monitor.step()
    monitor.step()
    assert len(monitor.history) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "`every=0` must be a whole number of at least 1"),
        ({"samples": 2.5}, ValueError, "`samples=2.5` must be a whole number"),
        ({"share": 0}, ValueError, "`share=0` must be a part of the training time such as 0.1"),
        ({"measures": ["rho_mex"]}, ValueError, "Did you mean `rho_max`"),
        ({"log": 3}, TypeError, "`log` is a int; pass a TensorBoard SummaryWriter, a W&B run"),
        ({"seed": -1}, ValueError, "`seed=-1` must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused_before_the_training(options, error, message):
    with pytest.raises(error, match=message):
        fg.Monitor(small(), "cross_entropy", HELD_OUT, **options)


# -- which samples ----------------------------------------------------------------------------


def rows_of(data) -> torch.Tensor:
    if torch.is_tensor(data[0]):
        return data[0]
    return torch.cat([batch[0] for batch in data])


@pytest.mark.parametrize("kind", ["pair", "data set", "loader"])
def test_samples_are_drawn_over_all_the_data_and_stay_the_same(kind):
    inputs, targets = torch.arange(100.0)[:, None], torch.arange(100)
    pairs = TensorDataset(inputs, targets)
    loader = DataLoader(pairs, batch_size=7, shuffle=True)
    data = {"pair": (inputs, targets), "data set": pairs, "loader": loader}[kind]
    state = torch.get_rng_state()
    chosen = rows_of(read_subset(data, 10, seed=0))[:, 0]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(chosen.unique()) == 10
    assert chosen.max() > 50
    assert torch.equal(chosen, rows_of(read_subset(data, 10, seed=0))[:, 0])
    assert not torch.equal(chosen, rows_of(read_subset(data, 10, seed=1))[:, 0])
    assert len(rows_of(read_subset(data, None, seed=0))) == 100


def test_of_other_batches_the_first_are_read():
    class Stream:
        def __iter__(self):
            buffer = torch.zeros(4, 1)
            for number in range(5):
                yield buffer.fill_(number), torch.zeros(4)

    chosen = read_subset(Stream(), 10, seed=0)
    assert [len(batch[0]) for batch in chosen] == [4, 4, 2]
    assert rows_of(chosen)[:, 0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
