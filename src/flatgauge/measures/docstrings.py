"""Docstrings of measures, assembled from what they declare.

In: the sections that a family of measures writes (`Definition:`, `Args:`, ...), the facts it
declares, and the signature. Out: a complete Google docstring. What the sections leave out is filled
in from the declaration and from `OPTIONS`, which holds one text per option. `help()`, the
catalogue, the pages of the documentation and the doctests read the result.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping

#: What an option means wherever a family does not say more.
OPTIONS = {
    "surface": "Where to measure.",
    "layers": "Glob patterns of the layers to take; None for all.",
    "parameters": '``"all"`` trainable ones, or the weights of ``"layers"`` only.',
    "surrogate": '``"normalized_cross_entropy"``, or None for the surface\'s own loss.',
    "all_columns": "Whether to be exact also with 64 or more outputs.",
    "probes": "Hessian products for what is not exact.",
    "generator": "Source of randomness, required where not everything is exact.",
}

#: What every measure of swept blocks costs, returns and raises.
OF_BLOCKS = """
Cost:
    One sweep, exact for layers in which the output is linear (with 64 or more outputs: the
    largest factors and random combinations, unless ``all_columns``). The others take Hessian
    products.

Returns:
    The estimate with every layer's value.

Raises:
    ValueError: If an option is unknown, the model has no layers, a pattern matches none, or a
        generator is needed and missing.
"""

_ORDER = (
    *("Definition", "Invariance", "Cost", "Reference", "Args", "Returns", "Raises", "Example"),
)
_WIDTH = 96

#: A name that a section lists, with the text on it.
_ENTRY = re.compile(r"(?m)^    (\w+): (.+(?:\n {8}.+)*)")


def sections(*texts: str) -> dict[str, str]:
    """The Google sections of texts by title: later ones replace earlier ones, but `Args` add up."""
    found: dict[str, str] = {}
    for text in texts:
        _, *parts = re.split(r"(?m)^(\w+):\n", inspect.cleandoc(text))
        for title, body in zip(parts[::2], parts[1::2], strict=True):
            earlier = f"{found[title]}\n" if title == "Args" and title in found else ""
            found[title] = earlier + body.strip("\n").rstrip()
    return found


def assemble(
    summary: str,
    texts: Iterable[str],
    *,
    names: Mapping[str, str],
    claims: Iterable[str],
    cost: str,
    reference: str,
    signature: inspect.Signature,
) -> str:
    """The docstring of a measure.

    Args:
        summary: Its definition in one line.
        texts: Sections; `Invariance` follows the claims.
        names: What takes the place of ``<key>`` in the texts: the name of the measure, and the
            arguments by which it differs from others of its family.
        claims: The groups that it is invariant to.
        cost: In a line, where no text has the section.
        reference: The keys of papers, as ``[key]``.
        signature: Of the function.

    Returns:
        The text, in Google's style.
    """
    found = {"Cost": _paragraph(f"{cost[0].upper()}{cost[1:]}."), **sections(*texts)}
    found["Invariance"] = _paragraph(f"{', '.join(claims)}. {found.get('Invariance', '')}")
    found["Reference"] = _paragraph(reference)
    options = OPTIONS | dict(re.findall(_ENTRY, found.get("Args", "")))
    found["Args"] = "\n".join(
        _paragraph(f"{option}: {options[option]}", hanging=True) for option in signature.parameters
    )
    body = "\n\n".join(f"{title}:\n{found[title]}" for title in _ORDER if found.get(title))
    for key, text in names.items():
        body = body.replace(f"<{key}>", text)
    return f"{summary}\n\n{body}\n"


def _paragraph(text: str, *, hanging: bool = False) -> str:
    """A text in lines of an indented section."""
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * (8 if hanging else 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
