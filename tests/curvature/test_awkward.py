"""Networks that are easily misread: what is called exact must be exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from reference import dense_blocks, form, relative, rows_and_columns
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues

N = 6


class Net(nn.Module):
    """A model made of a function and its modules or parameters."""

    def __init__(self, function: Callable, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self._function(self, *inputs, **named)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def L(inner: int, outer: int, **options) -> nn.Linear:
    return nn.Linear(inner, outer, **options)


def head(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return s.o(F.relu(x))


def focal(output, target):
    logs = F.log_softmax(output, 1).gather(1, target[:, None])[:, 0]
    return -((1 - logs.exp()) ** 2 * logs).mean()


def time_first(output, target):
    return F.cross_entropy(output.transpose(0, 1).flatten(0, 1), target.flatten())


def sorted_and_back(s, x):
    order = x[:, 0].argsort()
    return s.o(F.relu(s.a(x[order]))[order.argsort()] * x[:, :1])


def assigned(s, x):
    z = x.new_zeros(x.shape[0], 5)
    z[:, 1:4] = s.a(x)
    return head(s, z)


def without_gradient(s, x):
    h = s.l(x)
    with torch.no_grad():
        g = 2 * h.abs()
    return h + g


def batch_norm(weight: Callable) -> Callable:
    def forward(s, x):
        mean, variance = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([0.7, 1.1, 0.9])
        z = F.batch_norm(s.a(x), mean.to(x), variance.to(x), weight(s), s.b)
        return s.o(F.relu(z).mean(2))

    return forward


@dataclass
class Awkward:
    """A network, the shape of its inputs, and what must (not) be exact."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3,)
    loss: object = "cross_entropy"
    target: tuple[int, ...] | None = None
    exact: tuple[str, ...] = ()
    curved: tuple[str, ...] = ()


AWKWARD = {
    "a bias through an op": Awkward(
        lambda: Net(lambda s, x: head(s, F.linear(x, s.W, 2 * s.b)), W=P(4, 3), b=P(4), o=L(4, 3)),
        exact=("W",),
    ),
    "a bias of one number": Awkward(
        lambda: Net(lambda s, x: head(s, torch.addmm(s.b, x, s.W)), W=P(3, 4), b=P(1), o=L(4, 3)),
        exact=("W",),
    ),
    "a bias of a tied weight": Awkward(
        lambda: Net(
            lambda s, x: head(s, F.linear(x, s.W, s.b)) + F.linear(x, s.W[:3]),
            W=P(4, 3),
            b=P(4),
            o=L(4, 3),
        ),
        curved=("W",),
        exact=("b",),
    ),
    "a batch-norm's scale through an op": Awkward(
        lambda: Net(batch_norm(lambda s: 1 + s.g), a=nn.Conv1d(2, 3, 2), g=P(3), b=P(3), o=L(3, 3)),
        (2, 4),
    ),
    "batch-norm of vectors": Awkward(
        lambda: nn.Sequential(L(3, 4), nn.BatchNorm1d(4), nn.ReLU(), L(4, 3)),
        exact=("0.weight", "1.weight", "1.bias", "3.weight"),
    ),
    "a learned attention mask": Awkward(
        lambda: Net(
            lambda s, x: s.o(F.scaled_dot_product_attention(x, x, x, attn_mask=s.m).mean(1)),
            m=P(4, 4),
            o=L(3, 3),
        ),
        (4, 3),
        curved=("m",),
        exact=("o.weight",),
    ),
    "complex numbers": Awkward(
        lambda: Net(lambda s, x: s.o(torch.fft.rfft(s.a(x)).abs()), a=L(3, 4), o=L(3, 3)),
        curved=("a.weight", "a.bias"),
    ),
    "samples between merged axes": Awkward(
        lambda: Net(
            lambda s, x: s.o(
                F.relu(s.l(x.permute(1, 0, 2, 3).reshape(-1, 3)))
                .reshape(2, -1, 2, 4)
                .permute(1, 0, 2, 3)
                .mean((1, 2))
            ),
            l=L(3, 4),
            o=L(4, 3),
        ),
        (2, 2, 3),
        curved=("l.weight",),
    ),
    "samples behind a merged axis": Awkward(
        lambda: Net(
            lambda s, x: s.o(
                F.relu(s.l(x.transpose(0, 1).reshape(-1, 3))).reshape(2, -1, 4).mean(0)
            ),
            l=L(3, 4),
            o=L(4, 3),
        ),
        (2, 3),
        exact=("l.weight", "l.bias"),
    ),
    "samples sorted and back": Awkward(
        lambda: Net(sorted_and_back, a=L(3, 4), o=L(4, 3)),
        loss=focal,
        curved=("a.weight", "a.bias"),
    ),
    "samples flipped and back": Awkward(
        lambda: Net(lambda s, x: head(s, s.a(x.flip(0)).flip(0)), a=L(3, 4), o=L(4, 3)),
        curved=("a.weight",),
        exact=("o.weight",),
    ),
    "log-softmax over positions": Awkward(
        lambda: Net(lambda s, x: F.log_softmax(s.l(x).transpose(1, 2), dim=2), l=L(3, 3)),
        (4, 3),
        loss=F.nll_loss,
        target=(4,),
    ),
    "time in front": Awkward(
        lambda: Net(lambda s, x: s.l(x.transpose(0, 1)), l=L(3, 3)),
        (N, 3),
        loss=time_first,
        target=(N,),
        curved=("l.weight",),
    ),
    "a permuted matrix": Awkward(
        lambda: Net(lambda s, x: head(s, x @ s.W.permute(1, -2)), W=P(3, 3), o=L(3, 3)),
        exact=("W",),
    ),
    "a transposed matrix, read twice": Awkward(
        lambda: Net(lambda s, x: (lambda M: F.relu(x @ M) @ M)(s.W.transpose(0, 1)), W=P(3, 3)),
        curved=("W",),
    ),
    "one output without an axis": Awkward(
        lambda: Net(lambda s, x: s.o(F.relu(s.a(x))).squeeze(-1), a=L(3, 4), o=L(4, 1)),
        loss="mse",
        target=(),
        exact=("a.weight", "o.weight"),
    ),
    "a slice assigned": Awkward(
        lambda: Net(assigned, a=L(3, 3), o=L(5, 3)), exact=("a.weight", "o.weight")
    ),
    "a layer that is only compared": Awkward(
        lambda: Net(
            lambda s, x: torch.where(s.g(x)[:, :1] > 0, s.a(x), s.b(x)),
            g=L(3, 2),
            a=L(3, 3),
            b=L(3, 3),
        ),
        exact=("g.weight", "a.weight"),
    ),
    "a token that is repeated": Awkward(
        lambda: Net(
            lambda s, x: s.o(torch.cat([s.c.repeat(x.shape[0], 1, 1), x], 1)).sum(1),
            c=P(1, 1, 3),
            o=L(3, 3),
        ),
        (2, 3),
        exact=("o.weight", "o.bias"),
    ),
    "samples along space": Awkward(
        lambda: Net(lambda s, x: s.c(x.T[None])[0].T, c=nn.Conv1d(3, 3, 1)), curved=("c.weight",)
    ),
    "arguments without names": Awkward(
        lambda: Net(lambda s, *inputs: s.l(inputs[0]), l=L(3, 3)), exact=("l.weight",)
    ),
    "a table of vectors": Awkward(
        lambda: Net(
            lambda s, x: s.o(F.relu(s.t((x[:, :2] > 0).long()).flatten(1))),
            t=nn.Embedding(2, 3),
            o=L(6, 3),
        ),
        exact=("t.weight", "o.weight"),
    ),
    "normalised by hand": Awkward(
        lambda: Net(lambda s, x: s.o(s.n(s.a(x))), a=L(3, 4), n=nn.GroupNorm(2, 4), o=L(4, 3)),
        curved=("a.weight",),
        exact=("n.weight", "n.bias", "o.weight"),
    ),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_what_is_called_exact_is_exact(name):
    awkward = AWKWARD[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = awkward.build().double().eval()
        inputs = torch.randn(N, *awkward.shape).double()
        shape = (N,) if awkward.target is None else (N, *awkward.target)
        regression = awkward.loss == "mse"
        targets = torch.randn(shape).double() if regression else torch.randint(0, 3, shape)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    named = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
    loss = named.get(awkward.loss, awkward.loss)
    case = Case(model, awkward.loss, loss, inputs, targets)
    surface = case.surface()
    generator = Generator().manual_seed(0)
    blocks = block_curvature(surface, generator=generator)
    for parameter in awkward.exact:
        assert blocks[parameter].exact, blocks[parameter].reason
    for parameter in awkward.curved:
        assert not blocks[parameter].exact
        assert blocks[parameter].reason
    dense = dense_blocks(case)
    for parameter, weight in model.named_parameters():
        block, expected = blocks[parameter], dense[parameter]
        if not block.exact:
            continue
        torch.testing.assert_close(
            block.values["diagonal"].reshape(-1), expected.diagonal(), rtol=1e-9, atol=1e-12
        )
        if block.layer is not None:
            matrix = parameter == "W" and block.layer.out_axis == 1
            module = None if matrix else model.get_submodule(parameter.rpartition(".")[0])
            rows, columns = rows_and_columns(module, weight.detach())
            for part, masks in (("incoming", rows), ("outgoing", columns)):
                forms = [form(weight.detach(), mask, expected) for mask in masks]
                right = torch.tensor(forms, dtype=torch.float64)
                torch.testing.assert_close(block.values[part], right, rtol=1e-9, atol=1e-12)
            sizes = relative(weight.detach(), rows, expected, 1)
            assert block.values["relative"].item() == pytest.approx(sizes, rel=1e-9, abs=1e-12)
    layers = list(blocks.layers)
    tops = block_eigenvalues(surface, layers, tolerance=1e-8, max_matvecs=300, generator=generator)
    for layer, top in tops.items():
        if blocks[layer].exact:
            expected = torch.linalg.eigvalsh(dense[layer])[-1].item()
            assert top.value == pytest.approx(expected, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("forward", [without_gradient, lambda s, x: s.l(x) + s.l(x).detach()])
def test_a_gradient_of_part_of_the_function_is_refused(forward):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Net(forward, l=L(3, 3)).double()
    data = torch.ones(N, 3).double(), torch.arange(N) % 3
    surface = LossSurface(model, "cross_entropy", data)
    with pytest.raises(ValueError, match="is not the derivative of the loss"):
        block_curvature(surface, generator=Generator().manual_seed(0))


def test_an_input_changed_in_place():
    linear = L(3, 3).double()
    inputs, labels = torch.randn(N, 3).double(), torch.randint(0, 3, (N,))
    changing = Net(lambda s, x: s.l(x.add_(1)), l=linear)
    found = block_curvature(LossSurface(changing, "cross_entropy", (inputs, labels)), ("diagonal",))
    right = block_curvature(LossSurface(linear, "cross_entropy", (inputs + 1, labels)))
    torch.testing.assert_close(
        found["l.weight"].values["diagonal"], right["weight"].values["diagonal"]
    )


def test_a_diagonal_from_mixtures_is_not_called_exact():
    model = nn.Sequential(L(3, 4), nn.ReLU(), L(4, 100)).double()
    data = torch.randn(N, 3).double(), torch.randint(0, 100, (N,))
    surface = LossSurface(model, "cross_entropy", data)
    mixed = block_curvature(surface, ("diagonal",), generator=Generator().manual_seed(0))
    assert not any(block.exact for block in mixed.values())
    exact = block_curvature(surface, ("diagonal",), all_columns=True)
    assert all(block.exact for block in exact.values())


def test_negative_class_weights_have_signs():
    model = L(3, 3).double()
    inputs, labels = torch.randn(N, 3).double(), torch.tensor([0, 1, 2, 1, 0, 2])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, -0.3, 2.0]).double())
    surface = LossSurface(model, loss, (inputs, labels))
    blocks = block_curvature(surface)
    whole = surface.hvp(torch.eye(surface.size).double()).diagonal()
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in blocks.values()])
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def test_data_errors_do_not_depend_on_the_order_of_samples():
    model = L(3, 3).double()
    inputs, labels = torch.randn(N, 3).double(), torch.tensor([1, 0, 2, 0, 2, 1])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    errors = []
    for order in (list(range(N)), [3, 1, 5, 0, 2, 4]):
        surface = LossSurface(model, loss, (inputs[order], labels[order]))
        errors.append(block_curvature(surface, ("trace",))["weight"].data_stderr["trace"].item())
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)


def test_batches_that_run_other_operations_are_refused():
    model = Net(lambda s, x: (x @ s.W if x.shape[1] < 5 else x @ s.W.T).sum(1), W=P(3, 3)).double()
    batches = [(torch.randn(4, length, 3).double(), torch.randint(0, 3, (4,))) for length in (4, 6)]
    surface = LossSurface(model, "cross_entropy", batches)
    with pytest.raises(ValueError, match="other operations for some batches"):
        block_curvature(surface)


def test_ragged_batches():
    model = Net(lambda s, x: head(s, s.a(x)).mean(1), a=L(3, 4), o=L(4, 3)).double()
    batches = [(torch.randn(4, length, 3).double(), torch.randint(0, 3, (4,))) for length in (4, 6)]
    surface = LossSurface(model, "cross_entropy", batches)
    blocks = block_curvature(surface)
    assert all(block.exact for block in blocks.values())
    whole = surface.hvp(torch.eye(surface.size).double()).diagonal()
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in blocks.values()])
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def test_a_loss_without_second_derivative_is_estimated():
    model = nn.Sequential(L(3, 4), nn.ReLU(), L(4, 3)).double()
    data = torch.randn(N, 3).double(), torch.randint(0, 3, (N,))
    surface = LossSurface(model, nn.MultiMarginLoss(p=2), data)
    blocks = block_curvature(surface, ("trace",), generator=Generator().manual_seed(0))
    assert "cannot be differentiated twice" in blocks["0.weight"].reason


def test_a_model_that_keeps_tensors_is_left_without_the_exporters():
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = L(3, 3)

        def forward(self, x):
            if not hasattr(self, "ones"):
                self.ones = torch.ones(3).double()
            return self.linear(x) * self.ones

    model = Lazy().double()
    data = torch.randn(N, 3).double(), torch.randint(0, 3, (N,))
    assert fg.measure(LossSurface(model, "cross_entropy", data))["rho_max"].exact
    assert model(data[0]).isfinite().all()


@pytest.mark.parametrize("layers", [[], 3])
def test_layers_are_patterns(layers):
    surface = LossSurface(L(3, 3), "cross_entropy", (torch.randn(N, 3), torch.arange(N) % 3))
    with pytest.raises(ValueError, match="must be a glob pattern or a list of them"):
        fg.measure(surface, measures={"rho_max": {"layers": layers}})
    with pytest.raises(ValueError, match=r"matches no layer; the layers are weight"):
        fg.measure(surface, measures={"rho_max": {"layers": "conv*"}})
    with pytest.raises(ValueError, match="must be 'outgoing'"):
        fg.measure(surface, measures={"rho_max": {"side": "left"}})
