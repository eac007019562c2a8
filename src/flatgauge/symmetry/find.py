"""Find the gauge group of a model, and check it by calling the model.

What enters: a model with example inputs, or a loss surface. What leaves: a `GaugeGroup` that has
been verified. `infer_gauge` is the only place that does so: it exports the model with a few
samples, infers the scales from the graph, solves for the free ones, and checks that a randomly
rescaled copy computes the same outputs, at this and other shapes.

A `ModelCall` runs in eval mode on copies of parameters, buffers and inputs, so it leaves no trace
on the model. Two sets of weights compute the same if all outputs agree to the bit or, else, within
the rounding of double precision. `Origin` describes the model that a group was found for: another
model of the same parts may be rescaled with that group; any other is first tried on the example.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from flatgauge.graph.export import ExportedGraphs, Structure, UnsupportedGraphError, structure_of
from flatgauge.runtime.isolation import isolate, locate_errors
from flatgauge.surface.losses import prediction
from flatgauge.surface.model import arguments_for, unwrap
from flatgauge.symmetry.gauge import (
    GaugeGroup,
    State,
    cloned_state,
    list_names,
    rescale_state,
    state_in_float64,
    state_of,
    to_double,
)
from flatgauge.symmetry.inference import infer_scales

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: Samples for the export; two, so that the batch differs from axes of size one.
_FEW = 2

#: Samples of the second part of the check.
_MORE = 3

#: Samples of a surface that an example call holds.
_SURFACE_SAMPLES = 4

#: Seed of the check.
_SEED = 20190917

#: What models of Hugging Face transformers call their caches, and where their classes are defined.
_CACHE_NAMES = ("past_key_values", "cache_params", "mems")
_CACHE_MODULE = "transformers.cache_utils"

#: How far outputs may differ in double precision, relative to the largest of them.
_ROUNDING = 1e-9

#: Random numbers drawn to perturb weights, and how far the next tensor starts: primes, so that no
#: row and no tensor repeats another.
_BLOCK, _STEP = 65_537, 7_919

#: How far outputs may differ if a model does not compute in double precision.
_COARSE = 1e-3

#: Seed of the trial of another model.
_TRIAL_SEED = 20191008


def find_gauge(model: nn.Module, example_inputs: Any, *, frozen: str = "fixed") -> GaugeGroup:
    """Find all rescalings of a model's parameters that leave its function unchanged.

    Every activation and parameter gets unknown scales, every op of the exported graph relates
    them, and what stays free is the group. An op without a rule pins all that it touches and is
    listed in `pinned`. The result is verified at once with a randomly rescaled copy.

    Args:
        model: A ``torch.nn.Module``; not changed. It is read in eval mode. Caches in its output
            (``past_key_values``) are not part of its function.
        example_inputs: What to call it with: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. The values do not matter, the shapes do.
        frozen: ``"fixed"`` holds parameters that do not require a gradient, as buffers are held;
            ``"free"`` lets them move. Where no parameter requires a gradient, all move.

    Returns:
        The group.

    Raises:
        UnsupportedGraphError: If the model cannot be exported, or if a rescaled copy does not
            compute the same function.
        TypeError: If an argument is of the wrong kind.
        ValueError: If `frozen` is neither of the two, or the model cannot be called.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        >>> gauge = find_gauge(net, torch.randn(2, 4))
        >>> gauge.dim  # one scale per hidden unit
        5
        >>> move = gauge.sample(generator=torch.Generator().manual_seed(0))
        >>> twin = gauge.rescale(net, move)
        >>> x = torch.randn(7, 4)
        >>> torch.equal(net(x), twin(x)), torch.equal(net[0].weight, twin[0].weight)
        (True, False)
    """
    return infer_gauge(*validate_model(model, example_inputs), frozen=frozen)


def surface_gauge(
    surface: LossSurface, *, layerwise: bool = False, frozen: str = "fixed"
) -> GaugeGroup:
    """The gauge group of a surface's model, inferred once; `layerwise` has one scale per tensor."""

    def compute() -> GaugeGroup:
        twin = surface.copy()  # In the precision of the surface.
        call = example_call(twin, _SURFACE_SAMPLES)
        return infer_gauge(twin.model, call, frozen=frozen, graphs=surface.graphs)

    # Zeros have every scale: if stored numbers become zero or cease to be, the group changes.
    named = surface.model.named_parameters()
    fixed = tuple(n for n, p in named if frozen == "fixed" and not p.requires_grad)
    key = fixed, zeros_of(surface.model, fixed)
    gauge = surface.cache.get(("gauge", key), compute, static=True)
    if not layerwise:
        return gauge
    return surface.cache.get(("layerwise gauge", key), gauge.layerwise, static=True)


def infer_gauge(
    model: nn.Module,
    call: ModelCall,
    *,
    frozen: str = "fixed",
    graphs: ExportedGraphs | None = None,
) -> GaugeGroup:
    """Export a model without wrappers, infer its scales, solve for free ones, and verify them."""
    if frozen not in ("fixed", "free"):
        raise ValueError(f"`frozen={frozen!r}` is unknown; use 'fixed' or 'free'.")
    without_grad = [name for name, p in model.named_parameters() if not p.requires_grad]
    all_frozen = len(without_grad) == len(list(model.parameters()))
    fixed = tuple(without_grad) if frozen == "fixed" and not all_frozen else ()
    few, caches = _shrink(model, call)
    device = next(iter(model.parameters())).device
    with isolate(model, device):
        graphs = graphs or ExportedGraphs()
        graph = graphs.export(model, few.args, few.kwargs, 0, few.select)
    with torch.no_grad():
        inference = infer_scales(graph, state_of(model), fixed)
    notes = []
    if fixed:
        notes.append(f"held, as they do not require a gradient: {list_names(fixed, quote='`')}")
    elif frozen == "fixed" and without_grad:
        notes.append("no parameter requires a gradient, so all may move")
    if caches:
        notes.append(f"left out of the outputs, as caches: {list_names(caches, quote='`')}")
    origin = Origin(structure_of(model), zeros_of(model, fixed), fixed, few, tuple(notes))
    gauge = GaugeGroup.fixing_outputs(inference, origin)
    verify_gauge(model, gauge, few)
    return gauge


def example_call(surface: LossSurface, samples: int) -> ModelCall:
    """What a surface calls its model with for its first samples, and what the loss reads of it."""
    loss = surface.risk.loss
    batch = surface.risk.example(min(samples, surface.samples))
    args, kwargs = surface.functional_model.arguments(batch, with_labels=loss.own)
    if loss.own:
        return ModelCall(args, kwargs, _loss_of_output)
    if loss.has_hessian:
        return ModelCall(args, kwargs, prediction)
    return ModelCall(args, kwargs)


def _loss_of_output(output: Any) -> Any:
    """The loss that the model itself computed."""
    return output.loss


def validate_model(model: Any, example_inputs: Any) -> tuple[nn.Module, ModelCall]:
    """Check a model and its example inputs; return it without wrappers, and the call."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` is a {type(model).__name__}, not a torch.nn.Module; the order of the "
            "arguments is find_gauge(model, example_inputs)."
        )
    inner = unwrap(model)
    if not any(True for _ in inner.parameters()):
        raise ValueError("`model` has no parameters; there is nothing to rescale.")
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise ValueError(
                f"`{name}` has no values yet (it is lazy, or on the device `meta`); call the model "
                "once, or load its weights, before finding its gauge."
            )
    call = ModelCall(*arguments_for(inner, example_inputs))
    if not call.tensors:
        raise TypeError(
            f"`example_inputs` is a {type(example_inputs).__name__} without any tensor; pass what "
            "the model is called with: a tensor, a tuple of positional arguments, or a dict of "
            "keyword arguments."
        )
    return inner, call.map(Tensor.detach)


def verify_gauge(model: nn.Module, gauge: GaugeGroup, call: ModelCall) -> None:
    """Raise unless a randomly rescaled copy computes the same, for this and other shapes."""
    if not gauge.dim:
        return
    own = state_of(model)
    names = gauge.inference.scales
    if any(own[name].dtype in (torch.float16, torch.bfloat16) for name in names):
        own = {n: t.float() if t.is_floating_point() else t for n, t in own.items()}
        call = call.map(lambda t: t.float() if t.is_floating_point() else t)
    base = jitter(own, names, _SEED)
    outputs = call(model, cloned_state(base))
    if not all(bool(t.isfinite().all()) for t in outputs if t.is_floating_point()):
        base = cloned_state(own)
        outputs = call(model, cloned_state(own))
    generator = Generator().manual_seed(_SEED)
    factors = gauge.factors(gauge.sample(generator=generator, log2_range=4))
    _require_same(call.compare(model, base, rescale_state(base, factors), outputs), call)
    factors = gauge.factors(gauge.sample(generator=generator, log2_range=4))
    twin = rescale_state(base, factors)
    for other in [call.with_samples(_MORE).map(_noise(generator)), *_shorten(call)]:
        try:
            result = other.compare(model, base, twin)
        except Exception:
            continue  # A shape the model does not take.
        _require_same(result, other)


def _require_same(result: tuple[bool, float], call: ModelCall) -> None:
    """Raise if a rescaled copy gives other outputs."""
    same, change = result
    if not same:
        raise UnsupportedGraphError(
            f"a rescaled copy of the model gives other outputs (they differ by {change:.2g} of the "
            f"largest, for inputs of shape {[tuple(t.shape) for t in call.tensors]}), so the "
            "scales inferred from its graph are wrong, or the model is random or depends on the "
            "shape of its input in ways its graph does not show; calling it twice in eval mode on "
            "the same input shows whether it is random."
        )


def _noise(generator: Generator) -> Any:
    """A function that adds noise to floating-point inputs."""

    def add_noise(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        return tensor + noise * tensor.abs().mean()

    return add_noise


def _shorten(call: ModelCall) -> list[ModelCall]:
    """The call with a shorter sequence, if it has one."""
    tensors = call.tensors
    lengths = {t.shape[1] for t in tensors if t.dim() in (2, 3) and t.shape[1] > 2}
    tokens = not tensors[0].is_floating_point() or tensors[0].dim() == 3
    if len(lengths) != 1 or not tokens:
        return []
    (length,) = lengths

    def shorter(tensor: Tensor) -> Tensor:
        axes = [a for a, size in enumerate(tensor.shape) if size == length and a]
        for axis in axes[:1]:
            tensor = tensor.narrow(axis, 0, length - 1)
        return tensor

    return [call.map(shorter)]


def _shrink(model: nn.Module, call: ModelCall) -> tuple[ModelCall, tuple[str, ...]]:
    """A call of a few samples (the one given if need be), and the names of cached outputs."""
    few = call.with_samples(_FEW)
    caches: tuple[str, ...] = ()

    def look(output: Any) -> Any:
        nonlocal caches
        caches = cache_names(output)
        return call.select(output)

    if few is not call:
        try:
            replace(few, select=look)(model)
        except Exception:  # A model of a fixed batch size, or an example without a batch.
            few = call
    if few is call:
        try:
            replace(call, select=look)(model)
        except Exception as error:
            raise ValueError(
                f"the model cannot be called with `example_inputs`: {type(error).__name__}: {error}"
            ) from error
    # If the call selects a part of the output, its caches do not matter.
    return few, caches if call.select is without_caches else ()


# -- calling a model -------------------------------------------------------------------------------


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


# -- the model that a group was found for ----------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """The model that a group was found for.

    Attributes:
        structure: What it is built of.
        zeros: Digests of where its constants are zero: zeros have every scale.
        constants: The names of its frozen parameters that were held.
    """

    structure: Structure
    zeros: tuple[int, ...]
    constants: tuple[str, ...]
    call: ModelCall
    notes: tuple[str, ...]

    def check_fits(self, model: nn.Module, factors: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` if a model has other parts and `factors` change its outputs."""
        difference = _difference(self.structure, structure_of(model))
        if not difference and zeros_of(model, self.constants) != self.zeros:
            difference = "its buffers or frozen parameters are zero at other places"
        if not difference:
            return
        try:
            change = self._change(model, factors)
        except Exception as error:
            change, reason = 1.0, f"it cannot be called with that example ({error})"
        else:
            reason = f"rescaled by this move, its outputs change by {change:.2g} of the largest"
        if change:
            raise ValueError(
                f"this group was found for another model ({difference}), and {reason}; find the "
                "model's own group with `find_gauge(model, example_inputs)`."
            )

    def _change(self, model: nn.Module, factors: Mapping[str, Tensor]) -> float:
        """By how much of the largest a model's outputs change; zero if that is rounding."""
        generator = Generator().manual_seed(_TRIAL_SEED)

        def shake(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor + torch.randn(tensor.shape, generator=generator).to(tensor)

        call = self.call.map(shake)
        own = state_of(model)
        fine = state_in_float64(own)
        try:
            allowed = 0.0
            result = call.in_float64().compare(model, fine, rescale_state(fine, factors))
        except RuntimeError:  # It insists on its own precision.
            allowed = _COARSE
            result = call.compare(model, own, rescale_state(own, factors))
        same, change = result
        return 0.0 if same or change <= allowed else change


def zeros_of(model: nn.Module, constants: Iterable[str]) -> tuple[int, ...]:
    """Digests of where a model's buffers and some of its parameters are zero."""
    parameters = dict(model.named_parameters())
    tensors = [*model.buffers(), *(parameters[n] for n in constants if n in parameters)]
    return tuple(zlib.crc32((tensor == 0).cpu().numpy().tobytes()) for tensor in tensors)


def _difference(one: Structure, other: Structure) -> str:
    """The first difference between two models, "" if there is none."""
    for path in one | other:
        place = f"`{path}`" if path else "the model"
        if path not in one or path not in other:
            return f"{place} is in one of them only"
        (before, tensors, *_), (now, others, *_) = one[path], other[path]
        if before is not now:
            return f"{place} was a {before.__qualname__} and is a {now.__qualname__}"
        if one[path] != other[path]:
            return f"{place} has other {'settings' if tensors == others else 'tensors'}"
    return ""
