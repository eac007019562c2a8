"""Rewritings that are no rescalings of units: outputs shifted, weight moved between branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.rescaling import Call, copied, same_function

#: How well two branches must be proportional.
_ALIKE = 1e-6

#: Tried on a copy; two, as layers in a row may be exchanged by one of them.
_SHARES = (0.25, 0.6, 0.0, 1.0)


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


def find_branches(model: nn.Module, call: Call, gauge: GaugeGroup) -> list[Branches]:
    """Find parallel branches that weight can be moved between.

    Args:
        model: The model.
        call: An example call.
        gauge: Its gauge group: branches that are added scale alike.

    Returns:
        The pairs of branches that, tried on a copy, leave the outputs unchanged.
    """
    move = gauge.sample(generator=Generator().manual_seed(0), powers_of_two=False)
    factors = gauge.factors(move)
    # In double precision: a share of a rounded weight is rounded once more.
    double = copied(model).double()
    fine = call.changed(lambda t: t.double() if t.is_floating_point() else t)
    found = []
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for branches in _proportional(trainable):
        if not all(_alike(factors, *pair) for pair in branches.pairs):
            continue
        twins = [copied(double) for _ in _SHARES]
        for twin, share in zip(twins, _SHARES, strict=True):
            branches.redistribute(twin, share)
        with suppress(RuntimeError):  # A model that insists on its own precision.
            if all(same_function(double, twin, fine)[0] for twin in twins):
                found.append(branches)
    return found


def _alike(factors: Mapping[str, Tensor], one: str, other: str) -> bool:
    """Whether a move multiplies two tensors by the same."""
    still = torch.ones((), dtype=torch.float64)
    change = factors.get(one, still) / factors.get(other, still) - 1
    return bool(change.abs().max() < _ALIKE)


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
    if len(before) != 1 or not before[0].is_floating_point():
        return None
    (old,) = before
    sizes = {old.shape[axis] for axis in (1, -1) if old.dim() > 1} or {1}
    far = 1 + 2 * float(old.abs().max())  # Far enough to be cut off by a ReLU at the end.
    for name, parameter in reversed(list(model.named_parameters())):
        if (
            parameter.requires_grad
            and parameter.numel() in sizes
            and all(_moves_by(model, name, amount, old, call) for amount in (far, -far))
        ):
            return name
    return None


def _moves_by(model: nn.Module, name: str, amount: float, old: Tensor, call: Call) -> bool:
    """Whether adding a number to a parameter adds it to all outputs."""
    twin = copied(model)
    with torch.no_grad():
        twin.get_parameter(name).add_(amount)
    return bool((call(twin)[0] - old - amount).abs().max() < 1e-3 * abs(amount))


def _joined(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent else leaf
