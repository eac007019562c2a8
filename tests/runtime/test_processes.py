"""Several ranks give what one process gives; and where one goes wrong, all are told."""

from __future__ import annotations

import json

import pytest
import rank_programs
import torch
from ranks import on_ranks
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatgauge as fg
from flatgauge.runtime.distributed import resolve_processes

#: Differences of two losses, or of two gradients, lose digits.
LOOSE = {"expected_sharpness": 1e-10, "products by differences": 1e-6}


def agree(found: dict, expected: dict, loose: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        tolerance = max(loose, LOOSE.get(name, 0.0))
        assert found[name] == pytest.approx(values, rel=tolerance, abs=1e-14), name


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """What the first and the last of three ranks give; the other one is killed in the end."""
    place = tmp_path_factory.mktemp("three") / "report.json"
    first, second, third = on_ranks(3, rank_programs.three, str(place))
    assert second is None
    for found in (first, third):
        assert isinstance(found, dict), found
    return first, third, place


@pytest.fixture(scope="module")
def two():
    ranks = on_ranks(2, rank_programs.two)
    for found in ranks:
        assert isinstance(found, dict), found
    return ranks


@pytest.mark.slow
def test_three_ranks_give_the_numbers_of_one(three):
    for name in ("measures", "smooth"):
        expected = getattr(rank_programs, name)(None)
        for found in three[:2]:
            agree(found[name], expected)


def test_every_sample_counts_once(three):
    surface = fg.LossSurface(rank_programs.network(), "cross_entropy", rank_programs.samples(11))
    expected = rank_programs.derivatives(surface)
    for found in three[:2]:
        for kind in rank_programs.KINDS:
            agree(found["data"][kind], expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("repeated", "ValueError: 8 samples are on more than one rank, but not all ranks have"),
        ("claimed", "ValueError: `sharded=False` says that the data are the same on every rank"),
        ("lengths", "the ranks' data do not fit together: rank 0 a data set of 9, rank 1 a data"),
        ("kind", "TypeError: `processes=3` must be None (this process alone), 'all'"),
        ("mixed", "ValueError: the surfaces are measured by different processes"),
        ("empty", "ValueError: `data` is empty"),
        ("labels", "ValueError: labels run from 1 to 6, but the model has 3 outputs"),
        ("one argument", "rank 1 of 3 has left 'LossSurface' with ValueError: `chunk=-1` must"),
        ("weights", "ValueError: rank 1 does not compute `the loss` at the same place as rank 0"),
        ("frozen", "rank 1 does not compute `the loss` at the same place as rank 0"),
        ("frozen product", "at the same place as rank 0: parameters (frozen ones too), buffers,"),
        ("frozen measure", "at the same place as rank 0: parameters (frozen ones too), buffers,"),
        ("buffer", "rank 1 does not compute `the loss` at the same place as rank 0"),
        ("buffer product", "`for b in model.buffers(): torch.distributed.broadcast(b, 0)`"),
        ("buffer measure", "at the same place as rank 0: parameters (frozen ones too), buffers,"),
        ("raised", "ArithmeticError: rank 1 of 3: no such number"),
        ("report", "could not be measured: ArithmeticError: rank 1 of 3: no such number"),
        ("goes on", "True"),
        ("left", "GroupError: rank 1 of 3 has left 'measure' with OSError: disk full"),
        ("still there", "True"),
        ("out of step", "GroupError: rank 0 is at 'the loss' and rank 1 at 'the gradient'"),
        ("over", "GroupError: rank 0 is at 'the loss' and rank 1 at 'the gradient'"),
    ],
)
def test_where_one_rank_fails_all_are_told(three, name, text):
    for found in three[:2]:
        assert text in found["failures"][name]


def test_a_rank_that_is_killed_is_named_and_leaves_whole_results(three):
    first, third, place = three
    for text, seconds in (first["killed"], third["killed"]):
        assert text.startswith("GroupError: rank 1 of 3 was lost before 'the loss")
        assert seconds < 30  # The group itself would wait for longer.
    assert list(json.loads(place.read_text())["measures"]) == ["rho_max"]
    assert [path.name for path in place.parent.iterdir()] == [place.name]


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(two):
    sharded = rank_programs.sharded(None)
    plain = rank_programs.wrapped_models(None)["plain"]
    products = sharded.pop("products")
    for found in two:
        # Alone, differences are taken chunk by chunk with steps of their own: small entries of a
        # product lose digits.
        largest = max(map(abs, products))
        assert found["sharded"].pop("products") == pytest.approx(
            products, rel=1e-8, abs=1e-8 * largest
        )
        agree(found["sharded"], sharded, 1e-8)
        for name in ("plain", "ddp", "compiled"):
            agree(found["wrapped"][name], plain)


def test_a_sharded_model_is_left_as_it_was_and_the_rest_is_refused(two):
    for found in two:
        assert found["leftovers"]["left"]
        *refused, precision = found["leftovers"]["refused"]
        assert len(refused) == 6
        for text in refused:
            assert "the model is sharded by FSDP" in text
        assert "measured as it is, in torch.float64, not in torch.float32" in precision


def test_a_group_must_be_there():
    data = (torch.ones(1, 1), torch.ones(1, 1))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="none is initialised; call"):
        fg.LossSurface(model, "mse", data, processes="all")
    assert resolve_processes(None).size == 1


def test_a_sampler_of_one_rank_is_told_without_a_group():
    data = TensorDataset(*rank_programs.samples(5))
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    surface = fg.LossSurface(rank_programs.network(), "cross_entropy", loader)
    assert surface.samples == 3
    assert any("gives the samples of rank 1 of 2 only" in note for note in surface.notes)
