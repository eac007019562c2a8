"""Spectra as text and as a short table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import align_columns
from flatgauge.estimators.estimate import Estimate, format_with_error
from flatgauge.runtime.resources import duration

if TYPE_CHECKING:
    from flatgauge.analysis.spectra.single import Spectrum

#: What a geometry makes of the Hessian, as text.
_DESCRIPTIONS = {
    "weights": "H",
    "per tensor": "D H D, in units of every tensor's norm",
    "per weight": "D H D, in units of every weight's size",
    "basis paths": "the Hessian by the values of basis paths",
    "balanced": "H of the balanced form",
}

#: What the pictures show.
CAPTION = (
    "How many eigenvalues lie in a decade, over the eigenvalue, on an axis that is logarithmic for "
    "both signs and linear about zero: by stochastic Lanczos quadrature, with a band of one "
    "standard error, faint where its steps cannot separate eigenvalues from zero. Ticks below "
    "are the largest eigenvalues, the pale one is the smallest that was seen."
)


def title_of(geometry: str) -> str:
    """The title of a picture.

    Args:
        geometry: The geometry.

    Returns:
        The title.
    """
    return f"Spectrum of {_DESCRIPTIONS.get(geometry, f'the curvature ({geometry})')}"


def summary(spectra: Mapping[str, Spectrum]) -> str:
    """The numbers of one or several spectra as a table, one column each.

    Args:
        spectra: By name; one without a name has no header.

    Returns:
        The text.
    """
    items = list(spectra.values())
    lines = [str(items[0].facts)] if len(items) == 1 else _heads(spectra)
    named = [("", *spectra)] if any(spectra) else []
    lines += ["", title_of(items[0].geometry), *align_columns([*named, *_rows(items)])]
    return "\n".join([*lines, *_notes(spectra)])


def _heads(spectra: Mapping[str, Spectrum]) -> list[str]:
    """What was measured, several surfaces, with their own caveats."""
    lines = []
    for name, item in spectra.items():
        facts = item.facts
        lines.append(
            f"{name}: {facts.model}, {facts.parameters:,} parameters, {facts.samples:,} samples, "
            f"loss ({facts.loss_name}) {facts.loss:.6g}, ‖gradient‖ {facts.gradient_norm:.3g}"
        )
        lines += [f"note on {name}: {note}" for note in facts.notes]
    return lines


def _rows(items: list[Spectrum]) -> list[tuple[str, ...]]:
    """The numbers."""
    count = max(len(item.top) for item in items)
    tops = [
        (f"λ{k + 1}", *(str(item.top[k]) if k < len(item.top) else "" for item in items))
        for k in range(count)
    ]
    return [
        ("eigenvalues", *(f"{item.size:,}" for item in items)),
        *tops,
        ("smallest seen", *(str(item.smallest) for item in items)),
        ("trace", *(str(item.trace) for item in items)),
        ("negative", *(f"{_share(i.negative)} below {-i.resolution:.2g}" for i in items)),
        ("near zero", *(f"{_share(i.near_zero)} within {i.resolution:.2g}" for i in items)),
        ("products", *(f"{item.matvecs} ({duration(item.seconds)})" for item in items)),
    ]


def _share(share: Estimate) -> str:
    """A share in percent, with its error."""
    if not share.value and share.error:
        return f"under {100 * share.error:.1g} %"
    if share.error < 5e-5:
        return f"{100 * share.value:.4g} %"
    return f"{format_with_error(100 * share.value, 100 * share.error)} %"


def _notes(spectra: Mapping[str, Spectrum]) -> list[str]:
    """All notes, each once."""
    holders: dict[str, list[str]] = {}
    for name, item in spectra.items():
        for note in item.notes:
            holders.setdefault(note, []).append(name)
    return [
        f"note on {', '.join(names)}: {note}" if len(names) < len(spectra) else f"note: {note}"
        for note, names in holders.items()
    ]
