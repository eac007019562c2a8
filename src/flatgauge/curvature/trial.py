"""Trying a plan out on a few samples: what the graph says must be what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatgauge.batch import Batch
from flatgauge.curvature.placing import place_taps
from flatgauge.curvature.plan import Plan
from flatgauge.curvature.tally import collect
from flatgauge.curvature.taps import Chunk, handlers_of
from flatgauge.graph import UnsupportedGraphError
from flatgauge.loss import prediction
from flatgauge.subject import Subject

#: How far the graph may differ from the model, relative to the size of what is compared.
_AGREEMENT = 1e-3


class Trial:
    """Runs model and graph side by side.

    Args:
        subject: The model.
        inputs: From a batch to what the graph is called with.
        with_labels: Whether a dict batch passes its labels on to the model.
    """

    def __init__(
        self, subject: Subject, inputs: Callable[[Batch], list[Any]], *, with_labels: bool
    ) -> None:
        self._subject = subject
        self._inputs = inputs
        self._with_labels = with_labels

    def logits(self, plan: Plan, few: Batch) -> Tensor:
        """What the graph gives where the plan ends."""
        # Every run gets samples of its own: a model may write to them.
        inputs = self._inputs(self._subject.place(few))
        with torch.no_grad():
            return plan.graph.run(self._subject.state, inputs, {}, plan.logits)

    def compare_outputs(self, plan: Plan, few: Batch) -> None:
        """Compare what graph and model return: an exporter may follow one branch of many.

        Args:
            plan: The plan.
            few: The samples.

        Raises:
            UnsupportedGraphError: If they differ.
        """
        output, got = self._outputs(plan, few)
        if got.shape != output.shape or not _close(got, output):
            raise UnsupportedGraphError(
                "the exported graph computes something else than the model itself; Python that "
                "depends on values or on the number of samples is the usual cause."
            )

    def other_gradients(self, plan: Plan, few: Batch) -> dict[str, str]:
        """The parameters whose gradient by the model is not that by the graph, and why."""
        leaves = dict(zip(self._subject.names, self._subject.leaves, strict=True))
        names = list(plan.sites)
        output, got = self._outputs(plan, few)
        weights = torch.linspace(1, 2, output.numel()).to(output).view_as(output)
        gradients = [
            torch.autograd.grad(
                (value * weights).sum(), [leaves[name] for name in names], allow_unused=True
            )
            for value in (output, got)
        ]
        found = {}
        for name, own, other in zip(names, *gradients, strict=True):
            absent = own is None and other is None
            if not absent and (own is None or other is None or not _close(other, own)):
                found[name] = "its gradient is not that of the graph (no_grad, custom backward)"
        return found

    def other_samples(self, plan: Plan, few: Batch) -> dict[str, str]:
        """The parameters at which one sample's column is heard in another's place, and why."""
        chunk = Chunk(few.samples, frozenset({"trace"}))
        try:
            return self._mixed(plan, few, chunk)
        finally:
            chunk.let_go()

    def _mixed(self, plan: Plan, few: Batch, chunk: Chunk) -> dict[str, str]:
        """The same, on a chunk that is let go of afterwards."""
        values = self._subject.state
        taps = place_taps(plan, chunk, values, frozenset(plan.sites))
        inputs = self._inputs(self._subject.place(few))
        logits = plan.graph.run(values, inputs, handlers_of(taps), plan.logits)
        ramp = torch.linspace(1, 2, logits[0].numel()).to(logits).view_as(logits[0])
        found = {}
        for sample in range(few.samples):
            column = torch.zeros_like(logits)
            column[sample] = ramp
            chunk.pass_back(logits, [(column, None)])
            for name, parts in collect(taps).items():
                assert parts.trace is not None
                parts.trace[sample] = 0
                if parts.trace.any():
                    found[name] = "samples are mixed or reordered between it and the output"
        return found

    def _outputs(self, plan: Plan, few: Batch) -> tuple[Tensor, Tensor]:
        """What the model returns, and what the graph does, both to be differentiated."""
        subject = self._subject
        output = subject(subject.leaves, subject.place(few), with_labels=self._with_labels)
        values = subject.state | dict(zip(subject.names, subject.leaves, strict=True))
        inputs = self._inputs(subject.place(few))
        return prediction(output), plan.finish(plan.graph.run(values, inputs, {}, plan.logits))


def _close(value: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree as far as rounding lets them."""
    return bool((value - expected).abs().max() <= _AGREEMENT * expected.abs().max())
