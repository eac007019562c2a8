"""Monitors in others' hands: Lightning, Hugging Face, DDP; the weights keep every bit."""

from __future__ import annotations

import socket
import warnings
from datetime import timedelta

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import flatgauge as fg

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(48, 6), torch.arange(48) % 3
HELD_OUT = torch.randn(20, 6), torch.arange(20) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


# -- Lightning --------------------------------------------------------------------------------


def fit(folder, *callbacks):
    """Train with Lightning; accumulates gradients over two batches, logs to a file."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            inputs, targets = batch
            return nn.functional.cross_entropy(self(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    torch.manual_seed(2)
    module = Module()
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8, shuffle=True)
    logger = lightning.loggers.CSVLogger(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and logging intervals.
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=logger,
            callbacks=list(callbacks),
            accumulate_grad_batches=2,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    return {n: v.clone() for n, v in module.state_dict().items()}, torch.rand(())


def test_lightning_trains_to_the_same_bits_and_logs(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from flatgauge.analysis.monitor.lightning import MonitorCallback

    told: list[int] = []
    plain = fit(tmp_path / "plain")
    by_epoch = MonitorCallback("cross_entropy", HELD_OUT, share=None, strict=True)
    by_step = MonitorCallback(
        "cross_entropy",
        HELD_OUT,
        every=2,
        unit="step",
        model=lambda module: module.net,
        log=lambda values, step: told.append(step),
        share=None,
        strict=True,
    )
    watched = fit(tmp_path / "watched", by_epoch, by_step)
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)
    assert by_epoch.history.steps == [3, 6]
    assert by_step.history.steps == told == [2, 4, 6]
    assert all(row.training_loss > 0 for row in by_step.history)
    assert "net.0.weight" in by_epoch.history.layers("rho_sum")
    assert by_epoch.history.values("rho_sum")[-1] == by_step.history.values("rho_sum")[-1]
    (path,) = (tmp_path / "watched").rglob("metrics.csv")
    assert "flatgauge/kappa_trace_sum_by_layer/net.0.weight" in path.read_text().splitlines()[0]


# -- Hugging Face -----------------------------------------------------------------------------


def train(folder, watch):
    """Train with Hugging Face's Trainer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x, labels=None):
            logits = self.net(x)
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)

    class Pairs(TensorDataset):
        def __getitem__(self, index):
            inputs, targets = super().__getitem__(index)
            return {"x": inputs, "labels": targets}

    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        logging_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    model = Classifier()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Pairs(INPUTS, TARGETS), eval_dataset=Pairs(*HELD_OUT)
    )
    callbacks = watch(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About memory that is pinned for no accelerator.
        trainer.train()
    return {n: v.clone() for n, v in model.state_dict().items()}, torch.rand(()), trainer, callbacks


def test_hugging_face_trains_to_the_same_bits_and_logs(tmp_path):
    pytest.importorskip("accelerate")
    from flatgauge.analysis.monitor.huggingface import MonitorCallback

    def watch(trainer):
        common = {"share": None, "strict": True}
        batch = {"x": HELD_OUT[0], "labels": HELD_OUT[1]}
        found = [
            MonitorCallback(None, trainer.get_eval_dataloader(), log=trainer, **common),
            MonitorCallback(None, batch, every=5, unit="step", **common),
        ]
        for callback in found:
            trainer.add_callback(callback)
        return found

    *plain, trainer, _ = train(tmp_path, lambda trainer: [])
    own = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    *watched, trainer, (callback, by_step) = train(tmp_path, watch)
    torch.testing.assert_close(watched, plain, rtol=0, atol=0)
    assert callback.history.steps == [6, 12]
    assert by_step.history.steps == [5, 10]
    entries = trainer.state.log_history
    assert [entry["step"] for entry in entries if "loss" in entry] == own
    ours = [entry for entry in entries if "flatgauge/rho_sum" in entry]
    assert [entry["step"] for entry in ours] == [6, 12]
    assert ours[1]["flatgauge/rho_sum"] == callback.history.values("rho_sum")[1]
    assert "flatgauge/kappa_trace_sum_by_layer/net.0.weight" in ours[0]


# -- several processes ------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def worker(rank: int, port: int, results) -> None:
    """One of two processes that train together; who waits for the other too long fails."""
    torch.set_num_threads(1)
    limit, place = timedelta(seconds=60), f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", place, rank=rank, world_size=2, timeout=limit)
    mine, found = (INPUTS[rank::2], TARGETS[rank::2]), []
    for watched in (False, True):
        model = DistributedDataParallel(network())
        torch.manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if watched:
            monitor = fg.Monitor(model, "cross_entropy", HELD_OUT, share=None, strict=True)
        for start in range(0, 24, 8):
            optimizer.zero_grad()
            inputs, targets = (part[start : start + 8] for part in mine)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if watched:
                monitor.step(loss)
        found.append({name: value.tolist() for name, value in model.module.state_dict().items()})
    results.put((rank, found, monitor.history.steps))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_to_the_same_bits_and_the_first_measures():
    context = multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [context.Process(target=worker, args=(rank, port, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
    assert [process.exitcode for process in processes] == [0, 0]
    found = dict((rank, rest) for rank, *rest in (results.get(), results.get()))
    for (plain, watched), _ in found.values():
        assert watched == plain
    assert found[0][0][0]["0.weight"] == found[1][0][0]["0.weight"]
    assert found[0][1] == [1, 2, 3]
    assert found[1][1] == []


def test_a_unit_that_cannot_be_counted_is_refused():
    from flatgauge.analysis.monitor.monitor import counts_steps

    with pytest.raises(ValueError, match="`unit='batch'` is unknown; measure at every 'epoch'"):
        counts_steps("batch")
