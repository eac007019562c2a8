"""Which published experiments there are, and at what sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flatgauge.studies.published import (
    batch_size,
    init_batch,
    mnist_layers,
    random_labels,
    rescaling,
)
from flatgauge.studies.study import Study

#: Minutes on the digits, an hour on two cores, the published setting.
PRESETS = ("quick", "medium", "paper")


@dataclass(frozen=True)
class Published:
    """An experiment of a paper.

    Attributes:
        name: On the command line.
        about: What it asks, in one line.
        paper: Where it is from.
        parts: Its pools of networks by name, at the size of a preset.
    """

    name: str
    about: str
    paper: str
    parts: Callable[[str], dict[str, Study]]


STUDIES: Mapping[str, Published] = {
    one.name: one
    for one in (
        Published(
            "random-labels",
            "Are networks sharper that had to fit random labels?",
            "Tsuzuku et al. 2019, §6",
            random_labels.parts,
        ),
        Published(
            "batch-size",
            "Do large batches end in sharper minima that generalize worse?",
            "Rangamani et al. 2019, Table 4; Yi et al. 2019, Figure 3",
            batch_size.parts,
        ),
        Published(
            "init-batch",
            "Does flatness follow the generalization gap over initialisations and batch sizes?",
            "Petzka et al. 2019, Figures 1 and 2",
            init_batch.parts,
        ),
        Published(
            "mnist-layers",
            "Which layer's flatness follows the generalization gap, and do sums follow it better?",
            "Petzka et al. 2019, Appendix C",
            mnist_layers.parts,
        ),
        Published(
            "rescaling",
            "Does the Riemannian spectral norm move when layers are rescaled?",
            "Rangamani et al. 2019, Tables 2 and 3",
            rescaling.parts,
        ),
    )
}


def published_study(name: str, preset: str = "quick") -> dict[str, Study]:
    """The pools of networks of a published experiment.

    Args:
        name: Of the experiment: see `STUDIES`.
        preset: ``"quick"``, ``"medium"`` or ``"paper"``.

    Returns:
        Studies by the name of the part.

    Raises:
        ValueError: If there is no such experiment or preset.
    """
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else "."
        raise ValueError(f"`{name}` is no study; there are {', '.join(STUDIES)}{hint}")
    if preset not in PRESETS:
        raise ValueError(f"`preset={preset!r}` is unknown; use one of {', '.join(PRESETS)}.")
    return STUDIES[name].parts(preset)
