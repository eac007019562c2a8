"""The process: leaving the model as found, memory and threads, groups of processes."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # Slow to load, and seldom needed.

        return metadata.version("flatgauge")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
