"""The site: what is on it, in which order, and how mkdocs is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import BasePlugin
from mkdocs.structure.files import File, Files

from making.formulas import Formulas
from making.linking import addresses, linked, without_marks

DOCS = Path(__file__).parents[1]
THEME = Path(__file__).parent / "theme"

#: Everything a broken page can be guilty of is an error.
_VALIDATION = {
    "nav": dict.fromkeys(("omitted_files", "not_found", "absolute_links"), "warn"),
    "links": dict.fromkeys(
        ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
    ),
}

_PALETTE = [
    {
        "media": "(prefers-color-scheme: light)",
        "scheme": "default",
        "toggle": {"icon": "material/weather-night", "name": "Dark"},
    },
    {
        "media": "(prefers-color-scheme: dark)",
        "scheme": "slate",
        "toggle": {"icon": "material/weather-sunny", "name": "Light"},
    },
]

_FEATURES = [
    *("navigation.tabs", "navigation.indexes", "navigation.top", "navigation.footer"),
    *("content.code.copy", "search.highlight", "toc.follow"),
]


class Generated(BasePlugin):  # type: ignore[type-arg]
    """Adds pages that are made, not written, and finishes those that are written."""

    def __init__(self, contents: Mapping[str, str | bytes]) -> None:
        """Take what is to be added.

        Args:
            contents: By address.
        """
        super().__init__()
        self._contents = contents
        self._known = addresses()

    def on_files(self, files: Files, *, config: MkDocsConfig) -> Files:
        """Add everything that was made."""
        for address, content in self._contents.items():
            files.append(File.generated(config, address, content=content))
        return files

    def on_page_markdown(self, markdown: str, *, page: Any, **_: Any) -> str:
        """Link names, drop marks."""
        return without_marks(linked(markdown, page.file.src_uri, self._known))


def build_site(contents: Mapping[str, str | bytes], nav: list[Any], out: Path) -> None:
    """Write the site; anything that mkdocs would warn of is an error.

    Args:
        contents: Pages and pictures that were made, by address.
        nav: What stands where.
        out: The folder to write; its contents are replaced.

    Raises:
        ValueError: If a setting is refused.
        mkdocs.exceptions.Abort: If a link, an anchor or an entry of the navigation leads nowhere.
    """
    theme = {path.name: path.read_bytes() for path in THEME.iterdir()}
    config = MkDocsConfig(config_file_path=str(DOCS.parent / "pyproject.toml"))
    config.load_dict(_settings(nav, out))
    errors, warnings = config.validate()
    if errors or warnings:
        raise ValueError(f"mkdocs refuses its settings: {errors + warnings}")
    assets = {f"assets/{name}": content for name, content in theme.items()}
    config.plugins["flatgauge"] = Generated({**contents, **assets})
    build(config)


def _settings(nav: list[Any], out: Path) -> dict[str, Any]:
    return {
        "site_name": "flatgauge",
        "site_description": "How flat is the minimum of a trained network, whatever way it is "
        "written?",
        "docs_dir": str(DOCS),
        "site_dir": str(out),
        "strict": True,
        "use_directory_urls": False,
        "nav": nav,
        "validation": _VALIDATION,
        "exclude_docs": "making/\nbuild.py\n__pycache__/\n",
        "theme": {
            "name": "material",
            "font": False,
            "icon": {"logo": "material/gauge"},
            "features": _FEATURES,
            "palette": _PALETTE,
        },
        "extra_css": ["assets/site.css"],
        "extra": {"generator": False, "polyfills": ["assets/iframe-worker.js"]},
        "plugins": ["material/search", "material/offline"],
        "markdown_extensions": [
            *("tables", "admonition", "attr_list", "md_in_html", "sane_lists"),
            *("pymdownx.superfences", "pymdownx.details"),
            {"pymdownx.highlight": {"pygments_lang_class": True}},
            *({"toc": {"permalink": True}}, Formulas.__module__),
        ],
    }
