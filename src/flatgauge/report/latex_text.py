r"""Formulas as plain text: LaTeX in, Unicode out, for terminals.

>>> unicode_formula(r"\sum_{ij} \theta_i^2 H_{ij} \le \frac{1}{2} \lambda_{\max}")
'Σᵢⱼ θᵢ² Hᵢⱼ ≤ 1/2 λₘₐₓ'
"""

from __future__ import annotations

import re

_GREEK = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ϵ",
    "varepsilon": "ε",
    "zeta": "ζ",
    "eta": "η",
    "theta": "θ",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "nu": "ν",
    "xi": "ξ",
    "pi": "π",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "phi": "φ",
    "varphi": "φ",
    "chi": "χ",
    "psi": "ψ",
    "omega": "ω",
    "Gamma": "Γ",
    "Delta": "Δ",
    "Theta": "Θ",
    "Lambda": "Λ",
    "Xi": "Ξ",
    "Pi": "Π",
    "Sigma": "Σ",
    "Phi": "Φ",
    "Psi": "Ψ",
    "Omega": "Ω",
}

#: Commands without argument.
_SYMBOLS = _GREEK | {
    "sum": "Σ",
    "prod": "Π",
    "int": "∫",
    "partial": "∂",
    "nabla": "∇",
    "infty": "∞",
    "cdot": "·",
    "times": "×",
    "odot": "⊙",
    "circ": "∘",
    "pm": "±",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
    "ne": "≠",
    "approx": "≈",
    "sim": "~",
    "propto": "∝",
    "in": "∈",
    "subset": "⊂",
    "cup": "∪",
    "cap": "∩",
    "to": "→",
    "mapsto": "↦",
    "langle": "⟨",
    "rangle": "⟩",
    "ell": "ℓ",
    "top": "ᵀ",
    "prime": "′",
    "dots": "…",
    "ldots": "…",
    "cdots": "⋯",
    "mid": "|",
    "lVert": "‖",
    "rVert": "‖",
    "|": "‖",
    "{": "{",
    "}": "}",
    ",": " ",
    ";": " ",
    ":": " ",
    "!": "",
    " ": " ",
    "quad": "  ",
    "qquad": "   ",
    "\\": "\n",
    "left": "",
    "right": "",
    "big": "",
    "Big": "",
    "bigl": "",
    "bigr": "",
    "displaystyle": "",
}

#: Commands whose argument stands for itself.
_PLAIN = {"operatorname", "mathrm", "mathbf", "mathcal", "text", "textrm", "mathit", "boldsymbol"}
_LETTERS = {"mathbb": dict(zip("REPNZC", "ℝ𝔼ℙℕℤℂ", strict=True))}
_ACCENTS = {"tilde": "\u0303", "hat": "\u0302", "bar": "\u0304", "dot": "\u0307", "vec": "\u20d7"}

_UPPER = dict(
    zip(
        "0123456789+-=()abcdefghijklmnoprstuvwxyz*T′ᵀ",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ*ᵀ′ᵀ",
        strict=True,
    )
)
_LOWER = dict(
    zip("0123456789+-=()aehijklmnoprstuvx′", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ′", strict=True)
)

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|[{}^_&]|\s+|.", re.DOTALL)


def unicode_formula(latex: str) -> str:
    """Write a formula in Unicode; what is not known stays as it is.

    Args:
        latex: Without dollar signs.

    Returns:
        One line, or several where the formula has line breaks.
    """
    tokens = _TOKEN.findall(latex.strip())
    text = _sequence(tokens)
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
    text = re.sub(r":math:`([^`]*)`", lambda found: _inline(found[1]), text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _block(found: re.Match[str]) -> str:
    """A formula on lines of its own, as indented as it was."""
    lines = unicode_formula(" ".join(found[2].split())).split("\n")
    return "\n".join(f"{found[1]}    {line}" for line in lines)


def _inline(latex: str) -> str:
    return unicode_formula(latex).replace("\n", " ")


def _sequence(tokens: list[str]) -> str:
    """Everything up to the end, or to the brace that closes what was opened before."""
    parts: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token == "}":
            break
        if token in "^_":
            parts.append(_script(token, _argument(tokens)))
        elif token == "{":
            parts.append(_sequence(tokens))
        elif token.startswith("\\"):
            parts.append(_command(token[1:], tokens))
        else:
            parts.append({"&": "", "'": "′"}.get(token, " " if token.isspace() else token))
    return "".join(parts)


def _argument(tokens: list[str]) -> str:
    """What the next brace holds, or the next sign."""
    while tokens and tokens[0].isspace():
        tokens.pop(0)
    if not tokens:
        return ""
    token = tokens.pop(0)
    if token == "{":
        return _sequence(tokens)
    return _command(token[1:], tokens) if token.startswith("\\") else token


def _command(name: str, tokens: list[str]) -> str:
    """One command with what belongs to it."""
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    if name in _PLAIN:
        return _argument(tokens)
    if name in _LETTERS:
        return "".join(_LETTERS[name].get(letter, letter) for letter in _argument(tokens))
    if name in _ACCENTS:
        return _argument(tokens) + _ACCENTS[name]
    if name in ("frac", "tfrac", "dfrac"):
        return f"{_grouped(_argument(tokens))}/{_grouped(_argument(tokens))}"
    if name == "sqrt":
        return f"√{_grouped(_argument(tokens))}"
    if name in ("begin", "end"):
        _argument(tokens)
        return ""
    # Functions (\max, \log, \exp) are called by their names; so is what is not known.
    return name


def _grouped(text: str) -> str:
    """Brackets around what is more than one thing."""
    return text if re.fullmatch(r"[\w.′‖|∂²ᵀ₀-₉ᵢⱼₖ]+|\(.*\)", text.strip()) else f"({text.strip()})"


def _script(kind: str, text: str) -> str:
    """What is raised or lowered: small letters where Unicode has them all."""
    small = _UPPER if kind == "^" else _LOWER
    text = text.strip()
    if text and all(letter in small for letter in text):
        return "".join(small[letter] for letter in text)
    return f"{kind}{text}" if re.fullmatch(r"[\w′]+", text) else f"{kind}({text})"
