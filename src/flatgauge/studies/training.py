"""Training one network until its recipe's goals are reached."""

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
from flatgauge.studies.networks.catalogue import build
from flatgauge.studies.networks.initialisation import initialise
from flatgauge.studies.preparing import Prepared
from flatgauge.studies.recipe import Recipe

#: States of a trained network; only the first enters statistics.
REACHED, MISSED, DIVERGED = "reached", "not reached", "diverged"

#: The whole training set is looked at when the loss over an epoch is within this factor of its
#: goal: while weights still move, that loss is above the one at the end of the epoch.
_NEAR = 5.0

#: Samples in one pass without gradients.
_PASS = 2000


@dataclass(frozen=True)
class Standing:
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
class Trained:
    """A network at the end of its training.

    Attributes:
        model: In evaluation mode.
        state: ``"reached"``, ``"not reached"`` or ``"diverged"``.
        epochs: Passes over the data.
        steps: Changes of the weights.
        standing: How it does.
        seconds: Wall-clock time of the training.
        replaced: How many training labels are not the true ones.
    """

    model: nn.Module
    state: str
    epochs: int
    steps: int
    standing: Standing
    seconds: float
    replaced: int

    def facts(self) -> dict[str, Any]:
        """All but the model, as plain values.

        Returns:
            Values by name.
        """
        own = {name: getattr(self, name) for name in ("state", "epochs", "steps", "replaced")}
        return own | asdict(self.standing) | {"seconds": self.seconds}


def network(recipe: Recipe, prepared: Prepared) -> nn.Module:
    """The network of a recipe with its first weights.

    Args:
        recipe: Which.
        prepared: Its data.

    Returns:
        The network.
    """
    own = ":" in recipe.network
    if own:
        with seed_global_rng(0, "import"):  # By whichever run is first, and not at its expense.
            resolve(recipe.network)
    with seed_global_rng(recipe.seed, "weights"):
        if own:
            # A copy: code may give the same network whenever it is asked for one.
            model = copy.deepcopy(build_model(recipe.network))
        else:
            model = build(
                recipe.network,
                shape=prepared.shape,
                classes=prepared.classes,
                width=recipe.width,
            )
    if not own or recipe.init != "default":
        initialise(model, recipe.init, child_generator(recipe.seed, "weights"))
    return model.to(getattr(torch, recipe.dtype))


def train(recipe: Recipe, prepared: Prepared) -> Trained:
    """Train a network from its first weights until its goals are reached.

    Args:
        recipe: How.
        prepared: Its data.

    Returns:
        The network, and how it came out.
    """
    start = time.perf_counter()
    model = network(recipe, prepared)
    optimizer = optimizer_of(recipe, model)
    order = child_generator(recipe.seed, "order")
    epochs, steps = 0, 0
    at_once = not recipe.epochs and reached(recipe, model, prepared, math.inf, last=True)
    state = REACHED if at_once else MISSED
    with seed_global_rng(recipe.seed, "training"):  # What a network draws itself, as for dropout.
        while state == MISSED and epochs < recipe.epochs:
            model.train()
            total = torch.zeros((), dtype=torch.float64)
            for chosen in torch.randperm(len(prepared.inputs), generator=order).split(recipe.batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(prepared.inputs[chosen]), prepared.targets[chosen])
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(chosen)
                steps += 1
            epochs += 1
            mean = total.item() / len(prepared.inputs)
            if not math.isfinite(mean):
                state = DIVERGED
            elif reached(recipe, model, prepared, mean, last=epochs == recipe.epochs):
                state = REACHED
    optimizer.zero_grad()
    model.eval()
    stands = standing(model, prepared, gradient=recipe.gradient_goal is not None)
    seconds = time.perf_counter() - start
    state = final_state(state, stands)
    return Trained(model, state, epochs, steps, stands, seconds, prepared.replaced)


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """What changes the weights.

    Args:
        recipe: How.
        model: Whose.

    Returns:
        A torch optimiser.
    """
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


def reached(
    recipe: Recipe, model: nn.Module, prepared: Prepared, mean: float, *, last: bool = False
) -> bool:
    """Whether a network is where its recipe wants it, on all training samples.

    Args:
        recipe: Whose goals.
        model: The network; left in evaluation mode if it was looked at.
        prepared: Its data.
        mean: The loss over the last epoch, by which most looks are spared.
        last: Whether this is the last chance, so that it is looked at in any case.

    Returns:
        Whether training is over with all goals reached.
    """
    if not last and not (recipe.early and recipe.has_goal):
        return False
    if recipe.loss_goal is not None and mean > _NEAR * recipe.loss_goal and not last:
        return False
    model.eval()
    loss, accuracy = scores(model, prepared.inputs, prepared.targets)
    if not loss <= (math.inf if recipe.loss_goal is None else recipe.loss_goal):  # Nor is nan.
        return False
    if recipe.accuracy_goal is not None and accuracy < recipe.accuracy_goal:
        return False
    return (
        recipe.gradient_goal is None
        or gradient_norm(model, prepared.inputs, prepared.targets) <= recipe.gradient_goal
    )


def final_state(state: str, stands: Standing) -> str:
    """The state of a network, with a look at where it stands.

    Args:
        state: After the last epoch, of which only losses before its last step are known.
        stands: How it does after that step.

    Returns:
        The same; ``"diverged"`` if the last step left no finite loss.
    """
    return state if math.isfinite(stands.train_loss) else DIVERGED


def standing(model: nn.Module, prepared: Prepared, *, gradient: bool = False) -> Standing:
    """How a network does on all samples.

    Args:
        model: In evaluation mode.
        prepared: Its data.
        gradient: Whether the gradient's norm is wanted.

    Returns:
        Losses, accuracies and norms.
    """
    train_loss, train_accuracy = scores(model, prepared.inputs, prepared.targets)
    test_loss, test_accuracy = scores(model, prepared.test_inputs, prepared.test_targets)
    squares = sum(float(part.detach().double().square().sum()) for part in model.parameters())
    steepness = gradient_norm(model, prepared.inputs, prepared.targets) if gradient else None
    return Standing(
        train_loss, train_accuracy, steepness, test_loss, test_accuracy, math.sqrt(squares)
    )


def scores(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """The mean cross-entropy and the share of right classes, without a gradient.

    Args:
        model: In evaluation mode.
        inputs: Of all samples.
        targets: Their labels.

    Returns:
        Loss and accuracy.
    """
    total, right = 0.0, 0
    with torch.no_grad():
        for x, y in zip(inputs.split(_PASS), targets.split(_PASS), strict=True):
            outputs = model(x)
            total += float(F.cross_entropy(outputs, y, reduction="sum").double())
            right += int((outputs.argmax(1) == y).sum())
    return total / len(inputs), right / len(inputs)


def gradient_norm(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """The norm of the gradient of the mean loss.

    Args:
        model: In evaluation mode; its `.grad` is not touched.
        inputs: Of all samples.
        targets: Their labels.

    Returns:
        The norm.
    """
    parameters = [part for part in model.parameters() if part.requires_grad]
    sums = [torch.zeros_like(part, dtype=torch.float64) for part in parameters]
    for x, y in zip(inputs.split(_PASS), targets.split(_PASS), strict=True):
        loss = F.cross_entropy(model(x), y, reduction="sum")
        for total, part in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += part
    return math.sqrt(sum(float(total.square().sum()) for total in sums)) / len(inputs)
