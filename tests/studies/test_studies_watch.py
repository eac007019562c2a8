"""A process that does not get on is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_studies import TINY, tiny_study

from flatgauge.studies.watch import Watch


def test_a_process_is_named_once_after_ten_times_what_is_usual() -> None:
    watch = Watch(60)
    for pid in (1, 2):
        watch.report(pid, None, 0)
    assert watch.warnings(599) == []
    for when, run in enumerate("abcd", start=1):
        watch.report(1, run, 20 * when)
    watch.report(2, "e", 30)
    assert watch.warnings(229) == []
    (said,) = watch.warnings(231)
    assert said.startswith("process 2 has reported nothing for 201 s, last run `e`; if it hangs")
    assert "`kill 2`" in said
    assert watch.warnings(232) == []
    watch.report(2, "f", 240)
    assert [said[:9] for said in watch.warnings(300)] == ["process 1"]
    watch.end(1)
    assert len(watch.warnings(2000)) == 1
    watch.end(2)
    assert watch.warnings(10_000) == []


def test_a_process_without_a_report_is_named_too() -> None:
    watch = Watch(1)
    watch.report(7, None, 0)
    assert "process 7 has reported nothing for 11 s, last no run" in watch.warnings(11)[0]


NETWORK = """
import pathlib, time
from torch import nn

def net():
    try:
        (pathlib.Path(__file__).parent / "first").unlink()
    except FileNotFoundError:
        pass
    else:
        time.sleep(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_a_worker_that_hangs_is_named_on_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nets.py"
    file.write_text(NETWORK)
    (tmp_path / "first").touch()
    study = tiny_study(
        recipe=TINY.but(network=f"{file}:net"),
        factors={"batch": [8]},
        measures=["expected_sharpness"],
    )
    study.run(tmp_path / "study", workers=2, patience=0.01)
    said = capfd.readouterr().err
    assert re.search(r"^warning: process \d+ has reported nothing for \d+ s, last ", said, re.M)
