"""The reference: every public name, made from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import flatgauge as fg
from making.docstrings import markdown, parsed

#: Packages with a page of their own, beside the names of `flatgauge` itself. The measures have
#: their pages already.
PACKAGES = (
    "estimators",
    "curvature",
    "symmetry",
    "geometry",
    "studies.networks",
    "studies.statistics",
)

#: From this length on, a signature has one parameter in a line.
_LINE = 88


def reference_pages() -> dict[str, str]:
    """Every page by its address, with an overview."""
    pages = {"reference/index.md": _overview()}
    for name in fg.__all__:
        pages[f"reference/{name}.md"] = _entry(f"fg.{name}", getattr(fg, name), level=1)
    for package in PACKAGES:
        pages[f"reference/{package}.md"] = _package_page(package)
    return pages


def _overview() -> str:
    lines = ["# Reference", "", "```python", "import flatgauge as fg", "```", ""]
    kinds = {
        "Functions": [name for name in fg.__all__ if inspect.isfunction(getattr(fg, name))],
        "Classes": [name for name in fg.__all__ if inspect.isclass(getattr(fg, name))],
    }
    for kind, names in kinds.items():
        lines += [f"## {kind}", "", "| | |", "|---|---|"]
        lines += [f"| [`fg.{name}`]({name}.md) | {_summary(getattr(fg, name))} |" for name in names]
        lines.append("")
    lines += ["## Packages", "", "| | |", "|---|---|"]
    lines.append("| [`fg.measures`](../measures/index.md) | One function for every measure. |")
    for package in PACKAGES:
        module = importlib.import_module(f"flatgauge.{package}")
        lines.append(f"| [`flatgauge.{package}`]({package}.md) | {_summary(module)} |")
    return "\n".join(lines)


def _package_page(package: str) -> str:
    """All public names of a package."""
    module = importlib.import_module(f"flatgauge.{package}")
    parts = [f"# flatgauge.{package}", markdown(inspect.getdoc(module) or "")]
    for name in module.__all__:
        item = getattr(module, name)
        if inspect.isfunction(item) or inspect.isclass(item):
            parts.append(_entry(name, item, level=2))
        else:
            parts.append(f"## {name}\n\nA value of type `{type(item).__name__}`.")
    return "\n\n".join(parts)


def _entry(title: str, item: Any, *, level: int) -> str:
    """A function, or a class with what it can do."""
    parts = [
        f"{'#' * level} {title}",
        _signature(title.rpartition(".")[2], item),
        markdown(inspect.getdoc(item) or ""),
    ]
    if inspect.isclass(item):
        for name, member in _members(item):
            head = f"{'#' * (level + 1)} {name}"
            if isinstance(member, property) or not callable(member):
                parts += [head, markdown(inspect.getdoc(member) or "")]
            else:
                parts += [head, _signature(name, member), markdown(inspect.getdoc(member) or "")]
    return "\n\n".join(part for part in parts if part)


def _members(item: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the project wrote, in the order of the source."""
    seen = set()
    for base in item.__mro__:
        if not base.__module__.startswith("flatgauge"):
            continue
        for name, member in vars(base).items():
            documented = inspect.getdoc(member) and (
                inspect.isfunction(member)
                or isinstance(member, property | classmethod | staticmethod)
                or type(member).__name__ == "cached_property"
            )
            if name.startswith("_") or name in seen or not documented:
                continue
            seen.add(name)
            yield name, getattr(item, name) if isinstance(member, classmethod) else member


def _signature(name: str, item: Any) -> str:
    """How it is called, in a fence: in a line, or with one parameter in a line."""
    found = inspect.signature(item)
    parts: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        if keyword and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(_parameter(parameter))
    empty = inspect.isclass(item) or found.return_annotation in (found.empty, "None", None)
    back = "" if empty else f" -> {_annotation(found.return_annotation)}"
    short = f"{name}({', '.join(parts)}){back}"
    if len(short) > _LINE:
        short = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){back}"])
    return f"```python\n{short}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    """A parameter as it is written in the source."""
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = parameter.annotation is not parameter.empty
    text = star + parameter.name + (f": {_annotation(parameter.annotation)}" if typed else "")
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {parameter.default!r}" if typed else f"{text}={parameter.default!r}"


def _annotation(annotation: Any) -> str:
    """A type, which most modules keep as text."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _summary(item: Any) -> str:
    """The first paragraph of a docstring, for a cell of a table."""
    return " ".join(parsed(inspect.getdoc(item) or "").summary.split()).replace("|", "\\|")
