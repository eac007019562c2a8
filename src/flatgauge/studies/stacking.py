"""Train several small networks of one shape together, each as it would be trained alone.

The results are those of `train`, bit for bit: who else is in the stack, and whether there is one,
makes no difference. So a run is reproducible from its recipe alone, and stacking is a matter of
speed only.

Measured on one core in processor time beside `train`, for
16 members (for 4): digits, three hidden layers of 64: 7.1 times as fast (3.5) at batch 8, 5.7 (3.4)
at 32, 4.3 (2.4) at 128, 2.4 (2.0) at 256; MNIST, 50-50-50-30: 2.8 (1.9) at 32, 2.0 (1.8) at 128,
1.1 (1.3) at 1000; three hidden layers of 512: 1.1 (1.1) at 128. What is saved is bookkeeping, so
that little is gained where a step has far more than ten million multiplications. Convolutions gain
little: LeNet-5 on CIFAR-10 under `torch.func.vmap`, where they become grouped ones, had 1.6 times
(1.0) the speed of one by one at batch 4, and 0.5 to 0.8 times at 32 and 64. They are trained one by
one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

from flatgauge.estimators.linalg import child_generator
from flatgauge.studies.networks.mlp import perceptron
from flatgauge.studies.perceptrons import Perceptrons, linear_layers
from flatgauge.studies.preparing import Prepared
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.training import (
    DIVERGED,
    MISSED,
    REACHED,
    Trained,
    final_state,
    network,
    optimizer_of,
    reached,
    standing,
)

Label = TypeVar("Label")

#: Members of a stack; more gain little.
SIZE = 16

#: Multiplications of weights and inputs in a step above which a stack gains little or nothing.
_MOST = 12_000_000


@dataclass(eq=False)
class _Member:
    """A network in training."""

    label: Any
    recipe: Recipe
    prepared: Prepared
    model: nn.Module
    order: Generator
    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    kept: list[dict[str, Any]] = field(default_factory=list)
    """What the optimiser remembers of every parameter."""

    @property
    def alike(self) -> Hashable:
        """Members that are alike share an optimiser: one that is new has nothing to remember."""
        recipe = self.recipe
        settings = recipe.optimizer, recipe.rate, recipe.momentum, recipe.weight_decay
        return (*settings, self.steps == 0)


def stack_key(recipe: Recipe, prepared: Prepared) -> Hashable | None:
    """What networks must have in common to be trained together.

    Args:
        recipe: Of a network.
        prepared: Its data.

    Returns:
        A key that is equal for networks that fit together; None if this one is trained alone:
        only multilayer perceptrons by name are trained together.
    """
    if perceptron(recipe.network) is None or not recipe.epochs:
        return None
    shapes = prepared.shape, prepared.classes, len(prepared.inputs)
    return recipe.network, recipe.width, recipe.batch, recipe.dtype, *shapes


def worth_stacking(recipe: Recipe, prepared: Prepared) -> bool:
    """Whether a network is trained faster in a stack than alone.

    Args:
        recipe: Of the network.
        prepared: Its data.

    Returns:
        Whether it can be in a stack, and its steps are so small that it gains from it.
    """
    if stack_key(recipe, prepared) is None:
        return False
    with torch.device("meta"):
        weights = sum(part.numel() for part in network(recipe, prepared).parameters())
    return weights * min(recipe.batch, len(prepared.inputs)) <= _MOST


def train_stacked(
    jobs: Iterable[tuple[Label, Recipe, Prepared]], *, size: int = SIZE
) -> Iterator[tuple[Label, Trained]]:
    """Train networks of one shape together, each until its own goals are reached.

    A network that is done leaves at once, and the next job takes its place. `seconds` of a
    network are its share of the time that the stack took.

    Args:
        jobs: Label, recipe and data of every network, taken when there is room.
        size: The most networks in training at any time.

    Yields:
        Label and result of every network, as they are done.

    Raises:
        ValueError: If a network does not fit to the first, or `size` is no number of networks.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"`size={size!r}` must be a whole number of at least 1.")
    waiting, members, key = iter(jobs), list[_Member](), None
    while True:
        for label, recipe, prepared in islice(waiting, size - len(members)):
            key = _fitting(recipe, prepared, key)
            if members:
                prepared = _sharing(prepared, members[0].prepared)
            members.append(_entering(label, recipe, prepared))
        if not members:
            return
        done = _train_until_one_is_done(members)
        members = [member for member in members if member not in done]
        for member, state in done.items():
            yield member.label, _result(member, state)


def _fitting(recipe: Recipe, prepared: Prepared, key: Hashable | None) -> Hashable:
    """The key of a network, refused if it is another one than before, or none."""
    own = stack_key(recipe, prepared)
    if own is None:
        raise ValueError(
            f"`{recipe.network}` with `epochs={recipe.epochs}` is not trained in a stack; needed "
            "are a multilayer perceptron by name and at least one epoch; use `train`."
        )
    if key is not None and own != key:
        raise ValueError(
            f"a network of {own} does not fit into a stack of {key} (network, width, batch, dtype, "
            "shape of an input, classes, samples); train together what has one `stack_key`."
        )
    return own


def _sharing(prepared: Prepared, other: Prepared) -> Prepared:
    """The same data, with inputs in the same memory as others if they are equal."""
    if prepared.inputs is other.inputs or not torch.equal(prepared.inputs, other.inputs):
        return prepared
    return replace(prepared, inputs=other.inputs)


def _entering(label: Any, recipe: Recipe, prepared: Prepared) -> _Member:
    """A network with its first weights."""
    start = time.perf_counter()
    model, order = network(recipe, prepared), child_generator(recipe.seed, "order")
    assert linear_layers(model) is not None
    return _Member(label, recipe, prepared, model, order, seconds=time.perf_counter() - start)


def _result(member: _Member, state: str) -> Trained:
    """How a network came out."""
    start = time.perf_counter()
    member.model.eval()
    gradient = member.recipe.gradient_goal is not None
    stands = standing(member.model, member.prepared, gradient=gradient)
    seconds = member.seconds + time.perf_counter() - start
    replaced, state = member.prepared.replaced, final_state(state, stands)
    return Trained(member.model, state, member.epochs, member.steps, stands, seconds, replaced)


def _train_until_one_is_done(members: list[_Member]) -> dict[_Member, str]:
    """Train all members for some epochs; those that are done then, with their states."""
    stack = Perceptrons([member.model for member in members])
    optimizers = _optimizers(members, stack)
    batches = _Batches([member.prepared for member in members], members[0].recipe.batch)
    done: dict[_Member, str] = {}
    while not done and len(optimizers) == len({member.alike for member in members}):
        start = time.perf_counter()
        totals = torch.zeros(len(members), dtype=torch.float64)
        for inputs, targets in batches.in_order([member.order for member in members]):
            losses = stack.gradients(inputs, targets)
            for optimizer in optimizers:
                optimizer.step()
            totals += losses * targets.shape[1]
            for member in members:
                member.steps += 1
        means = (totals / batches.samples).tolist()
        for number, (member, mean) in enumerate(zip(members, means, strict=True)):
            member.epochs += 1
            stack.unload(number, member.model)
            state = _state(member, mean)
            if state is not None:
                done[member] = state
        for member in members:
            member.seconds += (time.perf_counter() - start) / len(members)
    memories = {part: kept for optimizer in optimizers for part, kept in optimizer.state.items()}
    for member, parameters in zip(members, stack.parameters, strict=True):
        member.kept = [memories.get(part, {}) for part in parameters]
    return done


def _state(member: _Member, mean: float) -> str | None:
    """How a network's training ended; None if it goes on."""
    if not math.isfinite(mean):
        return DIVERGED
    last = member.epochs == member.recipe.epochs
    if reached(member.recipe, member.model, member.prepared, mean, last=last):
        return REACHED
    return MISSED if last else None


def _optimizers(members: list[_Member], stack: Perceptrons) -> list[torch.optim.Optimizer]:
    """One optimiser for all members that are alike, which goes on where it was."""
    shared: dict[Hashable, list[int]] = {}
    for number, member in enumerate(members):
        shared.setdefault(member.alike, []).append(number)
    found = []
    for numbers in shared.values():
        parameters = [part for number in numbers for part in stack.parameters[number]]
        optimizer = optimizer_of(members[numbers[0]].recipe, nn.ParameterList(parameters))
        for number in numbers:
            for part, kept in zip(stack.parameters[number], members[number].kept, strict=False):
                if kept:
                    optimizer.state[part] = kept
        found.append(optimizer)
    return found


class _Batches:
    """The samples of all members, in the order of each."""

    def __init__(self, prepared: list[Prepared], size: int) -> None:
        self.samples, self._size = len(prepared[0].inputs), size
        self._targets = torch.stack([one.targets for one in prepared])
        every = [one.inputs for one in prepared]
        alike = all(inputs is every[0] for inputs in every)
        # Inputs of one member after those of another, or those that all share.
        self._inputs = (every[0] if alike else torch.cat(every)).flatten(1)
        first = [0 if alike else number * self.samples for number in range(len(every))]
        self._first = torch.tensor(first)[:, None]

    def in_order(self, orders: list[Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs (members, samples, features) and targets (members, samples) of every step."""
        drawn = torch.stack([torch.randperm(self.samples, generator=order) for order in orders])
        for chosen in drawn.split(self._size, dim=1):
            places = (chosen + self._first).flatten()
            inputs = self._inputs.index_select(0, places)
            yield inputs.view(*chosen.shape, -1), self._targets.gather(1, chosen)
