"""What every position of a convolution sees."""

from __future__ import annotations

import math
from itertools import chain

import torch.nn.functional as F
from torch import Tensor


def patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """Cut images of any dimension into the patches that a convolution multiplies.

    Args:
        images: The images (n, channels, *space).
        kernel: The kernel's size along every spatial axis.
        stride: The steps between patches.
        padding: The zeros before and after every spatial axis.
        dilation: The steps within a patch.

    Returns:
        The patches (n, channels, taps, positions).

    Example:
        >>> import torch
        >>> row = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> patches(row, (2,), (1,), ((0, 0),), (1,))[0, 0]
        tensor([[1., 2.],
                [2., 3.]])
    """
    if any(chain.from_iterable(padding)):
        images = F.pad(images, [side for pair in reversed(padding) for side in pair])
    images = images.contiguous()
    space = images.shape[2:]
    counts = tuple(
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(space, kernel, stride, dilation, strict=True)
    )
    steps = images.stride()[2:]
    view = images.as_strided(
        (*images.shape[:2], *kernel, *counts),
        (
            *images.stride()[:2],
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
    )
    return view.reshape(*images.shape[:2], math.prod(kernel), math.prod(counts))
