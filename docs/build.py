"""Build the documentation: `python docs/build.py` (or `make docs`) writes the folder `site/`.

Pages of measures and of the reference are made from the registry and from docstrings, those of
the gallery by running its scripts; the others are the Markdown files beside this one. The site
asks the network for nothing: open `site/index.html`.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["NO_MKDOCS_2_WARNING"] = "1"  # Advertisement of the theme, on every start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # As the command line does.

from making.gallery_pages import scripts, shown
from making.measure_pages import measure_pages
from making.reference_pages import reference_pages
from making.site import DOCS, build_site
from making.tables import refresh

#: The order of the written pages; those that it does not name stand at the end of the last part.
WRITTEN = {
    "Start": ["index.md", "tour.md", "choosing.md", "coming_from.md", "faq.md"],
    "Understand": ["gauge_explained.md", "gauge.md", "grid.md", "basis_paths.md", "errata.md"],
    "Use": ["command_line.md", "report.md", "landscapes.md", "spectra.md", "studies.md"],
}


def main() -> None:
    """Make everything that is made, then the site."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DOCS.parent / "site", help="where to")
    parser.add_argument("--tables", action="store_true", help="only rewrite tables in the sources")
    arguments = parser.parse_args()
    if arguments.tables:
        return refresh()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # Before the gallery runs: its scripts enter measures of their own into the registry.
    made = {"measures": measure_pages(), "reference": reference_pages()}
    made["gallery"], pictures = gallery_pages(DOCS / "gallery")
    contents: dict[str, str | bytes] = {**pictures}
    for pages in made.values():
        contents |= pages
    build_site(contents, navigation(made), arguments.out)
    return None


def gallery_pages(folder: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """Run the gallery.

    Args:
        folder: With the scripts.

    Returns:
        Pages and pictures by address.
    """
    pages, pictures, lines = {}, {}, ["# Gallery", ""]
    lines += [
        "Scripts to run and to change; each takes seconds. The output is from a real run.",
        "",
    ]
    for script in scripts(folder):
        with tempfile.TemporaryDirectory() as work:
            page = shown(script, Path(work))
        pages[f"gallery/{script.stem}.md"] = page.text
        pictures |= {f"gallery/{name}": content for name, content in page.pictures.items()}
        lines.append(f"- [{page.title}]({script.stem}.md)")
    return {"gallery/index.md": "\n".join(lines), **pages}, pictures


def navigation(made: dict[str, dict[str, str]]) -> list[Any]:
    """Everything there is, in the order in which it is read."""
    named = {page for pages in WRITTEN.values() for page in pages} | {"catalogue.md"}
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    start, understand, use = WRITTEN.values()
    return [
        {"Start": [{"flatgauge": start[0]}, *start[1:]]},
        {"Gallery": [*made["gallery"]]},
        {"Measures": [*made["measures"], "catalogue.md"]},
        {"Understand": understand},
        {"Use": [*use, *sorted(written - named)]},
        {"Reference": [*made["reference"]]},
    ]


if __name__ == "__main__":
    main()
