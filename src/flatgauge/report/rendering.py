"""What all pages share: one file with its scripts in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flatgauge.report.sections import shorten

if TYPE_CHECKING:
    from flatgauge.report.layer_bars import Choice

#: What a page may load: nothing from anywhere, and no script but its own two.
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; worker-src blob:; base-uri 'none'; form-action 'none'"
)


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


def render_page(
    template: str, page: dict[str, Any], contents: dict[str, Any], *, drawn: bool
) -> str:
    """Fill a template.

    Args:
        template: Its name.
        page: What it shows.
        contents: All numbers, plain; they stand in the page as JSON.
        drawn: Whether anything is drawn: the library for that is large.

    Returns:
        The page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("flatgauge.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shorten"] = shorten
    environment.filters["breakable"] = _breakable
    environment.filters["html"] = lambda table, links: Markup(table.to_html(links))
    environment.tests["number"] = lambda value: hasattr(value, "full")
    templates = Path(__file__).parent / "templates"
    own = (templates / "page.js").read_text(encoding="utf-8")
    # A browser reads every end of a line as "\n", and takes the digest of that.
    library = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n") if drawn else ""
    scripts = [text for text in (library, own) if text]
    return environment.get_template(template).render(
        page,
        version=metadata.version("flatgauge"),
        contents=in_script(json.dumps(contents, ensure_ascii=False, allow_nan=False)),
        style=Markup((templates / "style.css").read_text(encoding="utf-8")),
        scripts=[Markup(text) for text in scripts],
        policy=_POLICY.format(scripts=" ".join(f"'sha256-{_digest(text)}'" for text in scripts)),
    )


def check_drawable(items: Sequence[Any]) -> None:
    """Refuse what has no picture.

    Args:
        items: What is to be drawn.

    Raises:
        TypeError: If one of them cannot be.
    """
    for item in items:
        if not isinstance(item, Drawable):
            raise TypeError(
                f"a {type(item).__name__} cannot be drawn; it needs `title`, `caption`, `notes`, "
                "`figure()` and `to_dict()`, as a Landscape or a Spectrum has."
            )


def choice_contents(choice: Choice) -> dict[str, Any]:
    """One of several pictures, for a template.

    Args:
        choice: The picture.

    Returns:
        Its words, and the figure as JSON.
    """
    figure = in_script(choice.figure.to_json())
    return {
        "name": choice.name,
        "note": choice.note,
        "positive": choice.positive,
        "wide": choice.wide,
        "figure": figure,
    }


def drawn_contents(item: Drawable) -> dict[str, Any]:
    """A picture with its words, for a template.

    Args:
        item: The picture.

    Returns:
        Its words, and the figure as JSON.
    """
    return {
        "title": item.title,
        "caption": item.caption,
        "notes": list(item.notes),
        "figure": in_script(item.figure().to_json()),
    }


def in_script(text: str) -> Any:
    """JSON that can stand in a script element: nothing in it can end the element.

    Args:
        text: The JSON.

    Returns:
        The same JSON, safe.
    """
    from markupsafe import Markup

    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def _breakable(name: str) -> Any:
    """A name that may be broken after its underscores."""
    from markupsafe import Markup, escape

    return Markup(escape(name).replace("_", Markup("_<wbr>")))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
