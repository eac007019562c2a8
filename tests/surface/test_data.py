"""Ways of giving data: what is a pair, what is a loader's own, and what must stay untouched."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from flatgauge import LossSurface

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def net(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


def rebuilt(output: Tensor, _: None) -> Tensor:
    return output.square().mean()


# -- pairs -------------------------------------------------------------------------------------


def test_a_list_of_two_tensors_is_a_pair_only_where_it_cannot_be_two_batches():
    pair = LossSurface(net(), "cross_entropy", [X, Y])
    assert pair.value() == LossSurface(net(), "cross_entropy", (X, Y)).value()
    two = LossSurface(net(), rebuilt, [X[:5], X[5:]])
    assert two.samples == 12
    assert two.value() == pytest.approx(net()(X).square().mean().item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"a list of two tensors of shape \(12, 4\), which may be"):
        LossSurface(net(4), "mse", [X, X])
    assert LossSurface(net(4), "mse", (X, X)).samples == 12


def both(output: Tensor, target) -> Tensor:
    first, second = target.values() if isinstance(target, dict) else target
    return F.cross_entropy(output, first) + output.square().mean() * 0 + second.mean()


@pytest.mark.parametrize(
    "target", [(Y, X[:, 0]), [Y, X[:, 0]], {"a": Y, "b": X[:, 0]}], ids=["tuple", "list", "dict"]
)
def test_several_targets_make_one_pair(target):
    surface = LossSurface(net(), both, (X, target), chunk=5)
    assert surface.samples == 12
    expected = F.cross_entropy(net()(X), Y) + X[:, 0].mean()
    assert surface.value() == pytest.approx(expected.item(), rel=1e-5)


def test_a_tuple_of_two_pairs_is_two_batches():
    surface = LossSurface(net(), "cross_entropy", ((X[:4], Y[:4]), (X[4:], Y[4:])))
    whole = LossSurface(net(), "cross_entropy", (X, Y))
    assert surface.value() == pytest.approx(whole.value(), rel=1e-6)


class Square(nn.Module):
    """Outputs of shape (N, 3, 3): positions by classes, or the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.reshape(-1, 3, 4))


def test_as_many_positions_as_classes_are_refused_until_it_is_said_which_is_which():
    inputs, labels = X.reshape(4, 3, 4), Y.reshape(4, 3).flip(1)
    with pytest.raises(ValueError, match=r"the second dimension or the last.*F\.cross_entropy`"):
        LossSurface(Square(), "cross_entropy", (inputs, labels))
    output = Square()(inputs)
    second = LossSurface(Square(), F.cross_entropy, (inputs, labels))
    assert second.value() == pytest.approx(F.cross_entropy(output, labels).item(), rel=1e-5)
    module = LossSurface(Square(), nn.CrossEntropyLoss(), (inputs, labels))
    assert module.value() == second.value()
    last = LossSurface(
        Square(), lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten()), (inputs, labels)
    )
    expected = F.cross_entropy(output.flatten(0, 1), labels.flatten()).item()
    assert last.value() == pytest.approx(expected, rel=1e-5)
    assert abs(expected - second.value()) > 1e-3


def test_a_dict_batch_keeps_back_only_the_labels_it_uses():
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net(x + y)

    data = {"x": X, "y": 2 * X, "labels": Y}
    surface = LossSurface(Conditioned(), "cross_entropy", data, chunk=5)
    assert surface.value() == pytest.approx(F.cross_entropy(net()(3 * X), Y).item(), rel=1e-6)


def test_targets_that_are_not_finite_are_located():
    bad = X.clone()
    bad[2, 1] = math.inf
    with pytest.raises(ValueError, match="the targets of `data` hold 1 values that are nan or inf"):
        LossSurface(net(4), "mse", (X, bad))


def test_sparse_inputs_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"sparse or nested tensor.*`\.to_dense\(\)`"):
        LossSurface(net(), "cross_entropy", (X.to_sparse(), Y))


# -- loaders -----------------------------------------------------------------------------------


class Scaled(DataLoader):
    """A loader that does something to every batch."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield 10 * x, y


def test_a_shuffling_loader_of_the_users_own_kind_is_kept():
    loader = Scaled(TensorDataset(X, Y), batch_size=5, shuffle=True)
    surface = LossSurface(net(), "cross_entropy", loader)
    expected = F.cross_entropy(net()(10 * X), Y).item()
    assert surface.value() == pytest.approx(expected, rel=1e-6)
    assert surface.notes == ["the data come in random order; the first pass is held in memory"]


@pytest.mark.parametrize("count", [6, 24])
def test_a_sampler_of_another_number_of_samples_is_kept(count):
    pairs = TensorDataset(X, Y)
    loader = DataLoader(pairs, batch_size=4, sampler=RandomSampler(pairs, num_samples=count))
    if count == 6:
        with pytest.raises(ValueError, match="other samples on a second pass"):
            LossSurface(net(), "cross_entropy", loader)
    else:  # Every sample twice.
        assert LossSurface(net(), "cross_entropy", loader).samples == 24


def states() -> tuple:
    legacy = np.random.get_state()[1].tolist()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), legacy


def test_a_streamed_loader_advances_no_random_state():
    source = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(4000, 100), torch.randint(0, 3, (4000,)))
    loader = DataLoader(data, batch_size=500, generator=source)
    model = nn.Linear(100, 3)
    before, own = states(), source.get_state()
    surface = LossSurface(model, "cross_entropy", loader, memory="2MiB")
    surface.value(), surface.gradient(), surface.hvp(torch.ones(surface.size))
    assert not surface.data.in_memory
    assert states() == before
    assert torch.equal(source.get_state(), own)


class Seeding:
    """Draws its batches from the global random state, which it seeds itself."""

    def __iter__(self):
        torch.manual_seed(5)
        for _ in range(4):
            yield torch.randn(1000, 100), torch.randint(0, 3, (1000,))


def test_a_streamed_loader_keeps_a_random_state_of_its_own():
    model = nn.Linear(100, 3)
    streamed = LossSurface(model, "cross_entropy", Seeding(), memory="2MiB")
    held = LossSurface(model, "cross_entropy", Seeding())
    assert held.data.in_memory
    assert not streamed.data.in_memory
    assert streamed.value() == pytest.approx(held.value(), rel=1e-6)


def test_workers_that_the_user_keeps_are_not_taken_over():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, num_workers=1, persistent_workers=True)
    reading = iter(loader)
    first = next(reading)[0]
    surface = LossSurface(net(), "cross_entropy", loader)
    rest = [x for x, _ in reading]
    assert torch.equal(torch.cat([first, *rest]), X)
    assert surface.samples == 12
    del reading
    loader._iterator = None


class Counted(Dataset):
    """Knows its length, and nothing else does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int):
        return X[index], Y[index]


def test_a_data_set_is_read_in_its_order():
    surface = LossSurface(net(), "cross_entropy", Counted())
    assert torch.equal(next(iter(surface.data)).inputs, X)
