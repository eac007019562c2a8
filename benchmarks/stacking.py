"""What a network's training costs in a stack, beside its training alone.

    python -m benchmarks.stacking --rounds 3 --data FOLDER

One thread, processor time; 1 is what `train` takes. FOLDER holds MNIST; without it, only the
digits are trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from benchmarks import rounds
from benchmarks.rounds import Action, Method
from flatgauge.studies.preparing import Prepared, prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.stacking import train_stacked, worth_stacking
from flatgauge.studies.training import train

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


def costs(recipe: Recipe, prepared: Prepared, count: int) -> dict[int, float]:
    """The cost of a member in stacks of several sizes; 1 is the cost of training it alone.

    Args:
        recipe: Of all members, but for the seed.
        prepared: Their data.
        count: How many rounds count.

    Returns:
        The medians of all rounds, by size.
    """

    def stacked(size: int) -> Action:
        jobs = [(seed, recipe.but(seed=seed), prepared) for seed in range(size)]
        return lambda: list(train_stacked(jobs, size=size))

    methods = [Method(str(size), partial(stacked, size)) for size in SIZES]
    timings, _ = rounds.timed(partial(train, recipe, prepared), methods, rounds=count)
    return {size: timing.median / size for size, timing in zip(SIZES, timings, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: how many times as fast a member is trained in a stack."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", help="the folder with MNIST")
    options = parser.parse_args(arguments)
    rounds.set_threads(1)
    print(f"{'network':18}{'batch':>6}{'':2}{'':6}" + "".join(f"{n:>8}" for n in SIZES))
    for recipe in RECIPES:
        if recipe.data == "mnist" and options.data is None:
            continue
        prepared = prepare(recipe, options.data)
        found = costs(recipe, prepared, options.rounds)
        worth = "worth it" if worth_stacking(recipe, prepared) else ""
        cells = "".join(f"{1 / cost:7.1f}×" for cost in found.values())
        print(f"{recipe.network:18}{recipe.batch:6}  {recipe.optimizer:6}{cells}  {worth}")


if __name__ == "__main__":
    main()
