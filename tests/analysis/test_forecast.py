"""What measuring takes: foreseen by part, told, and refused where it cannot fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatgauge as fg
from flatgauge.cli import session as command
from flatgauge.runtime.resources import MemoryBudget

MIB = 2**20


def surface(memory, width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 3))
    data = (torch.randn(400, 20), torch.arange(400) % 3)
    return fg.LossSurface(model, "cross_entropy", data, memory=memory)


def test_a_basis_is_as_large_as_the_budget_allows_and_never_too_small():
    assert MemoryBudget(2**30, 1000, 4).lanczos_vectors() == 40
    assert MemoryBudget(2**30, 1000, 4).lanczos_vectors(count=30) == 80
    assert MemoryBudget(1300 * MIB, 25_000_000, 4).lanczos_vectors() == 4  # count + 3
    assert MemoryBudget(4000 * MIB, 25_000_000, 4).lanczos_vectors() == 10
    assert (
        MemoryBudget(1300 * MIB, 25_000_000, 4).lanczos_vectors(length=1000) == 40
    )  # of one layer


def test_columns_are_multiplied_together_where_there_is_room():
    assert MemoryBudget(2**30, 1000, 4).hvp_columns(8) == 8
    assert MemoryBudget(1600 * MIB, 25_000_000, 4).hvp_columns(8) == 1
    # 94 vectors: 10 in hand, a basis of 28, and half of the rest for columns of 4 each.
    assert MemoryBudget(94 * 100_000_000, 25_000_000, 4).hvp_columns(8) == 8
    assert MemoryBudget(50 * 100_000_000, 25_000_000, 4).hvp_columns(8) == 4


def test_parts_together_stay_within_the_budget():
    for memory in ("2MiB", "8MiB", "1GiB"):
        found = fg.memory_estimate(surface(memory))
        assert found.fits
        assert found.total <= found.budget
    assert found.graphs_kept == found.chunks
    assert "all of" in str(found)


def test_what_is_computed_again_is_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    data = (torch.randn(3000, 1, 8, 8), torch.arange(3000) % 3)
    tight = fg.LossSurface(model, "cross_entropy", data, memory="3MiB")
    found = fg.memory_estimate(tight)
    assert 0 <= found.graphs_kept < found.chunks
    assert "the rest is computed again" in str(found)


@pytest.mark.parametrize("measures", [["hessian_max_eigenvalue"], ["rho_sum"], None])
def test_the_impossible_is_refused_before_anything_runs(measures):
    tight = surface("1MiB", width=3000)
    begun = []
    with pytest.raises(MemoryError, match=r"needs about .* raise `memory=` to .* freeze param"):
        fg.measure(tight, measures=measures, progress=lambda *told: begun.append(told))
    assert not begun


def test_what_is_asked_for_after_a_refusal_is_enough():
    with pytest.raises(MemoryError) as caught:
        fg.memory_estimate(surface("1MiB", width=3000))
    words = str(caught.value).split("`memory=` to ")[1].split()
    enough = surface(" ".join(words[:2]), width=3000)
    assert fg.memory_estimate(enough).fits


def test_a_bar_begins_with_the_estimate(capsys):
    fg.measure(surface("64MiB"), measures=["path_norm"], progress=True)
    assert "memory: budget 64.0 MiB" in capsys.readouterr().err


def test_a_bound_on_the_process_leaves_what_is_not_resident(monkeypatch):
    model = {"": nn.Linear(1000, 1000)}
    monkeypatch.setattr(command, "resident_bytes", lambda: 300 * MIB)
    assert command._room("auto", model) == "auto"
    assert command._room("1GiB", model) == (1024 - 300 - 144) * MIB
    with pytest.raises(
        MemoryError, match=r"hold 300.0 MiB of it already.*give .* or more, or take"
    ):
        command._room("400MiB", model)
