"""The networks of the papers, and their initialisations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, nn

import flatgauge as fg
from flatgauge.studies.networks import (
    INITIALISATIONS,
    NETWORKS,
    build,
    find_architecture,
    initialise,
)

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]

#: Small enough to be cheap; every network at its own.
WIDTHS = {"alexnet": 1 / 16, "vgg16": 1 / 32, "plainnet18": 1 / 16, "wrn16-4": 1 / 16}

#: Parameters, layer by layer: (inputs × outputs + biases).
MNIST_FC = (784 * 512 + 512) + 4 * (512 * 512 + 512) + (512 * 10 + 10)
LENET_END = (400 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)
ALEXNET_START = (3 * 25 * 64 + 64) + (64 * 25 * 64 + 64)
ALEXNET_END = (64 * 8 * 8 * 384 + 384) + (384 * 192 + 192) + (192 * 10 + 10)
VGG_STARTS = (3 * 9 * 64 + 64) + (64 * 9 * 64 + 64) + (64 * 9 * 128 + 128) + (128 * 9 * 128 + 128)
VGG_MIDDLE = (128 * 9 * 256 + 256) + 2 * (256 * 9 * 256 + 256) + (256 * 9 * 512 + 512)
VGG_END = 5 * (512 * 9 * 512 + 512) + 2 * (512 * 512 + 512) + (512 * 10 + 10)
PLAIN_START = (3 * 9 * 64 + 64) + 4 * (64 * 9 * 64 + 64) + (64 * 9 * 128 + 128)
PLAIN_MIDDLE = 3 * (128 * 9 * 128 + 128) + (128 * 9 * 256 + 256) + 3 * (256 * 9 * 256 + 256)
PLAIN_END = (256 * 9 * 512 + 512) + 3 * (512 * 9 * 512 + 512) + (512 * 10 + 10)
# Convolutions without biases; batch-norm has two numbers per channel; shortcuts are 1 by 1.
WRN_START = 3 * 9 * 16
WRN_STAGE1 = (2 * 16 + 16 * 9 * 64 + 2 * 64 + 64 * 9 * 64 + 16 * 64) + 2 * (2 * 64 + 64 * 9 * 64)
WRN_STAGE2 = (2 * 64 + 64 * 9 * 128 + 2 * 128 + 128 * 9 * 128 + 64 * 128) + 2 * (
    2 * 128 + 128 * 9 * 128
)
WRN_STAGE3 = (2 * 128 + 128 * 9 * 256 + 2 * 256 + 256 * 9 * 256 + 128 * 256) + 2 * (
    2 * 256 + 256 * 9 * 256
)
WRN_END = 2 * 256 + 256 * 10 + 10

COUNTS = [
    ("mlp-5x512", (1, 28, 28), MNIST_FC),
    (
        "mlp-50-50-50-30",
        (1, 28, 28),
        (784 * 50 + 50) + 2 * (50 * 50 + 50) + (50 * 30 + 30) + (30 * 10 + 10),
    ),
    ("mlp-3x512", (1, 28, 28), (784 * 512 + 512) + 2 * (512 * 512 + 512) + (512 * 10 + 10)),
    ("mlp-3x64", (1, 8, 8), 3 * (64 * 64 + 64) + (64 * 10 + 10)),
    ("f1", (1, 28, 28), (784 * 300 + 300) + (300 * 100 + 100) + (100 * 10 + 10)),
    (
        "c1",
        (1, 28, 28),
        (25 * 10 + 10) + (10 * 25 * 20 + 20) + (320 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10),
    ),
    ("lenet5", (1, 28, 28), (25 * 6 + 6) + (6 * 25 * 16 + 16) + LENET_END),
    ("lenet5", (3, 32, 32), (3 * 25 * 6 + 6) + (6 * 25 * 16 + 16) + LENET_END),
    (
        "lenet5",
        (1, 8, 8),  # 16 channels of 4 by 4 pixels are left
        (25 * 6 + 6) + (6 * 25 * 16 + 16) + LENET_END - (400 - 256) * 120,
    ),
    ("alexnet", (3, 32, 32), ALEXNET_START + ALEXNET_END),
    ("vgg16", (3, 32, 32), VGG_STARTS + VGG_MIDDLE + VGG_END),
    ("plainnet18", (3, 32, 32), PLAIN_START + PLAIN_MIDDLE + PLAIN_END),
    ("wrn16-4", (3, 32, 32), WRN_START + WRN_STAGE1 + WRN_STAGE2 + WRN_STAGE3 + WRN_END),
]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def seeded(name: str, seed: int = 0, **options) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(name, **options)


@pytest.mark.parametrize(("name", "shape", "expected"), COUNTS)
def test_number_of_parameters(name, shape, expected):
    with torch.device("meta"):
        assert count(build(name, shape=shape)) == expected


def test_every_network_of_the_catalogue_has_a_count():
    assert set(NETWORKS) <= {name for name, _, _ in COUNTS}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*NETWORKS, "mlp-16"])
def test_every_network_runs_and_learns_on_every_shape(name, shape):
    if name in ("c1", "vgg16") and shape == (1, 8, 8):
        return  # Too small, and refused: see below.
    net = seeded(name, shape=shape, classes=7, width=WIDTHS.get(name, 0.1))
    outputs = net(torch.randn(2, *shape, generator=Generator().manual_seed(0)))
    assert outputs.shape == (2, 7)
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_no_module_is_used_twice_and_activations_are_modules(name):
    with torch.device("meta"):
        net = build(name, shape=(3, 32, 32))
    calls: list[nn.Module] = []
    leaves = [module for module in net.modules() if not list(module.children())]
    for module in leaves:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    net.eval()(torch.zeros(1, 3, 32, 32, device="meta"))
    assert sorted(map(id, calls)) == sorted(map(id, leaves))
    hidden = sum(isinstance(m, nn.ReLU) for m in leaves)
    weighted = sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in leaves)
    assert hidden == {"wrn16-4": 13}.get(name, weighted - 1)


def test_width_multiplies_every_hidden_size():
    net = build("lenet5", shape=(3, 32, 32), width=0.5)
    sizes = [tuple(p.shape) for n, p in net.named_parameters() if n.endswith("weight")]
    assert sizes == [(3, 3, 5, 5), (8, 3, 5, 5), (60, 200), (42, 60), (10, 42)]
    wide = build("mlp-50-50-50-30", width=1.5)
    assert [p.shape[0] for p in wide.parameters() if p.ndim == 2] == [75, 75, 75, 45, 10]
    thin = build("mlp-4-4", width=1e-6)
    assert [p.shape[0] for p in thin.parameters() if p.ndim == 2] == [1, 1, 10]


def test_names_of_perceptrons_are_read():
    spelled = build("mlp-2x16-8", shape=(5,), classes=3)
    assert [tuple(p.shape) for p in spelled.parameters() if p.ndim == 2] == [
        (16, 5),
        (16, 16),
        (8, 16),
        (3, 8),
    ]
    assert [n for n, m in spelled.named_modules() if isinstance(m, nn.Linear)] == [
        "fc1",
        "fc2",
        "fc3",
        "fc4",
    ]
    assert find_architecture("mlp-9").about == "Hidden layer of 9 units"
    assert all(known.about and known.paper for known in NETWORKS.values())


def test_weights_come_from_the_global_generator():
    one, same, other = (seeded("lenet5", seed) for seed in (0, 0, 1))
    for first, second, third in zip(*(net.parameters() for net in (one, same, other)), strict=True):
        assert torch.equal(first, second)
        assert not torch.equal(first, third)


@pytest.mark.parametrize(
    ("name", "shape", "width", "dim"),
    [
        ("mlp-5x512", (1, 8, 8), 1 / 128, 5 * 4),
        ("mlp-50-50-50-30", (1, 8, 8), 0.1, 5 + 5 + 5 + 3),
        ("mlp-3x512", (1, 8, 8), 1 / 128, 3 * 4),
        ("f1", (1, 8, 8), 0.01, 3 + 1),
        ("lenet5", (1, 8, 8), 0.5, 3 + 8 + 60 + 42),
        ("lenet5", (1, 28, 28), 0.5, 3 + 8 + 60 + 42),
        ("c1", (1, 28, 28), 0.1, 1 + 2 + 12 + 8),
        ("alexnet", (3, 32, 32), 1 / 16, 4 + 4 + 24 + 12),
        ("vgg16", (3, 32, 32), 1 / 32, 2 * 2 + 2 * 4 + 3 * 8 + 6 * 16 + 2 * 16),
        ("plainnet18", (1, 8, 8), 1 / 32, 2 + 4 * (2 + 4 + 8 + 16)),
    ],
)
def test_one_scale_per_hidden_unit_or_channel(name, shape, width, dim):
    net = seeded(name, shape=shape, width=width).eval()
    assert fg.find_gauge(net, torch.randn(2, *shape)).dim == dim


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet_5", {}, "not known as a network.*`mlp-5x512`.*did you mean `lenet5`"),
        ("mlp-64-0", {}, "hidden layers written as `mlp-64-32` or `mlp-2x64`"),
        ("mlp", {}, "not known as a network"),
        ("c1", {"shape": (1, 8, 8)}, "too small; `c1` needs images of at least 16 by 16"),
        ("lenet5", {"shape": (1, 8, 7)}, "at least 8 by 8 pixels.*enlarge the images"),
        ("vgg16", {"shape": (3, 16, 16)}, "at least 28 by 28"),
        (
            "alexnet",
            {"shape": (784,)},
            "not that of an image; `alexnet` needs .channels, hei",
        ),
        ("mlp-4", {"shape": ()}, "not the shape of an input.*without the number of samples"),
        ("mlp-4", {"shape": (1, 0, 8)}, "not the shape of an input"),
        ("mlp-4", {"classes": 0}, "`classes=0` is not possible"),
        ("mlp-4", {"width": 0.0}, "`width=0.0` is not possible; needed is a positive number"),
        ("mlp-4", {"width": math.nan}, "`width=nan` is not possible"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize(
    ("scheme", "bound", "deviation", "biased"),
    [
        ("default", 1 / math.sqrt(300), 1 / math.sqrt(300) / math.sqrt(3), True),
        ("xavier_normal", math.inf, math.sqrt(2 / (300 + 200)), False),
        ("kaiming_uniform", math.sqrt(6 / 300), math.sqrt(2 / 300), False),
        ("uniform", 0.1, 0.1 / math.sqrt(3), True),
        ("normal", math.inf, math.sqrt(0.1), True),
    ],
)
@pytest.mark.parametrize("layer", [nn.Linear(300, 200), nn.Conv2d(12, 8, 5)], ids=["fc", "conv"])
def test_initial_statistics(scheme, bound, deviation, biased, layer):
    # Both have a fan in of 300 and a fan out of 200.
    initialise(layer, scheme, Generator().manual_seed(0))
    weight, size = layer.weight.detach(), layer.weight.numel()
    assert weight.abs().max() <= bound
    # The square of a number of one of these kinds has a standard deviation of at most √2 times
    # its mean; so five standard errors are the limit.
    assert abs(weight.square().mean() / deviation**2 - 1) < 5 * math.sqrt(2 / size)
    assert abs(weight.mean()) < 5 * deviation / math.sqrt(size)
    assert bool(layer.bias.any()) == biased
    if biased:
        assert layer.bias.abs().max() <= bound
        assert layer.bias.std().item() == pytest.approx(deviation, rel=1.0)


@pytest.mark.parametrize("scheme", INITIALISATIONS)
def test_initial_weights_come_from_the_generator_alone(scheme):
    nets = [seeded("wrn16-4", seed, shape=(1, 8, 8), width=1 / 16) for seed in (0, 1)]
    state = torch.get_rng_state()
    nets[0](torch.randn(4, 1, 8, 8, generator=Generator().manual_seed(0)))  # moves statistics
    for net in nets:
        initialise(net, scheme, Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert nets[0].bn.weight.eq(1).all()
    assert nets[0].bn.bias.eq(0).all()
    assert all(p.requires_grad for p in nets[0].parameters())


def test_default_is_what_torch_draws_in_a_new_layer():
    layer = nn.Linear(30, 20)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        fresh = nn.Linear(30, 20)
    initialise(layer, "default", Generator().manual_seed(3))
    assert torch.equal(layer.weight, fresh.weight)
    assert torch.equal(layer.bias, fresh.bias)


def test_initialise_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"`scheme='xavier'` is not known.*`xavier_normal`"):
        initialise(nn.Linear(2, 2), "xavier", Generator())
    net = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))
    before = net[0].weight.clone()
    with pytest.raises(TypeError, match=r"`1` is a GRU with parameters of its own.*yourself"):
        initialise(net, "uniform", Generator())
    assert torch.equal(net[0].weight, before)
