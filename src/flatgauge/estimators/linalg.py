"""Matrices as counted operators on torch vectors, sums in double precision, random vectors.

`Matrix` wraps anything square with ``shape`` and ``@``. `to_float64`, `float64_pieces` and
`ChunkedSum` add up in double precision, on every device and without copies of long vectors.
Randomness comes from explicit seeds and generators, never from the global state: `child_generator`
derives an independent generator for each purpose, so that what one part draws does not change what
another part draws. Vectors are drawn where the generator lives and moved to where they are used.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor
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
        shape = tuple(int(n) for n in operator.shape)
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
            raise ValueError(
                f"`operator` has shape {shape!r}; a square matrix (p, p) with p >= 1 is needed."
            )
        self.size = shape[0]
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
            kind = "nan" if torch.isnan(product).any() else "inf"
            bad = int((~torch.isfinite(product)).sum())
            raise ValueError(
                f"the product with the {self.size} × {self.size} `{self._name}` is not finite "
                f"({kind}; {bad} of {product.numel()} entries, product {self.matvecs}); nothing "
                "can be said about such a matrix. Check that the loss and its derivatives are "
                "finite at these parameters and on this data."
            )
        return product


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


def is_finite(value: Any) -> bool:
    """Whether something is a finite real number that fits double precision."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_tensor(numbers: Any, name: str) -> Tensor:
    """Read a point or vectors, which may be a NumPy array."""
    if isinstance(numbers, np.ndarray):
        numbers = torch.as_tensor(numbers)
    if not isinstance(numbers, Tensor):
        raise TypeError(f"`{name}` is a {type(numbers).__name__}; give a tensor or a NumPy array.")
    if not numbers.is_floating_point():
        raise ValueError(f"`{name}` is {numbers.dtype}; give floating-point numbers.")
    return numbers


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


#: Seeds are smaller than this: torch's generator on the CPU ignores all bits beyond 32.
SEEDS = 2**32


def check_seed(seed: Any) -> int:
    """Return the seed; refuse anything but a whole number of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ValueError(f"`seed={seed!r}` must be a whole number from 0 to 2**32 - 1.")
    return seed


def require_generator(generator: Generator | None, *, caller: str, otherwise: str) -> Generator:
    """Return the generator, or raise a `ValueError` that says how to make one."""
    if generator is None:
        raise ValueError(
            f"`{caller}` draws random vectors and needs a generator; pass "
            f"`generator=torch.Generator().manual_seed(0)`, or {otherwise}."
        )
    return generator


def root_seed(generator: Generator) -> int:
    """A seed drawn from a generator, which advances by one number."""
    return int(torch.randint(2**31, (1,), generator=generator, device=generator.device))


def child_seed(seed: int, purpose: str) -> int:
    """The 32-bit seed that belongs to a seed and a purpose."""
    return zlib.crc32(f"{seed} {purpose}".encode())


def child_generator(
    source: int | Generator, purpose: str, device: torch.device | str | None = None
) -> Generator:
    """A generator for one purpose, independent of others, on the source's device or `device`."""
    if isinstance(source, Generator):
        device = device or source.device
        source = root_seed(source)
    return Generator(device=device or "cpu").manual_seed(child_seed(source, purpose))


def digest(generator: Generator | None) -> int:
    """A checksum of a generator's state; 0 for none."""
    return 0 if generator is None else zlib.crc32(generator.get_state().numpy().tobytes())


@contextmanager
def seed_global_rng(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generator for a block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(child_seed(seed, purpose))
        yield


def random_direction(matrix: Matrix, generator: Generator) -> Tensor:
    """A Gaussian vector ``(p,)``: uniform as a direction, with a part along every eigenvector."""
    drawn = torch.randn(
        matrix.size, dtype=matrix.dtype, device=generator.device, generator=generator
    )
    return drawn.to(matrix.device)


def random_signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Independent random signs (Rademacher), one byte each, where the generator draws."""
    drawn = torch.randint(
        0, 2, shape, dtype=torch.int8, device=generator.device, generator=generator
    )
    return drawn.mul_(2).sub_(1)


@dataclass(frozen=True)
class TruncatedNormal:
    """Independent normal numbers, of standard deviation σ before the cut, within ±τ (`cut`)."""

    sigma: float
    cut: float

    @property
    def mass(self) -> float:
        """Probability Z of the interval [-τ, τ]."""
        return math.erf(self.cut / self.sigma / math.sqrt(2))

    @property
    def variance(self) -> float:
        """Variance of one number."""
        ratio = self.cut / self.sigma
        if math.isinf(ratio):
            return self.sigma**2
        if ratio < 1e-3:  # Practically uniform; the difference below would cancel.
            return self.cut**2 / 3
        density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        return self.sigma**2 * (1 - 2 * ratio * density / self.mass)

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw a float64 vector by inverting the distribution function."""
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        signed = (2 * uniform - 1) * self.mass
        found: Tensor = math.sqrt(2) * self.sigma * torch.erfinv(signed)
        return found.clamp(-self.cut, self.cut)

    def divergence(self, centre: Tensor, prior: float) -> float:
        r"""KL divergence in nats of the noise around ``centre`` from a normal prior around zero.

        Definition:
            .. math:: \sum_k -\ln Z + \ln \frac{\sigma_P}{\sigma} - \frac{s^2}{2 \sigma^2}
                      + \frac{v_k^2 + s^2}{2 \sigma_P^2}

            with :math:`s^2` the variance of one number, :math:`v` the centre, and :math:`\sigma_P`
            the prior's standard deviation.

        Returns:
            The divergence.
        """
        each = -math.log(self.mass) + math.log(prior / self.sigma)
        spread = self.variance / 2 * (prior**-2 - self.sigma**-2)
        squares = float(centre.double().square().sum())
        return len(centre) * (each + spread) + squares / (2 * prior**2)
