"""A report from the plain numbers and strings that it was written as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatgauge.estimators import Estimate
from flatgauge.report.json_text import numbers
from flatgauge.report.run import Facts

T = TypeVar("T", Estimate, Facts)


def read_report(contents: Mapping[str, Any]) -> tuple[dict[str, Estimate], Facts, bool]:
    """Take a written report apart.

    Args:
        contents: As `Report.to_dict` makes them; what is unknown in them is left out.

    Returns:
        The estimates, the facts, and whether all that was asked for is there.

    Raises:
        ValueError: If it is no report.
    """
    measures, facts = contents.get("measures"), contents.get("facts")
    if not isinstance(measures, dict) or not isinstance(facts, dict):
        held = ", ".join(f"`{key}`" for key in contents) or "nothing"
        raise ValueError(
            f"this is no report: it needs `facts` and `measures`, and holds {held}; give what "
            "`Report.to_json` or `flatgauge measure --save` wrote."
        )
    estimates = {name: _filled(Estimate, entry, name) for name, entry in measures.items()}
    return estimates, _filled(Facts, facts, "facts"), bool(contents.get("complete", True))


def _filled(kind: type[T], entry: Any, where: str) -> T:
    """One record from its attributes."""
    if not isinstance(entry, dict):
        raise ValueError(f"`{where}` of this report is {entry!r}; it must hold named values.")
    found = {}
    for field in fields(kind):
        if field.name in entry:
            found[field.name] = _value(str(field.type), field.name, entry[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"`{where}` of this report lacks `{field.name}`; write it anew.")
    return kind(**found)


def _value(kind: str, name: str, value: Any) -> Any:
    """One attribute: numbers that JSON has not, tuples and tensors are what they were."""
    if kind.startswith("tuple"):
        return tuple(value)
    if kind.startswith("str"):
        return value
    value = numbers(value)
    return {key: _tensor(part) for key, part in value.items()} if name == "units" else value


def _tensor(values: Any) -> Tensor:
    tensor = torch.tensor(values)
    # What was written with all digits is read with all digits.
    return torch.tensor(values, dtype=torch.float64) if tensor.is_floating_point() else tensor
