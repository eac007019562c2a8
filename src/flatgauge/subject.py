"""The user's model as a pure function of its parameters."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatgauge.batch import Batch
from flatgauge.blame import user_code
from flatgauge.compiled import compiled_parts, in_words, is_compiled
from flatgauge.compiled_forward import CompiledForward
from flatgauge.fingerprints import digest
from flatgauge.nested import map_tensors, tensors
from flatgauge.parameter_caches import ParameterCache, find_caches
from flatgauge.precision import Coarse, names_of
from flatgauge.products import differentiate
from flatgauge.snapshot import Snapshot

#: Single-precision numbers in a vector register.
_REGISTER = 16

T = TypeVar("T")


class _Holder(nn.Module):
    """Holds a model while something else is done."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = model

    def forward(self, action: Callable[[], Any]) -> Any:
        """Do it."""
        return action()


class Subject:
    """A model, unwrapped and checked, that can be called at any value of its parameters.

    It reads the model's parameters and buffers into copies of its own and calls the model with
    those, so nothing that happens here reaches the model, its `.grad`, its buffers or the hooks
    on its parameters; `refresh` notices when the model has changed since.

    Attributes:
        model: The module itself, without DataParallel or compile wrappers.
        names: The trainable parameters, named as in `model.named_parameters()`.
        leaves: Their values, as leaves to differentiate by.
        dtype: The precision of the computation.
        device: Where it runs.
        sharded: Whether every process holds a part of every parameter only.
        coarse: The precisions below single in which the model computes, "" for none.

    Args:
        model: The module.
        dtype: The precision of the computation; None follows the model.
        compiles: Whether passes without derivatives go through torch.compile.
    """

    sharded = False

    def __init__(self, model: Any, dtype: torch.dtype | None, *, compiles: bool = False) -> None:
        self._notes: list[str] = []
        self.model = unwrapped(model)
        self._forward = CompiledForward(self.model) if compiles else None
        if parts := [""] if is_compiled(model) else compiled_parts(self.model):
            self._notes.append(
                f"compiled by torch.compile: {in_words(parts)}; measured without, as a compiled "
                "backward pass has no derivative"
            )
        check_values(self.model)
        parameters = _trainable(self.model)
        self.names = tuple(parameters)
        self._shapes = _shapes(self.model)
        self.device = _single_device(parameters)
        self.dtype = dtype or self._precision(parameters)
        self._follows = dtype is None
        self.coarse = ""
        self._holder = _Holder(self.model)
        self.leaves: tuple[Tensor, ...] = ()
        self._others: dict[str, Tensor] = {}
        self._number: Tensor | None = None
        self._buffers: set[str] = set()
        self._channels_last = False
        self._keeps_state = True  # Until the first call has shown whether it does.
        self._caches = list[ParameterCache]()
        self.refresh()

    @property
    def notes(self) -> list[str]:
        """What was done to the model to make it measurable."""
        return self._notes + (self._forward.notes if self._forward is not None else [])

    def lay_out(self, few: Batch, evaluate: Callable[[Batch], Any]) -> None:
        """Choose how images lie in memory: with channels last where convolutions gain by it.

        The choice depends on model and loss alone, not on times, so that it is the same every time;
        those that cannot read such images, or read them differently, get them as they are.

        Args:
            few: A few samples to try it out on.
            evaluate: Calls model and loss on a batch.
        """
        self._channels_last = False
        if self.dtype is not torch.float32 or not gains_by_channels_last(self.model, self.device):
            return
        try:
            usual = self._found(few, evaluate)
            self._channels_last = True
            found = self._found(few, evaluate)
        except Exception:  # A `view` of what is not contiguous, or a check that it is.
            self._channels_last = False
            return
        self._channels_last = len(found) == len(usual) and all(
            one.shape == other.shape and torch.allclose(one, other, 1e-3, 1e-4 * _largest(other))
            for one, other in zip(found, usual, strict=True)
        )

    def settle_precision(self, evaluate: Callable[[], Any]) -> None:
        """Notice a model that computes in half precision by itself; leave that out where possible.

        Autocast does not touch double precision, and half is too coarse for second derivatives.

        Args:
            evaluate: Calls the model.
        """
        if self.sharded:
            return
        self.coarse = _coarse(evaluate)
        if not self.coarse:
            return
        advice = "numbers have few digits"
        if self._follows and self.device.type != "mps":
            found, before = self.coarse, self.dtype
            self._compute_in(torch.float64)
            self.coarse = _coarse(evaluate)
            if not self.coarse:
                self._notes.append(
                    f"the model computes in {found} by itself (`torch.autocast` in its forward); "
                    "measured in float64, which autocast leaves as it is"
                )
                return
            self._compute_in(before)
        elif self.device.type != "mps":
            advice += "; `dtype=None` or `dtype=torch.float64` measures in double precision, which "
            advice += "autocast leaves as it is"
        self._notes.append(
            f"the model computes in {self.coarse} by itself (`torch.autocast` or casts in its "
            f"forward), whatever the precision of its parameters: {advice}"
        )

    def _compute_in(self, dtype: torch.dtype) -> None:
        """Compute in another precision from now on; the model stays as it is."""
        self.dtype, self.leaves = dtype, ()
        self.refresh()

    def _found(self, few: Batch, evaluate: Callable[[Batch], Any]) -> list[Tensor]:
        """All tensors in what model and loss give."""
        with torch.no_grad():
            return [t for t in tensors(evaluate(self.place(few))) if t.is_floating_point()]

    def first_call(self, batch: Batch, *, with_labels: bool) -> Any:
        """Call the model, and find out whether it keeps anything from one call for the next.

        A model that does (a cache, a counter, hooks that it registers at its first call) begins
        every later call as it was found: it is one fixed function.

        Args:
            batch: What to call it on.
            with_labels: Whether a dict batch passes its labels on to the model.

        Returns:
            What the model returns.
        """
        before, self._keeps_state = self._snapshot(), False
        try:
            output = self(self.leaves, batch, with_labels=with_labels)
        finally:
            changed = before.restore()
        self._caches = find_caches(
            self.model, lambda: self(self.leaves, batch, with_labels=with_labels)
        )
        self._keeps_state = changed or bool(self._caches)
        self._notes += [
            f"`{cache.path}` of the model holds what it computed from parameters in an earlier "
            "call; it is computed again in every call here"
            for cache in self._caches
        ]
        return output

    def _snapshot(self) -> Snapshot:
        # Without random generators: a model that draws from one is random, and refused.
        return Snapshot(self.model, generators=False)

    def doubled(self) -> Subject:
        """The same model in double precision."""
        if self.dtype is torch.float64:
            return self
        return self.remake(torch.float64)

    def remake(self, dtype: torch.dtype) -> Subject:
        """The same model in some precision, with what its first call has shown."""
        other = Subject(self.model, dtype)
        other._keeps_state, other._caches = self._keeps_state, self._caches
        return other

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another precision from now on, the model included."""
        self.model.to(dtype)
        self._channels_last &= dtype is torch.float32
        self._compute_in(dtype)

    def refresh(self) -> bool:
        """Read the model again if its parameters or buffers changed.

        Returns:
            Whether they did.

        Raises:
            ValueError: If a parameter or buffer is not finite, or the trainable parameters are
                others than those that the surface was made for.
        """
        self._check_parameters()
        current = self._state()
        held = dict(zip(self.names, self.leaves, strict=False)) | self._others
        if current.keys() == held.keys() and all(
            torch.equal(value, held[name]) for name, value in current.items()
        ):
            return False
        for name, value in current.items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                bad = int((~torch.isfinite(value)).sum())
                raise ValueError(
                    f"`{name}` of the model holds {bad} of {value.numel()} values that are nan or "
                    "infinite; the training diverged, or the checkpoint is damaged."
                )
        self._buffers = {name for name, _ in self.model.named_buffers()}
        copies = {name: value.clone() for name, value in current.items()}
        self.leaves = tuple(copies.pop(name).requires_grad_() for name in self.names)
        self._others, self._number = copies, None
        return True

    def and_state(self, values: Iterable[Tensor] = ()) -> Iterator[Tensor]:
        """Values, and a number for the model's whole state: what must be the same on every rank.

        Args:
            values: Points or directions.

        Yields:
            The values; then one number that tells parameters (frozen ones too) and buffers apart,
            by names, shapes and bits.
        """
        yield from values
        if self._number is None:
            text = " ".join([*self.state, digest(self.state.values())])
            number = hashlib.blake2b(text.encode(), digest_size=7).digest()
            self._number = torch.tensor([int.from_bytes(number, "little")])
        yield self._number

    def _check_parameters(self) -> None:
        """Refuse a model whose trainable parameters are others than at the beginning."""
        now = _shapes(self.model)
        if now == self._shapes:
            return
        kinds = {
            "new, or trainable now": [name for name in now if name not in self._shapes],
            "gone, or frozen": [name for name in self._shapes if name not in now],
            "of another shape": [
                name
                for name, shape in now.items()
                if name in self._shapes and shape != self._shapes[name]
            ],
        }
        found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
        raise ValueError(
            "the model's trainable parameters are not those that the surface was made for "
            f"({found or 'they come in another order'}); make a new "
            "LossSurface(model, loss, data)."
        )

    def __call__(
        self, leaves: Sequence[Tensor], batch: Batch, *, with_labels: bool, forward: bool = False
    ) -> Any:
        """Call the model with other values for its trainable parameters.

        Args:
            leaves: The values, in the order of `names`.
            batch: What to call it on.
            with_labels: Whether a dict batch passes its labels on to the model.
            forward: Whether nothing will be differentiated, so that the compiler may be used.

        Returns:
            What the model returns.
        """
        before = self._snapshot() if self._keeps_state else None
        try:
            for cache in self._caches:
                cache.empty()
            with user_code("the model"):
                return self._call(leaves, batch, with_labels=with_labels, forward=forward)
        finally:
            if before is not None:
                before.restore()

    def _call(
        self, leaves: Sequence[Tensor], batch: Batch, *, with_labels: bool, forward: bool
    ) -> Any:
        """Call the model as it stands."""
        # Buffers are copied for every call: some models write to them even in eval mode.
        state = {
            name: value.clone() if name in self._buffers else value
            for name, value in self._others.items()
        }
        state |= zip(self.names, leaves, strict=True)
        arguments, keywords = self.arguments(batch, with_labels=with_labels)
        compiled = self._forward if forward else None
        if compiled is None:
            return torch.func.functional_call(self.model, state, arguments, keywords)
        held = {f"held.{name}": value for name, value in state.items()}
        action = partial(compiled, arguments, keywords)
        return torch.func.functional_call(self._holder, held, (action,))

    @property
    def state(self) -> dict[str, Tensor]:
        """The values of all parameters and buffers, by name, not to be differentiated by."""
        return self._others | {
            name: leaf.detach() for name, leaf in zip(self.names, self.leaves, strict=True)
        }

    def arguments(
        self, batch: Batch, *, with_labels: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with for a batch: positional and keyword arguments."""
        inputs = batch.inputs
        if isinstance(inputs, Mapping) and not with_labels:
            inputs = {key: value for key, value in inputs.items() if key != batch.label_key}
        return arguments_for(self.model, inputs)

    def holding(self, leaves: Sequence[Tensor], action: Callable[[], T]) -> T:
        """Do something while the model's trainable parameters have other values.

        A model with activation checkpoints runs again during the backward pass: it must meet
        the values of the forward pass there, not its own.

        Args:
            leaves: The values, in the order of `names`.
            action: What to do.

        Returns:
            What the action returns.
        """
        state = {f"held.{name}": leaf for name, leaf in zip(self.names, leaves, strict=True)}
        result: T = torch.func.functional_call(self._holder, state, (action,))
        return result

    def differentiate(self, value: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient of a scalar by the leaves that are held; None where it does not depend."""
        return differentiate(value, leaves)

    def place(self, batch: Batch) -> Batch:
        """Bring a batch to the model's device and precision."""

        def move(tensor: Tensor) -> Tensor:
            dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
            # A copy, as a model may write to its inputs; not part of a graph of the user's.
            moved = tensor.detach().to(self.device, dtype, copy=True)
            if self._channels_last and moved.dim() == 4 and moved.is_floating_point():
                moved = moved.contiguous(memory_format=torch.channels_last)
            return moved.requires_grad_(tensor.requires_grad)

        inputs, target = map_tensors(move, (batch.inputs, batch.target))
        return replace(batch, inputs=inputs, target=target)

    def _state(self) -> dict[str, Tensor]:
        """Every parameter and buffer in the precision of the computation."""
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {
            name: value.detach().to(self.dtype if value.is_floating_point() else value.dtype)
            for name, value in state.items()
        }

    def _precision(self, parameters: dict[str, nn.Parameter]) -> torch.dtype:
        """The parameters' widest precision, but at least single."""
        own = {parameter.dtype for parameter in parameters.values()}
        if torch.float64 in own:
            return torch.float64
        if own != {torch.float32}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in own))
            self._notes.append(f"the parameters are {names}; measured in float32")
        return torch.float32


def _coarse(evaluate: Callable[[], Any]) -> str:
    """The precisions below single in which a model computes, by their names."""
    with torch.no_grad(), Coarse() as seen:
        try:
            evaluate()
        except Exception:  # What is wrong with the model is said when it is tried out.
            return ""
    return names_of(seen.kinds)


def gains_by_channels_last(model: nn.Module, device: torch.device) -> bool:
    """Whether most of a model's convolutions are faster on images with their channels last.

    On processors, oneDNN's kernels for this layout need no copies and take half of the time, from
    as many channels on as fit a register.

    Args:
        model: The model.
        device: Where it runs.

    Returns:
        Whether they are.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    wide = [c for c in found if min(c.in_channels, c.out_channels) >= _REGISTER]
    return 2 * len(wide) > len(found)


def _largest(tensor: Tensor) -> float:
    """The size of the largest number in a tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_values(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers have no values yet.

    Args:
        model: The model.

    Raises:
        ValueError: If any of them is lazy, or on the device `meta`.
    """
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise ValueError(
                f"`{name}` of the model is not initialised yet (a lazy module); call the model "
                "once on an example before measuring it."
            )
        if value.is_meta:
            raise ValueError(
                f"`{name}` of the model is on the device `meta` and holds no values; build the "
                "model on a real device, or give it one with `model.to_empty(device='cpu')`, and "
                "load its weights."
            )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the trainable parameters, by name."""
    return {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}


def _listed(names: list[str]) -> str:
    """A few names."""
    return ", ".join(f"`{name}`" for name in names[:4]) + ", ..." * (len(names) > 4)


def arguments_for(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: positional and keyword arguments.

    Args:
        model: The model.
        inputs: A tuple of positional arguments, a dict of keyword arguments (of a model that does
            not take these names, its one positional argument), or one argument.

    Returns:
        The arguments.
    """
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        whole = not _takes(model, (), named) and _takes(model, (named,), {})
        return ((named,), {}) if whole else ((), named)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _takes(model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether a model's forward can be called with such arguments."""
    try:
        inspect.signature(model.forward).bind(*arguments, **keywords)
    except TypeError:
        return False
    except ValueError:  # There is no signature.
        return True
    return True


def unwrapped(model: Any) -> nn.Module:
    """Take off wrappers that stand in the way of second derivatives.

    Args:
        model: A module, perhaps wrapped for several devices or by the compiler.

    Returns:
        The module itself.

    Raises:
        TypeError: If it is no module whose parameters can be replaced.
    """
    while True:
        if type(model).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                "`model` is wrapped by FullyShardedDataParallel, which flattens the weights and "
                "frees them between passes; shard it with `torch.distributed.fsdp.fully_shard`, "
                "or load its full state dict into a plain model."
            )
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod
        else:
            break
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"`{name}` of the model" if name else "`model`"
            raise TypeError(
                f"{part} is a TorchScript module, whose parameters cannot be replaced; pass the "
                "Python module it was made from."
            )
    if not isinstance(model, nn.Module):
        raise TypeError(_no_module(model))
    return model


def _no_module(model: Any) -> str:
    """What to do with something that is not a module."""
    kind = type(model).__name__
    if isinstance(getattr(model, "__self__", None), nn.Module):
        return f"`model` is a method of a {type(model.__self__).__name__}; pass the module itself."
    if isinstance(model, type):
        return f"`model` is the class {model.__name__}; pass an instance of it."
    if isinstance(model, Mapping):
        return (
            f"`model` is a {kind}; if it is a state dict, load it into the module it belongs to "
            "(`model.load_state_dict(state)`) and pass that."
        )
    if callable(model):
        return (
            f"`model` is a {kind}, whose parameters cannot be found or replaced; needed is a "
            "torch.nn.Module that holds them as `nn.Parameter`. Write a class with the function as "
            "its `forward` and the parameters as attributes: `self.weight = nn.Parameter(weight)`."
        )
    return (
        f"`model` is a {kind}, not a torch.nn.Module; the order of the arguments is "
        "LossSurface(model, loss, data)."
    )


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters to differentiate by, checked for what cannot be differentiated."""
    everything = dict(model.named_parameters())
    for name, parameter in everything.items():
        if parameter.is_complex():
            raise ValueError(
                f"`{name}` of the model is complex; flatgauge measures real parameters only."
            )
    trainable = {name: p for name, p in everything.items() if p.requires_grad}
    if not everything:
        raise ValueError("`model` has no parameters; there is no weight space to be flat in.")
    if not trainable:
        raise ValueError(
            f"none of the model's {len(everything)} parameters requires a gradient; call "
            "`model.requires_grad_(True)` for those to be measured."
        )
    return trainable


def _single_device(parameters: dict[str, nn.Parameter]) -> torch.device:
    """The one device of all parameters."""
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the model's parameters lie on several devices ({names}); move it to one with "
            "`model.to(device)`."
        )
    return devices.pop()
