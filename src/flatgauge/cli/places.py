"""Where a command writes: never over what it reads, never twice to one file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from flatgauge.cli.ranks import rank
from flatgauge.loading.files import expand

#: Options that name what is read: models, checkpoints, data and losses.
_READ = ("model", "models", "weights", "to", "data", "loss")


def check_places(params: Mapping[str, Any], *options: str) -> None:
    """Refuse outputs before anything is computed for them.

    Args:
        params: The options of a command, by name.
        *options: Those that name a file to write.

    Raises:
        ValueError: If a file is read by the command, or is to hold two outputs.
        OSError: If it cannot be written.
    """
    if rank():  # The first one writes.
        return
    from flatgauge.analysis.files import check_writable

    outputs = {f"--{name}": Path(params[name]) for name in options if params[name] is not None}
    for option, place in outputs.items():
        for word in _words_read(params):
            if _reads(word, place):
                raise ValueError(
                    f"`{option} {place}` would overwrite what this command reads (`{word}`); name "
                    "another file."
                )
        check_writable(place)
    for (one, place), (other, second) in combinations(outputs.items(), 2):
        if _same_file(place, second):
            raise ValueError(
                f"`{one} {place}` and `{other} {second}` are the same file, and the second would "
                "replace the first; give two names."
            )


def _words_read(params: Mapping[str, Any]) -> Iterator[str]:
    """The words that name what is read."""
    for name in _READ:
        words = params.get(name) or []
        yield from map(str, [words] if isinstance(words, (str, Path)) else words)


def _reads(word: str, place: Path) -> bool:
    """Whether a word (`file`, `file.py:name`, `module:name`, `name:folder`) means a file."""
    start = word.rpartition(":")[0]
    module = start.replace(".", "/")
    files = (word, start, f"{module}.py", f"{module}/__init__.py")
    if any(file and _same_file(place, Path(file)) for file in files):
        return True
    folders = [expand(name) for name in (word, word.partition(":")[2]) if name]
    target = Path(os.path.realpath(expand(place)))
    if not any(folder.resolve() in target.parents for folder in folders if os.path.isdir(folder)):
        return False
    from flatgauge.loading.files import is_data_file

    return target.exists() and is_data_file(target)


def _same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file (not to a device that swallows both)."""
    one, other = expand(one), expand(other)
    try:
        if one.exists() and not one.is_file():
            return False
        return os.path.realpath(one) == os.path.realpath(other) or (
            one.exists() and other.exists() and one.samefile(other)
        )
    except OSError:  # A name that no file can have.
        return False
