"""Train one network until the goals of its recipe are reached.

In: a recipe and its data. Out: `TrainedNetwork`, the network in evaluation mode, how it came out
and how it does on all samples. First weights, the order of samples and whatever the network draws
itself have generators of their own, derived from the recipe's seed, so that a network can be made
again from its recipe alone.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.estimators.linalg import child_generator, seed_global_rng
from flatgauge.loading.models import build_model, resolve
from flatgauge.studies.data import StudyData
from flatgauge.studies.networks import build, initialise
from flatgauge.studies.recipe import Recipe

#: States of a trained network; only the first enters statistics.
REACHED, MISSED, DIVERGED = "reached", "not reached", "diverged"

#: The whole training set is looked at when the loss over an epoch is within this factor of its
#: goal: while weights still move, that loss is above the one at the end of the epoch.
_NEAR = 5.0

#: Samples in one pass without gradients.
_PASS = 2000


@dataclass(frozen=True)
class Scores:
    """How a network does on all samples.

    Attributes:
        train_loss: Mean cross-entropy on the training samples.
        train_accuracy: Share of training samples with the right class, as labelled there.
        gradient_norm: Of the mean training loss; None where it was not asked for.
        test_loss: On the test samples.
        test_accuracy: On the test samples.
        norm: Of all trainable parameters.
    """

    train_loss: float
    train_accuracy: float
    gradient_norm: float | None
    test_loss: float
    test_accuracy: float
    norm: float


@dataclass(frozen=True)
class TrainedNetwork:
    """A network at the end of its training.

    Attributes:
        model: In evaluation mode.
        state: ``"reached"``, ``"not reached"`` or ``"diverged"``.
        epochs: Passes over the data.
        steps: Changes of the weights.
        scores: How it does.
        seconds: Wall-clock time of the training.
        replaced: How many training labels are not the true ones.
    """

    model: nn.Module
    state: str
    epochs: int
    steps: int
    scores: Scores
    seconds: float
    replaced: int

    def facts(self) -> dict[str, Any]:
        """All but the model as plain values: the state, and everything that is a number."""
        numbers = {"trained_epochs": self.epochs, "steps": self.steps, "replaced": self.replaced}
        return {
            "state": self.state,
            "scores": numbers | asdict(self.scores) | {"seconds": self.seconds},
        }


def make_network(recipe: Recipe, data: StudyData, factory: str | None = None) -> nn.Module:
    """The network of a recipe with its first weights; `factory` is where its code is found here."""
    own = ":" in recipe.network
    factory = factory or recipe.network
    if own:
        with seed_global_rng(0, "import"):  # By whichever run is first, and not at its expense.
            resolve(factory)
    with seed_global_rng(recipe.seed, "weights"):
        if own:
            # A copy: code may give the same network whenever it is asked for one.
            model = copy.deepcopy(build_model(factory))
        else:
            model = build(
                recipe.network,
                shape=tuple(data.inputs.shape[1:]),
                classes=data.classes,
                width=recipe.width,
            )
    if not own or recipe.init != "default":
        initialise(model, recipe.init, child_generator(recipe.seed, "weights"))
    return model.to(getattr(torch, recipe.dtype))


def train(recipe: Recipe, data: StudyData, factory: str | None = None) -> TrainedNetwork:
    """Train a network from its first weights until its goals are reached."""
    start = time.perf_counter()
    model = make_network(recipe, data, factory)
    optimizer = _make_optimizer(recipe, model)
    order = child_generator(recipe.seed, "order")
    epochs, steps = 0, 0
    at_once = not recipe.epochs and _reaches_goals(recipe, model, data, math.inf, last=True)
    state = REACHED if at_once else MISSED
    with seed_global_rng(recipe.seed, "training"):  # What a network draws itself, as for dropout.
        while state == MISSED and epochs < recipe.epochs:
            model.train()
            total = torch.zeros((), dtype=torch.float64)
            for chosen in torch.randperm(len(data.inputs), generator=order).split(recipe.batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(data.inputs[chosen]), data.targets[chosen])
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(chosen)
                steps += 1
            epochs += 1
            mean = total.item() / len(data.inputs)
            if not math.isfinite(mean):
                state = DIVERGED
            elif _reaches_goals(recipe, model, data, mean, last=epochs == recipe.epochs):
                state = REACHED
    optimizer.zero_grad()
    model.eval()
    scores = score(model, data, gradient=recipe.gradient_goal is not None)
    seconds = time.perf_counter() - start
    if not math.isfinite(scores.train_loss):  # The last step may have left no finite loss.
        state = DIVERGED
    return TrainedNetwork(model, state, epochs, steps, scores, seconds, data.replaced)


def _make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    if recipe.optimizer == "adam":
        return torch.optim.Adam(
            model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay, fused=True
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


def _reaches_goals(
    recipe: Recipe, model: nn.Module, data: StudyData, mean: float, *, last: bool = False
) -> bool:
    """Whether all goals hold on all training samples."""
    # They are looked at, in evaluation mode, if the mean loss over the last epoch is near its goal,
    # or if there is no further epoch.
    if not last and not (recipe.early and recipe.has_goal):
        return False
    if recipe.loss_goal is not None and mean > _NEAR * recipe.loss_goal and not last:
        return False
    model.eval()
    loss, accuracy = mean_loss(model, data.inputs, data.targets)
    if not loss <= (math.inf if recipe.loss_goal is None else recipe.loss_goal):  # Nor is nan.
        return False
    if recipe.accuracy_goal is not None and accuracy < recipe.accuracy_goal:
        return False
    return (
        recipe.gradient_goal is None
        or gradient_norm(model, data.inputs, data.targets) <= recipe.gradient_goal
    )


def score(model: nn.Module, data: StudyData, *, gradient: bool = False) -> Scores:
    """How a network in evaluation mode does on all samples."""
    train_loss, train_accuracy = mean_loss(model, data.inputs, data.targets)
    test_loss, test_accuracy = mean_loss(model, data.test_inputs, data.test_targets)
    squares = sum(float(part.detach().double().square().sum()) for part in model.parameters())
    steepness = gradient_norm(model, data.inputs, data.targets) if gradient else None
    return Scores(
        train_loss, train_accuracy, steepness, test_loss, test_accuracy, math.sqrt(squares)
    )


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The mean cross-entropy and the share of right classes, without a gradient."""
    total, right = 0.0, 0
    with torch.no_grad():
        for x, y in zip(inputs.split(_PASS), targets.split(_PASS), strict=True):
            outputs = model(x)
            total += float(F.cross_entropy(outputs, y, reduction="sum").double())
            right += int((outputs.argmax(1) == y).sum())
    return total / len(inputs), right / len(inputs)


def gradient_norm(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The norm of the gradient of the mean loss; `.grad` is not touched."""
    parameters = [part for part in model.parameters() if part.requires_grad]
    sums = [torch.zeros_like(part, dtype=torch.float64) for part in parameters]
    for x, y in zip(inputs.split(_PASS), targets.split(_PASS), strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for total, part in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += part
    return math.sqrt(sum(float(total.square().sum()) for total in sums)) / len(inputs)
