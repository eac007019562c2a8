"""Rules of scale inference, one small network each, with sizes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import prune

import flatgauge as fg

Op = Callable[..., Tensor]


class Between(nn.Module):
    """Three inputs, four hidden units, an op on them, two outputs."""

    def __init__(self, op: Op, width: int, **parts: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(width, 2)
        self._op = op
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._op(self, torch.relu(self.first(x))))


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _assigned(m: nn.Module, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, [0, 2]] = m.p
    return h


def _masked(m: nn.Module, h: Tensor) -> Tensor:
    h = h.clone()
    h[h > m.p] = 0
    return h


def _hollow(m: nn.Module, h: Tensor) -> Tensor:
    weight = m.w.clone()
    weight.diagonal().zero_()
    return h @ weight


#: An op on four hidden units, how wide its result is, how many scales there are in all.
OPS: dict[str, tuple[Op, int, int, Callable[[], dict[str, Any]]]] = {
    # Zero and infinity have every scale, whatever they meet.
    "add zero": (lambda m, h: h + 0, 4, 4, dict),
    "add zeros": (lambda m, h: h + m.c, 4, 2, lambda: {"c": torch.tensor([0.0, 1, 0, 1])}),
    "compare with zero": (lambda m, h: h * (h > 0).to(h.dtype), 4, 4, dict),
    "compare with one": (lambda m, h: h * (h > 1).to(h.dtype), 4, 0, dict),
    "clamp at zero": (lambda m, h: (h - m.p).clamp(min=0), 4, 4, lambda: {"p": p(4)}),
    "clamp of less shape": (
        lambda m, h: h[:, :1].clamp(min=m.p).sum(1, keepdim=True) * h, 4, 1 + 3, lambda: {"p": p(4)}
    ),
    "mask with zero": (lambda m, h: h.masked_fill(h < m.p, 0.0), 4, 4, lambda: {"p": p(4)}),
    "mask with infinity": (
        lambda m, h: torch.minimum(h.masked_fill(h < m.p, torch.inf), h), 4, 4,
        lambda: {"p": p(4)},
    ),
    "mask with three": (lambda m, h: h.masked_fill(h == 0, 3.0), 4, 0, dict),
    "mask of more shape": (
        lambda m, h: h * m.p.masked_fill(h > 0, 0.0).sum(1, keepdim=True), 4, 4 + 1,
        lambda: {"p": p(4)},
    ),
    "where with zeros": (lambda m, h: torch.where(h > 0, h, torch.zeros_like(h)), 4, 4, dict),
    "where with twos": (lambda m, h: torch.where(h > 0, h, torch.full_like(h, 2.0)), 4, 0, dict),
    "where of more shape": (
        lambda m, h: h * torch.where(h > 0, m.p, 0.0).sum(1, keepdim=True), 4, 4 + 1,
        lambda: {"p": p(4)},
    ),
    "maximum with zero": (lambda m, h: torch.max(h - m.p, m.c), 4, 4,
                          lambda: {"p": p(4), "c": torch.zeros(())}),
    "zero bias": (lambda m, h: F.linear(h, m.w, m.c), 4, 8,
                  lambda: {"w": p(4, 4), "c": torch.zeros(4)}),
    "zeros in addmm": (lambda m, h: torch.addmm(m.c, h, m.w), 4, 8,
                       lambda: {"w": p(4, 4), "c": torch.zeros(1, 4)}),
    # Comparisons with a tolerance, casts, sorts.
    "isclose": (lambda m, h: h * torch.isclose(h, m.p, atol=0.5), 4, 0, lambda: {"p": p(4)}),
    "copy into whole numbers": (
        lambda m, h: h * torch.zeros(4, dtype=torch.long).copy_(3 * m.p), 4, 4, lambda: {"p": p(4)}
    ),
    "cast to truth": (lambda m, h: h * h.bool(), 4, 4, dict),
    "sort of the first axis": (lambda m, h: torch.msort(h.t()).t(), 4, 1, dict),
    "sort of a weight": (lambda m, h: h @ torch.msort(m.w), 4, 1 + 4, lambda: {"w": p(4, 4)}),
    "take along all": (
        lambda m, h: h * m.p.take_along_dim(h[0].repeat(2).argsort()[:4]), 4, 1 + 1,
        lambda: {"p": p(8)},
    ),
    # Sums of products.
    "inner of three axes": (lambda m, h: torch.inner(h, m.w).flatten(1), 6, 4 + 6,
                            lambda: {"w": p(2, 3, 4)}),
    "einsum with dots": (lambda m, h: torch.einsum("...i,ji->...j", h, m.w), 4, 8,
                         lambda: {"w": p(4, 4)}),
    "einsum without arrow": (lambda m, h: torch.einsum("bi,ij", h, m.w), 4, 8,
                             lambda: {"w": p(4, 4)}),
    "tensordot": (lambda m, h: torch.tensordot(h, m.w, ([1], [1])), 4, 8, lambda: {"w": p(4, 4)}),
    "outer": (lambda m, h: h @ torch.outer(m.p, m.q), 4, 4 + 4 + 1,
              lambda: {"p": p(4), "q": p(4)}),
    "gated halves": (lambda m, h: F.glu(m.g(h)), 2, 4 + 2, lambda: {"g": nn.Linear(4, 4)}),
    "numbers": (lambda m, h: h * (m.p + m.q) * (h.sum() > 0), 4, 1 + 1,
                lambda: {"p": p(), "q": p()}),
    "lerp": (lambda m, h: torch.lerp(h, m.p, 0.3), 4, 4, lambda: {"p": p(4)}),
    "matrix norm": (lambda m, h: h @ (m.w / torch.linalg.norm(m.w)), 4, 1 + 1,
                    lambda: {"w": p(4, 4)}),
    # Moves.
    "stacked vectors": (lambda m, h: h @ torch.vstack([m.p, m.q, m.p, m.q]), 4, 2 + 4,
                        lambda: {"p": p(4), "q": p(4)}),
    "diagonal matrix": (lambda m, h: h @ torch.diag(m.p), 4, 8, lambda: {"p": p(4)}),
    "hollow matrix": (_hollow, 4, 8, lambda: {"w": p(4, 4)}),
    "put at fixed places": (_assigned, 4, 2 + 2 + 2, lambda: {"p": p(2)}),
    "put zeros": (_masked, 4, 4, lambda: {"p": p(4)}),
    "rows by a mask": (lambda m, h: h + h[h.sum(1) > 0].sum(0), 4, 1, dict),
    "columns by a fixed mask": (lambda m, h: h[:, m.c], 3, 4,
                                lambda: {"c": torch.tensor([True, False, True, True])}),
    # Computed weights.
    "pruned": (lambda m, h: m.g(h), 4, 8,
               lambda: {"g": prune.identity(nn.Linear(4, 4), "weight")}),
    "bags": (lambda m, h: h * m.e(torch.tensor([[0, 1]])), 4, 8,
             lambda: {"e": nn.EmbeddingBag(5, 4, mode="sum")}),
}  # fmt: skip


def moves_nothing(model: nn.Module, *inputs: Tensor, dim: int) -> None:
    """Check the size of the gauge, and that random members change no output: at random weights,
    in addition to the check that `find_gauge` makes itself."""
    gauge = fg.find_gauge(model, inputs)
    model.eval()
    for seed in range(4):
        generator = Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        twin = gauge.rescale(model, gauge.sample(generator=generator))
        shape = (7, *inputs[0].shape[1:])
        x = torch.randn(shape, generator=generator).double()
        torch.testing.assert_close(twin(x), model(x), rtol=1e-12, atol=1e-12)
    assert gauge.dim == dim


@pytest.mark.parametrize("name", OPS)
def test_op(name):
    op, width, dim, parts = OPS[name]
    torch.manual_seed(0)
    model = Between(op, width, **parts()).double()
    moves_nothing(model, torch.randn(3, 3).double(), dim=dim)


class Net(nn.Module):
    """Parts by name, and what to do with them."""

    def __init__(self, forward: Op, **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def test_a_learned_image_is_no_kernel():
    model = Net(
        lambda m, x: m.last(torch.relu(m.first(m.image))).flatten(1) * x,
        image=p(1, 4, 2, 2),
        first=nn.Conv2d(4, 6, 2, groups=2),
        last=nn.Conv2d(6, 1, 1),
    ).double()
    moves_nothing(model, torch.randn(3, 1).double(), dim=4 + 6)


def test_keys_and_values_shared_by_all_samples():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        query = m.query(x)[:, None, None]  # One head meets two.
        return m.last(F.scaled_dot_product_attention(query, m.keys, m.values).flatten(1))

    model = Net(
        forward, query=nn.Linear(3, 4), keys=p(2, 5, 4), values=p(2, 5, 4), last=nn.Linear(8, 2)
    ).double()
    moves_nothing(model, torch.randn(3, 3).double(), dim=4 + 8)


def test_branches_on_data_pin_what_they_read():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(m.first(x))
        return m.last(torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h * 3, (hidden,)))

    gauge = fg.find_gauge(
        Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2)), torch.randn(3, 3)
    )
    assert gauge.dim == 0
    assert [pin.op for pin in gauge.pinned if not pin.known] == ["cond"]


def test_one_parameter_that_holds_the_memory_of_others():
    flat = torch.randn(40)
    model = Net(
        lambda m, x: F.linear(torch.relu(F.linear(torch.relu(x * m.all[:3]), m.one)), m.two),
        all=nn.Parameter(flat),
        one=nn.Parameter(flat[4:16].view(4, 3)),
        two=nn.Parameter(flat[20:28].view(2, 4)),
    )
    gauge = fg.find_gauge(model, torch.randn(3, 3))
    assert gauge.dim == 0
    assert {pin.sites for pin in gauge.pinned} == {("all",), ("one",), ("two",)}


def test_a_model_that_counts_its_calls_is_left_as_found():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.calls.add_(1)
        return m.last(torch.relu(m.first(x)))

    model = Net(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2))
    model.register_buffer("calls", torch.zeros(()))
    assert fg.find_gauge(model, torch.randn(3, 3)).dim == 4
    assert model.calls == 0


def test_an_example_may_come_out_of_another_network():
    example = nn.Linear(3, 3)(torch.randn(3, 3))
    assert fg.find_gauge(nn.Linear(3, 2), example).dim == 0


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2, device="meta"), lambda: nn.LazyLinear(2)])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_without_values(make):
    with pytest.raises(ValueError, match="`weight` has no values yet"):
        fg.find_gauge(make(), torch.randn(3, 3))


def test_weights_read_through_their_sign_have_a_scale_each():
    model = Net(lambda m, x: x @ torch.sign(m.weight).t(), weight=nn.Parameter(torch.randn(4, 3)))
    gauge = fg.find_gauge(model, torch.randn(5, 3))
    assert gauge.dim == 12
    factors = torch.arange(1.0, 13.0)
    twin = gauge.rescale(model, gauge.move(factors))
    torch.testing.assert_close(twin.weight, model.weight * factors.view(4, 3))
    x = torch.randn(5, 3)
    assert torch.equal(twin(x), model(x))


def test_a_straight_through_sign_is_pinned_with_the_reason():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return x @ (m.weight + (torch.sign(m.weight) - m.weight).detach()).t()

    gauge = fg.find_gauge(Net(forward, weight=nn.Parameter(torch.randn(4, 3))), torch.randn(5, 3))
    assert gauge.dim == 0
    assert [pin.op for pin in gauge.pinned] == ["sub"]


def test_products_of_activations_with_too_many_scales_are_pinned():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(m.first(x)).unflatten(1, (-1, 2))
        square = hidden @ hidden.transpose(1, 2)
        root = 3 * torch.eye(square.shape[-1]) - square  # Newton-Schulz: each entry for itself.
        return m.last((root @ root).flatten(1))

    def found(channels: int) -> fg.symmetry.GaugeGroup:
        first, last = nn.Linear(3, 2 * channels), nn.Linear(channels**2, 2)
        return fg.find_gauge(Net(forward, first=first, last=last), torch.randn(3, 3))

    assert not any("too many" in pin.reason for pin in found(4).pinned)
    # 64³ entries of several terms each, in this one product.
    reasons = [pin.reason for pin in found(64).pinned]
    assert any(reason.startswith("too many scales (") for reason in reasons)


def test_equations_of_all_ops_together_have_a_limit(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    assert fg.find_gauge(net, torch.randn(3, 3)).dim == 40
    monkeypatch.setattr("flatgauge.symmetry.inference.equations.MOST", 100)
    gauge = fg.find_gauge(net, torch.randn(3, 3))
    assert gauge.dim < 40
    assert any("too many scales" in pin.reason for pin in gauge.pinned)
