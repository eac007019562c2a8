"""What a network's training costs in a stack, beside its training alone, in processor time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from flatgauge.cli.benchmarks import rounds
from flatgauge.cli.benchmarks.rounds import Action, Method
from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.studies.preparing import Prepared, prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.stacking import train_stacked, worth_stacking
from flatgauge.studies.training import train

UNIT = "trainings alone"

#: Members of a stack.
SIZES = (1, 4, 8, 16)

DIGITS = Recipe(network="mlp-3x64", rate=0.01, test_samples=100)
MNIST = Recipe(data="mnist", network="mlp-50-50-50-30", rate=0.01, test_samples=100)

#: What is trained, for some epochs of some tens of steps.
RECIPES = (
    DIGITS.but(batch=8, samples=800, epochs=2),
    DIGITS.but(batch=32, epochs=4),
    DIGITS.but(batch=128, epochs=12),
    DIGITS.but(batch=256, epochs=20),
    DIGITS.but(batch=32, epochs=4, optimizer="adam", rate=0.001),
    MNIST.but(batch=32, samples=3200, epochs=1),
    MNIST.but(batch=128, samples=4000, epochs=2),
    MNIST.but(batch=1000, samples=8000, epochs=3),
    MNIST.but(batch=128, samples=1280, epochs=1, network="mlp-3x512"),
)


def measured(count: int, data: str | None) -> Iterator[TimingRow]:
    """Time the training of a member in stacks of several sizes.

    Args:
        count: How many rounds count.
        data: Where MNIST lies; without it only the digits are trained on.

    Yields:
        A row for every recipe and size.
    """
    for recipe in RECIPES:
        if recipe.data == "mnist" and data is None:
            continue
        prepared = prepare(recipe, data)

        def stacked(size: int, recipe: Recipe = recipe, prepared: Prepared = prepared) -> Action:
            jobs = [(seed, recipe.but(seed=seed), prepared) for seed in range(size)]
            return lambda: list(train_stacked(jobs, size=size))

        methods = [Method(str(size), partial(stacked, size)) for size in SIZES]
        timings, _ = rounds.timed(partial(train, recipe, prepared), methods, rounds=count)
        worth = ", worth it" if worth_stacking(recipe, prepared) else ""
        for size, timing in zip(SIZES, timings, strict=True):
            low, high = timing.spread
            yield TimingRow(
                f"{recipe.network}, {recipe.optimizer}{worth}",
                "training of a member",
                OWN,
                timing.median / size,
                batch=recipe.batch,
                setting=f"stack of {size}",
                spread=(low / size, high / size),
                rounds=count,
                unit=UNIT,
            )
