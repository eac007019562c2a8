"""The command line: arguments in, a public function called, its result printed.

Everything is imported when it is needed, so that Ctrl-C is answered from the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatgauge.cli.interrupts import quiet_interrupts

if TYPE_CHECKING:
    from flatgauge.cli.application import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; errors are one line on stderr unless ``--debug`` is given."""
    with quiet_interrupts():
        from flatgauge.cli.commands import main as run

        run()


def __getattr__(name: str) -> Any:
    if name == "app":
        from flatgauge.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
