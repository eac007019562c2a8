"""Where the numbers of a page come from."""

from __future__ import annotations

from collections.abc import Mapping

from flatgauge.analysis.formatting import Number, duration, number
from flatgauge.analysis.measurement import Report, RunInfo


def provenance_of(reports: Mapping[str, Report]) -> dict[str, dict[str, str | Number]]:
    """The facts of every run.

    Args:
        reports: By name of the model.

    Returns:
        By fact, then by name of the model; facts that no run has are left out.
    """
    rows: dict[str, dict[str, str | Number]] = {}
    for model, report in reports.items():
        for fact, told in _facts(report.facts).items():
            rows.setdefault(fact, {})[model] = told
    return {fact: told for fact, told in rows.items() if any(told.values())}


def _facts(facts: RunInfo) -> dict[str, str | Number]:
    software = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return {
        "model": facts.model,
        "trainable parameters": f"{facts.parameters:,}",
        "data": facts.data,
        "samples": f"{facts.samples:,}",
        "loss": facts.loss_name,
        "value of the loss": number(facts.loss),
        "length of the gradient": number(facts.gradient_norm, f"{facts.gradient_norm:.3g}"),
        "weight decay": f"{facts.weight_decay:g}" if facts.weight_decay else "",
        "precision": facts.dtype,
        "device": facts.device,
        "Hessian products": facts.products or "",
        "sweeps": facts.sweep or "",
        "seed": str(facts.seed),
        "time": "" if facts.seconds is None else duration(facts.seconds),
        "finished": facts.finished,
        "software": software,
        "platform": f"{facts.platform}, {facts.threads} threads" if facts.platform else "",
    }
