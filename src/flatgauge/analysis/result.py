"""The base of every result: the same record as text, tables, JSON, a page and in a notebook.

A result class gives its contents (`to_dict`), its tables and, where there is one, its picture.
`Result` makes the rest of them: ``repr`` and notebooks show the same tables, `to_json` writes a
file that says what it holds, `show` opens the page.

JSON: the first key is ``"schema": "flatgauge/<kind>/<version>"``, such as ``flatgauge/report/1``.
A version rises when a key changes its meaning or goes; new keys do not raise it, and readers leave
out what they do not know. Files without a schema were written before it existed and have the
contents of version 1. Numbers that JSON cannot hold are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from flatgauge.analysis.files import json_text, read_json, to_plain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from flatgauge.report.tables import Table

#: Stands in what holds only part of what was asked for.
UNFINISHED = "interrupted: not everything that was asked for is here"


class Result(ABC):
    """What an analysis returns: contents, tables and pages of one record."""

    #: What the record is called in files.
    kind: ClassVar[str]
    #: The version of its files.
    version: ClassVar[int] = 1

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts, with the schema."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """What is shown of it, as tables."""

    def figure(self) -> Figure | None:
        """Its picture for a page, None where it has none."""
        return None

    @property
    def heading(self) -> str:
        """What a page with it is called."""
        return f"flatgauge {self.kind}"

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        return json_text(self.to_dict(), path)

    def to_html(self, path: str | Path) -> Path:
        """Write a page with the picture and the tables: one file, with nothing from outside.

        Args:
            path: Where; an existing file is replaced.

        Returns:
            The path.
        """
        from flatgauge.report.result_page import write_result

        return write_result(path, self)

    def show(self) -> None:
        """Show the page: below the cell of a notebook, else in the browser."""
        from flatgauge.report.result_page import show_page

        with tempfile.NamedTemporaryFile(
            prefix=f"flatgauge-{self.kind}-", suffix=".html", delete=False
        ) as file:
            place = Path(file.name)
        show_page(self.to_html(place))

    def __repr__(self) -> str:
        from flatgauge.report.tables import tables_text

        return tables_text(self.tables())

    def _repr_html_(self) -> str:
        from flatgauge.report.tables import tables_html

        return tables_html(self.tables())

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Self:
        """The result that `to_dict` was called on; what is unknown in the contents is left out."""
        raise NotImplementedError(f"a {cls.kind} cannot be read back; run it again.")

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a result that was written, whole or up to an interruption.

        Args:
            path: What `to_json`, `save=` or the command line wrote.

        Returns:
            The result; `complete` says whether all that was asked for is there.
        """
        return cls.from_dict(read_json(path))

    @classmethod
    def schema(cls) -> str:
        """What its files call themselves."""
        return f"flatgauge/{cls.kind}/{cls.version}"

    @classmethod
    def plain_contents(cls, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Contents as JSON can hold them, with the schema first."""
        found: dict[str, Any] = to_plain({"schema": cls.schema(), **contents})
        return found

    @classmethod
    def check_schema(cls, contents: Mapping[str, Any]) -> None:
        """Refuse contents of a later version; those without a schema are of version 1."""
        schema = contents.get("schema", cls.schema())
        kind, _, version = str(schema).removeprefix("flatgauge/").partition("/")
        if kind == cls.kind and version.isdigit() and int(version) > cls.version:
            raise ValueError(
                f"this file has the schema `{schema}`, and this flatgauge reads "
                f"`{cls.schema()}`; update flatgauge to read it."
            )
