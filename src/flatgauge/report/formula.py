"""Formulas of the registry for a page: the LaTeX that docstrings use, as MathML."""

from __future__ import annotations

import re
from html import escape

#: Commands that are one symbol.
SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "theta": "θ",
    "lambda": "λ",
    "mu": "μ",
    "phi": "φ",
    "psi": "ψ",
    "varepsilon": "ε",
    "epsilon": "ϵ",
    "delta": "δ",
    "sigma": "σ",
    "rho": "ρ",
    "kappa": "κ",
    "tau": "τ",
    "eta": "η",
    "xi": "ξ",
    "Delta": "Δ",
    "Phi": "Φ",
    "Psi": "Ψ",
    "Sigma": "Σ",
    "infty": "∞",
    "nabla": "∇",
    "ell": "ℓ",
    "partial": "∂",
    "top": "⊤",
}

#: Commands that are an operator.
OPERATORS = {
    "le": "≤",
    "ge": "≥",
    "ne": "≠",
    "approx": "≈",
    "pm": "±",
    "to": "→",
    "times": "×",
    "dots": "…",
    "mid": "|",
    "sim": "∼",
    "odot": "⊙",
    "cdot": "·",
    "in": "∈",
    "langle": "⟨",
    "rangle": "⟩",
}

#: Operators that take what is below them; the big ones grow.
LIMITS = {"sum": "∑", "prod": "∏", "max": "max", "min": "min", "inf": "inf"}

SPACES = {",": "0.17em", "quad": "1em", "qquad": "1.4em", " ": "0.25em"}

#: Sizes of brackets, left to the browser.
_SIZES = ("left", "right", "big", "Big")

_FENCES = "()[]|‖⟨⟩"

#: Marks above a letter.
_ACCENTS = {"tilde": "~", "hat": "^", "bar": "¯", "dot": "˙"}

_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\S")


def mathml(latex: str, *, display: str = "block") -> str | None:
    r"""A formula as MathML.

    Args:
        latex: What stands in a docstring.
        display: ``"block"`` for a line of its own, ``"inline"`` within one.

    Returns:
        A ``<math>`` element, None where a command is unknown or a bracket is missing.

    Example:
        >>> mathml(r"\theta_i^2")
        '<math display="block"><msubsup><mi>θ</mi><mi>i</mi><mn>2</mn></msubsup></math>'
        >>> mathml(r"\unheardof")
    """
    reader = _FormulaReader(_TOKENS.findall(latex), latex)
    try:
        parts = reader.sequence(end=None)
    except (LookupError, ValueError):
        return None
    return f'<math display="{display}">{"".join(parts)}</math>'


def readable(latex: str) -> str:
    r"""A formula as plain text: symbols for the commands that are known, the rest as it stands.

    Args:
        latex: The formula.

    Returns:
        The text.

    Example:
        >>> readable(r"\sum_i \theta_i^2 \, \unheardof")
        '∑_i θ_i^2 \\unheardof'
    """
    known = SYMBOLS | OPERATORS | LIMITS | dict.fromkeys(_SIZES, "")
    known |= {"operatorname": "", "mathrm": "", "text": "", "|": "‖"} | dict.fromkeys(SPACES, " ")
    text = re.sub(r"\\([a-zA-Z]+|.)", lambda found: known.get(found[1], found[0]), latex)
    return " ".join(text.split())


class _FormulaReader:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[str], latex: str) -> None:
        self._tokens, self._place, self._latex = tokens, 0, latex

    def sequence(self, end: str | None) -> list[str]:
        """Elements up to a closing bracket, or to the end."""
        parts: list[str] = []
        while self._place < len(self._tokens):
            if self._tokens[self._place] == end:
                self._place += 1
                return parts
            parts.append(self._scripted())
        if end is not None:
            raise ValueError(f"`{self._latex}` lacks a closing bracket.")
        return parts

    def _scripted(self) -> str:
        """One element with what stands above and below it."""
        token = self._tokens[self._place]
        base = self._element()
        below, above, primes = "", "", ""
        while self._place < len(self._tokens) and self._tokens[self._place] in ("_", "^", "'"):
            mark = self._tokens[self._place]
            self._place += 1
            if mark == "_":
                below = self._element()
            elif mark == "^":
                above = self._element()
            else:
                primes += "<mo>′</mo>"
        above = f"<mrow>{primes}{above}</mrow>" if primes else above
        over = token.removeprefix("\\") in LIMITS and bool(below)
        if below and above:
            tag = "munderover" if over else "msubsup"
            return f"<{tag}>{base}{below}{above}</{tag}>"
        if below:
            tag = "munder" if over else "msub"
            return f"<{tag}>{base}{below}</{tag}>"
        return f"<msup>{base}{above}</msup>" if above else base

    def _element(self) -> str:
        """One element without scripts."""
        token = self._tokens[self._place]
        self._place += 1
        if token == "{":
            return f"<mrow>{''.join(self.sequence(end='}'))}</mrow>"
        if token == "\\|":
            return _operator("‖")
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{escape(token)}</mi>"
        if token in "_^}'":
            raise ValueError(f"`{self._latex}` has {token!r} where an expression is needed.")
        return _operator("−" if token == "-" else token)

    def _command(self, name: str) -> str:
        if name in SYMBOLS:
            return f"<mi>{SYMBOLS[name]}</mi>"
        if name in OPERATORS:
            return _operator(OPERATORS[name])
        if name in LIMITS:
            return _operator(LIMITS[name])
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"></mspace>'
        if name in _SIZES:
            return self._element()
        if name in ("frac", "tfrac"):
            return f"<mfrac>{self._element()}{self._element()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self._element()}</msqrt>"
        if name in _ACCENTS:
            mark = f'<mo stretchy="false">{_ACCENTS[name]}</mo>'
            return f'<mover accent="true">{self._element()}{mark}</mover>'
        if name == "mathbb":
            return {"E": "<mi>𝔼</mi>"}[self._words()]
        if name in ("operatorname", "mathrm", "text"):
            return self._named(name)
        raise LookupError(f"`{self._latex}` has the unknown command {name!r}.")

    def _named(self, command: str) -> str:
        """Upright words; an operator keeps its distance from what it is applied to."""
        words = escape(self._words())
        if command == "text":
            return f'<mtext>{words}</mtext><mspace width="0.25em"></mspace>'
        after = self._tokens[self._place] if self._place < len(self._tokens) else "("
        apart = command == "operatorname" and after not in ("(", "_", "^", "}")
        return f"<mi>{words}</mi>" + ('<mspace width="0.17em"></mspace>' if apart else "")

    def _words(self) -> str:
        """The letters within braces."""
        if self._tokens[self._place] != "{":
            raise ValueError(f"`{self._latex}` lacks an opening bracket.")
        end = self._tokens.index("}", self._place)
        words = "".join(self._tokens[self._place + 1 : end])
        self._place = end + 1
        return words


def _operator(text: str) -> str:
    """An operator; brackets and bars of the size of one line, without distance."""
    if text in _FENCES or text == "/":
        return f'<mo stretchy="false" lspace="0" rspace="0">{text}</mo>'
    return f"<mo>{escape(text)}</mo>"
