"""Several landscapes on the same axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.landscapes.picture import Picture
from flatgauge.analysis.landscapes.single import Landscape

if TYPE_CHECKING:
    import pandas as pd


class Landscapes(Picture, Mapping[str, Landscape]):
    """Landscapes of several models by name, over the same ticks and drawn at the same height.

    Attributes:
        title: What the picture shows.
        notes: What the reader must know.

    Args:
        landscapes: By name; all over the same ticks.
    """

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
        return {
            "title": self.title,
            "caption": self.caption,
            "notes": list(self.notes),
            "landscapes": {name: one.to_dict() for name, one in self.items()},
        }
