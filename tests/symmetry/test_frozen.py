"""Frozen parameters stay, masked entries do not count, caches are no outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import prune

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.measures import hessian_trace, minimum_sharpness, minimum_sharpness_nodewise

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(1))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def mlp(*, frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    net[2].requires_grad_(not frozen)
    return net.double()


def test_frozen_parameters_pin_the_scales_beside_them():
    model = mlp(frozen=True)
    gauge = fg.find_gauge(model, X)
    assert gauge.dim == 0  # The frozen bias fixes what follows, the frozen weight what precedes.
    assert "held, as they do not require a gradient: `2.weight`, `2.bias`" in gauge.describe()
    free = fg.find_gauge(model, X, frozen="free")
    assert free.dim == fg.find_gauge(mlp(frozen=False), X).dim == 11
    assert free.notes == ()
    with torch.no_grad():
        model[2].bias.zero_()
    gauge = fg.find_gauge(model, X)
    assert gauge.dim == 1  # One factor for all that enters the frozen matrix and all that leaves.
    twin = gauge.rescale(model, gauge.move([8.0]))
    assert torch.equal(twin(X), model(X))
    assert torch.equal(twin[2].weight, model[2].weight)
    assert torch.equal(twin[0].weight, 8 * model[0].weight)


def test_balancing_leaves_frozen_parameters_as_they_are():
    model = mlp(frozen=True)
    with torch.no_grad():
        model[2].bias.zero_()
        model[0].weight.mul_(16)
    even = fg.balance(model, X)
    assert torch.equal(even[2].weight, model[2].weight)
    ahead = even[0].weight.square().sum() + even[0].bias.square().sum()
    torch.testing.assert_close(ahead, even[4].weight.square().sum(), rtol=1e-10, atol=0)
    everything = fg.balance(model, X, frozen="free")
    assert not torch.equal(everything[2].weight, model[2].weight)


def test_a_model_without_trainable_parameters_moves_as_a_whole():
    model = mlp(frozen=False).requires_grad_(False)
    gauge = fg.find_gauge(model, X)
    assert gauge.dim == 11
    assert gauge.notes == ("no parameter requires a gradient, so all may move",)


@pytest.mark.parametrize("measure", [minimum_sharpness, minimum_sharpness_nodewise])
def test_the_smallest_trace_does_not_move_what_is_frozen(measure):
    model = mlp(frozen=True)
    surface = LossSurface(model, "cross_entropy", (X, Y))
    assert measure(surface).value == pytest.approx(hessian_trace(surface).value, rel=1e-12)
    with torch.no_grad():
        model[2].bias.zero_()
    surface = LossSurface(model, "cross_entropy", (X, Y))
    sums = {}
    for name, parameter in model.named_parameters():

        def loss(value: Tensor, name: str = name) -> Tensor:
            return F.cross_entropy(functional_call(model, {name: value}, (X,)), Y)

        hessian = torch.autograd.functional.hessian(loss, parameter.detach())
        sums[name] = float(hessian.reshape(parameter.numel(), -1).trace())
    # One factor c multiplies the first layer and divides the last weight: a / c² + b c² + rest.
    a, b = sums["0.weight"] + sums["0.bias"], sums["4.weight"]
    assert measure(surface).value == pytest.approx(2 * (a * b) ** 0.5 + sums["4.bias"], rel=1e-9)


class Masked(nn.Module):
    """A mask in front of the first weight: a buffer, or a frozen parameter."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        mask = (torch.rand(6, 4) > 0.4).float()
        if buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.first.weight * self.mask, self.first.bias)
        return self.last(torch.relu(hidden))


def test_a_mask_may_be_a_buffer_or_a_frozen_parameter():
    found = []
    for buffer in (True, False):
        model = Masked(buffer=buffer).double()
        assert fg.find_gauge(model, X).dim == 6
        surface = LossSurface(model, "cross_entropy", (X, Y))
        report = fg.measure(surface, measures=["hessian_trace"], gauge="balanced")
        least = minimum_sharpness(surface, generator=generator())
        found.append([report["balanced:hessian_trace"].value, least.value])
    assert found[0] == found[1]


def test_entries_that_pruning_hides_do_not_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    for layer, amount in ((model[0], 0.5), (model[2], 0.3)):
        prune.random_unstructured(layer, "weight", amount)
    gauge = fg.find_gauge(model, X)
    assert gauge.dim == 5  # A scale per hidden unit, none for hidden entries.
    even = fg.balance(model, X)
    torch.testing.assert_close(even(X), model(X), rtol=1e-10, atol=1e-12)
    entering = (even[0].weight_orig * even[0].weight_mask).square().sum(1) + even[0].bias.square()
    leaving = (even[2].weight_orig * even[2].weight_mask).square().sum(0)
    both = leaving > 0
    torch.testing.assert_close(entering[both], leaving[both], rtol=1e-10, atol=0)
    # Other numbers behind the mask change nothing.
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight_orig.add_(1e3 * (1 - layer.weight_mask))
    again = fg.balance(model, X)
    shown = (again[0].weight_orig * again[0].weight_mask).square().sum(1) + again[0].bias.square()
    torch.testing.assert_close(shown, entering, rtol=1e-10, atol=0)


def test_a_pruned_convolution_has_a_scale_per_channel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 3))
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[2], "weight", 0.5, n=2, dim=0)
    gauge = fg.find_gauge(model, torch.randn(2, 4, 6, 6))
    assert gauge.dim == 8


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "T5"])
def test_caches_are_no_outputs(kind):
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
    tokens = torch.randint(0, 20, (2, 5), generator=generator())
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    options = {
        "GPT2": {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8},
        "Llama": {"hidden_size": 8, "intermediate_size": 6, "max_position_embeddings": 8} | heads,
        "T5": {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 6},
    }[kind]
    tail = {"GPT2": "LMHeadModel", "Llama": "ForCausalLM", "T5": "ForConditionalGeneration"}[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=20, **options)
    model = getattr(transformers, f"{kind}{tail}")(config).eval()
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if kind == "T5" else {})
    assert model(**inputs).past_key_values is not None
    gauge = fg.find_gauge(model, inputs)
    assert gauge.notes == ("left out of the outputs, as caches: `past_key_values`",)
    twin = gauge.rescale(model, gauge.sample(generator=generator()))
    torch.testing.assert_close(twin(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)
    expected = fg.find_gauge(model, inputs | {"use_cache": False})
    assert gauge.dim == expected.dim > 0
    assert expected.notes == ()
