r"""Docstrings in Google's style as Markdown.

>>> print(markdown("Sum of all.\n\nArgs:\n    surface: Where\n        to measure.\n"))
Sum of all.
<BLANKLINE>
**Arguments**
<BLANKLINE>
- `surface`: Where to measure.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from making.bibliography import papers

#: Sections that list names with what they are, and what they are called on a page.
_LISTS = {"Args": "Arguments", "Raises": "Raises", "Attributes": "Attributes"}

_HEAD = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
_ENTRY = re.compile(r"^([*\w`.]+)(?: \(.*?\))?: ")


@dataclass(frozen=True)
class Docstring:
    """A docstring in parts.

    Attributes:
        summary: Its first paragraph.
        text: What stands before the first section, after the summary.
        sections: The bodies of sections by name.
    """

    summary: str
    text: str
    sections: dict[str, str]


def parsed(docstring: str) -> Docstring:
    """Take a docstring apart.

    Args:
        docstring: As `inspect.getdoc` gives it.

    Returns:
        Its parts.
    """
    opening, *parts = _HEAD.split(docstring)
    summary, _, text = opening.strip().partition("\n\n")
    bodies = (textwrap.dedent(body.strip("\n")) for body in parts[1::2])
    return Docstring(summary, text.strip(), dict(zip(parts[::2], bodies, strict=True)))


def markdown(docstring: str, *, heads: str = "**{}**") -> str:
    """A whole docstring as Markdown.

    Args:
        docstring: As `inspect.getdoc` gives it.
        heads: How the head of a section is written.

    Returns:
        The text.
    """
    found = parsed(docstring)
    parts = [prose(found.summary), prose(found.text)]
    for name, body in found.sections.items():
        parts += [heads.format(_LISTS.get(name, name)), section(name, body)]
    return "\n\n".join(part for part in parts if part)


def section(name: str, body: str) -> str:
    """The body of one section as Markdown.

    Args:
        name: Of the section.
        body: Without its indentation.

    Returns:
        The text.
    """
    if name in _LISTS:
        return "\n".join(f"- `{entry}`: {prose(text)}" for entry, text in _entries(body))
    if name == "Reference":
        known = papers()
        return "\n".join(f"- {known[key]}" for key in re.findall(r"\[(\w+)\]", body))
    return prose(body)


def _entries(body: str) -> list[tuple[str, str]]:
    """Names with what is said about them, in one line each."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            found.append((entry[1].strip("`"), line[entry.end() :]))
        elif found:
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
    return found


def prose(text: str) -> str:
    """Paragraphs: formulas between dollar signs, examples in fences, code between backticks.

    Args:
        text: Of a docstring, without indentation.

    Returns:
        Markdown.
    """
    text = re.sub(r"\.\. math:: ?((?:.+\n?)+)", _display, text)
    text = re.sub(r":math:`([^`]*)`", lambda found: f"${' '.join(found[1].split())}$", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text.strip("\n")) if part)


def _display(found: re.Match[str]) -> str:
    return f"$$ {' '.join(found[1].split())} $$\n"


def _paragraph(text: str) -> str:
    """One paragraph; where an example begins, a fence does."""
    lines = textwrap.dedent(text).splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith(">>>")), None)
    if start is None:
        indented = all(line.startswith("    ") for line in text.splitlines())
        return text if indented else "\n".join(lines)
    before = ["\n".join(lines[:start])] if start else []
    return "\n\n".join([*before, "\n".join(["```pycon", *lines[start:], "```"])])
