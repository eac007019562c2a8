"""What ranks run in tests: every function is one program of a group, or of one process alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flatgauge as fg
from flatgauge.analysis.measurement import run_measures
from flatgauge.analysis.request import resolve_measures

#: One of every way in which measures sum over samples.
MEASURES = {
    "hessian_max_eigenvalue": {},
    "hessian_trace": {},
    "adaptive_sharpness": {"starts": 1, "steps": 3},
    "expected_sharpness": {"pairs": 2, "sigma": 0.5},
    "psi_trace": {},
    "kappa_max": {},
    "rho_sum": {},
    "normalized_sharpness": {},
    "relative_flatness_normalized": {},
    "minimum_sharpness_nodewise": {},
    "fisher_rao_norm": {},
}


def network(bend: type[nn.Module] = nn.ReLU, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), bend(), nn.Linear(4, outputs)).double()


def samples(count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def numbers(report: Any) -> dict[str, Any]:
    return {
        name: [e.value, e.data_stderr or 0.0, e.stderr or 0.0, *e.layers.values()]
        for name, e in report.items()
    }


def derivatives(surface: fg.LossSurface) -> dict[str, Any]:
    vectors = torch.linspace(-1, 1, 2 * surface.size, dtype=torch.float64).reshape(-1, 2)
    return {
        "samples": [surface.samples],
        "value": [surface.value()],
        "elsewhere": [surface.value(1.5 * surface.point)],
        "gradient": surface.gradient().tolist(),
        "products": surface.hvp(vectors).flatten().tolist(),
    }


def measures(processes: Any) -> dict[str, Any]:
    """Everything that measures a surface, on eight samples: two, three and three of them."""
    options: Any = {"processes": processes, "weight_decay": 0.01}
    surface = fg.LossSurface(network(), "cross_entropy", samples(8), **options)
    found = numbers(fg.measure(surface, measures=MEASURES))
    plain = fg.LossSurface(network(), "cross_entropy", samples(8), processes=processes)
    certificate = fg.certify(plain, measures=["rho_max", "hessian_trace"], trials=1)
    found["certificate"] = [row.before for row in certificate.rows] + [float(certificate.passed)]
    line = fg.landscape(surface, space="filters", dims=1, points=3)
    found["landscape"] = [*line.loss.tolist(), *line.accuracy.tolist()]
    spectrum = fg.spectrum(surface, probes=2, steps=4, top=1)
    found["spectrum"] = [spectrum.top[0].value, *spectrum.density.nodes.flatten().tolist()]
    other = fg.LossSurface(network(nn.LeakyReLU), "cross_entropy", samples(8), **options)
    both = fg.compare({"a": surface, "b": other}, measures=["kappa_trace_sum"])
    found["compared"] = [report["kappa_trace_sum"].value for report in both.values()]
    return found


def smooth(processes: Any) -> dict[str, Any]:
    """A network that cannot be swept, under a loss of the user's own with labels to leave out."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=-100)

    x, y = samples(9)
    y[[1, 6, 7, 8]] = -100  # The last of three ranks has nothing that counts.
    surface = fg.LossSurface(network(nn.GELU), loss, (x, y), processes=processes, chunk=2)
    chosen = {"kappa_trace_sum": {"probes": 4}, "fisher_rao_norm": {}}
    return derivatives(surface) | numbers(fg.measure(surface, measures=chosen))


def given(kind: str, rank: int, size: int) -> Any:
    """Eleven samples, as ranks may have them."""
    x, y = samples(11)
    if kind == "same":
        return x, y
    if kind == "own":  # Ragged, and the last rank has none.
        edges = [0, 8, *([11] * (size - 1))]
        return x[edges[rank] : edges[rank + 1]], y[edges[rank] : edges[rank + 1]]
    data = TensorDataset(x, y)
    if kind == "loader":
        return DataLoader(data, batch_size=4, shuffle=True)
    sampler = DistributedSampler(data, shuffle=True, drop_last=kind == "dropping")
    return DataLoader(data, batch_size=2, sampler=sampler)


KINDS = ("same", "own", "loader", "sampler", "dropping")


def kinds_of_data() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        kind: derivatives(
            fg.LossSurface(
                network(),
                "cross_entropy",
                given(kind, rank, size),
                processes="all",
                sharded=False if kind == "loader" else None,
            )
        )
        for kind in KINDS
    }


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Failing(nn.Module):
    """Fails on one rank, when it is told to."""

    how = ""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank = network(), rank

    def forward(self, x: Tensor) -> Tensor:
        if Failing.how and dist.get_rank() == self.rank:
            if Failing.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no such number")
        return self.inner(x)


def different(kind: str, rank: int, data: Any) -> dict[str, str]:
    """What is said where ranks differ in a frozen parameter, or in a buffer."""
    model = nn.Sequential(network(), nn.BatchNorm1d(3).double())
    model[1].bias.requires_grad_(False)
    tensor = model[1].bias if kind == "frozen" else model[1].running_mean
    with torch.no_grad():
        tensor += rank
    surface = fg.LossSurface(model, "cross_entropy", data, processes="all")
    ones, wanted = torch.ones(surface.size).double(), {"expected_sharpness": {"pairs": 2}}
    return {
        kind: message(surface.value),
        f"{kind} product": message(lambda: surface.hvp(ones)),
        f"{kind} measure": message(lambda: fg.measure(surface, measures=wanted)),
    }


def failures() -> dict[str, str]:
    """What every rank is told where one of them goes wrong; afterwards all go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = samples(9)

    def made(model: nn.Module, data: Any, **options: Any) -> fg.LossSurface:
        return fg.LossSurface(model, "cross_entropy", data, processes="all", **options)

    said: dict[str, str] = {}
    said["repeated"] = message(lambda: made(network(), (x[rank : rank + 5], y[rank : rank + 5])))
    said["claimed"] = message(lambda: made(network(), (x[rank:], y[rank:]), sharded=False))
    short = TensorDataset(x[rank:], y[rank:])
    said["lengths"] = message(lambda: made(network(), short, sharded=False))
    said["kind"] = message(lambda: fg.LossSurface(network(), "mse", (x, y), processes=3))
    said["empty"] = message(lambda: made(network(), []))
    said["labels"] = message(lambda: made(network(), (x[rank::size], y[rank::size] + 2 * rank)))
    said["one argument"] = message(lambda: made(network(), (x, y), chunk=-1 if rank == 1 else None))
    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += rank
    said["weights"] = message(made(other, (x, y)).value)
    for kind in ("frozen", "buffer"):
        said |= different(kind, rank, (x, y))

    model = Failing(1)
    surface = made(model, (x, y))
    alone = fg.LossSurface(network(), "cross_entropy", (x, y))
    said["mixed"] = message(lambda: fg.compare({"a": surface, "b": alone}))
    value = surface.value()
    Failing.how = "raise"
    said["raised"] = message(lambda: surface.value(2 * surface.point))
    wanted = resolve_measures(["expected_sharpness"])
    ((_, marked),) = run_measures(surface, wanted, seed=0, strict=False)
    said["report"] = str(marked.notes)
    Failing.how = ""
    said["goes on"] = str(surface.value(surface.point) == value)

    def save(result: Any) -> None:
        if rank == 1:
            raise OSError("disk full")

    said["left"] = message(lambda: fg.measure(surface, measures=["rho_max"], save=save))
    said["still there"] = str(surface.value(surface.point) == value)
    elsewhere = x.new_ones(surface.size)
    step = surface.gradient if rank else surface.value
    said["out of step"] = message(lambda: step(elsewhere))
    said["over"] = message(lambda: surface.value(elsewhere))
    return said


def killed(place: str) -> tuple[str, float]:
    """One rank dies between two measures: what the others are told, and after how long."""
    group = dist.new_group([2, 1, 0])
    surface = fg.LossSurface(Failing(1), "cross_entropy", samples(9), processes=group)

    def save(result: Any) -> None:
        if dist.get_rank() == 0:
            result.to_json(place)
        Failing.how = "kill"

    start = time.monotonic()
    wanted = ["rho_max", "expected_sharpness"]
    return message(
        lambda: fg.measure(surface, measures=wanted, save=save)
    ), time.monotonic() - start


def three(place: str) -> dict[str, Any]:
    """All programs of a group of three."""
    return {
        "measures": measures("all"),
        "smooth": smooth("all"),
        "data": kinds_of_data(),
        "failures": failures(),
        "killed": killed(place),
    }


def two() -> dict[str, Any]:
    """All programs of a group of two."""
    return {
        "wrapped": wrapped_models("all"),
        "sharded": sharded("all"),
        "leftovers": sharded_leftovers(),
    }


def wrapped_models(processes: Any) -> dict[str, Any]:
    """Models as they come out of training on several ranks."""
    plain: dict[str, nn.Module] = {"plain": network()}
    if processes:
        plain["ddp"] = nn.parallel.DistributedDataParallel(network())
        plain["compiled"] = torch.compile(network(), backend="eager")
    return {
        name: derivatives(fg.LossSurface(model, "cross_entropy", samples(5), processes=processes))
        for name, model in plain.items()
    }


def sharded(processes: Any) -> dict[str, Any]:
    """A model sharded by FSDP, on shards of three and four samples: one chunk, and two."""
    model = network()
    if processes:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    surface = fg.LossSurface(
        model, "cross_entropy", samples(7), processes=processes, products="differences", chunk=3
    )
    found = derivatives(surface)
    chosen: Any = {
        "riemannian_max_eigenvalue": {"max_matvecs": 3},
        "expected_sharpness": {"pairs": 2},
        "epsilon_sharpness": {},
        "adaptive_sharpness": {},
    }
    found |= numbers(fg.measure(surface, measures=chosen))
    return found


def sharded_leftovers() -> dict[str, Any]:
    """That a sharded model is left as it was, and what is refused of it."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network())
    before = [p.full_tensor() for p in model.parameters()]
    x, y = samples(4)
    nn.functional.cross_entropy(model(x), y).backward()
    slopes = [p.grad for p in model.parameters()]
    surface = fg.LossSurface(model, "cross_entropy", (x, y), processes="all")
    surface.gradient(2 * surface.point)
    left = [
        torch.equal(p.full_tensor(), b) and p.grad is g
        for p, b, g in zip(model.parameters(), before, slopes, strict=True)
    ]
    refused = [
        lambda: fg.measure(surface, measures=["kappa_max"]),
        lambda: fg.measure(surface, measures=["path_norm"]),
        lambda: fg.certify(surface),
        lambda: fg.landscape(surface, space="weights", dims=1, points=3),
        lambda: fg.LossSurface(model, "cross_entropy", (x, y), processes="all", products="reverse"),
        lambda: fg.LossSurface(model, "cross_entropy", (x, y)),
        lambda: fg.LossSurface(model, "mse", (x, x), processes="all", dtype=torch.float32),
    ]
    nn.functional.cross_entropy(model(x), y).backward()
    return {"left": all(left), "refused": [message(action) for action in refused]}
