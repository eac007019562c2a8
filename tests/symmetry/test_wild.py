"""The gauge of networks nobody here wrote: its size, and that moving along it changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wild import WILD, Wild

import flatgauge as fg
from flatgauge.graph.export import ModelGraph, UnsupportedGraphError
from flatgauge.symmetry.path_sums import path_sum

# Networks with a kernel that adds in another order once the numbers are scaled, and that kernel:
# there the outputs agree to 1e-5 instead of bit for bit.
REORDERED: dict[str, str] = {}

# Networks that no paths run through, and the first op that stops them: gates and squares multiply
# activations, other gates are curved, some norms divide by what they read, tokens are no numbers.
PATHLESS = {
    "alexnet": "`mul` .* it multiplies two activations",
    "seresnet20_cifar10": "`sigmoid` .* it is not piecewise linear",
    "bam_resnet18": "`mul` .* it multiplies two activations",
    "cbam_resnet18": "`sigmoid` .* it is not piecewise linear",
    "resnesta10": "`softmax` .* it is not piecewise linear",
    "ibn_resnet": "`instance_norm` .* it divides by statistics of the sample",
    "mobilenetv3_small_w7d20": "`mul` .* it multiplies two activations",
    "ghostnet": "`mul` .* it multiplies two activations",
    "regnety002": "`sigmoid` .* it is not piecewise linear",
    "efficientnet_b0": "`sigmoid` .* it is not piecewise linear",
    "bert": "`embedding` .* it reads whole numbers",
    "albert": "`embedding` .* it reads whole numbers",
    "gpt2": "`view` .* it reads whole numbers",
    "llama": "`embedding` .* it reads whole numbers",
    "t5_encoder": r"`\w+` .* it reads whole numbers",
    "vit": "`layer_norm` .* it divides by statistics of the sample",
    "convnext": "`layer_norm` .* it divides by statistics of the sample",
}


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


@dataclass(frozen=True)
class Found:
    """What was found in one network."""

    name: str
    network: Wild
    model: nn.Module
    before: dict[str, Tensor]
    gauge: fg.symmetry.GaugeGroup


@pytest.fixture(scope="module", params=WILD)
def found(request):
    network = WILD[request.param]
    model = network.model()
    before = numbers(model)
    gauge = fg.find_gauge(model, network.inputs(seed=0))
    return Found(request.param, network, model, before, gauge)


def test_size_is_the_one_derived_by_hand(found):
    assert found.gauge.dim == found.network.dim


def test_a_random_move_leaves_the_outputs_bit_for_bit(found):
    generator = torch.Generator().manual_seed(0)
    move = found.gauge.sample(generator=generator, log2_range=6, powers_of_two=True)
    copy = found.gauge.rescale(found.model, move)

    assert not changed(found.before, found.model)
    moved = changed(found.before, copy)
    assert any(name.endswith("weight") for name in moved)
    assert not [name for name in moved if name.endswith(("running_var", "num_batches_tracked"))]

    fresh = found.network.inputs(seed=1)
    for ours, theirs in zip(outputs(copy, fresh), outputs(found.model, fresh), strict=True):
        assert theirs.isfinite().all()
        assert theirs.std() > 0
        if found.name in REORDERED:
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        else:
            assert torch.equal(ours, theirs)


def test_what_is_pinned_is_told(found):
    told = " ".join(str(pin) for pin in found.gauge.pinned)
    assert bool(told) == bool(found.network.pins)
    for operation in found.network.pins:
        assert re.search(rf"\b{operation}\b", told)


def test_a_random_move_leaves_the_sum_over_all_paths_bit_for_bit(found):
    inputs = found.network.inputs(seed=0)
    arguments, keywords = ((), inputs) if isinstance(inputs, dict) else ((inputs[:1],), {})
    graph = ModelGraph(found.model, arguments, keywords, 0, lambda output: tensors(output)[0])
    if found.name in PATHLESS:
        with pytest.raises(UnsupportedGraphError, match=PATHLESS[found.name]):
            path_sum(graph, state(found.model), 1.0)
        return
    generator = torch.Generator().manual_seed(1)
    move = found.gauge.sample(generator=generator, log2_range=6, powers_of_two=True)
    before = path_sum(graph, state(found.model), 1.0)
    assert 1 < before < 1e60
    assert path_sum(graph, state(found.gauge.rescale(found.model, move)), 1.0) == before


def state(model: nn.Module) -> dict[str, Tensor]:
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in held.items()}
