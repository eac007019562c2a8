"""The gallery: every script is run, and shown with what it printed and drew.

A script is plain Python. Its docstring opens the page; `# %%` begins a part, whose first comment
is text and whose code is shown with its output. Pictures are the `.png` files that it writes.
"""

from __future__ import annotations

import ast
import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import matplotlib as mpl
import torch

_CELL = re.compile(r"^# %%.*\n", re.MULTILINE)


@dataclass
class Shown:
    """A script after it ran.

    Attributes:
        title: Of its page.
        text: The page, as Markdown.
        pictures: What it drew, by name.
    """

    title: str
    text: str
    pictures: dict[str, bytes] = field(default_factory=dict)


def scripts(folder: Path) -> list[Path]:
    """The scripts of the gallery, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def shown(script: Path, work: Path) -> Shown:
    """Run a script part by part, in a folder of its own.

    Args:
        script: The file.
        work: An empty folder, where it may write.

    Returns:
        Its page. A warning is an error: nobody wants to read it in a gallery.
    """
    source = script.read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, opening = docstring.partition("\n\n")
    page = Shown(title.rstrip("."), "")
    parts = [
        "---\nhide: [toc]\n---",
        f"# {page.title}",
        opening.strip(),
        f"[`{script.name}`]({script.name})",
    ]
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    with _apart(work):
        for text, code, compiled in _cells(source, script):
            known = set(work.glob("*.png"))
            told = io.StringIO()
            with redirect_stdout(told):
                exec(compiled, space)
            parts += [text, f"```python\n{code}\n```" if code else ""]
            output = told.getvalue().rstrip()
            parts.append(f"``` {{ .text .output }}\n{output}\n```" if output else "")
            for picture in sorted(set(work.glob("*.png")) - known):
                name = f"{script.stem}_{picture.name}"
                page.pictures[name] = picture.read_bytes()
                parts.append(f"![{page.title}]({name})")
    page.text = "\n\n".join(part for part in parts if part)
    return page


def _cells(source: str, script: Path) -> Iterator[tuple[str, str, CodeType]]:
    """Text, code to be shown, and code to be run, of every part; lines keep their numbers."""
    bounds = [0, *(found.end() for found in _CELL.finditer(source)), len(source)]
    for start, end in pairwise(bounds):
        body = _CELL.sub("", source[start:end])
        code = "\n" * source.count("\n", 0, start) + body
        compiled = compile(code, str(script), "exec")
        if start == 0:
            body = re.sub(r'^""".*?"""\n', "", body, count=1, flags=re.DOTALL)
        comment = re.match(r"(?:#.*\n)+", body)
        text = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE).strip() if comment else ""
        yield text, body[comment.end() if comment else 0 :].strip("\n"), compiled


@contextmanager
def _apart(folder: Path) -> Iterator[None]:
    """A folder, warnings, styles and random states of one's own."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            warnings.catch_warnings(),
            mpl.rc_context({"backend": "agg"}),
            torch.random.fork_rng(),
        ):
            warnings.simplefilter("error")
            # torch's own: the first forward-mode derivative uses torch.jit.script.
            warnings.filterwarnings("ignore", message="`torch.jit.script")
            yield
    finally:
        os.chdir(before)
