"""What one landscape and several share: how they are drawn and described."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.analysis.formatting import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flatgauge.analysis.landscapes.single import Landscape
    from flatgauge.report.plots.heights import ColourScale, Heights

#: How landscapes are drawn, by name: for how many directions, and by which module of plots.
KINDS = {"curve": (1, "curves"), "contour": (2, "contours"), "surface": (2, "reliefs")}


class Picture(ABC):
    """Something with landscapes in it that can be looked at."""

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

    def __repr__(self) -> str:
        """The caption, the loss at the model and the ends of what was seen, and notes."""
        lines = [self.caption, ""]
        width = max(len(name) for name in self.by_name())
        for name, one in self.by_name().items():
            seen = one.loss if one.beyond.all() else one.loss[~one.beyond]
            here = "not on the grid" if one.centre is None else f"{one.centre:.4g}"
            lines.append(
                f"{name:{width}}  loss at the model {here}, lowest {seen.min():.4g}, "
                f"highest {seen.max():.4g}".strip()
            )
        return printable("\n".join(lines + [f"note: {note}" for note in self.notes]))

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
        drawn, heights = self._choose_drawer(kind, "contour", what)
        axes: Axes = drawn.plot(heights, self._scale(what, log), ax)
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
        drawn, heights = self._choose_drawer(kind, "surface", what)
        return drawn.figure(heights, self._scale(what, log))

    def to_png(
        self,
        path: str | Path,
        *,
        what: str = "loss",
        kind: str | None = None,
        log: bool = False,
        dpi: int = 200,
    ) -> Path:
        """Write the picture that `plot` draws.

        Args:
            path: Where to; the suffix (.png, .pdf, .svg) says in which form.
            what: As for `plot`.
            kind: As for `plot`.
            log: As for `plot`.
            dpi: Dots per inch.

        Returns:
            The path.
        """
        from flatgauge.report.plots.forms import write_picture

        whole: Any = self.plot(what=what, kind=kind, log=log).figure
        return write_picture(path, whole, dpi=dpi)

    def to_html(
        self, path: str | Path, *, what: str = "loss", kind: str | None = None, log: bool = False
    ) -> Path:
        """Write the picture as one page that needs nothing else.

        Args:
            path: Where to.
            what: As for `figure`.
            kind: As for `figure`.
            log: As for `figure`.

        Returns:
            The path.
        """
        from flatgauge.report.plots.standalone import write_figure

        found = self.figure(what=what, kind=kind, log=log)
        return write_figure(path, found, title=self.title, caption=self.caption, notes=self.notes)

    def _scale(self, what: str, log: bool) -> ColourScale:
        from flatgauge.report.plots.heights import scale_of

        return scale_of(self._heights(what), what, log=log)

    def _heights(self, what: str) -> list[Heights]:
        return [one.heights(what, name) for name, one in self.by_name().items()]

    def _choose_drawer(
        self, kind: str | None, default: str, what: str
    ) -> tuple[Any, list[Heights]]:
        """Who draws it, and what."""
        dims = next(iter(self.by_name().values())).dims
        if kind is None:
            kind = "curve" if dims == 1 else default
        check_kind(kind, dims)
        drawer = importlib.import_module(f"flatgauge.report.plots.{KINDS[kind][1]}")
        return drawer, self._heights(what)


def check_kind(kind: str, dims: int) -> None:
    """Refuse a way of drawing that does not show a line, or a plane.

    Args:
        kind: Its name.
        dims: 1 for a line, 2 for a plane.

    Raises:
        ValueError: If it does not.
    """
    fitting = [name for name, (needed, _) in KINDS.items() if needed == dims]
    if kind not in fitting:
        raise ValueError(
            f"`kind={kind!r}` cannot show {'a line' if dims == 1 else 'a plane'}; use "
            f"{' or '.join(map(repr, fitting))}."
        )


def check_what(what: str) -> None:
    """Refuse what landscapes do not have.

    Args:
        what: ``"loss"`` or ``"accuracy"``.

    Raises:
        ValueError: If it is something else.
    """
    if what not in ("loss", "accuracy"):
        raise ValueError(f"`what={what!r}` must be 'loss' or 'accuracy'.")
