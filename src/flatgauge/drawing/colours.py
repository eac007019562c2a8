"""The colours of all pictures."""

from __future__ import annotations

#: One per thing that is compared; told apart also by people who do not see all colours, and on
#: light and dark ground alike (Okabe and Ito, 2008, without black and yellow).
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

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
