"""What goes wrong in the user's own code is said with its place, and loses nothing else."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatgauge as fg

HERE = Path(__file__).name


def line_of(text: str) -> str:
    """File and line of the only line of this file that holds a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip() == text]
    return rf"{HERE}:{number}\)"


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.arange(6) % 3


class Failing(nn.Module):
    """Fails when it is told to."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 5), nn.Linear(5, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "key":
            return {}["missing"]
        if self.kind == "value":
            raise ValueError("no such value")
        if self.kind == "exit":
            sys.exit(0)
        return self.last(self.first(x).relu())


@pytest.mark.parametrize(
    ("kind", "problem", "text", "line"),
    [
        ("key", RuntimeError, "KeyError: 'missing'", 'return {}["missing"]'),
        ("value", ValueError, "no such value", 'raise ValueError("no such value")'),
        ("exit", RuntimeError, r"the model ends the program by `sys.exit\(0\)`", "sys.exit(0)"),
    ],
)
def test_an_error_in_forward_names_file_and_line(kind, problem, text, line):
    with pytest.raises(ValueError, match=f"the model fails on inputs.*{text}.*{line_of(line)}"):
        fg.LossSurface(Failing(kind), "cross_entropy", samples())
    model = Failing()
    surface = fg.LossSurface(model, "cross_entropy", samples())
    model.kind = kind
    for action in (surface.value, surface.gradient):
        with pytest.raises(problem, match=f"{text}.*{line_of(line)}"):
            action()
    with pytest.raises(Exception, match=f"{text}.*{line_of(line)}") as caught:
        fg.find_gauge(model, samples()[0])
    assert not isinstance(caught.value, SystemExit)


def test_an_error_in_the_loss_names_file_and_line():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise AttributeError("no such attribute")

    def leave(output: Tensor, target: Tensor) -> Tensor:
        raise SystemExit(3)

    place = line_of('raise AttributeError("no such attribute")')
    with pytest.raises(ValueError, match=f"no such attribute.*{place}"):
        fg.LossSurface(Failing(), loss, samples())
    place = line_of("raise SystemExit(3)")
    with pytest.raises(ValueError, match=rf"the loss 'leave' ends the program.*3.*{place}"):
        fg.LossSurface(Failing(), leave, samples())


def test_an_error_in_a_data_set_names_file_and_line():
    class Broken(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            raise OSError("no such file")

    place = line_of('raise OSError("no such file")')
    with pytest.raises(OSError, match=f"no such file.*{place}"):
        fg.LossSurface(Failing(), "cross_entropy", DataLoader(Broken(), batch_size=2))


def locked() -> nn.Module:
    model = Failing()
    model.last.guard = threading.Lock()
    return model


def test_one_measure_that_fails_does_not_lose_the_others():
    surface = fg.LossSurface(locked(), "cross_entropy", samples())
    report = fg.measure(surface)
    failed = {name: e.notes[0] for name, e in report.items() if math.isnan(e.value)}
    assert len(report) - len(failed) >= 25
    assert any("`last.guard` is of type lock" in note for note in failed.values())


def test_an_unexpected_error_is_named_in_the_report(monkeypatch):
    surface = fg.LossSurface(Failing(), "cross_entropy", samples())

    def broken(*_: object, **__: object) -> None:
        raise TypeError("not what was expected")

    monkeypatch.setattr(type(surface), "hvp", broken)
    report = fg.measure(surface)
    note = report["hessian_max_eigenvalue"].notes[0]
    place = line_of('raise TypeError("not what was expected")')
    assert note.startswith("could not be measured: TypeError: not what was expected")
    assert note.endswith(place.replace("\\", ""))
    assert report["path_norm"].value > 0
    with pytest.raises(TypeError, match="not what was expected"):
        fg.measure(surface, measures=["hessian_max_eigenvalue"])

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(surface), "hvp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fg.measure(surface)


@pytest.mark.parametrize("held", [threading.Lock, lambda: open(__file__)])  # noqa: SIM115
def test_a_model_that_cannot_be_copied_says_what_it_holds(held):
    model = Failing()
    model.last.guard = held()
    surface = fg.LossSurface(model, "cross_entropy", samples())
    text = r"cannot be copied.*`last.guard` is of type .*Keep locks, open files"
    with pytest.raises(ValueError, match=text):
        surface.copy()
    getattr(model.last.guard, "close", int)()


def test_tensors_without_values_are_refused():
    with torch.device("meta"):
        hollow = Failing()
    with pytest.raises(ValueError, match=r"`first.weight` of the model is on the device `meta`"):
        fg.LossSurface(hollow, "cross_entropy", samples())
    model = Failing()
    model.register_buffer("scale", torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match=r"`scale` of the model is on the device `meta`.*to_empty"):
        fg.LossSurface(model, "cross_entropy", samples())
    x, y = samples()
    with pytest.raises(ValueError, match=r"`data` holds a tensor on the device `meta`"):
        fg.LossSurface(Failing(), "cross_entropy", (x.to("meta"), y))
