r"""Formulas of docstrings: LaTeX in, MathML for pages and Unicode for terminals out.

`latex2mathml` and `unicodeit` do the work. What is ours: fractions and roots in one line, and
scripts that Unicode has no letters for.

>>> unicode_formula(r"\sum_{ij} \theta_i^2 H_{ij} \le \frac{1}{2} \lambda_{\max}")
'∑ᵢⱼ θᵢ² Hᵢⱼ ≤ 1/2 λₘₐₓ'
"""

from __future__ import annotations

import re

#: Commands that unicodeit lacks or reads as an accent, before it is asked.
_PREPARED = (
    (r"\\\\", "\n"),
    (r"\\(?:operatorname|mathrm|mathbf|mathcal|text)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|big|Big|bigl|bigr|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:max|min|inf|sup|log|exp|det|dim)(?![a-zA-Z])", lambda found: found[0][1:]),
    (r"\\[tcd]?frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\{(?:[^{}]|\{[^{}]*\})*\})", r"\1/\2"),
    (r"\\(tilde|hat|bar|dot|vec)\s*(\\[a-zA-Z]+|\w(?![a-zA-Z]))", r"\\\1{\2}"),
    (r"\\(?:qquad|quad)", "  "),
    (r"\\[,;: ]", " "),
    (r"\\top", "T"),
    (r"\\sqrt\s*", "√"),
)
#: A group in braces that holds no other.
_GROUP = re.compile(r"\{([^{}]*)\}")


def mathml(latex: str, *, display: str = "block") -> str | None:
    r"""A formula as MathML.

    Args:
        latex: What stands in a docstring.
        display: ``"block"`` for a line of its own, ``"inline"`` within one.

    Returns:
        A ``<math>`` element, None where a command is unknown or a bracket is missing.

    Example:
        >>> mathml(r"x^2", display="inline")[-53:]
        '<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>'
        >>> mathml(r"\unknown")
    """
    from latex2mathml.converter import convert

    if latex.count("{") != latex.count("}"):
        return None
    found: str = convert(latex, display=display)
    return None if re.search(r">\\[a-zA-Z]", found) else found


def unicode_formula(latex: str) -> str:
    """Write a formula in Unicode; what is not known stays as a name.

    Args:
        latex: Without dollar signs.

    Returns:
        One line, or several where the formula has line breaks.
    """
    import unicodeit

    text = latex.strip()
    for pattern, plain in _PREPARED:
        text = re.sub(pattern, plain, text)
    text = unicodeit.replace(text.replace("'", "′"))
    while (simpler := _GROUP.sub(_without_braces, text)) != text:
        text = simpler
    text = re.sub(r"[{}\\&]", "", text)
    return "\n".join(re.sub(r" {2,}", " ", line).strip() for line in text.split("\n"))


def readable(docstring: str) -> str:
    r"""A docstring in which all formulas are written in Unicode.

    Args:
        docstring: With ``:math:`` and ``.. math::`` as Sphinx reads them.

    Returns:
        The text, with its paragraphs and indents.

    Example:
        >>> readable(r"The norm :math:`\|\theta\|^2` of ``w``.")
        'The norm ‖θ‖² of `w`.'
    """
    text = re.sub(r"^([ ]*)\.\. math::[ ]*(.*(?:\n\1[ ]{2,}.*)*)", _block, docstring, flags=re.M)
    text = re.sub(r":math:`([^`]*)`", lambda found: unicode_formula(found[1]), text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _block(found: re.Match[str]) -> str:
    """A formula on lines of its own, as indented as it was."""
    lines = unicode_formula(" ".join(found[2].split())).split("\n")
    return "\n".join(f"{found[1]}    {line}" for line in lines)


def _without_braces(found: re.Match[str]) -> str:
    """A group's content; in brackets after an operator that would tear it apart."""
    inner, before = found[1].strip(), found.string[found.start() - 1 : found.start()]
    after = found.string[found.end() : found.end() + 1]
    joined = (before in "/√^_" and before) or after == "/"
    simple = re.fullmatch(r"[\w.′‖|∂²ᵀ₀-₉ᵢⱼₖ]*|\(.*\)", inner)
    return f"({inner})" if joined and not simple else inner
