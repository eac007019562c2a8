"""Results as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def json_text(contents: dict[str, Any], path: str | Path | None) -> str:
    """Write plain contents as JSON.

    Args:
        contents: Made by `plain`.
        path: Where to write them; None to return the text only.

    Returns:
        The text.
    """
    text = json.dumps(contents, indent=2, ensure_ascii=False, allow_nan=False)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
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
