"""Pages as they are shown: names in code become links, marks of doctest go."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

import flatgauge as fg
from flatgauge.measures import registry

_FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)

#: Code in a line that is not part of a link already.
_CODE = re.compile(r"(?<![\[`])`([\w.]+)(\([^`]*\))?`(?![`\]])")

#: Links out of the folder of the documentation, to files that no page is made of.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests)[^)]*\)")


def addresses() -> dict[str, str]:
    """Where every name is explained."""
    found = {item.name: f"measures/{item.name}.md" for item in registry}
    for name in fg.__all__:
        found[f"fg.{name}"] = f"reference/{name}.md"
    return found


def linked(text: str, page: str, known: Mapping[str, str]) -> str:
    r"""A page with links where it names what has a page of its own.

    Args:
        text: Markdown.
        page: The address of this page; what it explains itself gets no link.
        known: Addresses by name.

    Returns:
        Markdown.

    Example:
        >>> linked("Take `rho_sum`.", "faq.md", {"rho_sum": "measures/rho_sum.md"})
        'Take [`rho_sum`](measures/rho_sum.md).'
        >>> linked("```\n`rho_sum`\n```", "faq.md", {"rho_sum": "measures/rho_sum.md"})
        '```\n`rho_sum`\n```'
    """

    def link(found: re.Match[str]) -> str:
        target = known.get(found[1])
        if target is None or target == page:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')})"

    def outside_fences(change: Callable[[str], str]) -> str:
        parts = _FENCE.split(text)
        return "".join(part if k % 2 else change(part) for k, part in enumerate(parts))

    def changed(part: str) -> str:
        lines = _OUTSIDE.sub(r"\1", part).split("\n")
        return "\n".join(line if line.startswith("#") else _CODE.sub(link, line) for line in lines)

    return outside_fences(changed)


def without_marks(text: str) -> str:
    """A page without what only doctest reads.

    Args:
        text: Markdown.

    Returns:
        Markdown.

    Example:
        >>> without_marks(">>> f()  # doctest: +SKIP")
        '>>> f()'
    """
    text = re.sub(r"[ ]*# doctest: .*$", "", text, flags=re.MULTILINE)
    text = text.replace("<BLANKLINE>", "").replace("```python\n>>>", "```pycon\n>>>")
    # Doctest wants an empty line before the fence that closes an example.
    return re.sub(r"\n\n```$", "\n```", text, flags=re.MULTILINE)
