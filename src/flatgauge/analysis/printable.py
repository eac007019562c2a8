"""Text that shows what it holds: no character in it can steer a terminal or hide others."""

from __future__ import annotations

import re

# Control characters but for tabs and ends of lines, separators, marks that turn the direction of
# writing, and halves of characters (from file names that are not UTF-8).
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Write characters that a terminal would act on, or could not show, as ``\uXXXX``.

    In JSON this is the same text.

    Args:
        text: Any text.

    Returns:
        The text; tabs and ends of lines are left.

    Example:
        >>> print(printable("net \x1b[31m"))
        net \u001b[31m
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""The same on a single line, for names.

    Args:
        text: Any text.

    Returns:
        The text without tabs and ends of lines.

    Example:
        >>> print(one_line("net\n1"))
        net\u000a1
    """
    return printable(text).replace("\n", "\\u000a").replace("\t", "\\u0009")
