"""Measure a model as it is, and again after every rewriting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flatgauge.estimators import Estimate
from flatgauge.measures import Measure
from flatgauge.measuring import estimates_of
from flatgauge.surface import LossSurface
from flatgauge.symmetry.rescaling import Call
from flatgauge.symmetry.rewriting import Rewriting
from flatgauge.symmetry.signs import outputs_and_signs

#: Measures with their options.
Wanted = list[tuple[Measure, dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What one rewriting did.

    Attributes:
        rewrite: The rewriting.
        estimates: The measures after it, by name.
        outputs: The largest change of any output, beside the largest output.
        loss: The relative change of the loss.
        flipped: How many ReLU inputs changed their sign.
    """

    rewrite: Rewriting
    estimates: dict[str, Estimate]
    outputs: float
    loss: float
    flipped: int


class Retrial:
    """A surface whose model may be changed, measured as it is.

    Attributes:
        before: The measures of the model as it is, by name.
        signs: How many ReLU inputs are compared.
        double: Whether this is in double precision.

    Args:
        surface: The surface; its model is rewritten, and put back.
        wanted: The measures.
        call: Samples on which outputs and signs are compared.
        seed: Of everything random in the measures.
        strict: Whether a measure that fails is an error.
    """

    def __init__(
        self, surface: LossSurface, wanted: Wanted, call: Call, seed: int, *, strict: bool
    ) -> None:
        self._surface, self._wanted, self._call = surface, wanted, call
        self._seed, self._strict = seed, strict
        self._state = {k: v.detach().clone() for k, v in _state(surface.model).items()}
        self.double = surface.dtype is torch.float64
        self.before = self._measured()
        self._outputs, self._signs = outputs_and_signs(surface.model, call)
        self._loss = surface.value()
        self.signs = sum(s.numel() for s in self._signs)
        self._again: dict[int, dict[str, Estimate]] = {}

    def after(self, rewrite: Rewriting) -> Outcome:
        """Rewrite the model, measure again, and put it back.

        Args:
            rewrite: The rewriting.

        Returns:
            What it did.
        """
        model = self._surface.model
        try:
            rewrite(model)
            outputs, signs = outputs_and_signs(model, self._call)
            return Outcome(
                rewrite,
                self._measured(),
                outputs=_change(self._outputs, outputs),
                loss=relative(self._loss, self._surface.value()),
                flipped=sum(int((a != b).sum()) for a, b in zip(self._signs, signs, strict=False)),
            )
        finally:
            with torch.no_grad():
                for name, tensor in _state(model).items():
                    tensor.copy_(self._state[name])

    def confirmed(self, outcome: Outcome, name: str) -> tuple[Estimate, Estimate]:
        """A measure before and after the same rewriting, in double precision.

        Args:
            outcome: Of the rewriting here.
            name: The measure.

        Returns:
            Both estimates.
        """
        if id(outcome) not in self._again:
            self._again[id(outcome)] = self._precise.after(outcome.rewrite).estimates
        return self._precise.before[name], self._again[id(outcome)][name]

    @cached_property
    def _precise(self) -> Retrial:
        """The same in double precision."""
        surface = self._surface.twin(torch.float64)
        call = self._call.changed(lambda t: t.double() if t.is_floating_point() else t)
        return Retrial(surface, self._wanted, call, self._seed, strict=self._strict)

    def _measured(self) -> dict[str, Estimate]:
        found, _ = estimates_of(self._surface, self._wanted, seed=self._seed, strict=self._strict)
        return found


def relative(before: float, after: float) -> float:
    """How much a number changed, beside its size."""
    if before == after:
        return 0.0
    return abs(after - before) / abs(before) if before and math.isfinite(before) else math.inf


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest change of any output, beside the largest output."""
    worst = 0.0
    for one, other in zip(before, after, strict=True):
        if not torch.equal(one, other):
            size = float(one.double().abs().max())
            change = float((one.double() - other.double()).abs().max()) / (size or 1.0)
            worst = max(worst, math.inf if math.isnan(change) else change)
    return worst


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())
