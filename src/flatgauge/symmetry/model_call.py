"""Call a model as it was found, and compare what it computes with two sets of weights.

What enters: a model and example inputs, with a function that selects from the model's output what
counts. What leaves: the tensors of that output. A call runs in eval mode on copies of parameters,
buffers and inputs, so it leaves no trace on the model. Two sets of weights compute the same if
all outputs agree to the bit or, else, within the rounding of double precision; `compare` returns
their largest difference too, relative to the largest entry of the output.
"""

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

from flatgauge.runtime.isolation import isolate
from flatgauge.runtime.user_errors import locate_errors

#: What models of Hugging Face transformers call their caches, and where their classes are defined.
_CACHE_NAMES = ("past_key_values", "cache_params", "mems")
_CACHE_MODULE = "transformers.cache_utils"

#: How far outputs may differ in double precision, relative to the largest of them.
_ROUNDING = 1e-9

#: Random numbers drawn to perturb weights, and how far the next tensor starts: primes, so that no
#: row and no tensor repeats another.
_BLOCK, _STEP = 65_537, 7_919

#: Parameters and buffers, by name.
State = dict[str, Tensor]


def without_caches(output: Any) -> Any:
    """A model's output without the keys and values that a language model stores for later."""
    if not cache_names(output):
        return output
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if not _is_cache(key, value)}
    return tuple(value for value in output if not _is_cache("", value))


def cache_names(output: Any) -> tuple[str, ...]:
    """The names of the caches in a model's output; the class of one without a name."""
    if isinstance(output, Mapping):
        return tuple(str(key) for key, value in output.items() if _is_cache(key, value))
    if isinstance(output, (tuple, list)):
        return tuple(type(value).__name__ for value in output if _is_cache("", value))
    return ()


def _is_cache(key: Any, value: Any) -> bool:
    return key in _CACHE_NAMES or any(b.__module__ == _CACHE_MODULE for b in type(value).__mro__)


@dataclass(frozen=True)
class ModelCall:
    """What a model is called with; `select` picks what counts from its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    select: Callable[[Any], Any] = without_caches

    def __call__(self, model: nn.Module, state: State | None = None) -> list[Tensor]:
        """All tensors in a model's output in eval mode; the model may write to a given `state`."""
        device = next(iter(model.parameters())).device
        if state is None:
            state = cloned_state(state_of(model))
        with isolate(model, device), torch.no_grad():
            inputs = copy.deepcopy((self.args, self.kwargs))  # It may write to these, too.
            with locate_errors("the model"):
                output = functional_call(model, state, *inputs)
            output = self.select(output)
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def samples(self) -> int:
        """The common size of the first axis of all tensors; 0 if they have none."""
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in self.tensors}
        return sizes.pop() if len(sizes) == 1 else 0

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelCall:
        """The same call with every tensor replaced."""
        args, kwargs = pytree.tree_map(
            lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf,
            (self.args, self.kwargs),
        )
        return ModelCall(args, kwargs, self.select)

    def with_samples(self, samples: int) -> ModelCall:
        """The call with its first samples, or with some repeated; itself if that is unclear."""
        size = self.samples
        if not samples or size in (0, samples):
            return self
        return self.map(lambda t: t[torch.arange(samples, device=t.device) % size])

    def in_float64(self) -> ModelCall:
        """The call in double precision."""
        return self.map(to_double)

    def compare(
        self, model: nn.Module, first: State, second: State, known: list[Tensor] | None = None
    ) -> tuple[bool, float]:
        """Whether two states give equal outputs (`known`: the first's), and how far they differ."""
        before = self(model, cloned_state(first)) if known is None else known
        pairs = list(zip(before, self(model, cloned_state(second)), strict=True))
        if all(torch.equal(a, b) for a, b in pairs):
            return True, 0.0
        fine, twins = self.in_float64(), [state_in_float64(state) for state in (first, second)]
        with suppress(RuntimeError):  # A model that insists on its precision is compared there.
            pairs = list(zip(*(fine(model, twin) for twin in twins), strict=True))
        change = _largest_change(pairs)
        return change <= _ROUNDING, change


def same_function(one: nn.Module, other: nn.Module, call: ModelCall) -> tuple[bool, float]:
    """Whether two models of one architecture give the same outputs; see `ModelCall.compare`."""
    return call.compare(one, state_of(one), state_of(other))


def state_of(model: nn.Module) -> State:
    """The parameters and buffers of a model, by name."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items()}


def cloned_state(state: State) -> State:
    """Copies of parameters and buffers."""
    return {name: tensor.clone() for name, tensor in state.items()}


def state_in_float64(state: State) -> State:
    """Copies of parameters and buffers in double precision."""
    return {name: to_double(tensor) for name, tensor in state.items()}


def to_double(tensor: Tensor) -> Tensor:
    """A copy in double precision; integers stay integers."""
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


@torch.no_grad()
def jitter(state: State, names: Iterable[str], seed: int) -> State:
    """Copies of parameters and buffers, with `names` perturbed so that zeros hide no error."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator, dtype=torch.float32)
    found = cloned_state(state)
    for number, name in enumerate(names):
        tensor = found[name]
        width = torch.promote_types(tensor.dtype, torch.float32)
        size = torch.linalg.vector_norm(tensor, dtype=width) / max(tensor.numel(), 1) ** 0.5
        noise = 0.1 * size.clamp(min=1e-2) * block.roll(_STEP * number).to(size)
        times = -(-tensor.numel() // _BLOCK)
        whole = noise.to(tensor).repeat(times)[: tensor.numel()]
        found[name] = tensor.add(whole.view(tensor.shape))
    return found


def _largest_change(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of any output, relative to the largest entry of that output."""
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
