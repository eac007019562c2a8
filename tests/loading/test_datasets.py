"""Data by name: built-in sets, a user's own arrays and functions, and the real sets."""

import copy
import os
import pickle
import zipfile
from textwrap import dedent

import numpy as np
import pytest
import torch
import zoo
from data_files import write_cifar

from flatgauge import LossSurface
from flatgauge.loading.datasets import BUILTIN, load_dataset


def test_samples_are_a_pair():
    samples = load_dataset("digits", split="test", limit=7)
    inputs, targets = samples
    assert isinstance(samples, tuple)
    assert len(samples) == 2
    assert inputs is samples.inputs
    assert targets is samples.targets
    assert (samples.name, samples.split, len(samples.classes)) == ("digits", "test", 10)
    for twin in (copy.deepcopy(samples), pickle.loads(pickle.dumps(samples))):
        assert repr(twin) == repr(samples)
        torch.testing.assert_close(twin.inputs, inputs)
        assert twin.classes == samples.classes


def test_digits_are_split_within_each_class():
    train, test = (load_dataset("digits", split=split) for split in ("train", "test"))
    assert train.inputs.shape == (1442, 1, 8, 8)
    assert test.inputs.shape == (355, 1, 8, 8)
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    share = test.targets.bincount() / (train.targets.bincount() + test.targets.bincount())
    assert share.min() > 0.19
    assert share.max() <= 0.2
    rows = torch.cat([train.inputs, test.inputs]).flatten(1)
    assert len(rows.unique(dim=0)) == 1797


def test_digits_are_those_of_scikit_learn():
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    parts = [load_dataset("digits", split=split) for split in ("train", "test")]
    images = np.concatenate([part.inputs.numpy()[:, 0] * 16 for part in parts])
    labels = np.concatenate([part.targets.numpy() for part in parts])
    found = {(image.tobytes(), label) for image, label in zip(images, labels, strict=True)}
    pairs = zip(bunch.images.astype("float32"), bunch.target, strict=True)
    assert found == {(image.tobytes(), label) for image, label in pairs}


@pytest.mark.parametrize("mean", [0.25, [0.25], (0.1, 0.2, 0.3)])
def test_normalisation_is_per_channel(tmp_path, mean):
    write_cifar(tmp_path)
    plain = load_dataset(f"cifar10:{tmp_path}").inputs
    inputs = load_dataset(f"cifar10:{tmp_path}", mean=mean, std=[0.5, 0.4, 0.3]).inputs
    for channel, std in enumerate((0.5, 0.4, 0.3)):
        centre = torch.tensor(mean).flatten().expand(3)[channel]
        expected = (plain[:, channel] - centre) / std
        torch.testing.assert_close(inputs[:, channel], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": [0.1, 0.2]}, r"`mean` has 2 numbers .* one for each of 1 channels"),
        ({"std": [0.1, 0.2, 0.3]}, r"`std` has 3 numbers"),
        ({"std": 0.0}, r"`std=0.0` cannot be used; needed are finite numbers above zero"),
        ({"std": float("nan")}, r"`std=nan` cannot be used"),
        ({"mean": float("inf")}, r"`mean=inf` cannot be used; needed are finite numbers\."),
        ({"limit": 0}, r"`limit=0` leaves no samples; needed is a whole number of at least 1"),
        ({"limit": -5}, r"`limit=-5` leaves no samples"),
        ({"limit": 2.5}, r"`limit=2.5` leaves no samples"),
        ({"limit": 2000}, r"`limit=2000` asks for more than `digits` \(train\) has.* 1442; pass"),
        ({"split": "val"}, r"`split='val'` is unknown; `digits` has 'train' and 'test'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset("digits", **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mnst:/data", r"`mnst:/data` is not known .* `digits`, `mnist:DIR`, .*mean `mnist:DIR`"),
        ("minst:data", r"did you mean `mnist:DIR`\?"),
        ("Fashion_MNIST:x", r"did you mean `fashion-mnist:DIR`\?"),
        ("cifar-10:some/folder", r"did you mean `cifar10:DIR`\?"),
        ("CIFAR10", r"did you mean `cifar10:DIR`\?"),
        ("digit", r"did you mean `digits`\?"),
        ("whatever", r"`package.module:factory`\.$"),
        ("mnist", r"`mnist` lacks the folder .*; write `mnist:DIR`"),
        ("mnist:", r"lacks the folder"),
        ("digits:/data", r"has '/data' too many; `digits` needs no folder"),
        ("file.py", r"`file.py` has no colon; .*write `file.py:NAME`"),
    ],
)
def test_names_that_are_not_known(spec, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(spec)


def test_the_list_of_built_in_names():
    assert list(BUILTIN) == ["digits", "mnist", "fashion-mnist", "cifar10"]
    for name, builtin in BUILTIN.items():
        assert builtin.usage in (name, f"{name}:DIR")
        assert len(builtin.classes) == 10
        assert builtin.about


@pytest.mark.parametrize("names", [("inputs", "targets"), ("x", "y")])
@pytest.mark.parametrize("compressed", [True, False])
def test_npz(tmp_path, names, compressed):
    save = np.savez_compressed if compressed else np.savez
    inputs, targets = np.linspace(0, 1, 24).reshape(6, 4), np.arange(6, dtype=np.int32)
    save(tmp_path / "own.npz", **dict(zip(names, (inputs, targets), strict=True)))
    samples = load_dataset(f"{tmp_path}/own.npz", limit=5, mean=0.5)
    torch.testing.assert_close(samples.inputs, torch.tensor(inputs[:5] - 0.5).float())
    assert samples.targets.tolist() == [0, 1, 2, 3, 4]
    assert samples.targets.dtype == torch.int64
    assert samples.name == f"{tmp_path}/own.npz"


def test_npz_splits(tmp_path):
    arrays = {
        f"{n}_{s}": np.full(3, i) for i, s in enumerate(("train", "test", "val")) for n in "xy"
    }
    np.savez(tmp_path / "own.npz", x=np.full(3, 9), y=np.full(3, 9), **arrays)
    for number, split in enumerate(("train", "test", "val")):
        assert load_dataset(f"{tmp_path}/own.npz", split=split).targets.tolist() == [number] * 3


@pytest.mark.parametrize(
    ("dtype", "inputs", "targets"),
    [
        ("uint8", (torch.float32, 1 / 255), (torch.int64, 1)),
        ("int32", (torch.int64, 1), (torch.int64, 1)),
        ("uint16", (torch.int64, 1), (torch.int64, 1)),
        ("bool", (torch.float32, 1), (torch.int64, 1)),
        ("float64", (torch.float32, 1), (torch.float32, 1)),
        ("float16", (torch.float32, 1), (torch.float32, 1)),
        (">f4", (torch.float32, 1), (torch.float32, 1)),
    ],
)
def test_npz_dtypes(tmp_path, dtype, inputs, targets):
    np.savez(tmp_path / "own.npz", x=np.ones((2, 3), dtype), y=np.ones(2, dtype))
    samples = load_dataset(f"{tmp_path}/own.npz")
    for tensor, (expected, value) in zip(samples, (inputs, targets), strict=True):
        assert tensor.dtype == expected
        torch.testing.assert_close(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        ("uint8", "the inputs are uint8, taken for images and divided by 255"),
        ("bool", "the inputs are bool, read as 0 and 1 in float32"),
        ("float64", "the inputs are float64, rounded to float32"),
        ("float32", None),
        ("int16", None),
    ],
)
def test_npz_conversions_are_in_the_notes_of_the_surface(tmp_path, dtype, note):
    rows = (np.arange(12).reshape(4, 3) % 2).astype(dtype)
    np.savez(tmp_path / "own.npz", x=rows, y=np.array([0, 1, 0, 1]))
    samples = load_dataset(f"{tmp_path}/own.npz")
    assert samples.notes == (() if note is None else (note,))
    if samples.inputs.is_floating_point():
        surface = LossSurface(torch.nn.Linear(3, 2), "cross_entropy", samples)
        assert surface.notes == list(samples.notes)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.full((2, 3), 1e300), np.ones(2), r"the inputs in .* are float64 and go from 1e\+300"),
        (np.ones((2, 3), "f4"), np.array([1, 2**64 - 1], "u8"), "the targets in .* are uint64"),
    ],
)
def test_npz_numbers_that_do_not_fit_are_refused(tmp_path, inputs, targets, message):
    np.savez(tmp_path / "own.npz", x=inputs, y=targets)
    with pytest.raises(ValueError, match=message + ".*does not fit"):
        load_dataset(f"{tmp_path}/own.npz")


ROWS = np.ones((3, 2))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": ROWS, "b": ROWS}, r"holds `a`, `b`; needed is one of the pairs `inputs_train`/"),
        ({}, r"holds nothing; needed is one of the pairs"),
        ({"x": ROWS}, r"holds `x`; needed .*`inputs`/`targets`, `x`/`y`; rename"),
        (
            {"x": ROWS, "y": np.ones(4)},
            r"inputs of shape \(3, 2\), targets of shape \(4,\); needed",
        ),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, r"and at least one"),
        ({"x": np.float32(3), "y": ROWS}, r"inputs of shape \(\), targets"),
        (
            {"x": np.array([{}, 1, 2]), "y": np.ones(3)},
            r"`x` in .* of dtype object; needed are num",
        ),
        ({"x": ROWS, "y": np.array(["a"] * 3)}, r"`y` in .* of dtype <U1; needed are numbers"),
        ({"x": ROWS * 1j, "y": np.ones(3)}, r"of dtype complex128; needed are numbers"),
    ],
)
def test_npz_that_is_wrong(tmp_path, arrays, message):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"{tmp_path}/own.npz")


@pytest.mark.parametrize(
    "start",
    [
        b"\x93NUMPY\x01\x00\x05\x00{{{{\n",
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (10**15,), }".ljust(117)
        + b"\n",
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117)
        + b"\n",
    ],
)
def test_npz_with_a_damaged_header(tmp_path, start):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", start)
        archive.writestr("y.npy", start)
    with pytest.raises(ValueError, match=r"is cut short or not an `.npz`"):
        load_dataset(f"{tmp_path}/own.npz")


def test_npz_without_the_split(tmp_path):
    np.savez(tmp_path / "own.npz", x=ROWS, y=np.ones(3))
    with pytest.raises(ValueError, match=r"and no split 'test'; leave `split` out"):
        load_dataset(f"{tmp_path}/own.npz", split="test")
    with pytest.raises(ValueError, match=r"`limit=4` asks for more than .* which is 3"):
        load_dataset(f"{tmp_path}/own.npz", limit=4)
    np.savez(tmp_path / "tokens.npz", x=np.ones((3, 2), int), y=np.ones(3))
    with pytest.raises(ValueError, match=r"`mean` was given for inputs of dtype int64"):
        load_dataset(f"{tmp_path}/tokens.npz", mean=0.5)


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "flipped", "npy", "pickle"])
def test_npz_that_is_damaged(tmp_path, kind):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x=np.arange(4000.0), y=np.arange(4000))
    good = bytearray(path.read_bytes())
    good[len(good) // 2] ^= 255
    contents = {"empty": b"", "text": b"hello", "flipped": good, "cut": good[: len(good) // 2]}
    path.write_bytes(contents.get(kind, pickle.dumps([1])))
    message = r"cut short or not an `.npz` \(\w+: .*; needed is what `numpy.savez` writes"
    if kind == "npy":
        np.save(tmp_path / "one.npy", ROWS)
        os.replace(tmp_path / "one.npy", path)
        message = r"holds one array without a name; .*numpy.savez\("
    with pytest.raises(ValueError, match=message):
        load_dataset(str(path))
    with pytest.raises(FileNotFoundError, match=r"other.npz` is not a file, seen from"):
        load_dataset(f"{tmp_path}/other.npz")


FACTORIES = """
    import torch

    DATA = [(torch.zeros(2, 3), torch.zeros(2))]

    def plain():
        return DATA

    def keen(split, limit=7, **more):
        return split, limit, more

    def takes_all(**options):
        return options

    def half(limit=7):
        return limit

    def needs(width):
        return DATA

    def forgets():
        pass

    def fails():
        raise OSError("no such disk")
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "data.py").write_text(dedent(FACTORIES))
    return f"{tmp_path}/data.py"


def test_a_factory_of_the_user(own):
    assert load_dataset(f"{own}:plain") is load_dataset(f"{own}:DATA")
    assert load_dataset(f"{own}:keen") == ("train", 7, {})
    assert load_dataset(f"{own}:keen", split="val", limit=3) == ("val", 3, {})
    assert load_dataset(f"{own}:takes_all") == {}
    assert load_dataset(f"{own}:takes_all", split="test", limit=3) == {"split": "test", "limit": 3}
    assert load_dataset(f"{own}:half") == 7
    assert load_dataset(f"{own}:half", limit=2) == 2
    assert load_dataset("collections:OrderedDict") == {}


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("plain", {"limit": 3}, ValueError, r"`limit=3` cannot be applied .*argument `limit`, or"),
        ("plain", {"split": "test"}, ValueError, r"`split='test'` cannot be applied"),
        ("half", {"split": "test"}, ValueError, r"`split='test'` cannot be applied"),
        ("DATA", {"limit": 3}, ValueError, r"`limit=3` cannot be applied"),
        ("plain", {"mean": 0.5}, ValueError, r"`mean=0.5` cannot be applied .*normalise there"),
        ("plain", {"limit": 0}, ValueError, r"`limit=0` leaves no samples"),
        ("needs", {}, TypeError, r"needs the arguments `width`"),
        ("forgets", {}, TypeError, r"returned None; needed are data; let it `return` them"),
        ("fails", {}, RuntimeError, r":fails` failed: OSError: no such disk \(.*data.py:25\)"),
        ("plane", {}, AttributeError, r"\(did you mean `plain`\?\)"),
    ],
)
def test_a_factory_that_cannot_serve(own, name, options, error, message):
    with pytest.raises(error, match=message):
        load_dataset(f"{own}:{name}", **options)


def test_a_file_or_module_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.py` is not a file"):
        load_dataset(f"{tmp_path}/none.py:make")
    with pytest.raises(ModuleNotFoundError, match=r"there is no module `not_there`"):
        load_dataset("not_there.data:make")


MEANS = {"mnist": [0.1307], "fashion-mnist": [0.2860], "cifar10": [0.4914, 0.4822, 0.4465]}
FIRST = {
    ("mnist", "train"): [5, 0, 4, 1, 9, 2, 1, 3],
    ("mnist", "test"): [7, 2, 1, 0, 4, 1, 4, 9],
    ("fashion-mnist", "train"): [9, 0, 0, 3, 0, 2, 7, 2],
    ("fashion-mnist", "test"): [9, 2, 1, 1, 6, 1, 4, 6],
    ("cifar10", "test"): [3, 8, 8, 0, 6, 6, 1, 6],
    ("cifar10", "train"): [6, 9, 9, 4, 1, 1, 2, 7],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), FIRST)
def test_the_real_sets(name, split):
    read = zoo.raw_images if split == "test" else zoo.raw_images.__wrapped__
    samples = read(name, None, split)
    count = {"test": 10_000}.get(split, 50_000 if name == "cifar10" else 60_000)
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    assert samples.inputs.shape == (count, *shape)
    assert samples.targets[:8].tolist() == FIRST[name, split]
    counts = samples.targets.bincount(minlength=10)
    assert counts.sum() == count
    if name != "mnist":
        assert counts.tolist() == [count // 10] * 10
    if split == "train":
        mean = samples.inputs.mean(dim=(0, 2, 3))
        torch.testing.assert_close(mean, torch.tensor(MEANS[name]), rtol=0, atol=6e-5)
