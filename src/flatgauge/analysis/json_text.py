"""Results as JSON, and back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flatgauge.analysis.files import write_whole
from flatgauge.loading.files import check_readable, expand

#: How numbers are written that JSON has not.
_ODD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def json_text(contents: dict[str, Any], path: str | Path | None) -> str:
    """Write plain contents as JSON.

    Args:
        contents: Made by `plain`.
        path: Where to write them, as a whole or not at all; None to return the text only.

    Returns:
        The text.
    """
    text = json.dumps(contents, indent=2, ensure_ascii=False, allow_nan=False)
    if path is not None:
        write_whole(path, text + "\n")
    return text


def plain(value: Any) -> Any:
    """Turn a nested value into what JSON can hold.

    Args:
        value: Tensors, mappings, sequences, numbers and strings.

    Returns:
        Plain dicts, lists and numbers; "inf" and "nan" where JSON has no number.
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def numbers(value: Any) -> Any:
    """Turn "inf", "-inf" and "nan" in a nested value back into the numbers that `plain` met.

    Args:
        value: Plain dicts, lists, numbers and strings.

    Returns:
        The same with these strings as numbers.

    Example:
        >>> numbers({"a": ["inf", 1.0]})
        {'a': [inf, 1.0]}
    """
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return _ODD.get(value, value) if isinstance(value, str) else value


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a file of JSON.

    Args:
        path: The file.

    Returns:
        Its contents.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no JSON object.
    """
    place = expand(path)
    if not os.path.isfile(place):
        raise FileNotFoundError(
            f"`{path}` is not a file, seen from `{Path.cwd()}`; give a file that `to_json` or "
            "`--save` wrote."
        )
    check_readable(place)
    try:
        contents = json.loads(place.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"`{path}` holds no JSON ({error}); give a file that `to_json` or `--save` wrote."
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{path}` holds no report; give a file that `to_json` wrote.")
    return contents
