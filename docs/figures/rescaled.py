"""One network, rescaled more and more: what explodes and what does not move.

`python docs/figures/rescaled.py` trains the network, rescales it, measures it and writes
`rescaled.png` beside this file, with all numbers inside (`numbers_in`); takes ten seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from PIL import Image
from torch import nn

import flatgauge as fg

#: Measures by name: how they are called in the picture.
MOVING = {
    "hessian_trace": "tr H",
    "hessian_max_eigenvalue": r"$\lambda_{\max}(H)$",
    "epsilon_sharpness": "ε-sharpness",
}
STILL = {
    "normalized_sharpness": "normalized sharpness",
    "balanced:hessian_trace": "tr H, balanced",
    "psi_trace": "ψ trace",
    "rho_sum": r"$\rho_\Sigma$",
    "adaptive_trace": "adaptive trace",
}

#: Every hidden unit is rescaled by a random power of two, up to 2 to the power of this.
RANGES = (0, 1, 2, 3, 4, 5, 6)

RED, BLUE, GREY = "#c0392b", "#1d5a9c", "#666666"


def trained() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A network 64-64-64-64-10 on images of digits, trained until its loss is 0.03."""
    data = fg.load_dataset("digits")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [(64, 64), (64, 64), (64, 64), (64, 10)]
        parts = [part for size in layers for part in (nn.Linear(*size), nn.ReLU())]
        model = nn.Sequential(nn.Flatten(), *parts[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = torch.tensor(1.0)
    while loss > 0.03:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
    return model, data


def numbers(ranges: Sequence[int] = RANGES) -> dict[str, Any]:
    """All values by measure, one for every range, and the largest change of any output."""
    model, data = trained()
    gauge = fg.find_gauge(model, data[0][:2])
    values: dict[str, list[float]] = {name: [] for name in (*MOVING, *STILL)}
    change = 0.0
    for reach in ranges:
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(-reach, reach + 1, (gauge.dim,), generator=generator)
        twin = gauge.rescale(model, gauge.move(2.0**factors))
        with torch.no_grad():
            change = max(change, float((twin(data[0]) - model(data[0])).abs().max()))
        report = fg.measure(fg.LossSurface(twin, "cross_entropy", data), measures=list(values))
        for name, estimate in report.items():
            values[name].append(estimate.value)
    return {"values": values, "change of outputs": change}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the picture, with its numbers inside.

    Args:
        found: By `numbers`.
        path: Where to.
    """
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure, ax = plt.subplots(figsize=(8.6, 4.5), dpi=160)
    values, lowest = found["values"], 0.0
    for name, label in sorted((MOVING | STILL).items(), key=lambda item: values[item[0]][-1]):
        colour = RED if name in MOVING else BLUE
        ax.plot(RANGES, values[name], color=colour, lw=2.6 if name == "hessian_trace" else 1.6)
        lowest = max(values[name][-1], 2.4 * lowest)  # Labels keep a distance from each other.
        place = (RANGES[-1], lowest)
        ax.annotate(label, place, (6, 0), textcoords="offset points", color=colour, va="center")
    trace = values["hessian_trace"]
    ax.set_yscale("log")
    ax.set_xlim(0, RANGES[-1])
    ax.set_xticks(RANGES, [f"{2**reach}" for reach in RANGES])
    ax.set_xlabel("every hidden unit rescaled by a random factor of up to …", color=GREY)
    ax.set_title(
        f"One network. No output changes by one bit.\ntr H goes from {trace[0]:.0f} to "
        f"{trace[-1]:,.0f}; what is blue does not move.",
        loc="left",
        fontsize=12.5,
        fontweight="bold",
    )
    ax.grid(axis="y", color="#e6e6e6", lw=0.8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(colors=GREY, length=0, which="both")
    figure.subplots_adjust(left=0.07, right=0.73, top=0.84, bottom=0.13)
    figure.savefig(path, metadata={"Description": json.dumps(found)})
    plt.close(figure)


def numbers_in(path: Path) -> dict[str, Any]:
    """The numbers that a picture was drawn from.

    Args:
        path: Of the picture.

    Returns:
        What `numbers` gave then.
    """
    with Image.open(path) as picture:
        found: dict[str, Any] = json.loads(picture.info["Description"])
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png")
    draw(numbers(), target)
    print(json.dumps(numbers_in(target), indent=1))
