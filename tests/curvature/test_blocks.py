"""The exact sweep against dense Hessians, part by part and layer by layer."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import LAYER_CASES, Case, build
from reference import block_parts, dense_blocks, error, form, loss_function, theta
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks
from flatgauge.curvature.sweep import backprop as sweep
from flatgauge.surface.losses import NormalizedCrossEntropy


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def curved(case: Case, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in case.curved)


@pytest.fixture(params=LAYER_CASES)
def case(request) -> Case:
    return build(request.param)


def test_the_graph_tells_what_is_exact(case):
    blocks = block_curvature(case.surface(), generator=seeded())
    exact = {name: block.exact for name, block in blocks.items()}
    assert exact == {name: not curved(case, name) for name in exact}


def test_every_part_is_the_definition(case):
    blocks = block_curvature(case.surface(), generator=seeded())
    dense = dense_blocks(case)
    for name, block in blocks.items():
        if not block.exact:
            continue
        right = block_parts(case.model, name, dense[name], layer=block.layer is not None)
        assert block.values.keys() - {"normalized"} == right.keys()
        for part, values in right.items():
            torch.testing.assert_close(block.values[part], values, rtol=1e-9, atol=1e-12)
        mean = block.samples["weighted_diagonal"].mean().item()
        assert mean == pytest.approx(block.values["weighted_diagonal"].item())
    exact = [name for name, block in blocks.layers.items() if block.exact]
    assert exact or case.curved


@pytest.mark.parametrize("name", [name for name in LAYER_CASES if build(name).curved])
def test_what_is_not_exact_agrees_within_its_own_error(name):
    case = build(name)
    blocks = block_curvature(case.surface(), probes=256, generator=seeded(1))
    dense = dense_blocks(case)
    for name, block in blocks.items():
        expected = dense[name]
        if block.exact:
            continue
        wanted = block_parts(case.model, name, expected, layer=block.layer is not None)
        for part, right in wanted.items():
            difference = (block.values[part].reshape(-1) - right.reshape(-1)).abs()
            assert (difference <= 5 * block.stderr[part].reshape(-1) + 1e-12).all()
    doubts = {name: block.stderr["trace"] for name, block in blocks.items() if not block.exact}
    assert max(doubts.values()) < 0.5 * max(dense[name].norm() for name in doubts)


def test_parameters_that_are_no_layers_have_no_units():
    blocks = block_curvature(build("gated").surface())
    assert set(blocks.layers) == {"value.weight", "gate.weight", "matrix"}
    assert set(blocks["scale"].values) == {"trace", "diagonal", "weighted_diagonal"}
    assert (blocks["matrix"].layer.out_axis, blocks["matrix"].layer.in_axis) == (1, 0)


def same(first: Blocks, second: Blocks, tolerance: float) -> None:
    assert list(first) == list(second)
    for name, block in first.items():
        for part, values in block.values.items():
            torch.testing.assert_close(
                values, second[name].values[part], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "sequence"])
def test_chunks_do_not_matter(name, monkeypatch):
    whole = block_curvature(build(name).surface(), generator=seeded())
    monkeypatch.setattr(sweep, "_WORKING_SET", 1)
    monkeypatch.setattr(sweep, "_SMALLEST_CHUNK", 3)
    surface = build(name).surface()
    seen = []
    with surface.on_progress(seen.append):
        pieces = block_curvature(surface, ("trace",), generator=seeded(), estimate=False)
        assert len(seen) >= 4
    pieces = block_curvature(surface, generator=seeded())
    same(whole, pieces, 1e-11)
    first, second = (b[next(iter(b))] for b in (whole, pieces))
    for part, errors in first.data_stderr.items():
        torch.testing.assert_close(errors, second.data_stderr[part])


def test_the_users_chunk_is_kept():
    surface = build("mlp").surface(chunk=2)
    seen = []
    with surface.on_progress(seen.append):
        block_curvature(surface, ("trace",))
    assert max(seen[-6:]) == 2
    assert sum(seen[-6:]) == 11


# -- identities --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weights"), [("mlp", "024"), ("conv and max-pool", "036")])
def test_what_leaves_a_unit_is_what_enters_it(name, weights):
    case = build(name)
    blocks = block_curvature(case.surface())
    hessian = torch.autograd.functional.hessian(loss_function(case), theta(case))
    names = [n for n, _ in case.model.named_parameters()]
    sizes = [p.numel() for p in case.model.parameters()]
    starts = dict(zip(names, [sum(sizes[:i]) for i in range(len(sizes))], strict=True))
    for layer, after in pairwise(weights):
        weight = case.model.get_parameter(f"{layer}.weight").detach()
        bias = case.model.get_parameter(f"{layer}.bias").detach()
        forms = []
        for unit in range(len(weight)):
            direction = torch.zeros(len(hessian)).double()
            row = weight[unit].numel()
            start = starts[f"{layer}.weight"] + unit * row
            direction[start : start + row] = weight[unit].reshape(-1)
            direction[starts[f"{layer}.bias"] + unit] = bias[unit]
            forms.append(direction @ hessian @ direction)
        leaving = blocks[f"{after}.weight"].values["outgoing"]
        if len(leaving) > len(forms):  # A flattened channel is all its positions.
            width = case.model.get_parameter(f"{after}.weight").detach()
            block = dense_blocks(case)[f"{after}.weight"]
            span = width.shape[1] // len(forms)
            masks = [torch.zeros_like(width) for _ in forms]
            for channel, mask in enumerate(masks):
                mask[:, channel * span : (channel + 1) * span] = 1
            leaving = numbers([form(width, mask, block) for mask in masks])
        torch.testing.assert_close(leaving, torch.stack(forms), rtol=1e-10, atol=1e-14)


def test_relative_flatness_of_the_last_layer_in_one_forward_pass():
    case = build("mlp")
    features = case.model[:-1](case.inputs)
    weight = case.model[-1].weight.detach()
    p = case.model(case.inputs).softmax(1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    traces = (curvature * (weight @ weight.T)).sum((1, 2))
    expected = (features.square().sum(1) * traces).mean()
    found = block_curvature(case.surface(), ("relative",))["4.weight"].values["relative"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


# -- losses ------------------------------------------------------------------------------------

PROBABILITIES = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [0.1, 0.1, 0.8], [0.0, 0.5, 0.5]])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0]).double()


def huber(output, target):
    return F.huber_loss(output, target, delta=0.3)


def concave(output, target):
    """A loss that curves downwards for some outputs."""
    return torch.log1p((output - target).square()).mean()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), torch.tensor([0, 1, 2, 1])),
        (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([0, 1, 2, 1])),
        (nn.CrossEntropyLoss(label_smoothing=0.2), torch.tensor([0, 1, 2, 1])),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), torch.tensor([0, 1, 2, 1])),
        (nn.CrossEntropyLoss(weight=WEIGHTS), PROBABILITIES.double()),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), PROBABILITIES.double()),
        (nn.MSELoss(), PROBABILITIES.double()),
        (nn.L1Loss(), PROBABILITIES.double()),
        (nn.BCEWithLogitsLoss(), PROBABILITIES.double()),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), PROBABILITIES.double()),
        (huber, PROBABILITIES.double()),
        (concave, PROBABILITIES.double()),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_every_loss(loss, target):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
        inputs = torch.randn(4, 4).double()
    surface = LossSurface(model, loss, (inputs, target))
    blocks = block_curvature(surface)
    whole = surface.hvp(torch.eye(surface.size).double()).diagonal()
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in blocks.values()])
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
    assert all(block.exact for block in blocks.values())


@pytest.mark.parametrize("head", [nn.LogSoftmax(1), nn.Softmax(1)])
def test_the_end_of_the_model_may_belong_to_the_loss(head):
    case = build("mlp")
    model = nn.Sequential(*case.model, head)
    loss = F.nll_loss if isinstance(head, nn.LogSoftmax) else F.cross_entropy
    surface = LossSurface(model, loss, (case.inputs, case.targets))
    blocks = block_curvature(surface)
    assert all(block.exact for block in blocks.values())
    whole = surface.hvp(torch.eye(surface.size).double()).diagonal()
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in blocks.values()])
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("classes_last", [True, False])
def test_labels_at_every_position(classes_last):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
        inputs, labels = torch.randn(5, 2, 3).double(), torch.randint(0, 3, (5, 2))
    labels[0, 1] = -100
    if not classes_last:
        model = nn.Sequential(*model, _Swapped())
    surface = LossSurface(model, "cross_entropy", (inputs, labels))
    blocks = block_curvature(surface)
    whole = surface.hvp(torch.eye(surface.size).double()).diagonal()
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in blocks.values()])
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
    assert all(block.exact for block in blocks.values())


class _Swapped(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_the_normalized_loss_keeps_the_signs_and_leaves_out_constant_logits():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(4, 5, bias=False), nn.LeakyReLU(), nn.Linear(5, 3, bias=False)
        inputs, targets = torch.randn(7, 4).double(), torch.randint(0, 3, (7,))
    model = nn.Sequential(*layers).double()
    inputs[3] = 0.0  # Its logits are all zero.
    kept = [0, 1, 2, 4, 5, 6]

    def scaled(output, target):
        return F.cross_entropy(output / output.std(1, correction=0, keepdim=True), target)

    part = Case(model, scaled, scaled, inputs[kept], targets[kept])
    expected = dense_blocks(part)
    surface = LossSurface(model, "cross_entropy", (inputs, targets))
    blocks = block_curvature(surface.with_loss(NormalizedCrossEntropy()))
    assert blocks.left_out == 1
    negative = False
    for name, block in blocks.items():
        right = expected[name].diagonal()
        assert error(block.values["diagonal"].reshape(-1), right) < 1e-9
        negative |= bool((right < -1e-6).any())
    assert negative


def test_weight_decay_counts_in_every_part():
    case = build("grouped and dilated conv")
    plain, decayed = (block_curvature(case.surface(weight_decay=d)) for d in (0.0, 0.7))
    for name, weight in case.model.named_parameters():
        before, after = plain[name].values, decayed[name].values
        penalty = 0.7 * torch.eye(weight.numel()).double()
        layer = plain[name].layer is not None
        for part, added in block_parts(case.model, name, penalty, layer=layer).items():
            torch.testing.assert_close(after[part], before[part] + added)
