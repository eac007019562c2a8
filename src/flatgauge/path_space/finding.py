"""Find the basis paths of a model, or of a surface's model."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.edges import edges_of
from flatgauge.path_space.folding import fold
from flatgauge.path_space.skeletons import SKELETONS
from flatgauge.subject import unwrapped
from flatgauge.surface import LossSurface
from flatgauge.symmetry import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.of_surface import gauge_of


def basis_paths(
    model: nn.Module, example_inputs: Any, *, skeleton: str = "strongest"
) -> BasisPaths:
    """The basis paths of a model: coordinates that no rescaling changes.

    For any network of chains and branches: of any widths, with biases, convolutions (a channel is
    a unit), pooling, batch-norms with stored statistics (folded), residual streams (all units that
    share a scale are one) and concatenations.

    Args:
        model: A ``torch.nn.Module``; not changed. It is read in eval mode.
        example_inputs: What to call it with: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments. The values do not matter, the shapes do.
        skeleton: ``"strongest"`` takes the path of largest value through every weight, and does
            not depend on the order of the units; ``"diagonal"`` joins unit i to unit i (Meng et
            al. 2019), and does.

    Returns:
        The paths.

    Raises:
        ValueError: If there is no such skeleton.
        UnsupportedGraphError: If the model cannot be exported, or a weight is no edge from unit to
            unit.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> _ = net[2].weight.data.copy_(torch.tensor([[5.0, -6.0]]))
        >>> paths = basis_paths(net, torch.zeros(1, 2))
        >>> paths.values  # six weights, two hidden units
        tensor([  5.,  10., -18., -24.], dtype=torch.float64)
        >>> paths.names[3]
        '0.weight[1, 1] → 2.weight[0, 1]'
        >>> paths.to_weights(paths.values * 2)["0.weight"]
        tensor([[2., 4.],
                [6., 8.]], dtype=torch.float64)
    """
    check_skeleton(skeleton)
    return _paths(unwrapped(model), find_gauge(model, example_inputs, frozen="free"), skeleton)


def paths_of(surface: LossSurface, skeleton: str = "strongest") -> BasisPaths:
    """The basis paths of a surface's model, read once for its parameters now.

    Args:
        surface: The surface.
        skeleton: ``"strongest"`` or ``"diagonal"``.

    Returns:
        The paths, in the precision of the surface.

    Raises:
        ValueError: If there is no such skeleton.
        UnsupportedGraphError: If the model cannot be exported, or a weight is no edge from unit to
            unit.
    """
    check_skeleton(skeleton)
    return surface.recall(
        ("basis paths", skeleton),
        lambda: _paths(surface.model, gauge_of(surface, frozen="free"), skeleton),
    )


def _paths(model: nn.Module, gauge: GaugeGroup, skeleton: str) -> BasisPaths:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, tensor in (parameters | buffers).items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{name}` holds numbers that are not finite, and paths through them have no "
                "value; load the model again, or see where training diverged."
            )
    folded = fold(gauge, parameters, buffers)
    edges = edges_of(gauge, parameters, folded)
    chosen = SKELETONS[skeleton](gauge, edges)
    counts: dict[str, int] = {}
    units = []
    for site in gauge.sites:
        units.append(f"{site}[{counts.get(site, 0)}]")
        counts[site] = counts.get(site, 0) + 1
    return BasisPaths(edges, folded, chosen, parameters, units, skeleton)


def check_skeleton(skeleton: str) -> None:
    """Refuse a skeleton that does not exist.

    Args:
        skeleton: Its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(skeleton, str) or skeleton not in SKELETONS:
        known = " or ".join(repr(name) for name in SKELETONS)
        raise ValueError(f"`skeleton={skeleton!r}` is unknown; use {known}.")
