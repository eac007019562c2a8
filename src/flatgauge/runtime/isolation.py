"""Run code that is not ours: models without leaving a trace, user code, plug-ins.

`isolate` sets a model up for differentiation and puts everything back afterwards: a `Snapshot`
holds the model's attributes and the contents of what they hold, `preserve_rng` the global random
states. `compiled_parts` names what `torch.compile` has taken over; `copy_model` copies a model, or
says what cannot be copied. `locate_errors` adds to an error of the user's code the innermost line
of its traceback that is not Python's, an installed package's or flatgauge's. `Plugins` loads what
other packages bring through entry points.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import sys
import sysconfig
import threading
import traceback
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib.metadata import EntryPoint, entry_points
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

#: One thread at a time, for all models: much of what is set and put back (random states, attention
#: kernels) belongs to the process.
PROCESS_LOCK = threading.RLock()

#: The models that are isolated now, the last one innermost.
_ISOLATED: list[nn.Module] = []

#: Types of values that cannot change in place, as most attributes are.
_FIXED = frozenset({bool, int, float, complex, str, bytes, type(None)})

#: The tables of a module whose tensors are its weights: others stand in for them in every call.
_WEIGHTS = frozenset({"_parameters", "_buffers"})

#: Containers that are emptied without side effects; and all that are looked into.
_PLAIN = frozenset({dict, OrderedDict, list, set, deque})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)

#: Puts one thing back, and returns whether it had changed.
Restore = Callable[[], bool]


@contextmanager
def isolate(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a block with the model in eval mode and everything else as curvature needs it.

    Inside: eval mode, gradients enabled, autocast off, attention under the math kernel (the
    only one with a second derivative), compiled calls run eagerly (a compiled graph has no
    second derivative), backward hooks off (they may alter gradients, and are not part of the
    function), embeddings with dense gradients. Afterwards, also after an exception or Ctrl-C:
    every module's mode, parameters, buffers, hooks and other attributes, with the contents of
    lists and tables among them, and every global random state, as before. Other threads wait.

    Raises:
        ProgramExitError: If the model ends the program.
    """
    with PROCESS_LOCK, ExitStack() as stack:
        before = Snapshot(model)
        _ISOLATED.append(model)
        try:
            stack.enter_context(preserve_rng(device))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if torch.amp.is_autocast_available(device.type):
                stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(eager(model))
            fast = torch.backends.mha.get_fastpath_enabled()
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)  # It rounds, and pads, differently.
            for module in model.modules():
                _prepare(module)
            yield
        except SystemExit as error:
            raise ProgramExitError("the model", error) from error
        finally:
            _ISOLATED.pop()
            # Parameters too: Ctrl-C may come while others stand in for them. And attributes that a
            # forward pass sets, such as a cached tensor, which would keep a whole graph alive.
            before.restore()


def in_isolation() -> bool:
    """Whether some model is isolated: its attributes may be those of a pass, not its own."""
    return bool(_ISOLATED)


def _prepare(module: nn.Module) -> None:
    """Set one module up to be differentiated; the snapshot restores what is set here."""
    module.training = False  # Not `.eval()`: a model may override it with side effects.
    if module._backward_hooks or module._backward_pre_hooks:
        module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.sparse = False


def eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled parts of a model eagerly: a compiled backward pass has no derivative."""
    # Not where nothing is compiled: torch's own control flow (`torch.cond`) needs the compiler.
    return torch.compiler.set_stance("force_eager") if compiled_parts(model) else nullcontext()


def is_compiled(module: Any) -> bool:
    """Whether calls of a module go through the compiler."""
    wrapped = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def compiled_parts(model: nn.Module) -> list[str]:
    """The compiled modules of a model, and compiled functions among their attributes, by name."""
    # A compiled function that the model reaches in another way (a closure, a global) is not found:
    # its second derivative fails when it is tried out, and products are computed without it.
    if "torch._dynamo" not in sys.modules:  # Whatever is compiled has loaded the compiler.
        return []
    parts: list[str] = []
    for path, module in model.named_modules():
        if is_compiled(module):
            parts.append(path)
            continue
        for name, value in vars(module).items():
            disabled = getattr(value, "_torchdynamo_disable", False)
            if hasattr(value, "_torchdynamo_orig_callable") and not disabled:
                parts.append(f"{path}.{name}".lstrip("."))
    return parts


def names_of_parts(parts: list[str]) -> str:
    """The names of compiled parts as a phrase."""
    names = [f"`{part}`" if part else "the whole" for part in parts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the global random states afterwards: Python's, NumPy's, torch's, and a device's."""
    before = RngState()
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        if device.type in ("cpu", "mps"):
            yield
        else:
            with torch.random.fork_rng([device.index or 0], device_type=device.type):
                yield
    finally:
        before.restore()
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


class RngState:
    """The global random states of the CPU as they are now, and those of some generators."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the legacy state is the global one
        self._torch = torch.get_rng_state()
        self._others = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        for generator, state in self._others:
            generator.set_state(state)


class Snapshot:
    """The attributes of every module of a model, and the contents of all that they hold.

    Contents are those of dicts (all tables of hooks among them), lists, sets and deques at any
    depth, of tensors and arrays that are not parameters or buffers, and, with ``generators``, the
    states of random generators. Modules in a list are treated like registered ones.
    """

    def __init__(self, model: nn.Module, *, generators: bool = True) -> None:
        self._empty: list[Any] = []  # Apart from the others, as most tables of hooks are empty.
        self._restores: list[Restore] = []
        seen: set[int] = set()
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                table = vars(value)
                self._restores.append(_container_restore(table, dict))
                for name, held in table.items():
                    if type(held) in _FIXED:
                        continue
                    if type(held) in _PLAIN and not held:
                        self._empty.append(held)
                    elif name in _WEIGHTS:  # Remembered by identity, everything else by content.
                        self._restores += filter(None, [_content_restore(held)])
                    else:
                        waiting.append(held)
            elif isinstance(value, _CONTAINERS):
                if type(value) in _PLAIN and not value:
                    self._empty.append(value)
                elif (restore := _content_restore(value)) is not None:
                    self._restores.append(restore)
                inside = value.values() if isinstance(value, dict) else value
                waiting += [item for item in inside if type(item) not in _FIXED]
            else:
                content = _content_restore(value)
                if restore := content or (generators and _generator_restore(value)) or None:
                    self._restores.append(restore)

    def restore(self) -> bool:
        """Put everything back; whether anything had changed."""
        filled = [container for container in self._empty if container]
        for container in filled:
            container.clear()
        return any([restore() for restore in self._restores]) or bool(filled)


def _content_restore(value: Any) -> Restore | None:
    """Restores the contents of a value; None for a type whose contents are not remembered."""
    # The methods of the container itself: a class derived from it may do more.
    for kind in (OrderedDict, dict, list, deque, set):
        if isinstance(value, kind):
            return _container_restore(value, kind)
    if type(value) is Tensor:
        return _tensor_restore(value)
    return _array_restore(value) if isinstance(value, np.ndarray) else None


def _container_restore(held: Any, kind: Any) -> Restore:
    """Restores the objects in a container, by identity."""
    keyed = issubclass(kind, dict)
    before = _objects(held, keyed)

    def restore() -> bool:
        now = _objects(held, keyed)
        if len(now) == len(before) and all(map(is_, now, before)):
            return False
        kind.clear(held)
        if keyed:
            half = len(before) // 2
            for key, value in zip(before[:half], before[half:], strict=True):
                kind.__setitem__(held, key, value)
        else:
            (kind.update if kind is set else kind.extend)(held, before)
        return True

    return restore


def _objects(held: Any, keyed: bool) -> list[Any]:
    """What a container holds: items, or keys and then values."""
    return [*held, *held.values()] if keyed else list(held)


def _tensor_restore(tensor: Tensor) -> Restore | None:
    """Restores a tensor that a forward pass may write to."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_inference() or not tensor.is_leaf:  # Not written to; or computed from weights.
        return None
    version, before, slope = tensor._version, tensor.detach().clone(), tensor.requires_grad

    def restore() -> bool:
        if tensor._version == version:
            return False
        with torch.no_grad():
            tensor.detach_().copy_(before).requires_grad_(slope)
        return True

    return restore


def _array_restore(array: np.ndarray[Any, Any]) -> Restore | None:
    if not array.flags.writeable or array.dtype.hasobject:
        return None
    before = array.copy()

    def restore() -> bool:
        if array.tobytes() == before.tobytes():
            return False
        array[...] = before
        return True

    return restore


def _generator_restore(value: Any) -> Restore | None:
    """Restores a random generator that the model has for itself."""
    read: Any
    write: Any
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        read, write = value.get_state, value.set_state
    elif isinstance(value, random.Random):
        read, write = value.getstate, value.setstate
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        read, write = lambda: bits.state, lambda state: setattr(bits, "state", state)
    else:
        return None
    before = read()

    def restore() -> bool:
        changed = repr(read()) != repr(before)
        write(before)
        return changed

    return restore


def computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Copies of the tensors that a model computes and holds (pruning, old weight norms), by id."""
    # A memo for `copy.deepcopy`, which refuses such tensors.
    held = [value for module in model.modules() for value in vars(module).values()]
    return {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}


@contextmanager
def explain_copy_errors(model: nn.Module) -> Iterator[None]:
    """Copy a model in the block; an error there names the attribute that cannot be copied."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        place = next(_uncopyable(model), None)
        if place is None:
            raise
        raise ValueError(
            f"the model cannot be copied, and this is measured on a copy: {place} "
            f"({type(error).__name__}: {error}). Keep locks, open files and connections out of "
            "the model's attributes, or give the class that holds them a `__deepcopy__`."
        ) from error


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model, also of one that holds computed tensors."""
    with explain_copy_errors(model):
        return copy.deepcopy(model, dict(computed_tensors(model)))


def _uncopyable(model: nn.Module) -> Iterator[str]:
    """The attributes of a model that cannot be copied."""
    # Modules stand for themselves: each is looked at once.
    known = {id(module): module for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, {**known, **computed_tensors(module)})
            except Exception:
                yield f"`{f'{path}.{name}'.lstrip('.')}` is of type {type(value).__name__}"


#: Folders of code that is not the user's: Python's own, installed packages, and flatgauge.
_FOREIGN = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in (
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
)


def error_location(error: BaseException, foreign: tuple[str, ...] = _FOREIGN) -> str:
    """File and line of the innermost call in the user's code; "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *foreign)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def describe_error(error: BaseException, *, anywhere: bool = False) -> str:
    """Type, message and user's line of an error; with `anywhere`, else the line of a package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = error_location(error) or (anywhere and error_location(error, _FOREIGN[-1:]))
    return f"{text} ({place})" if place else text


class ProgramExitError(RuntimeError):
    """The user's code has ended the program, where a result was needed."""

    def __init__(self, what: str, error: SystemExit) -> None:
        place = f" ({place})" if (place := error_location(error)) else ""
        super().__init__(
            f"{what} ends the program by `sys.exit({error.code!r})`{place}; it must return a "
            "result, or raise an error."
        )


@contextmanager
def locate_errors(what: str) -> Iterator[None]:
    """Run the user's code; an error in it says where, and `sys.exit` is an error.

    Raises:
        ProgramExitError: If the code ends the program; `what` is the subject of its message.
        Exception: What the code raises, of the same type where that takes a message.
    """  # noqa: DOC501
    try:
        yield
    except SystemExit as error:
        raise ProgramExitError(what, error) from error
    except Exception as error:
        place = error_location(error)
        internal = type(error).__module__.split(".")[0] in ("flatgauge", "torch")  # Caught by type.
        if internal or not place or place in str(error):
            raise
        raise _with_message(error, f"{error} ({place})") from error


def _with_message(error: Exception, text: str) -> Exception:
    """An error of the same type with another message; `RuntimeError` where that cannot be made."""
    with suppress(Exception):  # It may want other arguments.
        other = type(error)(text)
        if str(other) == text:
            return other
    return RuntimeError(f"{type(error).__name__}: {text}")


class NameClashError(ValueError):
    """Something of this name exists already."""


class Plugins:
    """What other packages bring under a group of entry points, loaded once, on first use.

    A plug-in that cannot be loaded is left out with a warning; a name that is taken is an error.
    """

    def __init__(self, group: str, add: Callable[[str, Any], Iterable[str]]) -> None:
        """Hand every name and loaded object to a function that returns the names it added."""
        self._group, self._add = group, add
        self._packages: dict[str, str] | None = None
        self._clash = ""

    def packages(self) -> dict[str, str]:
        """The package, with its version, that brought each name."""
        if self._packages is None:
            self._packages = {}  # Set first: a plug-in may use the table while it is loaded.
            for entry in entry_points(group=self._group):
                self._load(entry, self._packages)
        if self._clash:
            raise NameClashError(self._clash)
        return self._packages

    def _load(self, entry: EntryPoint, packages: dict[str, str]) -> None:
        """Load one entry point."""
        home = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        what = f"`{entry.name}` of the package `{home}` (entry points `{self._group}`)"
        try:
            packages |= dict.fromkeys(self._add(entry.name, entry.load()), home)
            logging.getLogger("flatgauge").debug("loaded %s", what)
        except NameClashError as error:
            self._clash = (
                f"{what} cannot be used: {error} Uninstall the package or rename it there."
            )
        except (Exception, SystemExit) as error:
            text = describe_error(error, anywhere=True)
            warnings.warn(
                f"{what} cannot be loaded and is left out: {text}; update the package or uninstall "
                "it.",
                stacklevel=2,
            )
