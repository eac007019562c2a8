"""Rewritings that are no rescalings of units: outputs shifted, weight moved between branches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatgauge.symmetry.rescaling import Call, same_function

#: How well two branches must be proportional.
_ALIKE = 1e-6


@dataclass(frozen=True)
class Branches:
    """Two parallel parts of a model whose parameters are proportional (Tsuzuku et al. 2019, §7.3).

    Attributes:
        pairs: The names of parameters that correspond.
    """

    pairs: tuple[tuple[str, str], ...]

    @torch.no_grad()
    def redistribute(self, model: nn.Module, share: float) -> None:
        """Give the first branch a share of both, the second the rest, in place.

        Args:
            model: The model.
            share: Between 0 and 1.
        """
        state = dict(model.named_parameters())
        for one, other in self.pairs:
            total = state[one].double() + state[other].double()
            state[one].copy_(share * total)
            state[other].copy_((1 - share) * total)


def find_branches(model: nn.Module, call: Call) -> list[Branches]:
    """Find parallel branches that weight can be moved between.

    Args:
        model: The model.
        call: An example call.

    Returns:
        The pairs of branches that, tried on a copy, leave the outputs unchanged.
    """
    found = []
    for branches in _proportional(dict(model.named_parameters())):
        twin = copy.deepcopy(model)
        branches.redistribute(twin, 0.25)
        if same_function(model, twin, call)[0]:
            found.append(branches)
    return found


def _proportional(state: Mapping[str, Tensor]) -> Iterator[Branches]:
    """Pairs of modules all of whose own parameters are proportional with one positive factor."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        parent, _, leaf = name.rpartition(".")
        modules.setdefault(parent, {})[leaf] = tensor.detach()
    alike: dict[object, list[str]] = {}
    for parent, leaves in modules.items():
        kind = tuple((leaf, tuple(t.shape)) for leaf, t in leaves.items())
        alike.setdefault(kind, []).append(parent)
    for parents in alike.values():
        vectors = {}
        for parent in parents:
            flat = torch.cat([t.double().reshape(-1) for t in modules[parent].values()])
            if bool(flat.any()):
                vectors[parent] = flat / flat.norm()
        for i, one in enumerate(vectors):
            for other in list(vectors)[i + 1 :]:
                if float((vectors[one] - vectors[other]).abs().max()) < _ALIKE:
                    names = modules[one]
                    yield Branches(
                        tuple((_joined(one, leaf), _joined(other, leaf)) for leaf in names)
                    )


def find_shift(model: nn.Module, call: Call) -> str | None:
    """Find the parameter that is added to all outputs of a model.

    Args:
        model: The model.
        call: An example call.

    Returns:
        The name of a bias such that adding a number to all of it adds that number to all
        outputs, None where there is none.
    """
    before = call(model)
    if len(before) != 1 or not before[0].is_floating_point() or not before[0].dim():
        return None
    classes = before[0].shape[-1] if before[0].dim() == 2 else before[0].shape[1]
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.numel() != classes:
            continue
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_parameter(name).add_(1.0)
        shifted = call(twin)[0] - before[0]
        if bool((shifted - 1).abs().max() < 1e-3):
            return name
    return None


def _joined(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent else leaf
