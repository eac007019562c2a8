"""Small data files in the layouts of the real ones, with known content."""

from __future__ import annotations

import gzip
import lzma
import pickle
import struct
from pathlib import Path

import numpy as np

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def pixels(count: int, *shape: int) -> np.ndarray:
    """Bytes that differ from image to image and from place to place."""
    return (np.arange(count * int(np.prod(shape))) * 31 % 251).astype(np.uint8).reshape(-1, *shape)


def labels(count: int) -> np.ndarray:
    return (np.arange(count) * 7 % 10).astype(np.uint8)


def write(path: Path, content: bytes, ending: str = "") -> Path:
    path = path.with_name(path.name + ending)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK[ending](content))
    return path


def idx(array: np.ndarray) -> bytes:
    """The IDX file of an array of bytes."""
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, count: int = 20, ending: str = "", dot: str = "-") -> None:
    for prefix, size in (("train", count), ("t10k", count // 2)):
        image_file = folder / f"{prefix}-images{dot}idx3-ubyte"
        write(image_file, idx(pixels(size, 28, 28)), ending)
        write(folder / f"{prefix}-labels{dot}idx1-ubyte", idx(labels(size)), ending)


def binary(count: int) -> bytes:
    """A binary batch of CIFAR-10."""
    return np.concatenate([labels(count)[:, None], pixels(count, 3072)], axis=1).tobytes()


def write_cifar(folder: Path, count: int = 10, ending: str = "", protocol: int | None = None):
    """Five training batches and one for testing; pickles if a protocol is given."""
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        if protocol is None:
            write(folder / f"{name}.bin", binary(count), ending)
        else:
            write(folder / name, batch(count, protocol), ending)


def batch(count: int, protocol: int) -> bytes:
    """A batch of CIFAR-10 for Python; protocol 0 stands for the original, of Python 2."""
    if protocol == 0:
        return python2_batch(count)
    keys = (b"data", b"labels", b"batch_label", b"filenames")
    values = (pixels(count, 3072), labels(count).tolist(), b"training batch", [b"a.png"])
    return pickle.dumps(dict(zip(keys, values, strict=True)), protocol=protocol)


def python2_batch(count: int) -> bytes:
    """Opcode for opcode what Python 2's cPickle wrote, with its 8-bit strings."""

    def text(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    content = pixels(count, 3072).tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) * 2 + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    array += number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + number(count) + number(3072) + b"\x86" + dtype + b"\x89"
    array += b"T" + struct.pack("<i", len(content)) + content + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels(count)) + b"e"
    entries = text(b"batch_label") + text(b"training batch 1 of 5")
    entries += text(b"labels") + listed + text(b"data") + array
    return b"\x80\x02}(" + entries + b"u."
