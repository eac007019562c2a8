"""Results that belong to a loss surface, kept for as long as they hold.

What enters is a key and a function that computes the result; what leaves is the result, computed at
most once while it holds: for the parameters as they are now, or for every value of the parameters
(`static`). The surface drops the former when it notices that its model has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch

from flatgauge.runtime.isolation import PROCESS_LOCK

T = TypeVar("T")


class SurfaceCache:
    """The results kept for one surface, by key.

    A key names all that a result depends on apart from model, loss and data: a frozen dataclass, or
    a tuple that begins with the name of its owner. Where random numbers matter, it holds the seed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check  # Refuses data that were written to; it reads all of them.
        self._current: dict[Hashable, Any] = {}
        self._static: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], T], *, static: bool = False) -> T:
        """Return the result under a key; compute it if it is not there."""
        results = self._static if static else self._current
        with PROCESS_LOCK, torch.inference_mode(False):
            if static:
                self._check()
            if key not in results:
                results[key] = compute()
            result: T = results[key]
        return result

    def clear(self, *, static: bool = True) -> None:
        """Drop the results for the present parameters; with `static` all others too."""
        self._current.clear()
        if static:
            self._static.clear()

    def static_results(self) -> Iterator[Any]:
        """Yield the static results of this surface."""
        yield from self._static.values()
