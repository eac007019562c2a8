"""The samples of a study: a data set by name, standardised, with some labels made random.

In: a recipe and the folder of data sets. Out: `StudyData`, training and test samples as tensors.
Clean samples are read once per process and shared by all recipes that agree in `sample_key`;
random labels are drawn for each recipe, from its seed.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flatgauge.estimators.linalg import child_generator
from flatgauge.loading.datasets import BUILTIN, load_dataset
from flatgauge.studies.recipe import Recipe

#: Data sets kept in memory; a study uses one or two.
_KEPT = 4

#: Data by this name are made of random numbers, others for every seed.
NOISE = "noise"

#: Shape and number of classes of data made of random numbers (Rangamani et al. 2019, §3.1).
_NOISE_SHAPE, _NOISE_CLASSES, _NOISE_SAMPLES = (1, 28, 28), 10, 500


@dataclass(frozen=True)
class StudyData:
    """Training and test samples of a network.

    Attributes:
        inputs: Of the training samples.
        targets: Their labels, as the network sees them.
        test_inputs: Of the test samples.
        test_targets: Their labels, never random.
        classes: How many classes there are.
        replaced: How many training labels differ from the true ones.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    replaced: int = 0


def load_data(recipe: Recipe, folder: str | None) -> StudyData:
    """The samples of a recipe, in its precision; data sets in files are read from the folder."""
    return randomise_labels(recipe, load_samples(recipe, folder))


def load_samples(recipe: Recipe, folder: str | None) -> StudyData:
    """The samples with their true labels; recipes of one `sample_key` share them."""
    if recipe.data == NOISE:
        return _noise(recipe.samples or _NOISE_SAMPLES, recipe.seed)
    return _load_clean(folder, *sample_key(recipe))


def sample_key(recipe: Recipe) -> tuple[str, int | None, int | None, int | None, bool]:
    """What recipes must have in common to share samples that are not noise."""
    return recipe.data, recipe.samples, recipe.test_samples, recipe.subset, recipe.standardise


def randomise_labels(recipe: Recipe, clean: StudyData) -> StudyData:
    """The data of a recipe made from its clean samples: its precision, its random labels."""
    dtype = getattr(torch, recipe.dtype)
    targets = draw_labels(clean.targets, recipe.random_labels, clean.classes, recipe.seed)
    return StudyData(
        clean.inputs.to(dtype),
        targets,
        clean.test_inputs.to(dtype),
        clean.test_targets,
        clean.classes,
        replaced=int((targets != clean.targets).sum()),
    )


def draw_labels(targets: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """Replace a share of labels by labels drawn evenly from all classes, by chance the true one."""
    count = round(share * len(targets))
    if not count:
        return targets
    generator = child_generator(seed, "random labels")
    chosen = torch.randperm(len(targets), generator=generator)[:count]
    mixed = targets.clone()
    mixed[chosen] = torch.randint(classes, (count,), generator=generator)
    return mixed


@lru_cache(maxsize=_KEPT)
def _load_clean(
    folder: str | None,
    data: str,
    samples: int | None,
    test_samples: int | None,
    subset: int | None,
    standardise: bool,
) -> StudyData:
    inputs, targets = _read_split(data, folder, "train", samples, subset)
    test_inputs, test_targets = _read_split(data, folder, "test", test_samples, subset)
    if standardise:
        # Pixels may be whole numbers.
        inputs, test_inputs = (
            x if x.is_floating_point() else x.float() for x in (inputs, test_inputs)
        )
        mean, deviation = inputs.mean(), inputs.std()
        if not deviation > 0:  # Nor is nan, of one number.
            raise ValueError(
                f"the training inputs of `{data}` are all the same and cannot be standardised; "
                "give others, or leave them as they are with `standardise=False`."
            )
        inputs, test_inputs = (inputs - mean) / deviation, (test_inputs - mean) / deviation
    classes = int(max(targets.max(), test_targets.max())) + 1
    return StudyData(inputs, targets, test_inputs, test_targets, classes)


def _read_split(
    data: str, folder: str | None, split: str, samples: int | None, subset: int | None
) -> tuple[Tensor, Tensor]:
    """The first samples of a split, or a drawn subset of it."""
    limit = samples if subset is None else None
    read = load_dataset(dataset_place(data, folder), split=split, limit=limit)
    inputs, targets = labelled_pair(data, read)
    if subset is None or samples is None:
        return inputs, targets
    if samples > len(inputs):
        raise ValueError(
            f"`samples={samples}` asks for more than `{data}` ({split}) has, which is "
            f"{len(inputs)}; ask for fewer."
        )
    generator = child_generator(subset, f"subset {split}")
    chosen = torch.randperm(len(inputs), generator=generator)[:samples]
    return inputs[chosen], targets[chosen]


def dataset_place(data: str, folder: str | None) -> str:
    """How a data set is written with the folder that holds its files."""
    if data not in BUILTIN or not BUILTIN[data].usage.endswith(":DIR"):
        return data
    if folder is None:
        raise ValueError(
            f"`{data}` is read from files; name the folder that holds them: `--data DIR` on the "
            "command line, `data=` in Python."
        )
    return f"{data}:{folder}"


def labelled_pair(data: str, found: Any) -> tuple[Tensor, Tensor]:
    """Inputs and class labels of what a data set gave, refused if it is something else."""
    two = isinstance(found, Sized) and not isinstance(found, Tensor) and len(found) == 2
    if not two or not all(isinstance(part, Tensor) for part in found):
        raise TypeError(
            f"`{data}` gives a {type(found).__name__}; a study trains on a pair of tensors "
            "(inputs, labels) that is held in memory; return that from the factory."
        )
    inputs, targets = found
    if targets.is_floating_point() or targets.dim() != 1:
        raise ValueError(
            f"the targets of `{data}` are {targets.dtype} of shape {tuple(targets.shape)}; a study "
            "trains classifiers: give whole class numbers of shape (N,)."
        )
    return inputs, targets


def _noise(samples: int, seed: int) -> StudyData:
    """Random inputs with random labels, of which nothing can be learned; tested on themselves."""
    generator = child_generator(seed, "noise")
    inputs = torch.randn(samples, *_NOISE_SHAPE, generator=generator, dtype=torch.float64)
    targets = torch.randint(_NOISE_CLASSES, (samples,), generator=generator)
    return StudyData(inputs, targets, inputs, targets, _NOISE_CLASSES)
