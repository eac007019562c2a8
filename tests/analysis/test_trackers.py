"""Numbers arrive in every tracker, layer by layer, with their steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatgauge.analysis.monitor.trackers import as_log

ROWS = ((10, {"loss": 0.5, "rho_sum": 2.0, "rho_sum_by_layer/0.weight": 1.5}), (20, {"loss": 0.25}))


def logged(tracker) -> None:
    log = as_log(tracker)
    for step, values in ROWS:
        log(values, step)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        logged(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("flatgauge/loss")] == [(10, 0.5), (20, 0.25)]
    assert events.Scalars("flatgauge/rho_sum_by_layer/0.weight")[0].value == 1.5


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(TypeError, match=r"`log=wandb` has no run yet; call `wandb.init\(\)` first"):
        as_log(wandb)
    with wandb.init(mode="offline", dir=str(tmp_path), project="p") as run:
        run.log({"own": 1.0}, step=500)  # Our steps lie before this one, and are kept.
        logged([run])
        summary = dict(run.summary)
    assert summary["flatgauge/loss"] == 0.25
    assert summary["flatgauge/step"] == 20
    assert summary["flatgauge/rho_sum_by_layer/0.weight"] == 1.5
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as run:
            logged([mlflow])
        with mlflow.start_run() as second:
            logged(second)
        for name in (run.info.run_id, second.info.run_id):
            found = mlflow.MlflowClient().get_metric_history(name, "flatgauge/loss")
            assert [(m.step, m.value) for m in found] == [(10, 0.5), (20, 0.25)]
    finally:
        mlflow.set_tracking_uri(before)


def test_lightning_logger(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(str(tmp_path))
    logged(logger)
    logger.save()
    (path,) = tmp_path.rglob("metrics.csv")
    head, first, second = path.read_text().splitlines()
    assert set(head.split(",")) == {
        "step",
        "flatgauge/loss",
        "flatgauge/rho_sum",
        "flatgauge/rho_sum_by_layer/0.weight",
    }
    assert "0.5" in first
    assert "20" in second.split(",")


def test_a_function_and_nothing():
    told = []
    logged([lambda values, step: told.append((step, values)), None])
    assert told == list(ROWS)


def test_no_tracker_is_imported_to_be_recognised():
    script = "import sys; from flatgauge.analysis.monitor.trackers import as_log; as_log(print)\n"
    script += "print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    trackers = {"wandb", "mlflow", "lightning", "tensorboard", "transformers", "accelerate"}
    assert not trackers & set(result.stdout.decode().split())
