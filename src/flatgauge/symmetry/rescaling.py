"""Rescale a model, and see that it still computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flatgauge.isolation import isolated
from flatgauge.subject import computed

#: How far outputs may differ in double precision, beside the largest of them.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Call:
    """What a model is called with.

    Attributes:
        arguments: By position.
        keywords: By name.
        chosen: Takes from the model's output what counts.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    chosen: Callable[[Any], Any] = lambda output: output

    def __call__(self, model: nn.Module) -> list[Tensor]:
        """Call a model in eval mode, leaving no trace on it.

        Args:
            model: The model.

        Returns:
            All tensors in its output.
        """
        device = next(iter(model.parameters())).device
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with isolated(model, device), torch.no_grad():
            copies = {name: tensor.clone() for name, tensor in state.items()}
            inputs = copy.deepcopy((self.arguments, self.keywords))
            output = self.chosen(functional_call(model, copies, *inputs))  # It may write to these.
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    def changed(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same with every tensor replaced."""
        arguments, keywords = pytree.tree_map(
            lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf,
            (self.arguments, self.keywords),
        )
        return Call(arguments, keywords, self.chosen)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors it is called with."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also of one that holds computed weights (pruning, old weight norms)."""
    return copy.deepcopy(model, dict(computed(model)))


def multiplied(model: nn.Module, factors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model with some tensors multiplied.

    Args:
        model: The model; not changed.
        factors: Broadcastable to the parameter or buffer of that name, in double precision.

    Returns:
        The copy.

    Raises:
        ValueError: If a number leaves the range of its precision.
    """
    twin = copied(model)
    multiply(twin, factors)
    return twin


@torch.no_grad()
def multiply(model: nn.Module, factors: Mapping[str, Tensor]) -> None:
    """Multiply some of a model's tensors in place.

    Args:
        model: The model.
        factors: Broadcastable to the parameter or buffer of that name, in double precision.

    Raises:
        ValueError: If a number leaves the range of its precision.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, factor in factors.items():
        tensor = state[name]
        new = (tensor.double() * factor.to(tensor.device)).to(tensor.dtype)
        lost = (new == 0) & (tensor != 0) | new.isinf() & tensor.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"the move takes {int(lost.sum())} entries of `{name}` out of the range of "
                f"{str(tensor.dtype).removeprefix('torch.')}; use a smaller `log2_range`, or "
                "convert the model with `.double()`."
            )
        tensor.copy_(new)


def jittered(model: nn.Module, names: list[str], seed: int) -> nn.Module:
    """A copy with every named tensor slightly changed, so that no error hides behind zeros."""
    twin = copied(model)
    generator = torch.Generator().manual_seed(seed)
    state = dict(twin.named_parameters()) | dict(twin.named_buffers())
    with torch.no_grad():
        for name in names:
            tensor = state[name]
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            size = tensor.double().square().mean().sqrt().clamp(min=1e-2).to(tensor.dtype)
            tensor.add_(0.1 * size * noise.to(tensor))
    return twin


def same_function(one: nn.Module, other: nn.Module, call: Call) -> tuple[bool, float]:
    """Whether two models give the same outputs on an example, up to rounding.

    Args:
        one: A model.
        other: Another.
        call: What to call them with.

    Returns:
        Whether, and the largest difference of any output beside the largest entry of that output:
        0 where all have the same bits, else in double precision, where the models allow that.
    """
    pairs = list(zip(call(one), call(other), strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return True, 0.0
    fine = call.changed(lambda t: t.double() if t.is_floating_point() else t)
    twins = [copied(model).double() for model in (one, other)]
    with suppress(RuntimeError):  # A model that insists on its own precision is compared there.
        pairs = list(zip(fine(twins[0]), fine(twins[1]), strict=True))
    change = _largest_change(pairs)
    return change <= _ROUNDING, change


def _largest_change(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of any output, beside the largest entry of that output."""
    worst = 0.0
    for a, b in pairs:
        if not a.is_floating_point():
            worst = max(worst, float((a != b).any()))
            continue
        known = a.isfinite()
        if not torch.equal(known, b.isfinite()):
            return float("inf")
        if known.any():
            size = float(a[known].abs().max())
            change = float((a[known] - b[known]).abs().max())
            worst = max(worst, change / size if size else float(change > 0))
    return worst
