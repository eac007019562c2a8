"""What every position of a convolution sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor


def patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    memory: Callable[[Sequence[int]], Tensor] | None = None,
) -> Tensor:
    """Cut images of any dimension into the patches that a convolution multiplies.

    Args:
        images: The images (n, channels, *space).
        kernel: The kernel's size along every spatial axis.
        stride: The steps between patches.
        padding: The zeros before and after every spatial axis.
        dilation: The steps within a patch.
        memory: From a shape to a tensor that is written over; a new one if not given.

    Returns:
        The patches (n, channels, taps, positions).

    Example:
        >>> import torch
        >>> row = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> patches(row, (2,), (1,), ((0, 0),), (1,))[0, 0]
        tensor([[1., 2.],
                [2., 3.]])
    """
    images = _padded(images, padding).contiguous()
    counts, kernels, moves = _steps(images, kernel, stride, dilation)
    view = images.as_strided(
        (*images.shape[:2], *kernel, *counts), (*images.stride()[:2], *kernels, *moves)
    )
    return _copied(view, memory).view(*images.shape[:2], math.prod(kernel), math.prod(counts))


def patches_in_rows(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    memory: Callable[[Sequence[int]], Tensor] | None = None,
) -> Tensor:
    """The same patches of images with their channels last, one row for every position.

    Args:
        images: The images (n, channels, height, width).
        kernel: The kernel's size along every spatial axis.
        stride: The steps between patches.
        padding: The zeros before and after every spatial axis.
        dilation: The steps within a patch.
        memory: From a shape to a tensor that is written over; a new one if not given.

    Returns:
        The patches (n, positions, taps * channels).
    """
    images = _padded(images, padding).contiguous(memory_format=torch.channels_last)
    counts, kernels, moves = _steps(images, kernel, stride, dilation)
    n, channels = images.shape[:2]
    view = images.as_strided(
        (n, *counts, *kernel, channels), (images.stride(0), *moves, *kernels, 1)
    )
    return _copied(view, memory).view(n, math.prod(counts), math.prod(kernel) * channels)


def _copied(view: Tensor, memory: Callable[[Sequence[int]], Tensor] | None) -> Tensor:
    """A view written out."""
    return view.contiguous() if memory is None else memory(view.shape).copy_(view)


def _padded(images: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    """Images with their zeros around them."""
    if not any(chain.from_iterable(padding)):
        return images
    return F.pad(images, [side for pair in reversed(padding) for side in pair])


def _steps(
    images: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """How many patches there are along every axis, and the steps within and between them."""
    sizes = zip(images.shape[2:], images.stride()[2:], kernel, stride, dilation, strict=True)
    found = [
        ((size - d * (k - 1) - 1) // s + 1, step * d, step * s) for size, step, k, s, d in sizes
    ]
    counts, kernels, moves = zip(*found, strict=True)
    return counts, kernels, moves
