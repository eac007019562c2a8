"""Evaluate a user's model without leaving a trace on it, or on the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # Importing the compiler takes a second, so it is asked only where it was used.
            if any(getattr(m, "_compiled_call_impl", None) is not None for m, _ in modes):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            model.eval()
            yield
    finally:
        for module, training in modes:
            # Not `.train()`: a model may override it with side effects of its own.
            module.training = training


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
    accelerator = device.type if device.type in ("cuda", "mps") else "cuda"
    devices = [device.index or 0] if device.type in ("cuda", "mps") else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=accelerator):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
