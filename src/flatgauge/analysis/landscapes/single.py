"""One landscape: arrays, pictures, tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.analysis.landscapes.picture import Picture, check_what

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.report.plots.heights import Heights


@dataclass(frozen=True, kw_only=True, repr=False)
class Landscape(Picture):
    """Loss and accuracy around a point.

    Attributes:
        space: Where the directions were drawn; ``"between"`` for lines to other models.
        ticks: Where along every direction the loss was computed (points,).
        loss: The loss, one axis per direction; infinite where there is none.
        accuracy: The share of labels that have the largest output; None without classes.
        beyond: Where a pole of the loss lies on the way from the centre (basis paths only): the
            loss there belongs to a network with another sign on some path.
        directions: The directions (dims, coordinates).
        title: What the picture shows.
        words: What the directions are, as text.
        marks: Points with a name, and their steps: the model itself, and those of `to`.
        options: The settings that it depends on.
        details: Numbers that belong to it, such as eigenvalues.
        notes: What the reader must know.
    """

    space: str
    ticks: NDArray[np.float64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64] | None = None
    beyond: NDArray[np.bool_]
    directions: Tensor
    title: str
    words: str
    marks: dict[str, tuple[float, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    details: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dims(self) -> int:
        """1 for a line, 2 for a plane."""
        return self.loss.ndim

    @property
    def centre(self) -> float | None:
        """The loss at the model itself; None if no point of the grid is there."""
        found = np.flatnonzero(self.ticks == 0.0)
        return float(self.loss[(int(found[0]),) * self.dims]) if len(found) else None

    @property
    def opening(self) -> str:
        """The first sentence of the caption."""
        size = " × ".join([str(len(self.ticks))] * self.dims)
        first, last = self.ticks[0], self.ticks[-1]
        shown = {k: self.options[k] for k in ("sigma", "skeleton", "seed") if k in self.options}
        settings = ", ".join(
            f"{name} = {value}" for name, value in (shown | self._format_details).items()
        )
        return (
            f"Mean {self.options.get('loss', 'loss')} of {self.options.get('samples', 'all')} "
            f"samples at {size} points, from {first:.3g} to {last:.3g} along {self.words}"
            f"{f' ({settings})' if settings else ''}."
        )

    @property
    def _format_details(self) -> dict[str, str]:
        return {name: f"{value:.4g}" for name, value in self.details.items()}

    def by_name(self) -> dict[str, Landscape]:
        """Itself, without a name."""
        return {"": self}

    def heights(self, what: str, name: str = "") -> Heights:
        """What a picture shows.

        Args:
            what: ``"loss"`` or ``"accuracy"`` (in per cent).
            name: Its name among others.

        Returns:
            Heights over the ticks.

        Raises:
            ValueError: If there is no such thing.
        """
        from flatgauge.report.plots.heights import Heights

        check_what(what)
        values = self.loss if what == "loss" else self.accuracy
        if values is None:
            raise ValueError(
                "there is no accuracy: outputs and targets are no classes and labels; draw "
                "`what='loss'`."
            )
        values = values if what == "loss" else 100 * values
        marks = self.marks if len(self.marks) > 1 else {"": self.marks.get("model", ())}
        return Heights(name, self.ticks, values, self.beyond, marks)

    def to_frame(self) -> pd.DataFrame:
        """One row per point of the grid: t1 (and t2), loss, accuracy if there is one, beyond."""
        import pandas as pd

        grid = np.meshgrid(*[self.ticks] * self.dims, indexing="ij")
        columns = {f"t{axis + 1}": values.reshape(-1) for axis, values in enumerate(grid)}
        columns["loss"] = self.loss.reshape(-1)
        if self.accuracy is not None:
            columns["accuracy"] = self.accuracy.reshape(-1)
        return pd.DataFrame(columns | {"beyond": self.beyond.reshape(-1)})

    def to_dict(self) -> dict[str, Any]:
        """Everything but the directions, as plain numbers, texts, lists and dicts.

        Returns:
            Numbers that JSON cannot hold are written as "inf", "nan".
        """
        names = ("space", "ticks", "loss", "accuracy", "beyond", "marks", "options", "details")
        contents = {"title": self.title, "caption": self.caption}
        found = contents | {name: getattr(self, name) for name in names} | {"notes": self.notes}
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Turn arrays and tuples into lists, and numbers that JSON lacks into texts."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
