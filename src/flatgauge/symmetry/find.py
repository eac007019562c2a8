"""Find the gauge group of a model.

What enters: a model with example inputs, or a loss surface. What leaves: a `GaugeGroup` that has
been verified. `infer_gauge` is the only place that does so: it exports the model with a few
samples, infers the scales from the graph, solves for the free ones, and checks that a randomly
rescaled copy computes the same outputs, at this and other shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import UninitializedParameter

from flatgauge.graph.export import ExportedGraphs, UnsupportedGraphError, structure_of
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.losses import prediction
from flatgauge.surface.model import arguments_for, unwrap
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.inference.walk import infer_scales
from flatgauge.symmetry.model_call import (
    ModelCall,
    cache_names,
    cloned_state,
    jitter,
    state_of,
    without_caches,
)
from flatgauge.symmetry.rescaling import Origin, rescale_state, zeros_of

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: Samples for the export; two, so that the batch differs from axes of size one.
_FEW = 2

#: Samples of the second part of the check.
_MORE = 3

#: Samples of a surface that an example call holds.
_SURFACE_SAMPLES = 4

#: More names than this are counted, not listed.
_MOST_NAMES = 4

#: Seed of the check.
_SEED = 20190917


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
        notes.append(f"held, as they do not require a gradient: {_list_names(fixed)}")
    elif frozen == "fixed" and without_grad:
        notes.append("no parameter requires a gradient, so all may move")
    if caches:
        notes.append(f"left out of the outputs, as caches: {_list_names(caches)}")
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


def _list_names(names: tuple[str, ...]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(f"`{name}`" for name in names[:_MOST_NAMES]) + more
