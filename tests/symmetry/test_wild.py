"""The gauge of networks nobody here wrote: its size, and that moving along it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wild import WILD

import flatgauge as fg

# Networks with a kernel that adds in another order once the numbers are scaled, and that kernel:
# there the outputs agree to 1e-5 instead of bit for bit.
REORDERED: dict[str, str] = {}


def numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    after = model.state_dict()
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, however it is packed."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    return [tensor for part in output if part is not None for tensor in tensors(part)]


@torch.no_grad()
def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    return tensors(model(**inputs) if isinstance(inputs, dict) else model(inputs))


@pytest.mark.parametrize("name", WILD)
def test_size_as_derived_and_outputs_bit_for_bit(name):
    network = WILD[name]
    model = network.model()
    before = numbers(model)

    gauge = fg.find_gauge(model, network.inputs(seed=0))
    assert gauge.dim == network.dim

    generator = torch.Generator().manual_seed(0)
    move = gauge.sample(generator=generator, log2_range=6, powers_of_two=True)
    copy = gauge.rescale(model, move)
    assert not changed(before, model)
    moved = changed(before, copy)
    assert any(name.endswith("weight") for name in moved)
    assert not [name for name in moved if name.endswith(("running_var", "num_batches_tracked"))]

    fresh = network.inputs(seed=1)
    for ours, theirs in zip(outputs(copy, fresh), outputs(model, fresh), strict=True):
        assert theirs.isfinite().all()
        assert theirs.std() > 0
        if name in REORDERED:
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name in WILD if WILD[name].pins])
def test_what_is_pinned_is_told(name):
    network = WILD[name]
    gauge = fg.find_gauge(network.model(), network.inputs(seed=0))
    told = " ".join(str(pin) for pin in gauge.pinned)
    for operation in network.pins:
        assert operation in told
