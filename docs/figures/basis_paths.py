"""Basis paths of a small network, drawn from the object itself.

`python docs/figures/basis_paths.py` writes `basis_paths.svg` beside this file.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import nn

import flatgauge as fg

#: Numbers of units, and the x of their columns.
WIDTHS = (2, 3, 3, 2)

ORANGE, BLUE, GREEN, PALE, DARK = "#d9711c", "#1d5a9c", "#2e7d4f", "#d0d4da", "#333333"

Weight = tuple[int, int, int]


def network() -> nn.Sequential:
    """2-3-3-2 without biases, with weights from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def weights_of(name: str) -> list[Weight]:
    """The weights along a path: layer, from which unit, to which unit.

    Args:
        name: As in `BasisPaths.names`.

    Returns:
        In their order.

    Example:
        >>> weights_of("0.weight[1, 0] → 2.weight[2, 1]")
        [(0, 0, 1), (1, 1, 2)]
    """
    found = re.findall(r"(\d+)\.weight\[(\d+), (\d+)\]", name)
    return [(int(layer) // 2, int(tail), int(head)) for layer, head, tail in found]


def place(layer: int, unit: int) -> tuple[float, float]:
    """Where a unit is drawn."""
    return float(layer), (WIDTHS[layer] - 1) / 2 - unit


def net(ax: Axes, model: nn.Sequential) -> None:
    """All weights, pale, and all units."""
    for layer, linear in enumerate(model[::2]):
        heads, tails = linear.weight.shape
        for head in range(heads):
            for tail in range(tails):
                line(ax, (layer, tail, head), PALE, 1.0)
    for layer, width in enumerate(WIDTHS):
        for unit in range(width):
            hidden = 0 < layer < len(WIDTHS) - 1
            ax.plot(
                *place(layer, unit),
                "o",
                ms=13,
                mfc="white",
                mec=DARK if hidden else "#999999",
                mew=1.3,
                zorder=5,
            )
    ax.set_xlim(-0.25, len(WIDTHS) - 0.75)
    ax.set_ylim(-1.55, 1.55)
    ax.axis("off")


def line(ax: Axes, weight: Weight, colour: str, width: float, *, dashed: bool = False) -> None:
    """One weight."""
    layer, tail, head = weight
    (x0, y0), (x1, y1) = place(layer, tail), place(layer + 1, head)
    style = (0, (3, 2)) if dashed else "-"
    ax.plot([x0, x1], [y0, y1], color=colour, lw=width, ls=style, zorder=2 + width / 10)


def draw(path: Path) -> fg.symmetry.BasisPaths:
    """Draw the skeleton and three of the paths.

    Args:
        path: Where to.

    Returns:
        What was drawn.
    """
    model = network()
    paths = fg.basis_paths(model, torch.zeros(1, WIDTHS[0]))
    routes = [weights_of(name) for name in paths.names]
    free = {
        (int(edge.name[0]) // 2, edge.index % tails, edge.index // tails)
        for edge in paths.free
        for tails in [model[int(edge.name[0])].in_features]
    }
    # The weights by which paths come in: what stands before the last weight that is not free.
    own = [max(k for k, weight in enumerate(route) if weight not in free) for route in routes]
    inward = {weight for route, last in zip(routes, own, strict=True) for weight in route[:last]}
    plt.rcParams.update({"svg.hashsalt": "flatgauge", "font.family": "DejaVu Sans"})
    figure, grid = plt.subplots(2, 2, figsize=(8, 6.2))
    axes = grid.flatten()
    net(axes[0], model)
    for weight in free:
        line(axes[0], weight, ORANGE, 3.2)
    for weight in inward:
        line(axes[0], weight, BLUE, 1.8, dashed=True)
    axes[0].set_title(
        f"the skeleton: out of every unit (orange)\nand into it (blue); m = {paths.m}, "
        f"H = {paths.hidden}",
        fontsize=9,
    )
    for ax, layer in zip(axes[1:], range(len(WIDTHS) - 1), strict=True):
        k = next(
            k
            for k, route in enumerate(routes)
            if route[own[k]][0] == layer and route[own[k]] not in inward
        )
        net(ax, model)
        for place_in_route, weight in enumerate(routes[k]):
            colour = (
                GREEN if place_in_route == own[k] else BLUE if place_in_route < own[k] else ORANGE
            )
            line(ax, weight, colour, 3.2)
        factors = " · ".join(
            f"{float(model[2 * at].weight[head, tail].detach()):.2f}"
            for at, tail, head in routes[k]
        )
        ax.set_title(
            f"the path of a weight of layer {layer + 1} (green)\nv = {factors} = "
            f"{float(paths.values[k]):.3f}",
            fontsize=9,
        )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return paths


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    print(draw(target).describe())
