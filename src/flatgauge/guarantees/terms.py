"""The terms of a bound, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

#: The columns of the table, in order.
COLUMNS = ("bound", "term", "value", "lower", "upper", "part", "note")


class NotCoveredError(ValueError):
    """A bound says nothing about a model of this kind."""


@dataclass(frozen=True)
class Term:
    """One term of a bound.

    Attributes:
        name: What it is.
        value: Its value; nan where there is none, for the reason that the note gives.
        lower: Where it was estimated, what it is at least with the confidence of the note.
        upper: And at most.
        part: Whether it is one of the parts that add up to the bound.
        note: What it means, and what it presumes.
    """

    name: str
    value: float
    lower: float = math.nan
    upper: float = math.nan
    part: bool = False
    note: str = ""


def total(terms: Iterable[Term]) -> float:
    """What the parts add up to."""
    return math.fsum(term.value for term in terms if term.part)


def verdict(value: float) -> Term:
    """Whether a bound on an error says anything."""
    vacuous = not value < 1
    note = "it is 1 or more, and no error is" if vacuous else "it is below 1: it says something"
    return Term("vacuous", float(vacuous), note=f"1 for yes, 0 for no: {note}")


def table(bounds: Sequence[tuple[str, Sequence[Term]]]) -> pd.DataFrame:
    """All terms of all bounds.

    Args:
        bounds: Names with terms.

    Returns:
        A frame, one row per term.
    """
    import pandas as pd

    rows = [
        (name, term.name, term.value, term.lower, term.upper, term.part, term.note)
        for name, terms in bounds
        for term in terms
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
