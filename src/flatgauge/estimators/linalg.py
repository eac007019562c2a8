"""Matrices of any library as counted operators on torch vectors, and sums in double precision.

`Matrix` wraps anything square with ``shape`` and ``@``. `to_float64`, `float64_pieces` and
`ChunkedSum` add up in double precision, on every device and without copies of long vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: What reordered sums and arbitrary factors may change, relatively, in single and in double
#: precision.
FLOAT32_RTOL, FLOAT64_RTOL = 1e-5, 1e-10

#: How many chunks are added up in their own precision.
CHUNKS_PER_FLUSH = 16

#: Entries of long vectors that are worked on at a time, where a copy is needed.
PIECE = 2**20


class SupportsMatmul(Protocol):
    """A square matrix of any library: torch, numpy, scipy, or an operator of our own."""

    @property
    def shape(self) -> Any:
        """Rows and columns."""

    def __matmul__(self, other: Any, /) -> Any:
        """The product with a vector ``(p,)`` or with a block of columns ``(p, k)``."""


class Matrix:
    """A square matrix, whatever its library, that multiplies torch vectors and counts.

    Objects with a torch ``dtype``, or with none, are handed torch vectors; all others
    (numpy arrays, scipy matrices and operators) are handed numpy vectors. Integer matrices
    and objects without a ``dtype`` are worked on in float64. Products carry no autograd
    graph. Symmetry is assumed and not checked.

    Attributes:
        size: Number of rows and of columns.
        dtype: Floating-point type of the vectors, torch.float32 or torch.float64.
        device: Where the vectors live.
        matvecs: Products made so far; a block of k columns counts as k.

    Example:
        >>> matrix = Matrix(np.array([[2, 1], [1, 2]]))
        >>> matrix @ torch.tensor([1.0, 0.0], dtype=matrix.dtype)
        tensor([2., 1.], dtype=torch.float64)
        >>> matrix.matvecs
        1
    """

    def __init__(self, operator: SupportsMatmul) -> None:
        self.size = _square(operator)
        given = getattr(operator, "dtype", None)
        self._numpy = given is not None and not isinstance(given, torch.dtype)
        self.dtype = _working_dtype(given)
        self.device = torch.device("cpu" if self._numpy else getattr(operator, "device", "cpu"))
        self._name = type(operator).__name__
        if isinstance(operator, Tensor):
            operator = operator.detach().to(self.dtype)
        elif isinstance(operator, np.ndarray):
            operator = np.asarray(operator)  # np.matrix would return rows for vectors
        self._operator = operator
        self.matvecs = 0

    def __matmul__(self, block: Tensor) -> Tensor:
        """Multiply a vector ``(p,)`` or a block of columns ``(p, k)``."""
        self.matvecs += block.shape[1] if block.ndim == 2 else 1
        product = self._operator @ (block.cpu().numpy() if self._numpy else block)
        if not isinstance(product, Tensor):
            product = torch.from_numpy(np.array(product))
        product = product.detach().to(device=self.device, dtype=self.dtype)
        if product.shape != block.shape:
            raise ValueError(
                f"the product of the {self.size} × {self.size} `{self._name}` with a block of "
                f"shape {tuple(block.shape)} has shape {tuple(product.shape)}; `@` must return "
                "the shape it is given, for vectors (p,) and for blocks (p, k)."
            )
        if not torch.isfinite(product).all():
            raise ValueError(self._not_finite(product))
        return product

    def _not_finite(self, product: Tensor) -> str:
        """The message for a product with nan or infinity."""
        kind = "nan" if torch.isnan(product).any() else "inf"
        bad = int((~torch.isfinite(product)).sum())
        return (
            f"the product with the {self.size} × {self.size} `{self._name}` is not finite "
            f"({kind}; {bad} of {product.numel()} entries, product {self.matvecs}); nothing "
            "can be said about such a matrix. Check that the loss and its derivatives are "
            "finite at these parameters and on this data."
        )


def _square(operator: SupportsMatmul) -> int:
    """The number of rows; refuse anything but a square matrix."""
    shape = tuple(int(n) for n in operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(
            f"`operator` has shape {shape!r}; a square matrix (p, p) with p >= 1 is needed."
        )
    return shape[0]


def _working_dtype(given: Any) -> torch.dtype:
    """The torch type in which to hold the vectors for a matrix of type ``given``."""
    name = str(given).removeprefix("torch.") if given is not None else "none"
    if name == "float32":
        return torch.float32
    if name in ("float64", "none", "bool") or "int" in name:
        return torch.float64
    raise ValueError(
        f"`operator` has dtype {name}; float32 or float64 is needed, because spectra computed "
        "with fewer digits are mostly rounding (and complex ones are not supported). Convert "
        "the model or the matrix first, for example with `.float()`."
    )


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in double precision; on the CPU where its device has none (Apple's MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def float64_pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of long vectors of one length in double precision; whole, they take more memory."""
    for pieces in zip(*(vector.split(PIECE) for vector in vectors), strict=True):
        yield tuple(to_float64(piece) for piece in pieces)


def vector_norm(vector: Tensor) -> float:
    """The length of a vector, summed in double precision."""
    return math.hypot(*(float(piece.norm()) for (piece,) in float64_pieces(vector)))


class ChunkedSum:
    """Vectors summed over chunks: a few in their own precision, and those sums in double.

    Single precision alone loses digits with every chunk; double precision alone can cost a
    third of a small chunk's product, as torch adds numbers of two precisions slowly.

    Attributes:
        partial: Where the next chunks are added.
    """

    def __init__(self, partial: Tensor) -> None:
        self.partial = partial
        self._double: Tensor | None = None
        self._chunks = 0

    def end_chunk(self) -> None:
        """Note that a chunk has been added to `partial`."""
        self._chunks += 1
        if self._chunks % CHUNKS_PER_FLUSH == 0:
            if self._double is None:
                dtype = self.partial.dtype if self.partial.device.type == "mps" else torch.float64
                self._double = torch.zeros_like(self.partial, dtype=dtype)
            flat = (vector.view(-1).split(PIECE) for vector in (self._double, self.partial))
            for total, piece in zip(*flat, strict=True):
                total += piece.to(total.dtype)
            self.partial.zero_()

    def clear(self) -> None:
        """Start again from zero."""
        self.partial.zero_()
        self._double, self._chunks = None, 0

    def total(self) -> Tensor:
        """The sum, to be taken once; of a few chunks in their own precision."""
        return self.partial if self._double is None else self._double.add_(self.partial)


class LowPrecisionDetector(TorchDispatchMode):
    """Collects the dtypes below single precision in which something is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note the dtypes of its results."""
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                self.dtypes.add(value.dtype)
        return result


def dtype_names(dtypes: set[torch.dtype]) -> str:
    """Names of dtypes, as in ``bfloat16``."""
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def agrees(found: Tensor, expected: Tensor, rtol: float) -> bool:
    """Whether two tensors differ by no more than ``rtol`` of the largest expected entry."""
    if found.shape != expected.shape:
        return False
    if not expected.numel() or not expected.is_floating_point():
        return bool((found == expected).all())
    return bool(((found - expected).abs() <= rtol * expected.abs().max()).all())
