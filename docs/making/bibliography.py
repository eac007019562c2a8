"""The papers that docstrings cite by their keys, read from `docs/references.bib`."""

from __future__ import annotations

import re
from pathlib import Path

_FILE = Path(__file__).parents[1] / "references.bib"
_ACCENTS = {
    r"{\'n}": "ń",
    r"{\'z}": "ź",
    r"{\"o}": "ö",
    r"{\"u}": "ü",
    r"{\'e}": "é",
    r"{\'a}": "á",
}


def papers() -> dict[str, str]:
    """Every paper in a line of Markdown, by its key."""
    found = {}
    for kind_and_key, body in re.findall(r"@(\w+\{\w+),(.*?)\n\}", _FILE.read_text(), re.S):
        fields = dict(re.findall(r"(\w+)\s*=\s*\{((?:[^{}]|\{[^{}]*\})*)\}", body))
        found[kind_and_key.split("{")[1]] = _line({k: _plain(v) for k, v in fields.items()})
    return found


def _line(fields: dict[str, str]) -> str:
    """Authors, title, where and when."""
    authors = [" ".join(reversed(name.split(", "))) for name in fields["author"].split(" and ")]
    where = ", ".join(
        fields[key] for key in ("booktitle", "journal", "volume", "note", "year") if key in fields
    )
    return f"{', '.join(authors)}: *{fields['title']}*. {where}."


def _plain(text: str) -> str:
    """A field without braces and commands."""
    for command, letter in _ACCENTS.items():
        text = text.replace(command, letter)
    return re.sub(r"[{}]", "", " ".join(text.split()))
