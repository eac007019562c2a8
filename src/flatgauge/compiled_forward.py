"""A model's forward pass by torch.compile, for values alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatgauge.nested import tensors

#: How far apart what both give may lie, relatively.
_AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-10}


class CompiledForward:
    """Calls a model through the compiler where that has been tried out, else the model itself.

    Inputs of one shape only are compiled for, those of the first call: the odd chunk at the end of
    the data is not worth another compilation.

    Attributes:
        notes: What came of it.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled: Any = None
        self._shapes: list[Any] | None = None
        self.notes: list[str] = []

    def __call__(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Call the model.

        Args:
            arguments: Its positional arguments.
            keywords: Its keyword arguments.

        Returns:
            What it returns.
        """
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors((arguments, dict(keywords)))]
        if self._shapes is None:
            self._shapes = shapes
            return self._tried(arguments, keywords)
        called = self._model if self._compiled is None or shapes != self._shapes else self._compiled
        return called(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self._model, memo))  # To be tried out anew.

    def _tried(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Compile the model and hold what it gives against the model itself."""
        usual = self._model(*arguments, **keywords)
        try:
            compiled = torch.compile(self._model)
            found = compiled(*arguments, **keywords)
        except Exception as error:  # Of the compiler, of its backend, or of a missing C compiler.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
            self.notes.append(
                f"`compile=True`: values are computed without, as it fails ({reason})"
            )
            return usual
        if not _alike(usual, found):
            self.notes.append(
                "`compile=True`: values are computed without, as the compiled model gives others"
            )
            return usual
        self._compiled = compiled
        self.notes.append("values are computed by torch.compile (`compile=True`)")
        return found


def _alike(usual: Any, found: Any) -> bool:
    """Whether what two calls gave is the same up to rounding."""
    one, other = list(tensors(usual)), list(tensors(found))
    return len(one) == len(other) and all(map(_close, one, other))


def _close(usual: Tensor, found: Tensor) -> bool:
    """Whether two tensors are the same up to rounding."""
    if usual.shape != found.shape or usual.dtype != found.dtype:
        return False
    if not usual.is_floating_point():
        return torch.equal(usual, found)
    room = _AGREEMENT.get(usual.dtype, 1e-2) * usual.abs().max() if usual.numel() else 0.0
    return bool(((usual - found).abs() <= room).all())
