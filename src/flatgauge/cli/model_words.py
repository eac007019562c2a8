"""Several models in the words of a command line, and a name for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from flatgauge.analysis.formatting import one_line

#: A model's reference and its checkpoint, None for the model as its factory makes it.
Entry = tuple[str, str | None]

_CHECKPOINTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")


def read_models(words: Sequence[str]) -> list[Entry]:
    """Read ``MODEL CHECKPOINT ... MODEL CHECKPOINT ...``: a checkpoint is for the model before it.

    Args:
        words: References to models (``file.py:factory``) and files.

    Returns:
        One entry per checkpoint, and one for a model that no checkpoint follows.

    Raises:
        ValueError: If a checkpoint comes before any model.

    Example:
        >>> read_models(["nets.py:lenet", "a.pt", "b.pt", "nets.py:pretrained"])
        [('nets.py:lenet', 'a.pt'), ('nets.py:lenet', 'b.pt'), ('nets.py:pretrained', None)]
    """
    entries: list[Entry] = []
    for word in words:
        if is_model(word):
            entries.append((word, None))
        elif not entries:
            raise ValueError(
                f"`{word}` is a checkpoint without a model before it; write "
                f"`path/to/file.py:factory {word} ...`."
            )
        elif entries[-1][1] is None:
            entries[-1] = entries[-1][0], word
        else:
            entries.append((entries[-1][0], word))
    return entries


def is_model(word: str) -> bool:
    """Whether a word refers to a model, ``file.py:factory``, and not to a file."""
    _, colon, name = word.rpartition(":")
    if not colon or word.endswith(_CHECKPOINTS) or Path(word).is_file():
        return False
    return all(part.isidentifier() for part in name.split("."))


def names_of(entries: Sequence[Entry]) -> list[str]:
    """A short name for every entry, different for all.

    Args:
        entries: Models with their checkpoints.

    Returns:
        The stems of the files; where these are the same, with as many folders before them as it
        takes, then with their endings and their models. A model without file has the name of its
        factory.

    Example:
        >>> names_of([("nets.py:net", f"runs/{run}/best.pt") for run in (1, 2)])
        ['1/best', '2/best']
    """
    deepest = max(len(Path(file or ".").parts) for _, file in entries) or 1
    ways: list[Callable[[Entry], str]] = [
        partial(_tail, depth=depth) for depth in range(1, deepest + 1)
    ]
    ways += [lambda entry: entry[1] or entry[0], lambda entry: " ".join(filter(None, entry))]
    for way in ways:
        names = [one_line(way(entry)) for entry in entries]
        if len(set(names)) == len(names):
            return names
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):  # The very same entry twice.
        seen[name] += 1
        names[number] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return names


def _tail(entry: Entry, depth: int) -> str:
    """The last parts of a checkpoint's path, without the ending."""
    model, file = entry
    if file is None:
        return model.rpartition(":")[2]
    return "/".join(Path(file).with_suffix("").parts[-depth:])
