"""What a page can draw."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Drawable(Protocol):
    """A result with a picture: a landscape, a spectrum."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    @property
    def caption(self) -> str:
        """What is drawn, in a sentence or two."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader must know."""

    def figure(self) -> Any:
        """The picture as a plotly figure."""

    def to_dict(self) -> dict[str, Any]:
        """The numbers, plain."""
