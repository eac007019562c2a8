"""Rescale a model, and see that it still computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flatgauge.blame import user_code
from flatgauge.copying import computed, copying
from flatgauge.isolation import isolated
from flatgauge.symmetry.caches import without_caches

#: How far outputs may differ in double precision, beside the largest of them.
_ROUNDING = 1e-9

#: Random numbers drawn for a change of weights, and how far the next tensor starts: primes, so that
#: no row and no tensor repeats another.
_BLOCK, _STEP = 65_537, 7_919

#: Parameters and buffers, by name.
State = dict[str, Tensor]


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
    chosen: Callable[[Any], Any] = without_caches

    def __call__(self, model: nn.Module, state: State | None = None) -> list[Tensor]:
        """Call a model in eval mode, leaving no trace on it.

        Args:
            model: The model.
            state: Parameters and buffers to call it with, which it may write to; None for
                copies of its own.

        Returns:
            All tensors in its output.
        """
        device = next(iter(model.parameters())).device
        if state is None:
            state = cloned(state_of(model))
        with isolated(model, device), torch.no_grad():
            inputs = copy.deepcopy((self.arguments, self.keywords))  # It may write to these, too.
            with user_code("the model"):
                output = functional_call(model, state, *inputs)
            output = self.chosen(output)
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


def state_of(model: nn.Module) -> State:
    """The parameters and buffers of a model, by name."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items()}


def cloned(state: State) -> State:
    """Copies of parameters and buffers."""
    return {name: tensor.clone() for name, tensor in state.items()}


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also of one that holds computed weights (pruning, old weight norms)."""
    with copying(model):
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
        state[name].copy_(_product(name, state[name], factor))


@torch.no_grad()
def rescale_state(state: State, factors: Mapping[str, Tensor]) -> State:
    """Copies of parameters and buffers, some of them multiplied.

    Args:
        state: The parameters and buffers; not changed.
        factors: Broadcastable to the tensor of that name, in double precision.

    Returns:
        The copies.

    Raises:
        ValueError: If a number leaves the range of its precision.
    """
    return {
        name: _product(name, tensor, factors[name]) if name in factors else tensor.clone()
        for name, tensor in state.items()
    }


def _product(name: str, tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times factors in double precision, rounded once."""
    factor = factor.to(tensor.device)
    coarse = factor.to(tensor.dtype)
    if bool((coarse.frexp().mantissa == 0.5).all()) and torch.equal(coarse.double(), factor):
        new = tensor * coarse  # Powers of two: the product is not rounded.
    else:
        new = (tensor.double() * factor).to(tensor.dtype)
    kept = torch.count_nonzero(new) == torch.count_nonzero(tensor)
    if not (bool(kept) and bool(new.sum().isfinite())):  # Rarely: look at every entry.
        lost = (new == 0) & (tensor != 0) | new.isinf() & tensor.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"the move takes {int(lost.sum())} entries of `{name}` out of the range of "
                f"{str(tensor.dtype).removeprefix('torch.')}; use a smaller `log2_range`, or "
                "convert the model with `.double()`."
            )
    return new


@torch.no_grad()
def jitter(state: State, names: Iterable[str], seed: int) -> State:
    """Copies of parameters and buffers, slightly changed, so that no error hides behind zeros.

    Args:
        state: The parameters and buffers; not changed.
        names: Those to change.
        seed: Of the changes. A block of random numbers is repeated along every tensor.

    Returns:
        The copies.
    """
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator, dtype=torch.float32)
    found = cloned(state)
    for number, name in enumerate(names):
        tensor = found[name]
        width = torch.promote_types(tensor.dtype, torch.float32)
        size = torch.linalg.vector_norm(tensor, dtype=width) / max(tensor.numel(), 1) ** 0.5
        noise = 0.1 * size.clamp(min=1e-2) * block.roll(_STEP * number).to(size)
        times = -(-tensor.numel() // _BLOCK)
        whole = noise.to(tensor).repeat(times)[: tensor.numel()]
        found[name] = tensor.add(whole.view(tensor.shape))
    return found


def same_function(one: nn.Module, other: nn.Module, call: Call) -> tuple[bool, float]:
    """Whether two models of one architecture give the same outputs on an example, up to rounding.

    Args:
        one: A model.
        other: Another.
        call: What to call them with.

    Returns:
        Whether, and the largest difference of any output beside the largest entry of that output:
        0 where all have the same bits, else in double precision, where the models allow that.
    """
    first, second = state_of(one), state_of(other)
    pairs = list(zip(call(one), call(other), strict=True))
    return compare(one, first, second, call, pairs)


def compare(
    model: nn.Module, one: State, other: State, call: Call, pairs: Sequence[tuple[Tensor, Tensor]]
) -> tuple[bool, float]:
    """Whether a model computes the same with two sets of parameters and buffers, up to rounding.

    Args:
        model: The model.
        one: Parameters and buffers.
        other: Others.
        call: What to call it with.
        pairs: Its outputs with the one and with the other.

    Returns:
        As `same_function`.
    """
    if all(torch.equal(a, b) for a, b in pairs):
        return True, 0.0
    fine = call.changed(doubled)
    twins = [{name: doubled(tensor) for name, tensor in state.items()} for state in (one, other)]
    with suppress(RuntimeError):  # A model that insists on its own precision is compared there.
        pairs = list(zip(*(fine(model, twin) for twin in twins), strict=True))
    change = _largest_change(pairs)
    return change <= _ROUNDING, change


def doubled(tensor: Tensor) -> Tensor:
    """A copy in double precision, of a tensor of whole numbers as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _largest_change(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
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
