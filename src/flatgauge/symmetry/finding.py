"""Find the gauge group of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.parameter import UninitializedParameter

from flatgauge.exports import graph_of
from flatgauge.graph import UnsupportedGraphError
from flatgauge.isolation import isolated
from flatgauge.subject import arguments_for, unwrapped
from flatgauge.symmetry.caches import caches_in, without_caches
from flatgauge.symmetry.gauge import GaugeGroup, closed
from flatgauge.symmetry.inference import Inference, infer
from flatgauge.symmetry.origin import Origin, structure_of, zeros_of
from flatgauge.symmetry.rescaling import (
    Call,
    cloned,
    compare,
    jitter,
    rescale_state,
    state_of,
)

#: Samples that the model is read with; two, so that the batch is told from axes of size one.
_FEW = 2

#: Samples of the second part of the check: another number.
_MORE = 3

#: More names than this are counted, not listed.
_SHOWN = 4

#: Draws of the check: any would do, this one is the same every time.
_SEED = 20190917


def find_gauge(model: nn.Module, example_inputs: Any, *, frozen: str = "fixed") -> GaugeGroup:
    """Find all rescalings of a model's parameters that leave its function unchanged.

    Every activation and parameter gets unknown scales, every op of the exported graph says how
    they hang together, and what stays free is the group. An op without a rule pins all that it
    touches and is listed in `pinned`. The result is checked on the spot with a randomly rescaled
    copy.

    Args:
        model: A ``torch.nn.Module``; not changed. It is read in eval mode. Caches in its output
            (``past_key_values``) are no part of its function.
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
    inner, call = read_arguments(model, example_inputs)
    return group_of(inner, call, frozen)[0]


def group_of(model: nn.Module, call: Call, frozen: str = "fixed") -> tuple[GaugeGroup, Call]:
    """Find the group of a model, and check it.

    Args:
        model: The model, without wrappers.
        call: An example call.
        frozen: Whether frozen parameters are ``"fixed"`` or ``"free"``.

    Returns:
        The group, and the call of a few samples that it was found with.

    Raises:
        UnsupportedGraphError: If the model cannot be exported, or if a rescaled copy does not
            compute the same function.
        ValueError: If `frozen` is neither of the two, or the model cannot be called.
    """
    if frozen not in ("fixed", "free"):
        raise ValueError(f"`frozen={frozen!r}` is unknown; use 'fixed' or 'free'.")
    idle = [name for name, p in model.named_parameters() if not p.requires_grad]
    all_idle = len(idle) == len(list(model.parameters()))
    fixed = tuple(idle) if frozen == "fixed" and not all_idle else ()
    few, caches = _callable(model, call)
    inference = read_scales(model, few, fixed)
    notes = []
    if fixed:
        notes.append(f"held, as they do not require a gradient: {_listed(fixed)}")
    elif frozen == "fixed" and idle:
        notes.append("no parameter requires a gradient, so all may move")
    if caches:
        notes.append(f"left out of the outputs, as caches: {_listed(caches)}")
    origin = Origin(structure_of(model), zeros_of(model, fixed), fixed, few, tuple(notes))
    gauge = closed(inference, origin)
    check(model, gauge, few)
    return gauge, few


def _listed(names: tuple[str, ...]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


def read_arguments(model: Any, example_inputs: Any) -> tuple[nn.Module, Call]:
    """Check a model and what it is to be called with.

    Args:
        model: The model.
        example_inputs: A tensor, a tuple of positional or a dict of keyword arguments.

    Returns:
        The model without wrappers, and the call.

    Raises:
        TypeError: If the model is no module, or there is no tensor in the example.
        ValueError: If the model has no parameters, or none with values.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` is a {type(model).__name__}, not a torch.nn.Module; the order of the "
            "arguments is find_gauge(model, example_inputs)."
        )
    inner = unwrapped(model)
    if not any(True for _ in inner.parameters()):
        raise ValueError("`model` has no parameters; there is nothing to rescale.")
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
            raise ValueError(
                f"`{name}` has no values yet (it is lazy, or on the device `meta`); call the model "
                "once, or load its weights, before finding its gauge."
            )
    call = Call(*arguments_for(inner, example_inputs))
    if not call.tensors:
        raise TypeError(
            f"`example_inputs` is a {type(example_inputs).__name__} without any tensor; pass what "
            "the model is called with: a tensor, a tuple of positional arguments, or a dict of "
            "keyword arguments."
        )
    return inner, call.changed(Tensor.detach)


def read_scales(model: nn.Module, call: Call, fixed: Collection[str] = ()) -> Inference:
    """Export a model and read the scales off its graph.

    Args:
        model: The model.
        call: An example call.
        fixed: The parameters that do not move.

    Returns:
        The scales.

    Raises:
        UnsupportedGraphError: If the model cannot be exported.
    """
    device = next(iter(model.parameters())).device
    with isolated(model, device):
        graph = graph_of(model, call.arguments, call.keywords, 0, call.chosen)
    with torch.no_grad():
        return infer(graph, state_of(model), fixed)


def _callable(model: nn.Module, call: Call) -> tuple[Call, tuple[str, ...]]:
    """Find a call that works: of a few samples, or the one given where those are too few.

    Returns:
        The call, and the caches in what the model returns.

    Raises:
        ValueError: If the model cannot be called with the example.
    """
    few = _resized(call, _FEW)
    caches: tuple[str, ...] = ()

    def look(output: Any) -> Any:
        nonlocal caches
        caches = caches_in(output)
        return call.chosen(output)

    if few is not call:
        try:
            replace(few, chosen=look)(model)
        except Exception:  # A model of a fixed batch size, or an example without a batch.
            few = call
    if few is call:
        try:
            replace(call, chosen=look)(model)
        except Exception as error:
            raise ValueError(
                f"the model cannot be called with `example_inputs`: {type(error).__name__}: {error}"
            ) from error
    # Where the call takes a part of the output, its caches are out of the question.
    return few, caches if call.chosen is without_caches else ()


def check(model: nn.Module, gauge: GaugeGroup, call: Call) -> None:
    """See that a randomly rescaled copy computes the same, for this and another shape.

    Args:
        model: The model.
        gauge: Its group.
        call: An example call.

    Raises:
        UnsupportedGraphError: If it does not.
    """
    if not gauge.dim:
        return
    own = state_of(model)
    if any(own[n].dtype in (torch.float16, torch.bfloat16) for n in gauge.inference.scales):
        own = {n: t.float() if t.is_floating_point() else t for n, t in own.items()}
        call = call.changed(lambda t: t.float() if t.is_floating_point() else t)
    base = jitter(own, gauge.inference.scales, _SEED)
    outputs = call(model, cloned(base))
    if not all(bool(t.isfinite().all()) for t in outputs if t.is_floating_point()):
        base = cloned(own)
        outputs = call(model, cloned(own))
    generator = Generator().manual_seed(_SEED)
    twin = rescale_state(base, gauge.factors(gauge.sample(generator=generator, log2_range=4)))
    pairs = list(zip(outputs, call(model, cloned(twin)), strict=True))
    _demand_same(compare(model, base, twin, call, pairs), call)
    twin = rescale_state(base, gauge.factors(gauge.sample(generator=generator, log2_range=4)))
    for other in _others(call, generator):
        try:
            one, two = other(model, cloned(base)), other(model, cloned(twin))
            found = compare(model, base, twin, other, list(zip(one, two, strict=True)))
        except Exception:
            continue  # A shape the model does not take.
        _demand_same(found, other)


def _demand_same(found: tuple[bool, float], call: Call) -> None:
    """Refuse a rescaled copy that gives other outputs."""
    same, change = found
    if not same:
        raise UnsupportedGraphError(_refusal(call, change))


def _refusal(call: Call, change: float) -> str:
    """What to say when a rescaled copy is not the same."""
    return (
        f"a rescaled copy of the model gives other outputs (they differ by {change:.2g} of the "
        f"largest, for inputs of shape {[tuple(t.shape) for t in call.tensors]}), so the scales "
        "read off its graph are wrong, or the model is random or depends on the shape of its input "
        "in ways its graph does not show; calling it twice in eval mode on the same input tells "
        "whether it is random."
    )


def _others(call: Call, generator: Generator) -> list[Call]:
    """The call with more samples and other numbers, and with a shorter sequence."""

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        return tensor + noise * tensor.abs().mean()

    return [_resized(call, _MORE).changed(noisy), *_shortened(call)]


def _shortened(call: Call) -> list[Call]:
    """The call with a shorter sequence, where it has one."""
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

    return [call.changed(shorter)]


def _resized(call: Call, samples: int) -> Call:
    """The call with another number of samples, where all its tensors have the same number."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in call.tensors}
    if len(sizes) != 1 or sizes & {0, samples}:
        return call
    (size,) = sizes

    def resized(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(samples, device=tensor.device) % size]

    return call.changed(resized)
