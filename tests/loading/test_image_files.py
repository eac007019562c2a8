"""The files of MNIST and CIFAR-10: every layout, and every way they can be wrong."""

import gzip
import lzma
import os
import pickle
import struct

import numpy as np
import pytest
import torch
from data_files import batch, binary, idx, labels, pixels, write, write_cifar, write_mnist

from flatgauge.loading.datasets import Samples, load_dataset

ENDINGS = ["", ".gz", ".xz"]


def scaled(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array.astype(np.float64) / 255).float()


def assert_images(samples: Samples, shape: tuple[int, ...], count: int, taken: int) -> None:
    inputs, targets = samples
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    torch.testing.assert_close(inputs, scaled(pixels(count, *shape)[:taken]), rtol=1e-7, atol=0)
    assert targets.tolist() == labels(count)[:taken].tolist()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("sub", ["", "raw", "MNIST/raw"])
def test_mnist_in_every_layout(tmp_path, ending, dot, sub):
    write_mnist(tmp_path / sub, ending=ending, dot=dot)
    for limit in (None, 3):
        samples = load_dataset(f"mnist:{tmp_path}", limit=limit)
        assert_images(samples, (1, 28, 28), 20, limit or 20)
    assert_images(load_dataset(f"mnist:{tmp_path}", split="test"), (1, 28, 28), 10, 10)


def test_a_folder_of_torchvision_holds_both_sets(tmp_path):
    write_mnist(tmp_path / "MNIST/raw", count=20)
    write_mnist(tmp_path / "FashionMNIST/raw", count=30)
    assert len(load_dataset(f"mnist:{tmp_path}").targets) == 20
    assert len(load_dataset(f"fashion-mnist:{tmp_path}").targets) == 30
    assert load_dataset(f"fashion-mnist:{tmp_path}").classes[9] == "Ankle boot"


def test_a_name_that_lies_about_compression(tmp_path):
    write_mnist(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(f"{path}.gz")  # as browsers do that unpack what they download
    assert_images(load_dataset(f"mnist:{tmp_path}"), (1, 28, 28), 20, 20)


def test_folders_and_files_that_are_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere` does not exist, .* does not download"):
        load_dataset(f"mnist:{tmp_path}/nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"file` is a file, .* needed is the folder"):
        load_dataset(f"cifar10:{tmp_path}/file")
    message = r"none of `train-images-idx3-ubyte`, `train-images.idx3-ubyte` \(plain, `.gz` or"
    with pytest.raises(FileNotFoundError, match=message):
        load_dataset(f"mnist:{tmp_path}")
    message = r"none of `data_batch_1.bin`, `data_batch_1` .*; check the folder"
    with pytest.raises(FileNotFoundError, match=message):
        load_dataset(f"cifar10:{tmp_path}")
    (tmp_path / "cifar-10-python.tar.gz").touch()
    with pytest.raises(FileNotFoundError, match=r"unpack `cifar-10-python.tar.gz` there first"):
        load_dataset(f"cifar10:{tmp_path}")


GOOD = idx(pixels(20, 28, 28))
HEADER = struct.pack(">4I", 0x803, 0, 28, 28)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], r"is cut short: 1 of 15680 expected bytes are missing; .*download"),
        (GOOD[:9], r"is cut short: 7 of 12 expected"),
        (b"", r"is cut short: 4 of 4"),
        (GOOD + b"x", r"goes on after the 20 items its header counts"),
        (
            idx(labels(20)),
            r"begins with b'.*x08.x01', which is not an IDX file of images .magic number",
        ),
        (b"<!DOCTYPE html>", r"begins with b'<!DO', which is not an IDX file"),
        (idx(pixels(20, 10, 10)), r"holds 20 items of size \[10, 10\]; needed .* 28×28"),
        (HEADER, r"holds 0 items"),
        (struct.pack(">4I", 0x803, 2**31, 28, 28), r"is cut short: \d+ of \d+ expected bytes"),
        (gzip.compress(GOOD)[:-20], r"is cut short or damaged .*end-of-stream.*download it again"),
        (gzip.compress(GOOD)[:-8] + bytes(8), r"is cut short or damaged \(CRC check failed"),
        (lzma.compress(GOOD)[:-20], r"is cut short or damaged"),
        (lzma.compress(GOOD)[:60] + bytes(60), r"is cut short or damaged"),
        (idx(pixels(19, 28, 28)), r"holds 19 images and `.*` 20 labels; needed is one label"),
    ],
)
def test_image_files_that_are_wrong(tmp_path, content, message):
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"mnist:{tmp_path}")


def test_label_files_that_are_wrong(tmp_path):
    write_mnist(tmp_path)
    wrong = labels(20)
    wrong[13] = 10
    write(tmp_path / "train-labels-idx1-ubyte", idx(wrong))
    with pytest.raises(ValueError, match=r"has label 10 at position 13; needed are 0 to 9"):
        load_dataset(f"mnist:{tmp_path}")
    with pytest.raises(ValueError, match=r"`limit=21` asks for more than .* has, which is 20"):
        load_dataset(f"mnist:{tmp_path}", limit=21)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("protocol", [None, 0, 2, 3, 4, 5])
@pytest.mark.parametrize("parent", [True, False])
def test_cifar_in_every_layout(tmp_path, ending, protocol, parent):
    folder = f"cifar-10-batches-{'bin' if protocol is None else 'py'}" if parent else ""
    write_cifar(tmp_path / folder, ending=ending, protocol=protocol)
    test = load_dataset(f"cifar10:{tmp_path}", split="test")
    assert_images(test, (3, 32, 32), 10, 10)
    train = load_dataset(f"cifar10:{tmp_path}")
    assert train.inputs.shape == (50, 3, 32, 32)
    torch.testing.assert_close(train.inputs[20:30], test.inputs, rtol=0, atol=0)
    assert len(load_dataset(f"cifar10:{tmp_path}", limit=23).targets) == 23


def test_no_more_batches_are_opened_than_needed(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    assert_images(load_dataset(f"cifar10:{tmp_path}", limit=4), (3, 32, 32), 10, 4)
    assert len(load_dataset(f"cifar10:{tmp_path}", limit=20).targets) == 20
    with pytest.raises(FileNotFoundError, match=r"none of `data_batch_3.bin`, `data_batch_3`"):
        load_dataset(f"cifar10:{tmp_path}", limit=21)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_an_array_in_column_order(tmp_path, ending):
    entries = {"data": np.asfortranarray(pixels(10, 3072)), "labels": labels(10).tolist()}
    for protocol in (2, 5):
        write(tmp_path / "test_batch", pickle.dumps(entries, protocol=protocol), ending)
        samples = load_dataset(f"cifar10:{tmp_path}", split="test")
        assert_images(samples, (3, 32, 32), 10, 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (binary(10)[:-1], r"has 30729 bytes, which is not a multiple of 3073 \(a label and 3072"),
        (b"", r"has 0 bytes"),
        (b"\x0b" + binary(10)[1:], r"has label 11 at position 0; needed are 0 to 9; .*CIFAR-100"),
        (lzma.compress(binary(10))[:-30], r"is cut short or damaged"),
    ],
)
def test_binary_batches_that_are_wrong(tmp_path, content, message):
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"cifar10:{tmp_path}", split="test")


def test_more_than_cifar_has(tmp_path):
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match=r"`limit=51` asks for more than .* which is 50"):
        load_dataset(f"cifar10:{tmp_path}", limit=51)


class Bomb:
    place = ""

    def __reduce__(self):
        return os.mkdir, (f"{self.place}/exploded",)


def dump(**changes: object) -> bytes:
    entries = {"data": pixels(10, 3072), "labels": labels(10).tolist()} | changes
    return pickle.dumps({key: value for key, value in entries.items() if value is not None})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dump(labels=None, fine_labels=[1]), r"holds `data`, `fine_labels`; needed are `data` and"),
        (pickle.dumps([1, 2]), r"holds `list`; needed are `data` and `labels`"),
        (dump(data=pixels(10, 3072).astype(np.float32)), r"`data` that is not an array of bytes"),
        (dump(data=pixels(10, 3071)), r"not an array of bytes with 3072 columns"),
        (dump(data=[1, 2]), r"not an array of bytes"),
        (dump(labels=["cat"] * 10), r"`labels` that are not a list of whole numbers"),
        (dump(labels=[1, 2]), r"holds 10 images and 2 labels"),
        (dump(labels=[0] * 9 + [10]), r"has label 10 at position 9"),
        (dump(labels=[0] * 9 + [-(10**30)]), r"has label -1000\d+ at position 9"),
        (dump(labels=labels(10)[0]), r"asks to run `numpy.*scalar`"),
        (dump()[:-500], r"cut short or not a pickle"),
        (b"<!DOCTYPE html>", r"cut short or not a pickle"),
        (batch(10, 0).replace(b"J\n\0\0\0J\0\x0c", b"J\x0b\0\0\0J\0\x0c"), r"cut short or not"),
        (batch(10, 0)[:200], r"cut short or not a pickle"),
    ],
)
def test_pickled_batches_that_are_wrong(tmp_path, content, message):
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_dataset(f"cifar10:{tmp_path}", split="test")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_runs_nothing(tmp_path, protocol):
    bomb = Bomb()
    bomb.place = str(tmp_path)
    entries = {"data": pixels(10, 3072), "labels": labels(10).tolist(), "more": bomb}
    write(tmp_path / "test_batch", pickle.dumps(entries, protocol=protocol))
    with pytest.raises(ValueError, match=r"asks to run `\w+.(mkdir|_reconstructor)`.*do not open"):
        load_dataset(f"cifar10:{tmp_path}", split="test")
    assert not (tmp_path / "exploded").exists()
