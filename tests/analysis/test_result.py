"""Every result shows itself in the same ways, from the same tables."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from flatgauge.analysis.result import Result
from flatgauge.report.tables import Cell, Column, Table


@dataclass(frozen=True, repr=False)
class Number(Result):
    """The least that a result has."""

    kind = "number"
    value: float

    def to_dict(self):
        return self.plain_contents({"value": self.value})

    def tables(self):
        return [Table("A number", (Column("value"),), ((Cell(f"{self.value:.3g}", self.value),),))]


def test_text_notebook_and_page_show_the_same_tables(tmp_path):
    number = Number(1.23456)
    page = number.to_html(tmp_path / "number.html").read_text()
    assert repr(number) == "A number\n\nvalue\n1.23"
    assert 'data-value="1.23456"' in number._repr_html_()
    assert 'data-value="1.23456"' in page
    assert "http" not in page.replace("http-equiv", "")


def test_json_begins_with_the_schema(tmp_path):
    Number(math.inf).to_json(tmp_path / "number.json")
    contents = json.loads((tmp_path / "number.json").read_text())
    assert contents == {"schema": "flatgauge/number/1", "value": "inf"}
    assert next(iter(contents)) == "schema"


def test_later_versions_are_refused_and_files_without_one_are_read():
    Number.check_schema({})
    Number.check_schema({"schema": "flatgauge/number/1"})
    with pytest.raises(ValueError, match="update flatgauge"):
        Number.check_schema({"schema": "flatgauge/number/2"})


def test_show_opens_the_page_in_the_browser(monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    Number(1.0).show()
    assert opened[0].startswith("file://")
    assert opened[0].endswith(".html")
