"""The colours and dashes of all pictures."""

from __future__ import annotations

from typing import Any

#: One per thing that is compared; told apart also by people who do not see all colours, and on
#: light and dark ground alike (Okabe and Ito, 2008, without black and yellow).
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

#: How lines are broken, for matplotlib and plotly: where they coincide, all of them are seen.
_DASHES: tuple[tuple[Any, str], ...] = (
    ("-", "solid"),
    ((0, (4, 2)), "dash"),
    ((0, (6, 2, 1, 2)), "dashdot"),
    ((0, (1, 1.5)), "dot"),
)

#: Shapes of points, for matplotlib and plotly. One more than there are colours, so that things
#: beyond the sixth still differ from all before them.
_SHAPES = (
    ("o", "circle"),
    ("s", "square"),
    ("^", "triangle-up"),
    ("D", "diamond"),
    ("v", "triangle-down"),
    ("X", "x"),
    ("P", "cross"),
)

#: For heights; perceptually even.
HEIGHTS = "viridis"


def colour(number: int) -> str:
    """The colour of the n-th thing that is compared.

    Args:
        number: Which one, from 0.

    Returns:
        The colour; they repeat after the last.
    """
    return SERIES[number % len(SERIES)]


def dashes(number: int) -> tuple[Any, str]:
    """How the line of the n-th thing that is compared is broken.

    Args:
        number: Which one, from 0.

    Returns:
        For matplotlib, and for plotly.
    """
    return _DASHES[number % len(_DASHES)]


def shape(number: int) -> tuple[str, str]:
    """The shape of the points of the n-th thing that is compared.

    Args:
        number: Which one, from 0.

    Returns:
        For matplotlib, and for plotly.
    """
    return _SHAPES[number % len(_SHAPES)]
