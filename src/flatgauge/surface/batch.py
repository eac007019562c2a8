"""One batch of samples: what the model is called with, and what the loss compares to.

What enters: a pair, a dict or inputs alone, as a loader gives them, with tensors anywhere in nested
tuples, lists and mappings. What leaves: a `Batch` that can be cut into samples, joined with others,
and recognised by its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested structure, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from tensors(tree[key])
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors(item)


def fingerprint(tree: Any, *, depth: int = 8) -> Hashable:
    """What identifies a structure by content; objects of unknown kind by their attributes."""
    kind = type(tree).__name__
    if depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float, complex)):
        return kind if depth == 0 else (kind, repr(tree))
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            tree = tree.to_dense()
        flat = tree.detach().cpu().contiguous().reshape(-1)
        return kind, str(tree.dtype), tuple(tree.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return kind, str(tree.dtype), tree.shape, tree.tobytes()
    if isinstance(tree, Mapping):
        return kind, tuple((repr(k), fingerprint(v, depth=depth - 1)) for k, v in tree.items())
    if isinstance(tree, (tuple, list)):
        return kind, tuple(fingerprint(item, depth=depth - 1) for item in tree)
    if isinstance(tree, (set, frozenset)):
        return kind, frozenset(fingerprint(item, depth=depth - 1) for item in tree)
    slots = [name for part in type(tree).__mro__ for name in getattr(part, "__slots__", ())]
    inside = {name: getattr(tree, name, None) for name in slots} | getattr(tree, "__dict__", {})
    return kind, fingerprint(inside, depth=depth - 1)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuild a nested structure with every tensor replaced; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def as_tensors(tree: Any) -> Any:
    """Turn the NumPy arrays and plain mappings of a nested structure into tensors and dicts."""
    if isinstance(tree, np.ndarray):
        return torch.as_tensor(tree)
    if isinstance(tree, Mapping):
        return {key: as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [as_tensors(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def concatenate(trees: list[Any]) -> Any:
    """Join structures of one shape along the sample dimension of each of their tensors."""
    if len(trees) == 1:
        return trees[0]
    leaves, spec = zip(*map(pytree.tree_flatten, trees), strict=True)
    parts = zip(*leaves, strict=True)
    joined = [torch.cat(part) if isinstance(part[0], Tensor) else part[0] for part in parts]
    return pytree.tree_unflatten(joined, spec[0])


def signature(tree: Any) -> Any:
    """Describe a structure up to its number of samples: equal signatures concatenate."""
    leaves, spec = pytree.tree_flatten(tree)
    kinds = [
        (x.dtype, x.device.type, tuple(x.shape[1:])) if isinstance(x, Tensor) else repr(x)
        for x in leaves
    ]
    return spec, tuple(kinds)


#: Where a dict batch keeps its targets, in the order of looking.
LABEL_KEYS = ("labels", "label", "targets", "target", "y")


#: Whole numbers by the bytes they take.
_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class Batch:
    """Some samples: what the model is called with, and what the loss compares to.

    Attributes:
        inputs: A tensor, or a tuple (positional arguments) or dict (keyword arguments) of them.
        target: What belongs to the inputs, or None. A dict batch keeps it in `inputs` too.
        splittable: Whether every tensor has the samples along its first dimension.
        label_key: Where a dict batch keeps the target.
    """

    inputs: Any
    target: Any
    samples: int
    splittable: bool
    label_key: str | None = None

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(t.numel() * t.element_size() for t in tensors((self.inputs, self.target)))

    def copy(self) -> Batch:
        """The same samples in tensors of their own."""
        inputs, target = map_tensors(torch.clone, (self.inputs, self.target))
        return replace(self, inputs=inputs, target=target)

    def rows(self, index: slice | list[int]) -> Batch:
        """Take some of the samples, in the order of the index."""
        inputs, target = map_tensors(lambda tensor: tensor[index], (self.inputs, self.target))
        count = next(tensors((target, inputs))).shape[0]
        return replace(self, inputs=inputs, target=target, samples=count)

    def split(self, size: int) -> Iterator[Batch]:
        """Cut into the fewest pieces of at most `size` samples, all nearly equal."""
        if self.samples <= size or not self.splittable:
            yield self
            return
        pieces = -(-self.samples // size)
        edges = [round(i * self.samples / pieces) for i in range(pieces + 1)]
        for start, stop in pairwise(edges):
            yield self.rows(slice(start, stop))


def as_batch(raw: Any, *, where: str) -> Batch:
    """Read one batch as the user's loader gives it."""
    raw = as_tensors(raw)
    inputs, target, key = raw, None, None
    if isinstance(raw, Mapping):
        key = next((key for key in LABEL_KEYS if key in raw), None)
        target = None if key is None else raw[key]
    elif isinstance(raw, (tuple, list)):
        if len(raw) not in (1, 2):
            raise ValueError(
                f"{where} is a {type(raw).__name__} of {len(raw)} items, but a batch is a pair "
                "(inputs, targets); for several inputs give ((first, second), targets), or a "
                "dict of keyword arguments."
            )
        inputs, target = raw[0], raw[1] if len(raw) == 2 else None
    if any(tensor.layout is not torch.strided for tensor in tensors((inputs, target))):
        raise ValueError(
            f"{where} holds a sparse or nested tensor, which cannot be cut into samples; make it "
            "dense with `.to_dense()` (`.to_padded_tensor(0.0)` if nested)."
        )
    if any(tensor.is_meta for tensor in tensors((inputs, target))):
        raise ValueError(
            f"{where} holds a tensor on the device `meta`, which has no values; give data that are "
            "in memory."
        )
    sizes = [tensor.shape[0] for tensor in tensors((target, inputs)) if tensor.dim() > 0]
    if sizes and sizes[0] == 0:
        raise ValueError(f"{where} holds no samples; remove it, or give data that has some.")
    splittable = bool(sizes) and len(set(sizes)) == 1 and _only_tensors((inputs, target))
    return Batch(inputs, target, sizes[0] if sizes else 1, splittable, key)


def _only_tensors(tree: Any) -> bool:
    """Whether slicing the tensors of a structure slices all there is in it per sample."""
    if isinstance(tree, Mapping):
        return all(_only_tensors(value) for value in tree.values())
    if isinstance(tree, (tuple, list)):
        return all(_only_tensors(item) for item in tree)
    if isinstance(tree, Tensor):
        return tree.dim() > 0
    return tree is None or isinstance(tree, bool)


def why_whole(batch: Batch) -> str:
    """Why a batch cannot be cut into samples, as text."""
    odd = [
        type(item).__name__
        for item in pytree.tree_leaves((batch.inputs, batch.target))
        if not isinstance(item, (Tensor, bool, type(None)))
    ]
    if odd:
        return f"they hold items of type {odd[0]}"
    if not all(tensor.dim() for tensor in tensors((batch.inputs, batch.target))):
        return "they hold tensors without dimensions"
    return "their tensors differ in the first dimension"


def check_numbers(batch: Batch, where: str) -> Batch:
    """Refuse inputs or targets that are not finite."""
    for role, tree in (("inputs", batch.inputs), ("targets", batch.target)):
        for tensor in tensors(tree):
            # In pieces: asked of all at once, it takes more than the data themselves.
            pieces = tensor.split(256) if tensor.dim() else (tensor,)
            if tensor.is_floating_point() and not all(torch.isfinite(x).all() for x in pieces):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ValueError(
                    f"the {role} of {where} hold {bad} values that are nan or infinite; "
                    "clean the data first (`torch.isfinite` finds them)."
                )
    return batch


def version_counters(batch: Batch) -> list[int]:
    """How often the tensors of a batch have been written to by torch."""
    held = tensors((batch.inputs, batch.target))
    return [0 if tensor.is_inference() else tensor._version for tensor in held]


def checksums(batch: Batch) -> list[int]:
    """Two numbers per tensor of a batch that change with its bits, and with the order of rows."""
    found = []
    for tensor in tensors((batch.inputs, batch.target)):
        total = ordered = place = 0
        for piece in (tensor if tensor.dim() else tensor[None]).split(1024):  # Copied in pieces.
            flat = piece.detach().reshape(len(piece), -1).contiguous()
            bits = flat.view(_WHOLE.get(flat.element_size(), torch.uint8))
            rows = bits.sum(1, dtype=torch.int64)
            total += int(rows.sum())
            places = torch.arange(place + 1, place + len(rows) + 1, device=rows.device)
            ordered += int((rows * places).sum())
            place += len(rows)
        found += [total, ordered]
    return found


def can_join(first: Batch, second: Batch) -> bool:
    """Whether two batches can be joined into one."""
    if not (first.splittable and second.splittable):
        return False
    return bool(
        signature((first.inputs, first.target)) == signature((second.inputs, second.target))
    )


def join(batches: list[Batch]) -> Batch:
    """Make one batch of several of one signature."""
    if len(batches) == 1:
        return batches[0]
    inputs, target = concatenate([(batch.inputs, batch.target) for batch in batches])
    samples = sum(batch.samples for batch in batches)
    return replace(batches[0], inputs=inputs, target=target, samples=samples)


def join_neighbours(batches: Iterable[Batch]) -> list[Batch]:
    """Join neighbours of one signature, so that later chunks are slices and not copies."""
    runs: list[list[Batch]] = []
    for batch in batches:
        if runs and can_join(runs[-1][0], batch):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return [join(run) for run in runs]


def slice_batches(batches: Iterable[Batch], start: int, stop: int) -> Iterator[Batch]:
    """The samples from one place to another; what cannot be cut belongs where it begins."""
    place = 0
    for batch in batches:
        if place >= stop:
            return
        first, behind = max(start - place, 0), min(stop - place, batch.samples)
        if batch.splittable:
            if first < behind:
                whole = behind - first == batch.samples
                yield batch if whole else batch.rows(slice(first, behind))
        elif start <= place:
            yield batch
        place += batch.samples


def sample_digests(batch: Batch) -> list[int]:
    """One number per sample that identifies it, in whatever batch or process it comes."""
    if not batch.splittable:  # It counts all its samples by the one number it has.
        return [_number(repr(fingerprint((batch.inputs, batch.target))).encode())] * batch.samples
    columns = []
    for tensor in tensors((batch.inputs, batch.target)):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        columns.append(flat.reshape(batch.samples, flat.numel() // batch.samples).numpy())
    return [_number(*(column[i].tobytes() for column in columns)) for i in range(batch.samples)]


def _number(*pieces: bytes) -> int:
    """A number of 64 bits with a sign, made of bytes."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return int.from_bytes(found.digest(), "little", signed=True)
