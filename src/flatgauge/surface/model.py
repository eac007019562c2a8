"""The user's model as a pure function of its parameters.

What enters: a module, perhaps wrapped, and the precision of the computation. What leaves: a
`FunctionalModel` that can be called at any values of the trainable parameters, and a `FlatLayout`
that says where each parameter lies in a flat vector. The model's parameters and buffers are copied;
every call puts copies in their place, so that nothing reaches the user's model.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn, uint8
from torch.nn.parameter import is_lazy

from flatgauge.estimators.linalg import LowPrecisionDetector, dtype_names
from flatgauge.graph.export import ExportedGraphs, ModelGraph, UnsupportedGraphError, in_precision
from flatgauge.runtime.distributed import SHARDED
from flatgauge.runtime.isolation import (
    Snapshot,
    compiled_parts,
    is_compiled,
    isolate,
    locate_errors,
    names_of_parts,
)
from flatgauge.surface.data import Batch, map_tensors, tensors
from flatgauge.surface.derivatives import differentiate


def digest(values: Iterable[Tensor]) -> str:
    """A short text that identifies tensors by shapes and bits."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)
    return found.hexdigest()


class FlatLayout:
    """The order and shapes of the parameters in a flat vector of `size` entries."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self.size = sum(self._sizes)

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector (p,), or of the columns of a matrix (p, k), as views."""
        parts = torch.split(vector, self._sizes)
        columns = tuple(vector.shape[1:])
        return [
            part.reshape(shape + columns) for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def flat(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join parts in order: the inverse of `pieces`."""
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector by name."""
        return dict(zip(self.names, self.pieces(vector), strict=True))

    def from_named(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join named parts into one vector."""
        if parts.keys() != set(self.names):
            odd = sorted(parts.keys() ^ set(self.names))
            raise ValueError(
                f"`parts` and the trainable parameters differ in {', '.join(odd[:5])}; give one "
                "tensor for each of `surface.names`."
            )
        for name, shape in zip(self.names, self._shapes, strict=True):
            if tuple(parts[name].shape) != shape:
                raise ValueError(
                    f"`{name}` is given with shape {tuple(parts[name].shape)}, but the parameter "
                    f"has shape {shape}."
                )
        return self.flat([parts[name] for name in self.names])

    def add(self, sums: Tensor, pieces: Sequence[Tensor | None]) -> None:
        """Add parts to a vector in place; None adds nothing."""
        for part, piece in zip(self.pieces(sums), pieces, strict=True):
            if piece is not None:
                part += piece.detach()


class ParameterCache(NamedTuple):
    """The dict `attribute` of the module at `path`: it holds tensors computed from parameters."""

    path: str
    module: nn.Module
    attribute: str
    keys: frozenset[Any]

    @property
    def table(self) -> dict[Any, Tensor]:
        """The dict itself, which the model may have replaced."""
        table: dict[Any, Tensor] = getattr(self.module, self.attribute)
        return table


def find_caches(model: nn.Module, call: Callable[[], Any]) -> list[ParameterCache]:
    """Find the tables that hide parameters from derivatives: filled in an earlier call."""
    # Tables of tensors are emptied, and those that the model fills again with the same entries,
    # computed from its parameters, are caches. (LeViT keeps its attention biases so in eval mode.)
    tables = [
        ParameterCache(f"{path}.{name}".lstrip("."), module, name, frozenset(table))
        for path, module in model.named_modules()
        for name, table in vars(module).items()
        if type(table) is dict and name not in ("_parameters", "_buffers", "_modules") and table
        if all(isinstance(item, Tensor) for item in table.values())
    ]
    if not tables:
        return []
    # One by one where the model needs what is in some of them.
    return _find_refilled(model, call, tables) or [
        found for table in tables for found in _find_refilled(model, call, [table])
    ]


def _find_refilled(
    model: nn.Module, call: Callable[[], Any], tables: list[ParameterCache]
) -> list[ParameterCache]:
    """The tables that get their entries again, some of them computed from parameters."""
    before = Snapshot(model)
    try:
        for cache in tables:
            cache.table.clear()
        with torch.enable_grad():
            call()
        again = [cache for cache in tables if cache.keys == set(cache.table)]
        return [c for c in again if any(item.requires_grad for item in c.table.values())]
    except Exception:
        return []
    finally:
        before.restore()


#: Samples of the example that is exported: neither one nor two, which would become constants.
_EXAMPLE = 3

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


class FunctionalModel:
    """A model, unwrapped and checked, that can be called at any value of its parameters.

    It reads the model's parameters and buffers into copies of its own and calls the model with
    those, so nothing that happens here reaches the model, its `.grad`, its buffers or the hooks
    on its parameters; `refresh` notices when the model has changed since.

    Attributes:
        model: The module itself, without DataParallel or compile wrappers.
        notes: What was done to the model to make it measurable.
        names: The trainable parameters, named as in `model.named_parameters()`.
        leaves: Their values, as leaves to differentiate by.
        dtype: The precision of the computation.
        sharded: Whether every process holds a part of every parameter only.
        coarse: The precisions below single in which the model computes, "" for none.
    """

    sharded = False

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        self.notes: list[str] = []
        self.model = unwrap(model)
        if parts := [""] if is_compiled(model) else compiled_parts(self.model):
            self.notes.append(
                f"compiled by torch.compile: {names_of_parts(parts)}; measured without, as a "
                "compiled backward pass has no derivative"
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

    def lay_out(self, few: Batch, evaluate: Callable[[Batch], Any]) -> None:
        """Choose how images lie in memory: with channels last where convolutions gain by it."""
        # The choice depends on model and loss alone, not on times, so that it is the same every
        # time; those that cannot read such images, or read them differently, get them as they are.
        self._channels_last = False
        if self.dtype is not torch.float32 or not gains_by_channels_last(self.model, self.device):
            return
        try:
            usual = self._float_outputs(few, evaluate)
            self._channels_last = True
            found = self._float_outputs(few, evaluate)
            self._channels_last = len(found) == len(usual) and all(map(_is_close, found, usual))
        except Exception:  # A `view` of what is not contiguous, or a check that it is.
            self._channels_last = False

    def settle_precision(self, evaluate: Callable[[], Any]) -> None:
        """Notice a model that computes in half precision by itself; avoid that if possible."""
        # Autocast does not touch double precision, and half is too coarse for second derivatives.
        self.coarse = "" if self.sharded else _find_low_precision(evaluate)
        if not self.coarse:
            return
        advice = "numbers have few digits"
        if self.device.type != "mps" and self._follows:
            found, before = self.coarse, self.dtype
            self._compute_in(torch.float64)
            self.coarse = _find_low_precision(evaluate)
            if not self.coarse:
                note = f"the model computes in {found} by itself (`torch.autocast` in its forward)"
                self.notes.append(f"{note}; measured in float64, which autocast leaves as it is")
                return
            self._compute_in(before)
        elif self.device.type != "mps":
            advice += "; `dtype=None` or `dtype=torch.float64` measures in double precision, which "
            advice += "autocast leaves as it is"
        self.notes.append(
            f"the model computes in {self.coarse} by itself (`torch.autocast` or casts in its "
            f"forward), whatever the precision of its parameters: {advice}"
        )

    def _compute_in(self, dtype: torch.dtype) -> None:
        """Compute in another precision from now on; the model stays as it is."""
        self.dtype, self.leaves = dtype, ()
        self.refresh()

    def _float_outputs(self, few: Batch, evaluate: Callable[[Batch], Any]) -> list[Tensor]:
        """All tensors in what model and loss give."""
        with torch.no_grad():
            return [t for t in tensors(evaluate(self.place(few))) if t.is_floating_point()]

    def first_call(self, batch: Batch, *, with_labels: bool) -> Any:
        """Call the model, and find out whether it keeps anything from one call for the next."""
        # A model that does (a cache, a counter, hooks that it registers at its first call) begins
        # every later call as it was found: it is one fixed function.
        # Random generators stay: a model that draws from one is random, and refused.
        before, self._keeps_state = Snapshot(self.model, generators=False), False
        try:
            output = self(self.leaves, batch, with_labels=with_labels)
        finally:
            changed = before.restore()
        call = partial(self, self.leaves, batch, with_labels=with_labels)
        self._caches = find_caches(self.model, call)
        self._keeps_state = changed or bool(self._caches)
        self.notes += [
            f"`{cache.path}` of the model holds what it computed from parameters in an earlier "
            "call; it is computed again in every call here"
            for cache in self._caches
        ]
        return output

    def in_float64(self) -> FunctionalModel:
        """The same model in double precision."""
        return self if self.dtype is torch.float64 else self.in_precision(torch.float64)

    def in_precision(self, dtype: torch.dtype) -> FunctionalModel:
        """The same model in some precision, with what its first call has shown."""
        other = FunctionalModel(self.model, dtype)
        other._keeps_state, other._caches = self._keeps_state, self._caches
        return other

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another precision from now on, the model included."""
        self.model.to(dtype)
        self._channels_last &= dtype is torch.float32
        self._compute_in(dtype)

    def refresh(self) -> bool:
        """Read the model again if its parameters or buffers changed."""
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

    def with_state(self, values: Iterable[Tensor] = ()) -> Iterator[Tensor]:
        """Values, and a number for the model's whole state: what must be the same on every rank."""
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
            "new, or trainable now": [n for n in now if n not in self._shapes],
            "gone, or frozen": [n for n in self._shapes if n not in now],
            "of another shape": [n for n in now if self._shapes.get(n, now[n]) != now[n]],
        }
        found = "; ".join(f"{kind}: {_list_names(names)}" for kind, names in kinds.items() if names)
        raise ValueError(
            "the model's trainable parameters are not those that the surface was made for "
            f"({found or 'they come in another order'}); make a new "
            "LossSurface(model, loss, data)."
        )

    def __call__(self, leaves: Sequence[Tensor], batch: Batch, *, with_labels: bool) -> Any:
        """Call the model with other values for its trainable parameters."""
        before = Snapshot(self.model, generators=False) if self._keeps_state else None
        try:
            for cache in self._caches:
                cache.table.clear()
            with locate_errors("the model"):
                # Buffers are copied for every call: some models write to them even in eval mode.
                state = {
                    name: value.clone() if name in self._buffers else value
                    for name, value in self._others.items()
                }
                state |= zip(self.names, leaves, strict=True)
                arguments, keywords = self.arguments(batch, with_labels=with_labels)
                return torch.func.functional_call(self.model, state, arguments, keywords)
        finally:
            if before is not None:
                before.restore()

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

    def export(
        self,
        batch: Batch,
        graphs: ExportedGraphs,
        select: Callable[[Any], Any],
        *,
        with_labels: bool,
        samples: int = _EXAMPLE,
    ) -> ModelGraph:
        """The graph for batches of one shape; the number of samples is open if any are given."""
        if self.sharded:
            raise UnsupportedGraphError(SHARDED)
        samples = samples if batch.splittable else 0
        example = batch.rows([0] * samples) if samples else batch
        called = self.arguments(example, with_labels=with_labels)
        arguments, keywords = map_tensors(Tensor.contiguous, called)
        model = in_precision(self.model, self.dtype)
        with isolate(model, self.device):  # The exporter's own tensors must not stay in it.
            return graphs.export(model, arguments, keywords, samples, select)

    def with_parameters(self, leaves: Sequence[Tensor], action: Callable[[], T]) -> T:
        """Do something while the model's trainable parameters have other values."""
        # A model with activation checkpoints runs again during the backward pass: it must meet the
        # values of the forward pass there, not its own.
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
            self.notes.append(f"the parameters are {names}; measured in float32")
        return torch.float32


def _find_low_precision(evaluate: Callable[[], Any]) -> str:
    """The precisions below single in which a model computes, by their names."""
    with torch.no_grad(), LowPrecisionDetector() as seen:
        try:
            evaluate()
        except Exception:  # What is wrong with the model is said when it is tried out.
            return ""
    return dtype_names(seen.dtypes)


def gains_by_channels_last(model: nn.Module, device: torch.device) -> bool:
    """Whether most of a model's convolutions are faster on images with their channels last."""
    # On processors, oneDNN's kernels for this layout need no copies and take half of the time, from
    # as many channels on as fit a register.
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    wide = [c for c in found if min(c.in_channels, c.out_channels) >= _REGISTER]
    return 2 * len(wide) > len(found)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same up to rounding."""
    largest = float(other.abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, 1e-3, 1e-4 * largest)


def check_values(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers have no values yet."""
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


def _list_names(names: list[str]) -> str:
    """A few names."""
    return ", ".join(f"`{name}`" for name in names[:4]) + ", ..." * (len(names) > 4)


def arguments_for(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: positional and keyword arguments."""
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


def unwrap(model: Any) -> nn.Module:
    """Take off wrappers that stand in the way of second derivatives."""
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
