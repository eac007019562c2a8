"""Names in pictures: shown as they are, also where a library reads markup in them."""

from __future__ import annotations


def plain_text(text: str) -> str:
    """A text that plotly shows as it is: it reads some HTML in labels.

    Args:
        text: Any text.

    Returns:
        The text with markup made harmless.

    Example:
        >>> plain_text("a <b>")
        'a &lt;b&gt;'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plain_label(text: str) -> str:
    r"""A text that matplotlib shows as it is: it reads formulas between dollar signs.

    Args:
        text: Any text.

    Returns:
        The text for titles, labels and legends, which leave out what begins with an underscore.

    Example:
        >>> print(plain_label("a$b"))
        a\$b
    """
    escaped = text.replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped
