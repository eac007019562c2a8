"""Nothing of the user's is changed: model, gradients, modes, hooks, random states."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from cases import CASES, build
from model_state import assert_same, everything_of, used
from reference import dense_gradient, dense_hessian, error
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatgauge import LossSurface, find_gauge
from flatgauge.graph.export import UnsupportedGraphError


def everything(surface: LossSurface) -> None:
    surface.value(), surface.gradient(), surface.hvp(torch.ones(surface.size))
    surface.value(surface.point * 2), surface.product_method, surface.params


@pytest.mark.parametrize("products", ["auto", "forward", "differences"])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_left_as_found(name, products):
    case = build(name)
    model = used(case)
    before = everything_of(model)
    pairs = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(pairs, batch_size=3, shuffle=True)
    everything(LossSurface(model, case.loss, loader, products=products))
    assert_same(everything_of(model), before)


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("action", ["value", "gradient", "hvp"])
def test_the_model_is_left_as_found_after_a_failure(problem, action):
    case = build("residual with batch-norm")
    model = used(case)
    surface = case.surface(chunk=4)
    surface.hvp(torch.ones(surface.size))
    surface.release()
    before = everything_of(model)
    calls = []

    def fail(*_) -> None:
        calls.append(1)
        if len(calls) == 2:
            torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
            raise problem("in the middle")

    handle = model.head.register_forward_hook(fail)
    with pytest.raises(problem, match="in the middle"):
        getattr(surface, action)(*([torch.ones(surface.size)] if action == "hvp" else []))
    handle.remove()
    assert_same(everything_of(model), before)
    vector = torch.ones(surface.size).double()
    assert error(surface.hvp(vector), dense_hessian(case) @ vector) < 1e-10


def test_a_loaders_own_generator_is_not_advanced():
    case = build("mlp")
    source = torch.Generator().manual_seed(3)
    pairs = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(pairs, batch_size=3, shuffle=True, generator=source)
    state = source.get_state()
    everything(LossSurface(case.model, case.loss, loader))
    assert torch.equal(source.get_state(), state)


def test_a_buffer_written_in_eval_mode_is_written_in_a_copy():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x)

    model = Counting()
    everything(LossSurface(model, "cross_entropy", (torch.randn(5, 4), torch.arange(5) % 3)))
    assert model.calls == 0


def test_everything_works_under_no_grad_and_inference_mode():
    case = build("residual with batch-norm")
    expected, hessian = dense_gradient(case), dense_hessian(case)
    outside = case.surface()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inside = case.surface()
            vector = torch.ones(inside.size).double()
            for surface in (inside, outside):
                assert error(surface.gradient(), expected) < 1e-10
                assert error(surface.gradient(surface.point + 0), expected) < 1e-10
                assert error(surface.hvp(vector), hessian @ vector) < 1e-10
                assert surface.value(surface.point * 1) == pytest.approx(surface.value())
        assert error(inside.hvp(vector), hessian @ vector) < 1e-10
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert error(case.surface().gradient(), expected) < 1e-10


class Remembering(nn.Module):
    """Keeps its last features and a count as attributes, as models for explanations do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.features = nn.Linear(4, 3).double(), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.linear(x)
        self.calls += 1
        self.fresh = self.features
        return self.features


def test_attributes_set_in_the_forward_pass_are_put_back():
    case, model = build("mlp"), Remembering()
    everything(LossSurface(model, case.loss, (case.inputs, case.targets)))
    assert (model.calls, model.features) == (0, None)
    assert not hasattr(model, "fresh")


@pytest.mark.parametrize("holder", [False, True])
def test_ctrl_c_while_other_values_stand_in_for_the_parameters(holder, monkeypatch):
    case = build("residual with batch-norm")
    surface = case.surface()
    before = {n: id(p) for n, p in [*case.model.named_parameters(), *case.model.named_buffers()]}

    def interrupted(model, state, *_):
        for name, value in state.items():  # As torch does, but never coming back.
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            table = module._parameters if last in module._parameters else module._buffers
            table[last] = value
        raise KeyboardInterrupt

    whole = torch.func.functional_call

    def call(model, state, *rest):
        inner = model is case.model
        return (whole if holder == inner else interrupted)(model, state, *rest)

    monkeypatch.setattr(torch.func, "functional_call", call)
    with pytest.raises(KeyboardInterrupt):
        surface.gradient()
    after = {n: id(p) for n, p in [*case.model.named_parameters(), *case.model.named_buffers()]}
    assert after == before


def test_threads_may_measure_one_model_at_the_same_time():
    case = build("residual with batch-norm")
    model = used(case)
    surfaces = [case.surface(chunk=2) for _ in range(2)]
    point = surfaces[0].point
    expected = {scale: case.surface().gradient(point * scale) for scale in (1.0, 1.5)}
    before, wrong = everything_of(model), []

    def work(surface: LossSurface, scale: float) -> None:
        for _ in range(6):
            try:
                if error(surface.gradient(point * scale), expected[scale]) > 1e-10:
                    wrong.append("gradient")
                if not torch.equal(surface.point, point):
                    wrong.append("point")
            except Exception as problem:
                wrong.append(repr(problem))

    threads = [
        threading.Thread(target=work, args=(surfaces[i % 2], 1 + 0.5 * (i % 2))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert_same(everything_of(model), before)


def test_hooks_that_alter_gradients_are_no_part_of_the_surface():
    case = build("residual with batch-norm")
    expected, hessian = dense_gradient(case), dense_hessian(case)
    calls = []

    def doubling(module, inputs, outputs):
        calls.append(1)
        return tuple(None if part is None else 2 * part for part in inputs)

    case.model.conv.register_full_backward_hook(doubling)
    next(case.model.parameters()).register_hook(lambda gradient: 3 * gradient)
    surface = case.surface()
    vector = torch.ones(surface.size).double()
    assert error(surface.gradient(), expected) < 1e-10
    assert error(surface.hvp(vector), hessian @ vector) < 1e-10
    assert calls == []
    case.model(case.inputs).sum().backward()
    assert calls == [1]


def test_frozen_parameters_are_not_copied_at_every_call():
    case = build("mlp")
    case.model[0].requires_grad_(False)
    surface, seen = case.surface(chunk=2), set()
    handle = case.model[0].register_forward_hook(lambda module, *_: seen.add(id(module.weight)))
    surface.value()
    handle.remove()
    assert len(seen) == 1


def test_a_surface_can_be_copied_but_not_pickled():
    case = build("mlp")
    surface = case.surface()
    vector = torch.ones(surface.size).double()
    product = surface.hvp(vector)
    twin = copy.deepcopy(surface)
    assert twin.model is not case.model
    assert torch.equal(twin.hvp(vector), product)
    with torch.no_grad():
        twin.model[0].weight.mul_(2)
    assert not torch.equal(twin.hvp(vector), product)
    assert torch.equal(surface.hvp(vector), product)
    with pytest.raises(TypeError, match="holds functions and cannot be pickled"):
        pickle.dumps(surface)


def test_the_cached_gradient_is_not_handed_out():
    surface = build("mlp").surface()
    first = surface.gradient()
    kept = first.clone()
    first.zero_()
    again = surface.gradient()
    assert torch.equal(again, kept)
    again.zero_()
    assert torch.equal(surface.gradient(), kept)


def of_random(model: nn.Module) -> LossSurface:
    return LossSurface(model, "cross_entropy", (torch.randn(5, 4), torch.arange(5) % 3))


class Hooking(nn.Module):
    """Registers hooks, a buffer, a parameter, a module and more in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.items, self.kinds = nn.Linear(4, 3), {"a": [1]}, [1, 2], {1}
        self.recent, self.scale = deque([1.0], maxlen=2), torch.ones(())
        self.counts, self.parts = np.zeros(2), [nn.Linear(3, 3)]
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        part, output = self.linear, self.linear(x)
        part.register_forward_hook(lambda *_: None)
        part.register_forward_hook(lambda *_, **__: None, with_kwargs=True, always_call=True)
        part.register_forward_pre_hook(lambda *_: None, prepend=True)
        part.register_full_backward_hook(lambda *_: None)
        part.register_full_backward_pre_hook(lambda *_: None)
        part.register_state_dict_post_hook(lambda *_: None)
        part.register_state_dict_pre_hook(lambda *_: None)
        part.register_load_state_dict_pre_hook(lambda *_: None)
        part.register_load_state_dict_post_hook(lambda *_: None)
        part.register_buffer("fresh", torch.zeros(()), persistent=False)
        self.added = nn.Linear(1, 1)
        self.table["a"].append(2), self.table.update(b=x)
        self.items.clear(), self.kinds.add(2), self.recent.append(2.0)
        self.counts[0] += 1
        self.scale *= 2
        self.parts[0].last = x
        torch.rand(1, generator=self.noise)
        return output


def attributes(module: nn.Module) -> dict[str, object]:
    plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "noise", "linear")}
    return {name: copy.deepcopy(value) for name, value in plain.items()}


def test_everything_that_a_forward_pass_registers_is_put_back():
    model = Hooking().eval()
    handle = model.linear.register_forward_hook(lambda *_: None)
    parts = [model, model.linear, model.parts[0]]
    before, state = [attributes(part) for part in parts], model.noise.get_state()
    held = [id(value) for part in parts for value in vars(part).values()]
    names = [name for name, _ in model.named_parameters()]
    surface = of_random(model)
    everything(surface)
    with pytest.raises(UnsupportedGraphError, match="is mutated in the forward"):
        find_gauge(model, torch.randn(5, 4))
    assert [name for name, _ in model.named_parameters()] == names
    assert [id(value) for part in parts for value in vars(part).values()] == held
    for part, attribute in zip(parts, before, strict=True):
        now = attributes(part)
        assert now.pop("counts", np.zeros(2)).tolist() == [0.0, 0.0]
        assert now.keys() | {"counts"} == attribute.keys() | {"counts"}
        for name, value in now.items():
            if name not in ("_modules", "parts", "_forward_hooks"):
                assert value == attribute[name], name
    assert list(model.linear._forward_hooks) == [handle.id]
    assert torch.equal(model.noise.get_state(), state)
    handle.remove()
    assert not model.linear._forward_hooks


class Tallying(nn.Module):
    """Its output depends on what the calls before have left in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.linear(x) * len(self.seen)


def test_every_call_begins_with_the_model_as_it_was_found():
    model = Tallying()
    surface = of_random(model)
    whole, single = surface.value(), LossSurface(model, "cross_entropy", surface_data(), chunk=1)
    assert whole > 0
    assert single.value() == pytest.approx(single.value(single.point))
    assert model.seen == []


class Caching(nn.Module):
    """Keeps what it computes from a parameter in eval mode, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias, self.cache = nn.Linear(4, 3), nn.Parameter(torch.randn(2)), {}
        self.index, self.constant = torch.tensor([0, 1, 0]), {"one": torch.ones(3)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.linear(x).tanh() * (self.bias[self.index] + self.constant["one"])
        if str(x.device) not in self.cache:
            self.cache[str(x.device)] = self.bias[self.index]
        return self.linear(x).tanh() * (self.cache[str(x.device)] + self.constant["one"])


def surface_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, generator=generator).double(), torch.arange(5) % 3


@pytest.mark.parametrize("called", ["not", "without gradients", "with gradients"])
def test_parameters_that_a_model_caches_in_eval_mode_count(called):
    model, (x, y) = Caching().double(), surface_data()
    loss = nn.functional.cross_entropy(model.train()(x), y)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters, create_graph=True)
    expected = torch.cat([part.reshape(-1) for part in expected])
    row = torch.autograd.grad(expected @ torch.ones_like(expected), parameters)
    row = torch.cat([part.reshape(-1) for part in row])
    model.eval()
    if called != "not":
        with torch.set_grad_enabled(called == "with gradients"):
            model(x)
    before = dict(model.cache)
    surface = LossSurface(model, "cross_entropy", (x, y), chunk=2)
    assert error(surface.gradient(), expected.detach()) < 1e-12
    assert error(surface.hvp(torch.ones(surface.size).double()), row) < 1e-12
    assert surface.value(surface.point * 2) != surface.value()
    assert model.cache == before
    named = [note for note in surface.notes if note.startswith("`cache` of the model holds what")]
    assert len(named) == (called != "not")


def test_a_cache_next_to_a_counter_is_found_too():
    class Counting(Caching):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    model, data = Counting().double().eval(), surface_data()
    fresh = LossSurface(model, "cross_entropy", data).gradient()
    with torch.no_grad():
        model(data[0])
    assert torch.equal(LossSurface(model, "cross_entropy", data).gradient(), fresh)
