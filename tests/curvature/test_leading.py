"""Eigenvalues that start from a part of the data, and columns that one sweep leaves for them."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.curvature import Hessian, Scaled
from flatgauge.curvature.columns import columns_of, groups_of
from flatgauge.curvature.leading import leading_pair
from flatgauge.curvature.sweep import Sweeper, sweeper_of
from flatgauge.estimators import top_eigenvalues

SAMPLES = 640


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def net_and_data(*, by_class: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = source(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    if by_class:
        labels = labels.sort().values
    inputs[:, 0] += labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        model.append(nn.Linear(8, 3))
    return model.double(), inputs, labels


@pytest.fixture(scope="module")
def surface() -> LossSurface:
    model, inputs, labels = net_and_data()
    return LossSurface(model, "cross_entropy", (inputs, labels))


def test_the_part_is_the_loss_on_the_first_eighth():
    model, inputs, labels = net_and_data()
    whole = LossSurface(model, "cross_entropy", (inputs, labels))
    part, eighth = whole.part(), slice(SAMPLES // 8)
    alone = LossSurface(model, "cross_entropy", (inputs[eighth], labels[eighth]))
    assert part.samples == SAMPLES // 8
    assert part.value() == pytest.approx(alone.value(), rel=1e-12)
    vector = torch.ones(whole.size).double()
    torch.testing.assert_close(part.hvp(vector), alone.hvp(vector))
    with torch.no_grad():  # It follows the model, too.
        model[0].weight.mul_(1.1)
    assert part.value() == pytest.approx(alone.value(), rel=1e-12)
    assert whole.matvecs == 0  # Products of the part are none of the whole.


def test_there_is_no_part_of_few_samples_or_of_streamed_or_ignored_ones():
    model, inputs, labels = net_and_data()
    assert LossSurface(model, "cross_entropy", (inputs[:200], labels[:200])).part() is None
    wide = inputs.repeat(1, 10)  # More than a quarter of the budget: read anew in every pass.
    loader = torch.utils.data.DataLoader(list(zip(wide, labels, strict=True)), batch_size=64)
    streamed = LossSurface(nn.Linear(60, 3).double(), "cross_entropy", loader, memory="1MiB")
    assert streamed.part() is None
    ignored = labels.clone()
    ignored[: SAMPLES // 8] = -100
    assert LossSurface(model, "cross_entropy", (inputs, ignored)).part() is None


@pytest.mark.parametrize("by_class", [False, True])
def test_the_eigenvalue_is_that_of_all_data_with_fewer_products(by_class):
    model, inputs, labels = net_and_data(by_class=by_class)
    surface = LossSurface(model, "cross_entropy", (inputs, labels))
    units = surface.point.abs()
    for operator in (Hessian(surface), Scaled(Hessian(surface), by=units)):
        exact = torch.linalg.eigvalsh(operator.dense())[-1].item()
        for seed in range(10):
            options = {"tolerance": 1e-4, "max_matvecs": 300}
            pair = leading_pair(operator, **options, generator=source(seed))
            plain = top_eigenvalues(operator, **options, generator=source(seed))
            assert abs(pair.values.item() - exact) <= pair.bounds.item() + 1e-12
            assert pair.converged
            if not by_class:  # Else the part shows one class only.
                assert pair.matvecs < plain.matvecs


def test_products_of_the_part_are_not_counted_as_products(surface):
    before = surface.matvecs
    estimate = fg.measures.hessian_max_eigenvalue(surface, generator=source())
    assert estimate.matvecs == surface.matvecs - before > 0


def test_a_block_by_part_is_the_block_of_the_first_samples(surface):
    sweeper = sweeper_of(surface)
    (group,), rest = groups_of(sweeper, list(sweeper.plan.layers))
    assert not rest
    model, inputs, labels = net_and_data()
    eighth = slice(SAMPLES // 8)
    few = sweeper_of(LossSurface(model, "cross_entropy", (inputs[eighth], labels[eighth])))
    blocks, alone = dict(columns_of(sweeper, group).blocks(sweeper)), columns_of(few, group)
    for name, block in alone.blocks(few):
        torch.testing.assert_close(blocks[name].part().dense(), block.dense())


def test_one_sweep_serves_measures_and_eigenvalues(monkeypatch):
    model, inputs, labels = net_and_data()
    passes: list[frozenset[str]] = []
    plain = Sweeper.passes

    def counted(self, names, wanted, **options):
        passes.append(wanted)
        return plain(self, names, wanted, **options)

    monkeypatch.setattr(Sweeper, "passes", counted)
    names = ["kappa_trace_sum", "kappa_max", "kappa_sum"]
    together = LossSurface(model, "cross_entropy", (inputs, labels))
    report = fg.measure(together, measures=names)
    assert passes == [frozenset({"trace", "columns"})]
    assert list(report) == names
    for name in names:  # And nothing depends on it.
        apart = LossSurface(model, "cross_entropy", (inputs, labels))
        assert fg.measure(apart, measures=[name])[name].value == report[name].value
    passes.clear()
    chosen = fg.measure(together, measures={"kappa_sum": {"layers": "0.*"}, "rho_max": {}})
    assert list(chosen["kappa_sum"].layers) == ["0.weight"]
    assert {"columns"} in passes  # Other layers than all: their own sweep.
