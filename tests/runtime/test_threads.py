"""Threads: as many as a machine can use."""

from __future__ import annotations

import os

import pytest
import torch
from command_line import call

from flatgauge.runtime.resources import set_threads


@pytest.mark.parametrize("threads", [100_000, 0, -1])
def test_more_threads_than_can_be_used_are_refused(threads):
    before = torch.get_num_threads()
    told = rf"{threads} threads cannot be used: this machine has {os.cpu_count()} processors; give"
    with pytest.raises(ValueError, match=told):
        set_threads(threads)
    assert torch.get_num_threads() == before


def test_the_command_line_says_so_too(monkeypatch, capsys, tmp_path):
    words = ("demo", "--threads", "100000", "--html", str(tmp_path / "page.html"))
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: 100000 threads cannot be used")
