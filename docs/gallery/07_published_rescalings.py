"""Published rescalings, repeated
==============================

Rescale networks as two papers did, measure again, and put our numbers beside theirs.

1. Rangamani et al. 2019 ("A Scale Invariant Flatness Measure for Deep Network Minima", Tables 2
   and 3): two networks on 500 random samples, layers multiplied by λ₁, λ₂, … with product one
   (biases by the cumulative products). The relative difference of the Riemannian spectral norm
   before and after should be zero; the papers' are in single precision, ours in both.
2. Petzka et al. 2019 ("A Reparameterization-Invariant Flatness Measure for Deep Neural
   Networks", Figure 2): trained networks, each rescaled by random factors between 5 and 25. The
   order of the networks by κ_τ and ρ does not change, that by the Hessian's trace is lost.

Half a minute.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from operator import mul

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import flatgauge as fg
from flatgauge.measures import riemannian_max_eigenvalue

#: Network, λ of the layers, and the published relative difference.
PUBLISHED = [
    ("F₁", (5, 4, 1 / 20), 1.7e-7),
    ("F₁", (100, 30, 1 / 3000), 7.17e-7),
    ("C₁", (5, 4, 3, 2, 1 / 120), 1.28e-7),
    ("C₁", (50, 24, 30, 1 / 6, 1 / 6000), 5.1e-6),
]


def network(name: str) -> nn.Sequential:
    """The networks of Table 1."""
    if name == "F₁":
        sizes = [(784, 300), (300, 100), (100, 10)]
        start: list[nn.Module] = []
    else:
        sizes = [(320, 120), (120, 84), (84, 10)]
        start = [nn.Unflatten(1, (1, 28, 28))]
        for inner, outer in ((1, 10), (10, 20)):
            start += [nn.Conv2d(inner, outer, 5), nn.MaxPool2d(2), nn.ReLU()]
        start.append(nn.Flatten())
    linear = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return nn.Sequential(*start, *linear[:-1])


def spectral_norm(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The largest eigenvalue of the Riemannian Hessian."""
    surface = fg.LossSurface(model, "cross_entropy", data)
    return riemannian_max_eigenvalue(surface, generator=torch.Generator().manual_seed(0)).value


@cache
def original(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, Tensor], float]:
    """A network as it is made, its random samples, and its spectral norm."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network(name).to(dtype)
        data = torch.randn(500, 784, dtype=dtype), torch.randint(0, 10, (500,))
    return model, data, spectral_norm(model, data)


def relative_difference(name: str, factors: tuple[float, ...], dtype: torch.dtype) -> float:
    """How much the spectral norm moves when the layers are multiplied by factors."""
    model, data, before = original(name, dtype)
    gauge = fg.find_gauge(model, data[0][:2]).layerwise()
    # A coordinate is the scale of a hidden layer's output: the product of all λ up to there.
    twin = gauge.rescale(model, gauge.move(list(accumulate(factors, mul))[:-1]))
    return abs(spectral_norm(twin, data) - before) / before


def tables_2_and_3() -> list[tuple[str, str, float, float, float]]:
    """Network, λ, published, ours in float32, ours in float64."""
    rows = []
    for name, factors, published in PUBLISHED:
        single, double = (
            relative_difference(name, factors, dtype) for dtype in (torch.float32, torch.float64)
        )
        label = ", ".join(f"{f:g}" if f >= 1 else f"1/{1 / f:.0f}" for f in factors)
        rows.append((name, label, published, single, double))
    return rows


def trained(seed: int, batch: int) -> nn.Sequential:
    """A small LeNet on the digits, trained with one batch size until its loss is small."""
    images, labels = fg.load_dataset("digits", limit=500)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-4 * batch**0.5)
        for _ in range(8):
            for part in torch.randperm(len(images)).split(batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
                optimizer.step()
    return model


def figure_2(networks: int = 6) -> dict[str, float]:
    """Rank correlation of every measure with itself, before and after the rescaling."""
    names = ["hessian_trace", "kappa_trace_sum", "rho_sum"]
    data = fg.load_dataset("digits", limit=300)
    values: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    generator = torch.Generator().manual_seed(0)
    for seed in range(networks):
        model = trained(seed, batch=(16, 64, 256)[seed % 3])
        gauge = fg.find_gauge(model, data[0][:2]).layerwise()
        factors = 5 + 20 * torch.rand(gauge.dim, generator=generator, dtype=torch.float64)
        twin = gauge.rescale(model, gauge.move(factors.cumprod(0)))
        before, after = (
            fg.measure(fg.LossSurface(m, "cross_entropy", data), measures=names)
            for m in (model, twin)
        )
        for name in names:
            values[name].append((before[name].value, after[name].value))
    return {name: float(spearmanr(pairs).statistic) for name, pairs in values.items()}


# %%
# What is left of Tables 2 and 3 is rounding.
rows = tables_2_and_3()
print(f"{'':4}{'λ':24}{'published':>12}{'float32':>12}{'float64':>12}")
for name, label, *numbers in rows:
    print(f"{name:4}{label:24}" + "".join(f"{number:12.1e}" for number in numbers))
assert all(single < published and double < 1e-12 for *_, published, single, double in rows)

# %%
# Figure 2: the rank correlation of a measure with itself, before and after factors in [5, 25].
found = figure_2()
for name, correlation in found.items():
    print(f"{name:20}{correlation:6.2f}")
assert found["kappa_trace_sum"] > 0.999
assert found["rho_sum"] > 0.999
assert found["hessian_trace"] < 0.8
