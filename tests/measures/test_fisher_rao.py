"""The Fisher-Rao norm against the gradients of single samples, one backward pass each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import LAYER_CASES, Case, build
from torch import Tensor, nn

from flatgauge import LossSurface, find_gauge
from flatgauge.measures import fisher_rao as gradients
from flatgauge.measures import fisher_rao_norm, fisher_rao_norm_liang
from flatgauge.surface.examples import linear_regression, two_weights


def shares(case: Case) -> dict[str, Tensor]:
    """Σ θ² (∂ℓ_n)² of every parameter and sample."""
    case.model.eval()
    found: dict[str, list[float]] = {name: [] for name, _ in case.model.named_parameters()}
    for x, y in zip(case.inputs, case.targets, strict=True):
        case.model.zero_grad()
        case.torch_loss(case.model(x[None]), y[None]).backward()
        for name, parameter in case.model.named_parameters():
            found[name].append((parameter.detach() * parameter.grad).square().sum().item())
    case.model.zero_grad()
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


@pytest.mark.parametrize("name", LAYER_CASES)
def test_exact_for_every_model(name):
    case = build(name)
    right = shares(case)
    estimate = fisher_rao_norm(case.surface())
    together = sum(right.values())
    assert estimate.exact
    assert estimate.value == pytest.approx(together.mean().item(), rel=1e-12)
    error = together.std() / len(together) ** 0.5
    assert estimate.data_stderr == pytest.approx(error.item(), rel=1e-10)
    for layer, value in estimate.layers.items():
        assert value == pytest.approx(right[layer].mean().item(), rel=1e-12)
    only = fisher_rao_norm(case.surface(), parameters="layers")
    assert only.value == pytest.approx(sum(estimate.layers.values()), rel=1e-12)


def radial(case: Case) -> Tensor:
    """⟨θ, ∇ℓ_n⟩² of every sample."""
    case.model.eval()
    found = []
    for x, y in zip(case.inputs, case.targets, strict=True):
        case.model.zero_grad()
        case.torch_loss(case.model(x[None]), y[None]).backward()
        slopes = [(p.detach() * p.grad).sum() for p in case.model.parameters()]
        found.append(float(sum(slopes)) ** 2)
    case.model.zero_grad()
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("name", ["mlp", "gelu", "conv and max-pool", "leaky relu with mse"])
def test_liangs_norm_is_that_of_the_slope_along_the_weights(name):
    case = build(name)
    right = radial(case)
    estimate = fisher_rao_norm_liang(case.surface(chunk=4))
    assert estimate.exact
    assert estimate.value == pytest.approx(right.mean().item(), rel=1e-12)
    error = (right.std() / len(right) ** 0.5).item()
    assert estimate.data_stderr == pytest.approx(error, rel=1e-10)
    assert estimate.samples.mean().item() == pytest.approx(estimate.value)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_biases_liangs_norm_is_a_function_of_the_outputs(depth):
    """A theorem of theirs: depth² E ⟨∂ℓ/∂f, f⟩²; the diagonal part is another number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(depth)
        parts = [[nn.Linear(4, 4, bias=False), nn.ReLU()] for _ in range(depth)]
        model = nn.Sequential(*[module for pair in parts for module in pair][:-1]).double()
        inputs, targets = torch.randn(9, 4).double(), torch.arange(9) % 4
    outputs = model(inputs).detach()
    slopes = outputs.softmax(1) - F.one_hot(targets, 4)
    right = depth**2 * (slopes * outputs).sum(1).square().mean().item()
    surface = LossSurface(model, "cross_entropy", (inputs, targets))
    assert fisher_rao_norm_liang(surface).value == pytest.approx(right, rel=1e-12)
    assert abs(fisher_rao_norm(surface).value / right - 1) > 0.1


def test_by_hand():
    assert fisher_rao_norm_liang(linear_regression(2.0)).value == 3600.0  # One weight: the same.
    assert fisher_rao_norm_liang(two_weights(2.0, 3.0)).value == (2 * 36 + 3 * 24) ** 2
    # (3w - 1)² has the derivative 6 (3w - 1) = 30 at w = 2, and (2 · 30)² = 3600.
    assert fisher_rao_norm(linear_regression(2.0)).value == 3600.0
    assert fisher_rao_norm(two_weights(2.0, 3.0)).value == 10368.0


@pytest.mark.parametrize("name", ["mlp", "gelu", "conv and max-pool"])
def test_chunks_do_not_matter(name):
    whole, pieces = (fisher_rao_norm(build(name).surface(chunk=chunk)) for chunk in (None, 2))
    assert pieces.value == pytest.approx(whole.value, rel=1e-12)
    assert pieces.data_stderr == pytest.approx(whole.data_stderr, rel=1e-9)


WEIGHTS = torch.tensor([0.5, 2.0, 0.0]).double()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])  # swept, and written out
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), WEIGHTS),
        (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([1.0, 0.0, 1.0])),
        (lambda output, target: F.cross_entropy(output, target), torch.ones(3)),
    ],
    ids=["weighted", "ignoring", "callable"],
)
def test_samples_weigh_as_in_the_loss(activation, loss, weights):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3)).double()
        inputs, targets = torch.randn(9, 4).double(), torch.arange(9) % 3
    right = sum(shares(Case(model, loss, F.cross_entropy, inputs, targets)).values())
    weight = weights[targets].double()
    surface = LossSurface(model, loss, (inputs, targets))
    expected = (weight @ right / weight.sum()).item()
    assert fisher_rao_norm(surface).value == pytest.approx(expected, rel=1e-12)
    along = radial(Case(model, loss, F.cross_entropy, inputs, targets))
    expected = (weight @ along / weight.sum()).item()
    assert fisher_rao_norm_liang(surface).value == pytest.approx(expected, rel=1e-12)


def test_mse_is_the_mean_over_outputs_of_a_sample():
    model = nn.Linear(1, 2, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    data = torch.ones(1, 1).double(), torch.ones(1, 2).double()
    # ((w₁ - 1)² + (w₂ - 1)²) / 2 has the derivatives 2, and 2 · (3 · 2)² = 72.
    assert fisher_rao_norm(LossSurface(model, "mse", data)).value == 72.0


class Own(nn.Module):
    """A model that computes its loss itself, from a dict batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_the_models_own_loss():
    case = build("mlp")
    surface = LossSurface(Own(case.model), None, [{"x": case.inputs, "labels": case.targets}])
    expected = fisher_rao_norm(case.surface()).value
    assert fisher_rao_norm(surface).value == pytest.approx(expected, rel=1e-12)


class Branching(nn.Module):
    """Python that depends on values: no graph, no vectorising."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return self.second(x)
        return torch.tanh(self.first(x)) + 0 * x.new_tensor(float(x.mean()))


def test_one_by_one_where_nothing_else_works(monkeypatch):
    case = build("mlp")
    model = Branching().double()
    counted = []
    one = gradients._sums_of_one
    monkeypatch.setattr(gradients, "_sums_of_one", lambda *given: counted.append(1) or one(*given))
    surface = LossSurface(model, "cross_entropy", (case.inputs, case.targets))
    estimate = fisher_rao_norm(surface)
    model.second.requires_grad_(False)
    right = 0.0
    for x, y in zip(case.inputs, case.targets, strict=True):
        model.zero_grad()
        F.cross_entropy(model(x[None]), y[None]).backward()
        for parameter in model.first.parameters():
            right += (parameter.detach() * parameter.grad).square().sum().item() / 11
    assert estimate.value == pytest.approx(right, rel=1e-12)
    assert len(counted) == 11


def test_many_samples_at_once_where_that_works(monkeypatch):
    monkeypatch.setattr(gradients, "_sums_of_one", None)
    for name in ("gelu", "tied weights", "attention"):
        fisher_rao_norm(build(name).surface())


# -- invariance --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "residual with batch-norm", "gelu"])
@pytest.mark.parametrize("powers", [True, False])
def test_rescaling(name, powers):
    case = build(name)
    before = fisher_rao_norm(case.surface()).value
    gauge = find_gauge(case.model, case.inputs)
    move = gauge.sample(generator=torch.Generator().manual_seed(0), powers_of_two=powers)
    moved = LossSurface(gauge.rescale(case.model, move), case.loss, (case.inputs, case.targets))
    after = fisher_rao_norm(moved).value
    assert after == before if powers else after == pytest.approx(before, rel=1e-10)


def test_a_shift_of_the_outputs_moves_the_bias_and_nothing_else():
    case = build("mlp")
    before = [fisher_rao_norm(case.surface(), parameters=p).value for p in ("all", "layers")]
    case.model[-1].bias.data += 1.5
    after = [fisher_rao_norm(case.surface(), parameters=p).value for p in ("all", "layers")]
    assert abs(after[0] / before[0] - 1) > 1e-3
    assert after[1] == pytest.approx(before[1], rel=1e-10)


class Parallel(nn.Module):
    """relu(W₁ x) + relu(W₂ x), equation (26) of Tsuzuku et al. 2019."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first) + torch.relu(x @ self.second)


def test_merging_two_branches_doubles_it():
    # Section 7.3 says that it halves: (W/2)² + (W/2)² = W²/2, with the same derivatives by both.
    case = build("mlp")
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    apart = Parallel(weight / 2, weight / 2)
    merged = Parallel(weight.clone(), torch.zeros_like(weight))
    values = [
        fisher_rao_norm(LossSurface(model, "cross_entropy", (case.inputs, case.targets))).value
        for model in (apart, merged)
    ]
    assert values[1] == pytest.approx(2 * values[0], rel=1e-12)


# -- what it says ------------------------------------------------------------------------------


def test_weight_decay_is_left_out_and_named():
    case = build("mlp")
    plain, decayed = (fisher_rao_norm(case.surface(weight_decay=d)) for d in (0.0, 0.3))
    assert plain.value == decayed.value
    assert plain.notes == ()
    assert "weight decay is not part" in decayed.notes[0]


def test_errors_teach():
    with pytest.raises(ValueError, match=r"`parameters='weights'` must be 'all' \("):
        fisher_rao_norm(build("mlp").surface(), parameters="weights")
    with pytest.raises(ValueError, match="the model has no layers"):
        fisher_rao_norm(two_weights(2.0, 3.0), parameters="layers")


def test_batches_that_cannot_be_cut():
    case = build("mlp")
    inputs = case.inputs.T.contiguous()
    model = nn.Sequential(_Turned(), *case.model)
    surface = LossSurface(model, "cross_entropy", [(inputs, case.targets)])
    with pytest.raises(ValueError, match="cannot be cut into samples: their tensors differ"):
        fisher_rao_norm(surface)


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T
