"""What a measure does not see, by its own claim: the order of all comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flatgauge.measures import registry

#: By what rescalings cannot move: the title of the group, and what it says.
BLINDNESS = {
    "units": "Blind to the scale of every unit",
    "layers": "Blind to the scale of whole layers only",
    "nothing": "Classical: depend on how the network is written",
}


def blindness(name: str, options: Mapping[str, Any]) -> str:
    """Which rescalings a measure claims not to see: a key of `BLINDNESS`.

    Args:
        name: Of the measure.
        options: With which it was measured.

    Returns:
        "units", "layers" or "nothing"; the last also for names that no measure has.
    """
    claims = registry[name].claims(options) if name in registry else frozenset()
    if "nodewise" in claims:
        return "units"
    return "layers" if "layerwise" in claims else "nothing"


def by_blindness(names: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Sort measures by what they do not see.

    Args:
        names: With their options.

    Returns:
        The names by key of `BLINDNESS`; keys without names are left out.
    """
    found: dict[str, list[str]] = {key: [] for key in BLINDNESS}
    for name, options in names:
        found[blindness(name, options)].append(name)
    return {key: members for key, members in found.items() if members}
