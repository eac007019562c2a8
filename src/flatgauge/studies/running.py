"""One run of a study: the network trained or taken from the folder, measured, and kept."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatgauge.asking import wanted_of
from flatgauge.measuring import report_of
from flatgauge.studies.preparing import Prepared, prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.rescaling import rescaled
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study
from flatgauge.studies.training import DIVERGED, network, train
from flatgauge.surface import LossSurface

#: Inputs that the symmetries of a network are found with.
_EXAMPLES = 2


def complete(study: Study, run: str, store: Store, folder: str | None) -> None:
    """Do what a run still lacks: its network, its row.

    Args:
        study: The study.
        run: The name of the run.
        store: The study's folder.
        folder: Where data sets are.
    """
    recipe = study.runs()[run]
    prepared = prepare(recipe, folder)
    if store.training(run) is None:
        store.keep_model(run, recipe, train(recipe, prepared))
    training = store.training(run)
    assert training is not None
    model = stored_network(recipe, prepared, run, store)
    row = {"run": run, "recipe": recipe.to_dict(), "training": training}
    if training["state"] == DIVERGED:
        store.keep_row(run, row | {"measured": None, "rescaled": None})
        return
    row["measured"] = measured(study, recipe, model, prepared)
    row["rescaled"] = None
    if recipe.rescaling is not None:
        example = prepared.inputs[:_EXAMPLES]
        twin = rescaled(model, example, recipe.rescaling, seed=recipe.seed)
        row["rescaled"] = measured(study, recipe, twin, prepared)
    store.keep_row(run, row)


def stored_network(recipe: Recipe, prepared: Prepared, run: str, store: Store) -> nn.Module:
    """A finished network from the folder.

    Args:
        recipe: How it was made.
        prepared: Its data.
        run: Its name.
        store: The study's folder.

    Returns:
        The network, in evaluation mode.
    """
    model = network(recipe, prepared)
    store.load_model(run, model)
    return model.eval()


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


def measured(study: Study, recipe: Recipe, model: nn.Module, prepared: Prepared) -> dict[str, Any]:
    """Measure a network as a study wants it; what fails is marked.

    Args:
        study: The study.
        recipe: Whose seed is used.
        model: The network.
        prepared: Its data.

    Returns:
        The report as plain values, without those of single units.
    """
    surface = surface_of(study, model, prepared)
    report = report_of(surface, wanted_of(study.measures), seed=recipe.seed, strict=False)
    contents = report.to_dict()
    for entry in contents["measures"].values():
        entry["units"] = {}
    return contents
