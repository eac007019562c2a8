"""Evaluate a user's model without leaving a trace on it, or on the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def isolated(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a block with the model in eval mode and everything else as curvature needs it.

    Inside: eval mode, gradients enabled, autocast off, attention under the math kernel (the
    only one with a second derivative), compiled calls run eagerly (a compiled graph has no
    second derivative). Afterwards, also after an exception or Ctrl-C: every module's own mode
    and every global random state as before.

    Args:
        model: The model whose modes are set and restored.
        device: Where it lives.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        with ExitStack() as stack:
            stack.enter_context(preserved_randomness(device))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if torch.amp.is_autocast_available(device.type):
                stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(getattr(m, "_compiled_call_impl", None) is not None for m, _ in modes):
                stack.enter_context(_eager())
            for module, _ in modes:  # Not `.eval()`: a model may override it with side effects.
                module.training = False
            fast = torch.backends.mha.get_fastpath_enabled()
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)  # It rounds, and pads, differently.
            yield
    finally:
        for module, training in modes:
            module.training = training


def _eager() -> AbstractContextManager[Any]:
    """Run compiled calls eagerly. Asked only where needed: importing the compiler is slow."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None:
        raise TypeError(
            "`model` was compiled in place (`model.compile()`), and a compiled graph has no second "
            "derivative; pass a copy that was not compiled, or use torch 2.6 or later."
        )
    stance: AbstractContextManager[Any] = set_stance("force_eager")
    return stance


@contextmanager
def preserved_randomness(device: torch.device) -> Iterator[None]:
    """Put every global random state back afterwards: Python's, NumPy's and torch's.

    Args:
        device: The accelerator whose state to keep, if it is one.

    Yields:
        Nothing.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the legacy state is the global one
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    indexed = device.type not in ("cpu", "mps")
    try:
        with torch.random.fork_rng(
            devices=[device.index or 0] if indexed else [],
            device_type=device.type if indexed else "cuda",
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)
