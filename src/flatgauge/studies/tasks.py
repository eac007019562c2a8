"""What a worker does for one network of a pool: train it, or measure it.

In: a `Task`, which holds all that is needed as plain values, so that it can be sent to another
process or machine. Out: `train_network` returns the contents of a checkpoint, `measure_network` a
row: scores, and the reports of the network as it is and rescaled. Nothing is written here.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatgauge.analysis.measurement import measure_requests
from flatgauge.analysis.request import resolve_measures
from flatgauge.estimators.linalg import child_generator, seed_global_rng
from flatgauge.graph.export import ExportedGraphs
from flatgauge.loading.datasets import load_dataset, normalise
from flatgauge.loading.models import build_model, load_weights, resolve
from flatgauge.studies.data import (
    NOISE,
    StudyData,
    dataset_place,
    load_samples,
    randomise_labels,
    sample_key,
)
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.store import Row, pack_model, read_training
from flatgauge.studies.training import DIVERGED, REACHED, make_network, mean_loss, train
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup

#: The state of a network that was not trained here; it enters statistics.
GIVEN = "given"

#: States of networks that enter statistics.
COUNTED = (REACHED, GIVEN)

#: Inputs that the symmetries of a network are found with.
_EXAMPLES = 2

#: A network is the same if its loss is, but for the order in which numbers are added.
_SAME = 1e-3

#: Sets of samples of checkpoints that a process keeps; a pool uses one.
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network of a pool: a recipe to train it by, or a checkpoint.

    Attributes:
        name: What it is called in the pool.
        columns: What makes it different: the recipe's fields, or columns of the user's. Values
            called `train_loss`, `test_loss`, `train_accuracy` or `test_accuracy` are taken as they
            are, and not computed.
        recipe: How to train it; None for a checkpoint.
        factory: Makes the model that the checkpoint belongs to, ``file.py:name``.
        checkpoint: The file of its weights.
        normalisation: Mean and standard deviation of its inputs, per channel or for all.
        group: A word for networks that belong together.
    """

    name: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    factory: str = ""
    checkpoint: str = ""
    normalisation: tuple[Any, Any] | None = None
    group: str = ""


@dataclass(frozen=True)
class PoolSamples:
    """Which samples checkpoints are measured and tested on.

    Attributes:
        data: What `fg.load_dataset` reads.
        test_data: The same for the test samples; None for those of the split "test" of `data`.
        samples: How many training samples; None for all.
        test_samples: How many test samples.
        tested: Whether test samples are needed.
    """

    data: str
    test_data: str | None = None
    samples: int | None = None
    test_samples: int | None = None
    tested: bool = True


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a step of one network needs.

    Attributes:
        network: Which.
        source: Its samples: a recipe of a study, or those of a pool of checkpoints.
        measures: Names with their options.
        measured: Measure on the first that many training samples; None for all.
        loss: As of `fg.LossSurface`.
        rescaling: How it is rewritten before it is measured again; None for not at all.
        seed: Of everything random in measures.
        rescaling_seed: Of random factors, a network's own.
        folder: Where data sets are that are read from files.
        weights: The checkpoint: a file, or its contents; None if it is still to be trained.
        factory: Where the code of the network is found, if not where it says.
        samples: PoolSamples that were read elsewhere; None to read them here.
    """

    network: Network
    source: Recipe | PoolSamples
    measures: Mapping[str, Mapping[str, Any]]
    measured: int | None
    loss: str
    rescaling: str | None
    seed: int
    rescaling_seed: int
    folder: str | None = None
    weights: Path | bytes | None = None
    factory: str | None = None
    samples: StudyData | None = None

    @property
    def sample_key(self) -> Any:
        """What tasks that share samples have in common; None if they are made by each."""
        if isinstance(self.source, PoolSamples):
            return self.source
        return None if self.source.data == NOISE else sample_key(self.source)

    @property
    def code(self) -> str:
        """What makes the network: a name, or a reference to the user's own code."""
        return self.network.factory if self.network.recipe is None else self.network.recipe.network


def train_network(task: Task) -> bytes:
    """Train the network of a task: the contents of a file with it, its recipe and its scores."""
    recipe = task.network.recipe
    assert recipe is not None
    return pack_model(recipe, train(recipe, load_task_data(task), task.factory))


def measure_network(task: Task) -> Row:
    """Measure the network of a task as it is, and rescaled if that is asked for.

    Args:
        task: What to measure, with its weights.

    Returns:
        The row, but for its name.
    """
    data = load_task_data(task)
    model, found = load_network(task, data)
    plain = again = None
    if found["state"] != DIVERGED:
        surface = make_surface(task, model, data)
        plain = _measure(task, surface)
        if task.rescaling is not None:
            example = data.inputs[:_EXAMPLES]
            twin = rescale_network(model, example, task.rescaling, seed=task.rescaling_seed)
            # Into the same network: what the surface knows of its graph stays true.
            model.load_state_dict(twin.state_dict())
            again = _measure(task, surface)
    return {"columns": dict(task.network.columns), **found, "measured": plain, "rescaled": again}


def load_task_data(task: Task) -> StudyData:
    """The samples of a task as its network sees them."""
    clean = load_task_samples(task) if task.samples is None else task.samples
    if isinstance(task.source, Recipe):
        return randomise_labels(task.source, clean)
    if task.network.normalisation is None:
        return clean
    mean, deviation = task.network.normalisation
    inputs, test_inputs = (
        normalise(x.clone(), mean, deviation) if len(x) else x
        for x in (clean.inputs, clean.test_inputs)
    )
    return StudyData(inputs, clean.targets, test_inputs, clean.test_targets, clean.classes)


def load_task_samples(task: Task) -> StudyData:
    """The samples that tasks of one `sample_key` share."""
    if isinstance(task.source, Recipe):
        return load_samples(task.source, task.folder)
    return _load_given(task.source, task.folder)


@functools.lru_cache(maxsize=_KEPT)
def _load_given(source: PoolSamples, folder: str | None) -> StudyData:
    """The samples of a pool of checkpoints."""
    inputs, targets = _read_pair(source.data, folder, "train", source.samples)
    test_inputs, test_targets = inputs[:0], targets[:0]
    if source.tested:
        place = source.test_data or source.data
        test_inputs, test_targets = _read_pair(place, folder, "test", source.test_samples)
    return StudyData(inputs, targets, test_inputs, test_targets, classes=0)


def _read_pair(
    data: str, folder: str | None, split: str, limit: int | None
) -> tuple[Tensor, Tensor]:
    found = load_dataset(dataset_place(data, folder), split=split, limit=limit)
    try:
        inputs, targets = found
        return inputs[:limit], targets[:limit]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{data}` gives a {type(found).__name__}; a pool is measured on a pair of tensors "
            "(inputs, targets) that is held in memory; return that from the factory."
        ) from error


def load_network(task: Task, data: StudyData) -> tuple[nn.Module, Row]:
    """The network of a task in evaluation mode, its state and scores; an error if it changed."""
    recipe = task.network.recipe
    with _as_file(task.weights) as place:
        if recipe is None:
            with seed_global_rng(0, "import"):
                model = build_model(task.factory or task.network.factory)
            load_weights(model, place)
            model.eval()
            digest = hashlib.sha256(place.read_bytes()).hexdigest()
            return model, {**_score_given(task, model, data), "checkpoint": digest}
        found = read_training(place, recipe)
        model = make_network(recipe, data, task.factory)
        load_weights(model, place)
    model.eval()
    loss, _ = mean_loss(model, data.inputs, data.targets)
    wanted = found["scores"]["train_loss"]
    same = math.isclose(loss, wanted, rel_tol=_SAME, abs_tol=_SAME**2)
    if found["state"] != DIVERGED and not same:
        raise ValueError(
            f"the network `{task.network.name}` was trained to a loss of {wanted:g} and has "
            f"{loss:g} now: `{recipe.network}` or the data `{recipe.data}` are not what they were; "
            "bring them back, or run the study in another folder."
        )
    return model, found


@contextmanager
def _as_file(weights: Path | bytes | None) -> Iterator[Path]:
    """A checkpoint as a file, for the time that it is read."""
    assert weights is not None
    if isinstance(weights, Path):
        yield weights
        return
    suffix = ".safetensors" if weights[8:9] == b"{" else ".pt"
    with tempfile.TemporaryDirectory(prefix="flatgauge-") as folder:
        place = Path(folder, f"network{suffix}")
        place.write_bytes(weights)
        yield place


def _score_given(task: Task, model: nn.Module, data: StudyData) -> Row:
    """The scores of a checkpoint, but for those that the user gave, and its state."""
    given, scores = task.network.columns, dict[str, float]()
    splits = (("train", data.inputs, data.targets), ("test", data.test_inputs, data.test_targets))
    for split, inputs, targets in splits:
        if f"{split}_loss" in given or not len(inputs):
            continue
        if task.loss == "cross_entropy" and targets.dim() == 1:
            loss, accuracy = mean_loss(model, inputs, targets)
            scores |= {f"{split}_loss": loss, f"{split}_accuracy": accuracy}
        else:
            scores[f"{split}_loss"] = _loss_surface(task, model, inputs, targets).value()
    squares = sum(float(part.detach().double().square().sum()) for part in model.parameters())
    scores["norm"] = math.sqrt(squares)
    known = (value for value in scores.values() if value is not None)
    return {"state": GIVEN if all(map(math.isfinite, known)) else DIVERGED, "scores": scores}


def make_surface(task: Task, model: nn.Module, data: StudyData) -> LossSurface:
    """The training loss of a network as its pool measures it."""
    many = task.measured
    surface = _loss_surface(task, model, data.inputs[:many], data.targets[:many])
    surface.graphs = _graphs_of(task.code)
    return surface


def _loss_surface(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> LossSurface:
    loss = resolve(task.loss) if ":" in task.loss else task.loss
    return LossSurface(model, loss, (inputs, targets))


@functools.cache
def _graphs_of(code: str) -> ExportedGraphs:
    """The graphs exported in this process for the networks of one factory."""
    return ExportedGraphs()


def _measure(task: Task, surface: LossSurface) -> dict[str, Any]:
    """The report of a surface as plain values, without those of single units."""
    requests = resolve_measures(task.measures)
    contents = measure_requests(surface, requests, seed=task.seed, strict=False).to_dict()
    for entry in contents["measures"].values():
        entry["units"] = {}
    return contents


# -- the same function, written with other weights ----------------------------------------------

_RANGE = re.compile(r"(layers|units)\s+(\S+?)\.\.(\S+)")


def rescale_network(model: nn.Module, example: Tensor, rescaling: str, *, seed: int) -> nn.Module:
    """A copy with the same function and other weights; an error if no scale is free."""
    kind, low, high, given = read_rescaling(rescaling)
    gauge = find_gauge(model, example)
    if kind != "units":
        gauge = gauge.layerwise()
    if not gauge.dim:
        raise ValueError(
            f"`rescaling={rescaling!r}` cannot be done: the network has no scale that is free; "
            "leave it out."
        )
    factors = _given_factors(gauge, given) if given else _draw_factors(gauge, kind, low, high, seed)
    return gauge.rescale(model, gauge.move(factors))


def read_rescaling(text: str) -> tuple[str, float, float, tuple[float, ...]]:
    """Read how a network is to be rewritten.

    Args:
        text: As in a recipe.

    Returns:
        ``"layers"`` or ``"units"``, the range of random factors, and given factors if there are.

    Raises:
        ValueError: If it has no meaning.

    Example:
        >>> read_rescaling("units 1/4..4"), read_rescaling("5, 4, 1/20")[-1]
        (('units', 0.25, 4.0, ()), (5.0, 4.0, 0.05))
    """
    found = _RANGE.fullmatch(text.strip())
    try:
        if found:
            low, high = (float(Fraction(part)) for part in (found[2], found[3]))
            if 0 < low <= high < math.inf:
                return found[1], low, high, ()
        else:
            given = tuple(float(Fraction(part.strip())) for part in text.split(","))
            if all(factor > 0 for factor in given) and math.isclose(math.prod(given), 1.0):
                return "layers", 0.0, 0.0, given
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(
        f"`rescaling={text!r}` cannot be read; write 'layers 5..25' or 'units 1/16..16' for random "
        "factors of a range, or the factors of all layers, with product 1: '5, 4, 1/20'."
    )


def _given_factors(gauge: GaugeGroup, factors: Sequence[float]) -> list[float]:
    """The coordinates of given factors of layers."""
    if len(factors) != gauge.dim + 1:
        raise ValueError(
            f"`rescaling` names the factors of {len(factors)} layers, but the network has "
            f"{gauge.dim + 1} that can be rescaled one by one; name one factor for each."
        )
    # A coordinate is the scale of a hidden layer's output: the product of all factors up to it.
    return list(accumulate(factors, mul))[:-1]


def _draw_factors(gauge: GaugeGroup, kind: str, low: float, high: float, seed: int) -> Tensor:
    """Random coordinates: even factors of layers; even exponents of units, half of them shared."""
    generator = child_generator(seed, "rescaling")
    uniform = torch.rand(gauge.dim, generator=generator, dtype=torch.float64)
    if kind == "layers":
        return (low + (high - low) * uniform).cumprod(0)
    # Factors of single units alone would average out, to nearly the same for every network.
    places = {site: number for number, site in enumerate(dict.fromkeys(gauge.sites))}
    shared = torch.rand(len(places), generator=generator, dtype=torch.float64)
    shared = shared[[places[site] for site in gauge.sites]]
    return low * (high / low) ** ((uniform + shared) / 2)
