"""Any frame as a table of a page, and as plain numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import to_plain
from flatgauge.report.coefficient import Number, number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class NamedTable:
    """A table with its words: published numbers beside ours, for example.

    Attributes:
        title: What it is, in a few words.
        caption: What stands in it, in a sentence or two.
        frame: Its rows; the index is the first column.
    """

    title: str
    caption: str
    frame: pd.DataFrame


@dataclass(frozen=True)
class FrameTable:
    """A frame prepared for a template.

    Attributes:
        key: What the page's JSON calls it.
        title: Over it; may be empty.
        caption: What stands in it.
        index: The heading of the first column.
        columns: The headings of the others, and whether they hold numbers.
        rows: The name of every row, and its cells.
    """

    key: str
    title: str
    caption: str
    index: str
    columns: list[tuple[str, bool]]
    rows: list[tuple[str, list[Number | str]]]


def frame_table(
    frame: pd.DataFrame,
    *,
    key: str,
    caption: str,
    title: str = "",
    columns: Sequence[Hashable] | None = None,
) -> FrameTable:
    """Prepare a frame for a template.

    Args:
        frame: The rows.
        key: What the page's JSON calls it.
        caption: What stands in it.
        title: Over it.
        columns: Which columns to show, in this order; None for all.

    Returns:
        The table.
    """
    shown = list(frame.columns) if columns is None else list(columns)
    cells = {column: [cell(value) for value in frame[column]] for column in shown}
    names = [row_name(label) for label in frame.index]
    rows = [(name, [cells[column][at] for column in shown]) for at, name in enumerate(names)]
    heads = [(str(c), any(isinstance(item, Number) for item in cells[c])) for c in shown]
    return FrameTable(key, title, caption, row_name(frame.index.names) or "", heads, rows)


def cell(value: Any) -> Number | str:
    """A value of a frame as a page shows it.

    Args:
        value: A number, a word, or nothing.

    Returns:
        A number with all its digits, or a text; empty where there is nothing.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Integral):
        whole = int(value)
        return number(whole, f"{whole}")
    if isinstance(value, Real):
        real = float(value)
        return "" if real != real else number(real, f"{real:.5g}")
    text = str(value)
    return "" if text in ("<NA>", "NaT") else text


def row_name(label: Any) -> str:
    """The name of a row: the parts of a nested one, joined."""
    if isinstance(label, (tuple, list)) or type(label).__name__ == "FrozenList":
        return ", ".join(str(part) for part in label if part is not None)
    return str(label)


def frame_contents(frame: pd.DataFrame | None) -> dict[str, Any] | None:
    """A frame as plain numbers: row by row, by name.

    Args:
        frame: The frame; None gives None.

    Returns:
        By name of the row, then by column; "nan" where there is no number.
    """
    if frame is None:
        return None
    columns = [str(column) for column in frame.columns]
    return {
        row_name(label): dict(zip(columns, map(_plain, row), strict=True))
        for label, row in zip(frame.index, frame.itertuples(index=False, name=None), strict=True)
    }


def column_contents(frame: pd.DataFrame | None) -> dict[str, list[Any]] | None:
    """A long frame as plain numbers: column by column, without its index.

    Args:
        frame: The frame; None gives None.

    Returns:
        By column.
    """
    if frame is None:
        return None
    return {str(column): [_plain(value) for value in frame[column]] for column in frame.columns}


def _plain(value: Any) -> Any:
    """What JSON can hold: numpy's numbers become Python's."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return to_plain(float(value))
    found = value.item() if hasattr(value, "item") else value
    return found if isinstance(found, bool) else str(found)
