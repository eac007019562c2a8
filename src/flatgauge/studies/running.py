"""One run of a study: the network trained or taken from the folder, measured, and kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from flatgauge.analysis.measurement import measure_requests
from flatgauge.analysis.request import resolve_measures
from flatgauge.graph.export import ExportedGraphs
from flatgauge.studies.preparing import Prepared, prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.rescaling import rescaled
from flatgauge.studies.store import Part, Store
from flatgauge.studies.training import DIVERGED, network, scores, train
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    from flatgauge.studies.study import Study

#: Inputs that the symmetries of a network are found with.
_EXAMPLES = 2

#: A network is the same if its loss is, but for the order in which numbers are added.
_SAME = 1e-3


def complete(study: Study, run: str, store: Store, folder: str | None) -> None:
    """Do what a run still lacks: its network, its row.

    Args:
        study: The study.
        run: The name of the run.
        store: The study's folder.
        folder: Where data sets are.
    """
    with named(run):
        for _ in completing(study, run, store, prepare(study.runs()[run], folder)):
            pass


@contextmanager
def named(run: str) -> Iterator[None]:
    """Let errors of a user's code say in which run they came up.

    Args:
        run: The name of the run.

    Yields:
        Nothing.

    Raises:
        RuntimeError: If the network cannot be trained or called.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"run `{run}` failed: {error}") from error


def completing(study: Study, run: str, store: Store, prepared: Prepared) -> Iterator[Part]:
    """Train, keep, measure, keep; what is there already is not done again.

    Args:
        study: The study.
        run: The name of the run.
        store: The study's folder.
        prepared: The data of the run.

    Yields:
        What was kept just now.
    """
    recipe = study.runs()[run]
    if store.training(run) is None:
        store.keep_model(run, recipe, train(recipe, prepared))
        yield "models"
    training = store.training(run)
    assert training is not None
    model = stored_network(recipe, prepared, run, store)
    plain = twice = None
    if training["state"] != DIVERGED:
        surface = surface_of(study, model, prepared)
        plain = measured(study, recipe, surface)
        if recipe.rescaling is not None:
            example = prepared.inputs[:_EXAMPLES]
            twin = rescaled(model, example, recipe.rescaling, seed=_own_number(recipe))
            # Into the same network: what the surface knows of its graph stays true.
            model.load_state_dict(twin.state_dict())
            twice = measured(study, recipe, surface)
    row = {"run": run, "recipe": recipe.to_dict(), "training": training}
    store.keep_row(run, row | {"measured": plain, "rescaled": twice})
    yield "rows"


def _own_number(recipe: Recipe) -> int:
    """A seed that no two networks of a study share: each is rescaled by factors of its own."""
    return int(recipe.digest, 16)


def stored_network(recipe: Recipe, prepared: Prepared, run: str, store: Store) -> nn.Module:
    """A finished network from the folder.

    Args:
        recipe: How it was made.
        prepared: Its data.
        run: Its name.
        store: The study's folder.

    Returns:
        The network, in evaluation mode.

    Raises:
        ValueError: If it does not have the loss it was trained to.
    """
    model = network(recipe, prepared)
    store.load_model(run, model)
    model.eval()
    training = store.training(run)
    assert training is not None
    loss, _ = scores(model, prepared.inputs, prepared.targets)
    wanted = training["train_loss"]
    same = math.isclose(loss, wanted, rel_tol=_SAME, abs_tol=_SAME**2)
    if training["state"] != DIVERGED and not same:
        raise ValueError(
            f"the network of run `{run}` was trained to a loss of {wanted:g} and has {loss:g} now: "
            f"`{recipe.network}` or the data `{recipe.data}` are not what they were; bring them "
            "back, or run the study in another folder."
        )
    return model


def surface_of(study: Study, model: nn.Module, prepared: Prepared) -> LossSurface:
    """The training loss of a network, as a study measures it.

    Args:
        study: The study.
        model: The network.
        prepared: Its data.

    Returns:
        The surface.
    """
    many = study.measured
    return LossSurface(model, "cross_entropy", (prepared.inputs[:many], prepared.targets[:many]))


@functools.cache
def _graphs_of(network: str) -> ExportedGraphs:
    """The graphs exported in this process for the networks of one factory."""
    return ExportedGraphs()


def measured(study: Study, recipe: Recipe, surface: LossSurface) -> dict[str, Any]:
    """Measure a network as a study wants it; what fails is marked.

    Args:
        study: The study.
        recipe: Whose seed is used.
        surface: Its network.

    Returns:
        The report as plain values, without those of single units.
    """
    surface.graphs = _graphs_of(recipe.network)
    report = measure_requests(
        surface, resolve_measures(study.measures), seed=recipe.seed, strict=False
    )
    contents = report.to_dict()
    for entry in contents["measures"].values():
        entry["units"] = {}
    return contents
