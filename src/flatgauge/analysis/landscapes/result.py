"""The results: one landscape, and several on the same axes, with their pictures and texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.analysis.result import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from flatgauge.report.plots.landscape import ColourScale, Heights
    from flatgauge.report.tables import Table


class DrawnLandscapes(Result):
    """What one landscape and several share: how they are drawn and described."""

    title: str
    notes: tuple[str, ...]

    @abstractmethod
    def by_name(self) -> Mapping[str, Landscape]:
        """The landscapes in it, by name."""

    @property
    @abstractmethod
    def opening(self) -> str:
        """The first sentence of the caption."""

    @property
    def caption(self) -> str:
        """What is seen, in a few sentences."""
        sentences = [self.opening]
        scale = self._scale("loss", False)
        if scale.cut:
            sentences.append(
                f"Losses above {scale.high:.3g} are cut off, unless the scale is logarithmic."
            )
        everyone = self.by_name().values()
        if any(one.beyond.any() for one in everyone):
            sentences.append(
                "Where a pole of the loss lies in between, a curve is dotted, a plane hatched or "
                "open."
            )
        if not all(np.isfinite(one.loss).all() for one in everyone):
            sentences.append("Where the loss is infinite there is a gap.")
        return " ".join(sentences)

    @property
    def heading(self) -> str:
        """What a page with it is called."""
        return self.title

    def tables(self) -> list[Table]:
        """The caption, the loss at the models and the ends of what was seen, and notes."""
        from flatgauge.report.views.landscape import landscape_tables

        return landscape_tables(self)

    def plot(
        self,
        ax: Axes | None = None,
        *,
        what: str = "loss",
        kind: str | None = None,
        log: bool = False,
    ) -> Axes:
        """Draw with matplotlib.

        Args:
            ax: Where to; None makes a figure. Several planes come side by side in a figure of
                their own, and as lines of equal height in different colours in a given `ax`.
            what: ``"loss"`` or ``"accuracy"``.
            kind: ``"curve"`` for lines; ``"contour"`` (the default) or ``"surface"`` for planes.
            log: Whether heights are shown on a logarithmic scale.

        Returns:
            The axes; of several side by side the first. `ax.figure.savefig(path)` saves all.

        Raises:
            ValueError: If it cannot be drawn like that.
        """
        plot, _ = self._drawers(kind, "contour")
        axes: Axes = plot(self._heights(what), self._scale(what, log), ax)
        return axes

    def figure(self, *, what: str = "loss", kind: str | None = None, log: bool = False) -> Any:
        """Draw with plotly.

        Args:
            what: ``"loss"`` or ``"accuracy"``.
            kind: ``"curve"`` for lines; ``"surface"`` (the default) or ``"contour"`` for planes.
            log: Whether heights are shown on a logarithmic scale.

        Returns:
            A `plotly.graph_objects.Figure` on transparent ground.

        Raises:
            ValueError: If it cannot be drawn like that.
        """
        _, figure = self._drawers(kind, "surface")
        return figure(self._heights(what), self._scale(what, log))

    def to_png(self, path: str | Path, *, dpi: int = 200, **look: Any) -> Path:
        """Write the picture that `plot` draws.

        Args:
            path: Where to; the suffix (.png, .pdf, .svg) gives the format.
            dpi: Dots per inch.
            **look: ``what``, ``kind`` and ``log`` as for `plot`.

        Returns:
            The path.
        """
        from flatgauge.report.plots.style import write_picture

        whole: Any = self.plot(**look).figure
        return write_picture(path, whole, dpi=dpi)

    def to_html(self, path: str | Path, **look: Any) -> Path:
        """Write the picture as one page that needs nothing else.

        Args:
            path: Where to.
            **look: ``what``, ``kind`` and ``log`` as for `figure`.

        Returns:
            The path.
        """
        from flatgauge.report.result_page import write_result

        return write_result(path, self, self.figure(**look))

    def _scale(self, what: str, log: bool) -> ColourScale:
        from flatgauge.report.plots.landscape import scale_of

        return scale_of(self._heights(what), what, log=log)

    def _heights(self, what: str) -> list[Heights]:
        return [one.heights(what, name) for name, one in self.by_name().items()]

    def _drawers(self, kind: str | None, default: str) -> tuple[Any, Any]:
        """What draws it with matplotlib, and with plotly."""
        from flatgauge.report.plots.landscape import KINDS

        dims = next(iter(self.by_name().values())).dims
        if kind is None:
            kind = "curve" if dims == 1 else default
        check_kind(kind, dims)
        return KINDS[kind][1:]


@dataclass(frozen=True, kw_only=True, repr=False)
class Landscape(DrawnLandscapes):
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

    kind = "landscape"

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
        keys: tuple[str, ...] = ("sigma", "skeleton", "seed")
        shown = {key: self.options[key] for key in keys if key in self.options}
        shown |= {name: f"{value:.4g}" for name, value in self.details.items()}
        settings = ", ".join(f"{name} = {value}" for name, value in shown.items())
        return (
            f"Mean {self.options.get('loss', 'loss')} of {self.options.get('samples', 'all')} "
            f"samples at {size} points, from {first:.3g} to {last:.3g} along {self.words}"
            f"{f' ({settings})' if settings else ''}."
        )

    def by_name(self) -> dict[str, Landscape]:
        """Itself, without a name."""
        return {"": self}

    def heights(self, what: str, name: str = "") -> Heights:
        """What a picture of loss or accuracy (in per cent) shows, under a name among others."""
        from flatgauge.report.plots.landscape import Heights

        if what not in ("loss", "accuracy"):
            raise ValueError(f"`what={what!r}` must be 'loss' or 'accuracy'.")
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
        """Everything but the directions, as plain numbers, texts, lists and dicts."""
        names = ("space", "ticks", "loss", "accuracy", "beyond", "marks", "options", "details")
        contents = {"title": self.title, "caption": self.caption}
        contents |= {name: getattr(self, name) for name in names}
        return self.plain_contents(contents | {"notes": self.notes})


class Landscapes(DrawnLandscapes, Mapping[str, Landscape]):
    """Landscapes of several models by name, over the same ticks and drawn at the same height.

    Attributes:
        title: What the picture shows.
        notes: What the reader must know.

    Args:
        landscapes: By name; all over the same ticks.
    """

    kind = "landscapes"

    def __init__(self, landscapes: Mapping[str, Landscape]) -> None:
        self._landscapes = dict(landscapes)
        self.title = f"{self._first.title}: {', '.join(self)}"
        self.notes = self._combine_notes()

    def __getitem__(self, name: str) -> Landscape:
        if name not in self._landscapes:
            raise KeyError(f"there is no {name!r}; there are {', '.join(self._landscapes)}.")
        return self._landscapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._landscapes)

    def __len__(self) -> int:
        return len(self._landscapes)

    @property
    def _first(self) -> Landscape:
        return next(iter(self._landscapes.values()))

    def by_name(self) -> Mapping[str, Landscape]:
        """The landscapes in it, by name."""
        return self._landscapes

    @property
    def opening(self) -> str:
        """The first sentences of the caption."""
        return f"At the same scale: {', '.join(self)}. {self._first.opening}"

    def _combine_notes(self) -> tuple[str, ...]:
        """What the reader must know: once where it holds for all, else with the model's name."""
        shared = [n for n in self._first.notes if all(n in one.notes for one in self.values())]
        others = [
            f"{name}: {note}"
            for name, one in self.items()
            for note in one.notes
            if note not in shared
        ]
        return (*shared, *others)

    def to_frame(self) -> pd.DataFrame:
        """One row per model and point of the grid, as of one landscape."""
        import pandas as pd

        frames = {name: one.to_frame() for name, one in self.items()}
        return pd.concat(frames, names=["model"]).reset_index(level="model").reset_index(drop=True)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the directions, as plain numbers, texts, lists and dicts."""
        landscapes = {name: one.to_dict() for name, one in self.items()}
        contents = {"title": self.title, "caption": self.caption, "notes": self.notes}
        return self.plain_contents(contents | {"landscapes": landscapes})


def check_kind(kind: str, dims: int) -> None:
    """Refuse a way of drawing that does not show a line (1), or a plane (2)."""
    from flatgauge.report.plots.landscape import KINDS

    fitting = [name for name, (needed, *_) in KINDS.items() if needed == dims]
    if kind not in fitting:
        raise ValueError(
            f"`kind={kind!r}` cannot show {'a line' if dims == 1 else 'a plane'}; use "
            f"{' or '.join(map(repr, fitting))}."
        )
