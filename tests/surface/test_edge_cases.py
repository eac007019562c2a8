"""Every odd input has an answer: an error that teaches, or a marked result."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cases import build
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatgauge as fg
from flatgauge import LossSurface

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def net(*, outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


# -- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("mse", net(), (X, Y)), ((X, Y), "mse", net()), (net(), (X, Y), net())]
)
def test_swapped_arguments_are_recognised(arguments):
    with pytest.raises(TypeError, match=r"the order is LossSurface\(model, loss, data\)"):
        LossSurface(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "`chunk=0` must be a number of samples"),
        ({"chunk": 2.5}, r"`chunk=2\.5` must be a number of samples"),
        ({"dtype": torch.float16}, "too coarse for second derivatives"),
        ({"weight_decay": -1.0}, r"`weight_decay=-1\.0` must be a finite number"),
        ({"weight_decay": math.nan}, "`weight_decay=nan` must be a finite number"),
        ({"products": "magic"}, "unknown `products='magic'`"),
        ({"memory": "lots"}, "`memory='lots'` is not an amount of memory"),
        ({"memory": "1KiB"}, "`memory='1KiB'` is too little"),
        ({"memory": 10}, "`memory=10` is too little"),
    ],
)
def test_meaningless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossSurface(net(), "cross_entropy", (X, Y), **options)


def test_points_and_vectors_of_the_wrong_length_are_refused():
    surface = LossSurface(net(), "cross_entropy", (X, Y))
    with pytest.raises(ValueError, match=r"shape \(3,\), but the surface has 43 parameters"):
        surface.hvp(torch.ones(3))
    with pytest.raises(ValueError, match=r"`point` has shape \(3,\)"):
        surface.value(torch.ones(3))


def test_points_and_vectors_may_be_numpy_arrays_but_not_lists():
    surface = LossSurface(net(), "cross_entropy", (X, Y))
    point = surface.point
    assert surface.value(point.numpy()) == surface.value(point)
    by_name = {name: part.numpy() for name, part in surface.params.items()}
    assert surface.value(by_name) == surface.value(point)
    assert torch.equal(surface.hvp(point.numpy()), surface.hvp(point))
    for wrong in (point.tolist(), "here"):
        with pytest.raises(TypeError, match=r"`point` is a \w+; give a tensor or a NumPy array"):
            surface.value(wrong)
        with pytest.raises(TypeError, match=r"`vectors` is a \w+; give a tensor or a NumPy array"):
            surface.hvp(wrong)
    with pytest.raises(ValueError, match=r"`vectors` is torch\.int64; give floating-point"):
        surface.hvp(torch.ones(43).long())


# -- the model --------------------------------------------------------------------------------


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="has no parameters"):
        LossSurface(nn.ReLU(), "cross_entropy", (X, Y))


def test_a_model_that_is_frozen():
    with pytest.raises(ValueError, match=r"none of the model's 4 parameters requires a gradient"):
        LossSurface(net().requires_grad_(False), "cross_entropy", (X, Y))


def test_a_partly_frozen_model_is_measured_in_what_is_trainable():
    model = net()
    model[0].requires_grad_(False)
    surface = LossSurface(model, "cross_entropy", (X, Y))
    assert surface.names == ("2.weight", "2.bias")
    features = torch.relu(model[0](X)).detach()
    head = LossSurface(nn.Sequential(model[2]), "cross_entropy", (features, Y))
    torch.testing.assert_close(surface.gradient(), head.gradient())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_named(bad):
    model = net()
    with torch.no_grad():
        model[2].bias[1] = bad
    with pytest.raises(ValueError, match=r"`2\.bias` of the model holds 1 of 3 values"):
        LossSurface(model, "cross_entropy", (X, Y))


def test_weights_that_become_nan_later_are_named_then():
    model = net()
    surface = LossSurface(model, "cross_entropy", (X, Y))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"`0\.weight` of the model holds 1 of 20 values"):
        surface.value()


def test_a_lazy_module_must_be_called_first():
    with pytest.raises(ValueError, match="not initialised yet"):
        LossSurface(nn.Sequential(nn.LazyLinear(3)), "cross_entropy", (X, Y))


def test_complex_parameters_are_refused():
    model = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="is complex"):
        LossSurface(model, "cross_entropy", (X, Y))


def test_a_scripted_module_is_refused():
    with pytest.raises(TypeError, match="TorchScript"):
        LossSurface(torch.jit.script(net()), "cross_entropy", (X, Y))
    with pytest.raises(TypeError, match="`0` of the model is a TorchScript"):
        LossSurface(nn.Sequential(torch.jit.script(net())), "cross_entropy", (X, Y))


def test_a_model_that_does_not_fit_the_data():
    with pytest.raises(ValueError, match=r"the model fails on inputs of shape \(4, 7\)"):
        LossSurface(net(), "cross_entropy", (torch.randn(12, 7), Y))


def test_a_model_cut_off_from_its_parameters():
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).detach()

    with pytest.raises(ValueError, match=r"does not depend on any trainable parameter"):
        LossSurface(Cut(), "cross_entropy", (X, Y))


def test_a_model_that_is_random_in_eval_mode():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x))

    with pytest.raises(ValueError, match="random in eval mode"):
        LossSurface(Noisy(), "cross_entropy", (X, Y))


def test_dropout_is_off():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).train()
    values = {LossSurface(model, "cross_entropy", (X, Y)).value() for _ in range(3)}
    assert len(values) == 1
    assert model.training


def test_batch_norm_uses_its_stored_statistics():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).train()
    surface = LossSurface(model, "cross_entropy", (X, Y), chunk=5)
    with torch.no_grad():
        expected = F.cross_entropy(model.eval()(X), Y).item()
    assert surface.value() == pytest.approx(expected, rel=1e-6)


def test_batch_statistics_are_refused_as_samples_influence_each_other():
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3))
    with pytest.raises(ValueError, match="no mean over its samples"):
        LossSurface(model, "cross_entropy", (X, Y))


def test_an_unused_parameter_has_no_curvature():
    model = net()
    model.unused = nn.Parameter(torch.ones(2))
    used = LossSurface(net(), "cross_entropy", (X, Y))

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = net(), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    surface = LossSurface(Wrapper(), "cross_entropy", (X, Y))
    assert surface.size == used.size + 2
    gradient, product = surface.gradient(), surface.hvp(torch.ones(surface.size))
    assert surface.split(gradient)["unused"].tolist() == [0, 0]
    assert surface.split(product)["unused"].tolist() == [0, 0]
    assert product.norm() == pytest.approx(used.hvp(torch.ones(used.size)).norm().item())


def test_a_model_without_layers_is_measured_all_the_same():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x

    surface = LossSurface(Scale(), "mse", (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
    assert surface.hvp(torch.ones(1)).item() == pytest.approx(10.0)
    assert fg.measure(surface)["hessian_trace"].value == pytest.approx(10.0)


def test_sparse_embeddings_have_dense_derivatives():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    sparse = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    sparse.load_state_dict(dense.state_dict())
    ids = torch.arange(24).reshape(12, 2) % 7
    surfaces = [LossSurface(model, "cross_entropy", (ids, Y)) for model in (dense, sparse)]
    vector = torch.ones(surfaces[0].size).double()
    assert torch.equal(surfaces[1].gradient(), surfaces[0].gradient())
    torch.testing.assert_close(surfaces[1].hvp(vector), surfaces[0].hvp(vector))
    assert sparse[0].sparse


def test_a_sparse_gradient_inside_the_model_is_made_dense():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.arange(21.0).reshape(7, 3)), nn.Linear(3, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.embedding(ids, self.table, sparse=True))

    surface = LossSurface(Functional(), "cross_entropy", (torch.arange(12) % 7, Y))
    assert torch.isfinite(surface.gradient()).all()
    assert torch.isfinite(surface.hvp(torch.ones(surface.size))).all()


def test_a_gradient_that_is_nan_for_late_samples_only():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            return hidden / (1 + hidden.square().sum(1, keepdim=True).sqrt())

    inputs = X.repeat(50, 1)
    inputs[593] = 0.0
    surface = LossSurface(Norm(), "cross_entropy", (inputs, Y.repeat(50)))
    assert math.isfinite(surface.value())
    with pytest.raises(ValueError, match=r"the gradient by `linear\.weight` is not finite"):
        surface.gradient()
    with pytest.raises(
        ValueError, match=r"the second derivative by `linear\.weight` is not finite"
    ):
        surface.hvp(torch.ones(surface.size))


def test_the_loss_elsewhere_may_be_infinite_but_is_never_nan():
    def difference(output: Tensor, _: Tensor) -> Tensor:
        return (output.exp() - (output + 1).exp()).mean()

    surface = LossSurface(net(), difference, (X, Y))
    far = torch.full((surface.size,), 1e4)
    assert surface.value(far) == math.inf
    assert surface.value_and_gradient(far)[0] == math.inf


class Rounding(nn.Module):
    """Rounds differently for one sample, in single precision: as kernels do in deep nets."""

    def __init__(self, *, also_in_double: bool) -> None:
        super().__init__()
        self.net, self.also_in_double = net(), also_in_double

    def forward(self, x: Tensor) -> Tensor:
        rough = len(x) == 1 and (self.also_in_double or x.dtype is torch.float32)
        return self.net(x) * (1.003 if rough else 1.0)


def test_single_precision_nets_are_not_refused_for_their_rounding():
    surface = LossSurface(Rounding(also_in_double=False), "cross_entropy", (X, Y))
    assert surface.dtype is torch.float32
    assert surface.value() == pytest.approx(F.cross_entropy(net()(X), Y).item(), rel=1e-5)
    with pytest.raises(ValueError, match="no mean over its samples"):
        LossSurface(Rounding(also_in_double=True), "cross_entropy", (X, Y))


# -- points where something vanishes ----------------------------------------------------------


def zeroed(layer: int) -> nn.Sequential:
    model = net()
    nn.init.zeros_(model[layer].weight)
    nn.init.zeros_(model[layer].bias)
    return model


@pytest.mark.parametrize(
    "model",
    [zeroed(0), zeroed(2), nn.Sequential(nn.Linear(4, 3, bias=False))],
    ids=["dead hidden layer", "constant outputs", "one layer"],
)
def test_degenerate_networks_give_finite_numbers(model):
    report = fg.measure(LossSurface(model, "cross_entropy", (X, Y)))
    for name, estimate in report.items():
        if name == "basis_path_ratio" and not model[-1].weight.any():
            assert "no basis path has a value other than zero" in estimate.notes[0]
        elif model[-1].weight.any() or "normalized_sharpness" not in name:
            assert math.isfinite(estimate.value)
        else:  # Outputs of zero have no normalized loss, and that is said.
            assert "the logits of every sample are constant" in estimate.notes[0]


def test_a_linear_loss_has_no_curvature():
    surface = LossSurface(nn.Linear(4, 1), lambda output, _: output.mean(), (X, Y))
    assert surface.hvp(torch.ones(5)).tolist() == [0] * 5
    report = fg.measure(surface)
    assert report["hessian_trace"].value == 0
    assert report["hessian_max_eigenvalue"].value == 0
    assert report["hessian_max_eigenvalue"].converged


def test_a_point_that_is_no_minimum_is_marked():
    report = fg.measure(LossSurface(net(), "cross_entropy", (X, Y)), measures=["hessian_trace"])
    assert any(
        note.startswith("not at a minimum: changing every weight") for note in report.facts.notes
    )
    saddle = LossSurface(nn.Linear(1, 1, bias=False), _downward, (torch.ones(3, 1), torch.ones(3)))
    estimate = fg.measure(saddle)["hessian_max_eigenvalue"]
    assert estimate.value == pytest.approx(-2.0)
    assert any(note.startswith("not a minimum") for note in estimate.notes)


def _downward(output: Tensor, _: Tensor) -> Tensor:
    return -output.square().mean()


# -- the data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [[], (X[:0], Y[:0]), DataLoader([])])
def test_empty_data(empty):
    with pytest.raises(ValueError, match=r"(`data` is empty|holds no samples)"):
        LossSurface(net(), "cross_entropy", empty)


def test_one_sample():
    surface = LossSurface(net(), "cross_entropy", (X[:1], Y[:1]))
    assert surface.value() == pytest.approx(F.cross_entropy(net()(X[:1]), Y[:1]).item())
    assert fg.measure(surface)["hessian_trace"].value > 0
    assert surface.notes == ["too few samples to check that the loss is a mean over them"]


def test_one_label_is_fine_but_one_output_class_is_not():
    LossSurface(net(), "cross_entropy", (X, torch.zeros(12).long())).gradient()
    with pytest.raises(ValueError, match="over one class is the constant 0"):
        LossSurface(net(outputs=1), "cross_entropy", (X, torch.zeros(12).long()))


@pytest.mark.parametrize("label", [3, -1])
def test_labels_out_of_range_are_told_with_the_range(label):
    labels = Y.clone()
    labels[1] = label
    with pytest.raises(ValueError, match=r"but the model has 3 outputs, so labels must lie in 0"):
        LossSurface(net(), "cross_entropy", (X, labels))


def test_a_label_out_of_range_deep_in_the_data_is_told_too():
    labels = Y.repeat(100)
    labels[1100] = 7
    with pytest.raises(ValueError, match=r"labels run from \d to 7"):
        LossSurface(net(), "cross_entropy", (X.repeat(100, 1), labels))


def test_inputs_that_are_not_finite_are_located():
    bad = X.clone()
    bad[3, 1] = math.nan
    with pytest.raises(ValueError, match=r"the inputs of `data` hold 1 values that are nan"):
        LossSurface(net(), "cross_entropy", (bad, Y))
    with pytest.raises(ValueError, match=r"the inputs of batch 1 of `data` hold 1 values"):
        LossSurface(net(), "cross_entropy", [(X[:2], Y[:2]), (bad[2:], Y[2:])])


def test_a_loss_that_is_not_finite():
    def overflowing(output: Tensor, _: Tensor) -> Tensor:
        return (output * math.inf).mean()

    with pytest.raises(
        ValueError, match=r"is -?(inf|nan), or its gradient is not finite; the training diverged"
    ):
        LossSurface(net(), overflowing, (X, Y))


def test_a_generator_can_be_read_only_once():
    with pytest.raises(TypeError, match=r"can be read only once.*pass `list\(data\)`"):
        LossSurface(net(), "cross_entropy", ((X, Y) for _ in range(2)))


@pytest.mark.parametrize("data", [None, 3, "mnist"])
def test_data_of_an_unknown_kind(data):
    with pytest.raises(TypeError, match="it must be a DataLoader, a list"):
        LossSurface(net(), "cross_entropy", data)


def test_a_batch_of_three():
    with pytest.raises(ValueError, match="of 3 items, but a batch is a pair"):
        LossSurface(net(), "cross_entropy", [(X, X, Y)])


class Augmented(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(4), Y[index]


class Shuffled(IterableDataset):
    """Comes in another order every time, without a sampler that says so."""

    def __iter__(self):
        return iter([(X[i], Y[i]) for i in torch.randperm(12).tolist()])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_random_augmentation_is_refused(shuffle, workers):
    loader = DataLoader(Augmented(), batch_size=4, shuffle=shuffle, num_workers=workers)
    with pytest.raises(ValueError, match=r"other samples on a second pass \(12 of 12 differ\)"):
        LossSurface(net(), "cross_entropy", loader)


def test_sampling_with_replacement_is_refused():
    sampler = torch.utils.data.RandomSampler(range(12), replacement=True)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)
    with pytest.raises(ValueError, match="other samples on a second pass"):
        LossSurface(net(), "cross_entropy", loader)


def test_data_in_random_order_are_held():
    surface = LossSurface(net(), "cross_entropy", DataLoader(Shuffled(), batch_size=5))
    assert surface.notes == ["the data come in random order; the first pass is held in memory"]
    whole = LossSurface(net(), "cross_entropy", (X, Y))
    assert surface.value() == pytest.approx(whole.value(), rel=1e-6)


def test_data_in_random_order_that_cannot_be_held_are_refused():
    class Large(IterableDataset):
        def __iter__(self):
            return iter([(torch.full((50_000,), float(i)), 0) for i in torch.randperm(9).tolist()])

    with pytest.raises(ValueError, match="in another order on every pass and is too large"):
        LossSurface(nn.Linear(50_000, 3), "cross_entropy", DataLoader(Large()), memory="1MiB")


def test_the_check_can_be_left_out():
    LossSurface(net(), "cross_entropy", DataLoader(Augmented()), check_data=False)


def test_an_impossible_budget_is_refused_with_what_to_do():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 400_000), nn.ReLU(), nn.Linear(400_000, 3))
    case = build("conv and max-pool")
    with pytest.raises(MemoryError, match=r"one sample twice needs about .* raise `memory=`"):
        LossSurface(model, "cross_entropy", (case.inputs, case.targets), memory="1MiB").value()
