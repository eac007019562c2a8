"""Several landscapes on the same axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flatgauge.landscaping.picture import Picture
from flatgauge.landscaping.single import Landscape

if TYPE_CHECKING:
    import pandas as pd


class Landscapes(Picture, Mapping[str, Landscape]):
    """Landscapes of several models by name, over the same ticks and drawn at the same height.

    Args:
        landscapes: By name; all over the same ticks.
    """

    def __init__(self, landscapes: Mapping[str, Landscape]) -> None:
        self._landscapes = dict(landscapes)

    def __getitem__(self, name: str) -> Landscape:
        if name not in self._landscapes:
            raise KeyError(f"there is no {name!r}; there are {', '.join(self._landscapes)}.")
        return self._landscapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._landscapes)

    def __len__(self) -> int:
        return len(self._landscapes)

    def __repr__(self) -> str:
        return f"Landscapes({', '.join(self)}; {self._first.words})"

    @property
    def _first(self) -> Landscape:
        return next(iter(self._landscapes.values()))

    def named(self) -> Mapping[str, Landscape]:
        """The landscapes in it, by name."""
        return self._landscapes

    @property
    def title(self) -> str:
        """What is seen, in a few words."""
        return f"{self._first.title}, side by side"

    @property
    def opening(self) -> str:
        """The first sentence of the caption."""
        return f"{', '.join(self)}, at the same scale. {self._first.opening}"

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the reader must know, with the model's name."""
        return tuple(f"{name}: {note}" for name, one in self.items() for note in one.notes)

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
