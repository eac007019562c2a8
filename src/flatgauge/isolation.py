"""Evaluate a user's model without leaving a trace on it, or on the process."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatgauge.blame import ProgramExitError
from flatgauge.compiled import eager
from flatgauge.snapshot import Snapshot

#: One thread at a time. One lock for all models, as much of what is set and put back (random
#: states, attention kernels) belongs to the process.
ALONE = threading.RLock()

#: The models that are isolated now, the last one innermost.
_ISOLATED: list[nn.Module] = []


@contextmanager
def isolated(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a block with the model in eval mode and everything else as curvature needs it.

    Inside: eval mode, gradients enabled, autocast off, attention under the math kernel (the
    only one with a second derivative), compiled calls run eagerly (a compiled graph has no
    second derivative), backward hooks off (they may alter gradients, and are no part of the
    function), embeddings with dense gradients. Afterwards, also after an exception or Ctrl-C:
    every module's mode, parameters, buffers, hooks and other attributes, with the contents of
    lists and tables among them, and every global random state, as before. Other threads wait.

    Args:
        model: The model whose modes are set and restored.
        device: Where it lives.

    Yields:
        Nothing.

    Raises:
        ProgramExitError: If the model ends the program.
    """
    with ALONE, ExitStack() as stack:
        before = Snapshot(model)
        _ISOLATED.append(model)
        try:
            stack.enter_context(preserved_randomness(device))
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


def is_isolated() -> bool:
    """Whether some model is isolated: its attributes may be those of a pass, not its own."""
    return bool(_ISOLATED)


def _prepare(module: nn.Module) -> None:
    """Set one module up to be differentiated; what is set here is put back by the snapshot."""
    module.training = False  # Not `.eval()`: a model may override it with side effects.
    if module._backward_hooks or module._backward_pre_hooks:
        module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.sparse = False


@contextmanager
def preserved_randomness(device: torch.device) -> Iterator[None]:
    """Put every global random state back afterwards: Python's, NumPy's and torch's.

    Args:
        device: The accelerator whose state to keep, if it is one.

    Yields:
        Nothing.
    """
    before = Randomness()
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


class Randomness:
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
