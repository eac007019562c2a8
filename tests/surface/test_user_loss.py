"""Hidden denominators: the right number whatever the chunk, or a refusal that says what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatgauge import LossSurface
from flatgauge.surface.data import as_batch, can_join, sample_digests

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(600, 4, generator=GENERATOR).double()


def net(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs)).double()


def rare_label(label: int, *, classes: int = 2) -> Tensor:
    labels = torch.arange(600) % classes
    labels[570] = label
    return labels


def test_a_class_weight_that_only_one_late_sample_has_is_seen():
    weight = torch.tensor([1.0, 1.0, 9.0]).double()
    with pytest.raises(ValueError, match=r"no mean over its samples.*pass `denominator=`"):
        LossSurface(
            net(), lambda o, t: F.cross_entropy(o, t, weight=weight), (X, rare_label(2)), chunk=64
        )


def test_a_weight_among_more_classes_than_are_looked_at_one_by_one_is_seen():
    weight = torch.ones(60).double()
    weight[57] = 30.0

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weight)

    labels = torch.arange(600) % 55
    labels[570] = 57
    for data in ((X, labels), (X, labels.sort()[0])):  # also where each class comes by itself
        with pytest.raises(ValueError, match=r"no mean over its samples"):
            LossSurface(net(60), weighted, data)
    surface = LossSurface(
        net(60), weighted, (X, labels), denominator=lambda t: weight[t].sum(), chunk=50
    )
    assert surface.value() == pytest.approx(weighted(net(60)(X), labels).item(), rel=1e-12)


def test_an_ignored_label_that_comes_late_is_seen():
    labels = rare_label(2)
    with pytest.raises(ValueError, match="no mean over its samples"):
        LossSurface(net(), lambda o, t: F.cross_entropy(o, t, ignore_index=2), (X, labels))
    labels[[500, 570]] = -100
    expected = F.cross_entropy(net()(X), labels).item()
    for chunk in (1, 64, 600):
        surface = LossSurface(net(), lambda o, t: F.cross_entropy(o, t), (X, labels), chunk=chunk)
        assert surface.value() == pytest.approx(expected, rel=1e-12)


def test_a_mask_in_numbers_that_only_late_samples_use_is_seen():
    def masked(output: Tensor, target: Tensor) -> Tensor:
        known = target > -50
        return ((output - target)[known] ** 2).mean()

    numbers = torch.randn(600, 3, generator=torch.Generator().manual_seed(1)).double()
    surface = LossSurface(net(), masked, (X, numbers), chunk=7)
    assert surface.value() == pytest.approx(masked(net()(X), numbers).item(), rel=1e-12)
    numbers[590:, 1] = -99.0
    with pytest.raises(ValueError, match="no mean over its samples"):
        LossSurface(net(), masked, (X, numbers))


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def buckets() -> list[tuple[Tensor, Tensor]]:
    lengths = (5, 9)
    x = [torch.randn(6, n, 4, generator=torch.Generator().manual_seed(n)).double() for n in lengths]
    return [(item, torch.arange(6 * n).reshape(6, n) % 3) for item, n in zip(x, lengths)]  # noqa: B905


def test_lengths_in_buckets_make_two_means_fit_and_one_must_be_chosen():
    (x1, y1), (x2, y2) = data = buckets()
    with pytest.raises(ValueError, match=r"over samples as well as over labels.*`denominator=len`"):
        LossSurface(net(), per_token, data)
    first, second = per_token(net()(x1), y1).item(), per_token(net()(x2), y2).item()
    by_token = LossSurface(net(), per_token, data, denominator=lambda t: (t != -100).sum(), chunk=2)
    assert by_token.value() == pytest.approx((5 * first + 9 * second) / 14, rel=1e-12)
    by_sample = LossSurface(net(), per_token, data, denominator=len, chunk=4)
    assert by_sample.value() == pytest.approx((first + second) / 2, rel=1e-12)
    named = LossSurface(net(), "cross_entropy", data)
    assert named.value() == pytest.approx(by_token.value(), rel=1e-12)


def test_padding_in_one_bucket_tells_which_mean_it_is():
    (x1, y1), (x2, y2) = buckets()
    y2[0, 4:] = -100
    values = [
        LossSurface(net(), per_token, [(x1, y1), (x2, y2)], chunk=chunk).value() for chunk in (1, 6)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    named = LossSurface(net(), "cross_entropy", [(x1, y1), (x2, y2)])
    assert values[0] == pytest.approx(named.value(), rel=1e-12)


def test_a_sum_is_recognised_even_on_one_sample():
    with pytest.raises(ValueError, match="is a sum over the batch"):
        LossSurface(net(), lambda o, t: o.square().sum(), (X[:1], X[:1]))


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", nn.MSELoss(), F.cross_entropy])
def test_a_denominator_beside_a_loss_that_has_its_own(loss):
    with pytest.raises(ValueError, match=r"`denominator=` is given, but the loss .* has its own"):
        LossSurface(net(), loss, (X, X), denominator=len)


def test_a_denominator_that_is_no_function():
    with pytest.raises(TypeError, match="`denominator` is a int; it must be a function"):
        LossSurface(net(), lambda o, t: o.mean(), (X, X), denominator=3)


@pytest.mark.parametrize("loss", ["cross_entropy", lambda o, t: F.cross_entropy(o, t.long())])
def test_labels_of_one_byte_are_never_taken_for_ignored(loss):
    labels = (torch.arange(600) % 160).to(torch.uint8)  # 156 is -100 in one byte
    surface = LossSurface(net(160), loss, (X, labels), chunk=90)
    expected = F.cross_entropy(net(160)(X), labels.long()).item()
    assert surface.value() == pytest.approx(expected, rel=1e-12)


# -- batches that cannot be split --------------------------------------------------------------


class Reader(nn.Module):
    """Reads words."""

    def __init__(self, *, noisy: bool = False) -> None:
        super().__init__()
        self.net, self.noisy = net(), noisy

    def forward(self, *words) -> Tensor:
        lengths = torch.tensor([[float(len(word)), 1.0, 0.0, 2.0] for word in words]).double()
        return self.net(lengths) + (torch.rand(1) if self.noisy else 0)


TEXTS = [(["a", "bcd"], torch.tensor([0, 1])), (["ef", "g", "hij"], torch.tensor([2, 0, 1]))]


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def test_batches_of_strings_are_taken_whole_and_their_loss_must_be_known():
    reason = "they hold items of type str"
    known = LossSurface(Reader(), "cross_entropy", TEXTS)
    assert any(reason in note and "taken whole" in note for note in known.notes)
    with pytest.raises(ValueError, match=rf"{reason}. Pass `denominator=`"):
        LossSurface(Reader(), mean_of, TEXTS)
    told = LossSurface(Reader(), mean_of, TEXTS, denominator=len)
    assert told.value() == pytest.approx(known.value(), rel=1e-12)


def test_randomness_is_seen_in_batches_that_cannot_be_split():
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    with pytest.raises(ValueError, match="random in eval mode"):
        LossSurface(Reader(noisy=True), squared, TEXTS, denominator=len)


@dataclass
class Note:
    text: str
    number: Tensor


class Changing(Dataset):
    """Objects of an unknown kind, whose content may change from pass to pass."""

    def __init__(self, *, changing: bool) -> None:
        self.changing, self.reads = changing, 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Note:
        self.reads += 1
        late = self.changing and self.reads > 2
        return Note("later" if late else "first", torch.full((3, 4), float(index)).double())


class OfNotes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, note: Note) -> Tensor:
        return self.net(note.number)


def test_changed_objects_are_noticed():
    def loader(*, changing: bool) -> DataLoader:
        return DataLoader(Changing(changing=changing), batch_size=None, collate_fn=_itself)

    def squared(output: Tensor, _: None) -> Tensor:
        return output.square().mean()

    fixed = LossSurface(
        OfNotes(), squared, loader(changing=False), denominator=lambda note: len(note.number)
    )
    numbers = torch.arange(2.0).repeat_interleave(3)[:, None].expand(6, 4).double()
    assert fixed.value() == pytest.approx(net()(numbers).square().mean().item(), rel=1e-12)
    with pytest.raises(ValueError, match="other samples on a second pass"):
        LossSurface(OfNotes(), squared, loader(changing=True), denominator=lambda _: 1)


def _itself(item):
    return item


def test_what_can_be_joined_and_split():
    def batch(*raw):
        return as_batch(raw, where="`data`")

    pair = batch(X[:3], X[:3])
    assert can_join(pair, batch(X[:5], X[:5]))
    assert not can_join(pair, batch(X[:3], X[:3].float()))
    assert not can_join(pair, batch(X[:3], X[:3, :2]))
    assert not can_join(pair, batch((X[:3], ["a", "b", "c"]), X[:3]))
    assert pair.splittable
    assert batch({"x": X[:3], "flag": True}, None).splittable
    assert not batch((X[:3], 2.0), X[:3]).splittable
    assert not batch((X[:3], torch.tensor(1.0)), X[:3]).splittable
    assert not batch(X[:3], X[:2]).splittable


def test_digests_tell_contents_and_not_objects_apart():
    def digest(text: str, number: float) -> list[int]:
        note = Note(text, torch.full((2,), number))
        return sample_digests(as_batch((note, torch.zeros(2)), where="`data`"))

    assert digest("a", 1.0) == digest("a", 1.0)
    assert digest("a", 1.0) != digest("b", 1.0)
    assert digest("a", 1.0) != digest("a", 2.0)
