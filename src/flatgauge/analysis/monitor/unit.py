"""In what a callback counts."""

from __future__ import annotations

#: What can be counted.
UNITS = ("epoch", "step")


def check_unit(unit: str) -> str:
    """Refuse what cannot be counted.

    Args:
        unit: What the user gave.

    Returns:
        The unit.

    Raises:
        ValueError: If it is neither epochs nor steps.
    """
    if unit not in UNITS:
        raise ValueError(f"`unit={unit!r}` is unknown; measure at every 'epoch' or every 'step'.")
    return unit
