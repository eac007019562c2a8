"""First layers before pooling, whose factor vectors are received behind it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import block_parts, dense_blocks, error, placed_handlers
from torch import nn

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.sweep.accumulate import PARTS
from flatgauge.curvature.sweep.ops import ConvPoolOp


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


NETWORKS = {
    "relu first": ([nn.Conv2d, 2, 4, 3], [nn.ReLU(), nn.MaxPool2d(2)], 36),
    "pooling first": ([nn.Conv2d, 1, 3, 3], [nn.MaxPool2d(2), nn.ReLU()], 27),
    "windows that overlap": ([nn.Conv2d, 2, 3, 3], [nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 27),
    "a window cut off": ([nn.Conv2d, 2, 3, 2], [nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)], 48),
    "one tap": ([nn.Conv2d, 3, 2, 1], [nn.ReLU(), nn.MaxPool2d(2)], 32),
}


def built(name: str) -> Case:
    torch.manual_seed(0)
    (kind, inner, out, size), between, features = NETWORKS[name]
    model = nn.Sequential(kind(inner, out, size), *between, nn.Flatten(), nn.Linear(features, 3))
    inputs = images(6, inner, 8, 8)
    inputs[0] = 1.0  # All windows tie.
    return Case(model.double(), "cross_entropy", F.cross_entropy, inputs, torch.arange(6) % 3)


def handler_types(case: Case, *parts: str, record: bool = False) -> list[type]:
    return [type(owner) for owner in placed_handlers(case.surface(), *parts, record=record)]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("parts", [PARTS, ("outgoing",), ("incoming", "trace")])
def test_every_part_is_the_definition(name, parts):
    case = built(name)
    blocks, dense = block_curvature(case.surface(), parts), dense_blocks(case)
    for parameter in ("0.weight", "0.bias") if "trace" in parts else ("0.weight",):
        values = blocks[parameter].values
        layer = parameter == "0.weight"
        right = block_parts(case.model, parameter, dense[parameter], layer=layer)
        for part in right.keys() & set(parts):
            assert error(values[part].reshape(-1), right[part].reshape(-1)) < 1e-10, part


def test_vectors_are_received_behind_the_pooling_if_nothing_in_front_is_watched():
    case = built("relu first")
    assert handler_types(case, "trace")[0] is ConvPoolOp
    assert handler_types(case, "outgoing")[0] is not ConvPoolOp  # At the layer's input.
    assert handler_types(case, "trace", record=True)[0] is not ConvPoolOp  # Recorded whole.
    wide = nn.Sequential(nn.Conv2d(1, 17, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    wide.append(nn.Linear(153, 3))
    other = Case(wide.double(), "cross_entropy", F.cross_entropy, images(6, 1, 8, 8), case.targets)
    assert handler_types(other, "trace")[0] is not ConvPoolOp  # Many patches.
    assert handler_types(other, "incoming")[0] is ConvPoolOp


class Twice(nn.Module):
    """Reads a convolution before and behind its pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.head(torch.cat([F.max_pool2d(x, 2).flatten(1), x.mean((2, 3))], 1))


def test_a_layer_that_is_read_before_the_pooling_too_is_watched_there():
    torch.manual_seed(0)
    inputs = images(5, 1, 8, 8)
    case = Case(Twice().double(), "cross_entropy", F.cross_entropy, inputs, torch.arange(5) % 3)
    assert ConvPoolOp not in handler_types(case, "trace")
    found = block_curvature(case.surface())["conv.weight"].values["diagonal"]
    assert error(found.reshape(-1), dense_blocks(case)["conv.weight"].diagonal()) < 1e-10
