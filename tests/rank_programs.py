"""What ranks run in tests: every function is one program of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import flatgauge as fg


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
    ).double()


def samples(count: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def everything(processes: Any = "all") -> dict[str, Any]:
    surface = fg.LossSurface(network(), "cross_entropy", samples(), processes=processes)
    report = fg.measure(surface)
    return {
        "report": {
            name: (e.value, e.data_stderr, e.stderr, e.notes, e.matvecs, dict(e.layers))
            for name, e in report.items()
        }
    }


def sharded_model(processes: Any = "all") -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    if processes:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    before = [p.detach().clone() for p in model.parameters()]
    surface = fg.LossSurface(
        model, "cross_entropy", samples(7), processes=processes, products="differences", chunk=3
    )
    point = surface.point * 1.5
    found: dict[str, Any] = {
        "value": surface.value(),
        "elsewhere": surface.value(point),
        "gradient": surface.gradient(point),
        "product": surface.hvp(torch.ones(surface.size, dtype=torch.float64)),
    }
    chosen = {
        "riemannian_max_eigenvalue": {"max_matvecs": 4},
        "expected_sharpness": {"pairs": 2},
    }
    report = fg.measure(surface, measures=chosen)
    found |= {name: report[name].value for name in chosen}
    if processes:
        found["left"] = all(
            torch.equal(p.full_tensor(), b.full_tensor()) and p.grad is None
            for p, b in zip(model.parameters(), before, strict=True)
        )
        for refused in (
            lambda: fg.measure(surface, measures=["kappa_max"]),
            lambda: fg.certify(surface),
            lambda: fg.landscape(surface, space="weights", dims=1, points=3),
            lambda: surface.under,
        ):
            try:
                refused()
            except Exception as error:
                found.setdefault("refused", []).append(str(error))
        loss = model(samples(7)[0]).sum()  # It can be trained on.
        loss.backward()
        found["trains"] = all(p.grad is not None for p in model.parameters())
    return found
