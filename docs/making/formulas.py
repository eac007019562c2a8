"""Formulas of a page, between dollar signs, as MathML: nothing is rendered in the browser."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

from flatgauge.report.formula import mathml

#: Below that of code (190), so that dollars in code stay what they are, above all others.
_PRIORITY = 185


class FormulaError(ValueError):
    """A formula that cannot be written as MathML."""


class Formulas(Extension):
    """``$...$`` in a line, ``$$...$$`` on lines of its own."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Enter the pattern."""
        md.inlinePatterns.register(
            _Pattern(r"\$\$(.+?)\$\$|(?<![\\\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\w)", md),
            "formula",
            _PRIORITY,
        )


def makeExtension(**_: object) -> Formulas:
    """What Markdown calls for an extension that is named by its module."""
    return Formulas()


class _Pattern(InlineProcessor):
    def handleMatch(
        self, m: re.Match[str], data: str
    ) -> tuple[Element | str | None, int | None, int | None]:
        latex, display = (m[1], "block") if m[1] else (m[2], "inline")
        element = mathml(" ".join(latex.split()), display=display)
        if element is None:
            raise FormulaError(
                f"the formula `{latex}` has a command that flatgauge.report.formula does not "
                "know, or lacks a bracket; add the command there, or write it another way."
            )
        return self.md.htmlStash.store(element), m.start(0), m.end(0)
