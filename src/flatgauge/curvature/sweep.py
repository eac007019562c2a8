"""The sweep: columns of the loss's curvature, passed back once through the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.batch import Batch
from flatgauge.curvature.plan import Plan, make_plan, without_sweep
from flatgauge.curvature.taps import Chunk, Tap
from flatgauge.estimators.probes import required
from flatgauge.graph import ModelGraph, UnsupportedGraphError, in_precision
from flatgauge.isolation import isolated
from flatgauge.losses import Loss, prediction
from flatgauge.memory import format_bytes
from flatgauge.output_curvature import Column, OutputCurvature, dense
from flatgauge.surface import LossSurface

#: Up to this many columns per sample, all are swept; beyond, the heaviest and mixtures.
MOST_COLUMNS = 63

#: What is swept of more columns: the heaviest of every sample, and mixtures of the rest.
HEAVY, MIXTURES = 16, 4

#: What a chunk's activations should take, and how many samples it should hold at least.
_WORKING_SET, _SMALLEST_CHUNK = 24 * 2**20, 32

#: How far the graph may differ from the model, relative to the size of the output.
_AGREEMENT = 1e-3


@dataclass(frozen=True)
class Pass:
    """One chunk of samples, run forward and ready to have columns passed back.

    Attributes:
        taps: What listens, all over the model.
        shares: Every sample's share in the denominator of the loss (n,).
        columns: The columns that are passed back as they are.
        mixtures: Random mixtures of those that are left.
    """

    taps: list[Tap]
    shares: Tensor
    columns: Iterator[Column]
    mixtures: Iterator[Column]
    _chunk: Chunk
    _logits: Tensor

    def pass_back(self, column: Column) -> None:
        """Pass one column back through the model; the taps hear it."""
        values, factor = column
        self._chunk.factor = None if factor is None else factor.to(self._logits)
        if self._logits.requires_grad:
            torch.autograd.grad(
                self._logits,
                self._chunk.leaves,
                values.to(self._logits),
                retain_graph=True,
                allow_unused=True,
            )


class Sweeper:
    """Passes the columns of a loss's curvature back through a model, chunk by chunk.

    Attributes:
        plan: What is exact, and what listens where.
        loss: The loss whose curvature it is.
        own: Whether that is the surface's own.

    Args:
        surface: The surface.
        surrogate: Another loss of the same outputs and targets, None for the surface's own.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
    """

    def __init__(self, surface: LossSurface, surrogate: Loss | None = None) -> None:
        self.surface = surface
        self.loss = surrogate or surface.objective.loss
        self.own = surrogate is None
        self._plans: dict[Any, Plan] = {}
        self._values = surface.subject.state
        with isolated(surface.model, surface.device):
            few = next(surface.objective.chunks(4))
            self.plan = self._plan_for(few)
            if self.plan.exact:
                self._check(few)

    @property
    def chunk(self) -> int:
        """Samples at a time.

        Raises:
            MemoryError: If not even one sample fits the budget.
        """
        itemsize = self.surface.dtype.itemsize
        each = self.plan.numbers_per_sample() * itemsize
        if each > self.surface.memory:
            raise MemoryError(
                f"sweeping one sample needs about {format_bytes(each)}, but the budget is "
                f"{format_bytes(self.surface.memory)}; raise `memory=`."
            )
        wanted = _WORKING_SET // (self.plan.activations_per_sample() * itemsize)
        wanted = max(wanted, _SMALLEST_CHUNK)
        return int(min(wanted, self.surface.memory // each, self.surface.samples))

    def passes(
        self,
        names: frozenset[str],
        wanted: frozenset[str],
        *,
        all_columns: bool,
        generator: Generator | None,
    ) -> Iterator[Pass]:
        """Run the model forward on all data.

        Args:
            names: The parameters to listen for.
            wanted: What to gather of each.
            all_columns: Whether to pass all columns back, however many there are.
            generator: Source of randomness for mixtures, where there are too many columns.

        Yields:
            One chunk after the other.

        Raises:
            UnsupportedGraphError: If other operations run for some batches than for others.
        """
        with isolated(self.surface.model, self.surface.device):
            for batch in self.surface.objective.chunks(self.chunk):
                plan = self._plan_for(batch)
                if plan.exact != self.plan.exact:
                    raise UnsupportedGraphError(
                        "the model runs through other operations for some batches than for the "
                        "first; measure batches of one shape at a time."
                    )
                chunk = Chunk(batch.samples, wanted)
                taps = plan.taps(chunk, self._values, names)
                logits = plan.graph.run(self._values, self._inputs(batch), taps, plan.logits)
                curvature, kept = self._curvature(plan, logits.detach(), batch)
                columns, mixtures = _split(curvature, all_columns, generator)
                shares = self._shares(batch) * kept
                yield Pass(list(taps.values()), shares, columns, mixtures, chunk, logits)

    def _curvature(
        self, plan: Plan, logits: Tensor, batch: Batch
    ) -> tuple[OutputCurvature, Tensor]:
        """The loss's curvature by the logits, and which samples have a loss."""
        kept = torch.ones(batch.samples, dtype=torch.float64, device=logits.device)
        target = batch.target
        ends = plan.head_names()
        expected = [self.loss.after] if self.loss.after else []
        if self.loss.curvature is not None and ends == expected:
            return self.loss.curvature(logits, target), kept
        if self.loss.defined is not None:
            kept = self.loss.defined(logits).double()
            safe = torch.arange(logits[0].numel(), device=logits.device).to(logits)
            logits = torch.where(
                kept.bool().view(-1, *[1] * (logits.dim() - 1)), logits, safe.view(logits[0].shape)
            )

        def total(point: Tensor) -> Tensor:
            value = self.loss.total(plan.finish(point), target)
            if self.own and self.loss.count is None:
                value = value * self.surface.objective.denominator(batch)
            return value

        curvature = dense(total, logits)
        curvature.matrices *= kept[:, None, None]
        return curvature, kept

    def _plan_for(self, batch: Batch) -> Plan:
        """The plan for batches of this shape."""
        leaves = self._inputs(batch)
        key = tuple(tuple(x.shape[1:]) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self._plans:
            self._plans[key] = self._planned(batch)
        return self._plans[key]

    def _planned(self, batch: Batch) -> Plan:
        """Read the graph from a batch, and what can be swept of it."""
        subject = self.surface.subject
        example = batch.rows([0, 0, 0]) if batch.splittable else batch
        arguments, keywords = subject.arguments(example, with_labels=self.loss.own)
        model = in_precision(subject.model, subject.dtype)
        graph = ModelGraph(model, arguments, keywords, samples=3 if batch.splittable else 0)
        output = _predicted(graph, self.loss)
        if not graph.symbol:
            output = (
                "samples cannot be told apart: the batches do not have them in front, or the model "
                "treats their number as a constant"
            )
        if isinstance(output, str):
            return without_sweep(graph, subject.names, output)
        return make_plan(graph, output, subject.names)

    def _inputs(self, batch: Batch) -> list[Any]:
        """What the model is called with, flattened."""
        return pytree.tree_leaves(self.surface.subject.arguments(batch, with_labels=self.loss.own))

    def _shares(self, batch: Batch) -> Tensor:
        """What every sample adds to the denominator of the loss."""
        count = self.surface.objective.denominator
        if not self.own:
            return torch.ones(batch.samples, dtype=torch.float64, device=self.surface.device)
        whole = count(batch) / batch.samples
        mean = self.surface.objective.count / self.surface.samples
        if abs(whole - mean) <= 1e-12 * mean and count(batch.rows([0])) == whole:
            shares = [whole] * batch.samples
        else:
            shares = [count(batch.rows([i])) for i in range(batch.samples)]
        return torch.tensor(shares, dtype=torch.float64, device=self.surface.device)

    def _check(self, few: Batch) -> None:
        """Compare the graph with the model: an exporter may follow one branch of many."""
        subject, plan = self.surface.subject, self.plan
        with torch.no_grad():
            output = subject(subject.leaves, few, with_labels=self.loss.own)
            expected = prediction(output)
            got = plan.finish(plan.graph.run(self._values, self._inputs(few), {}, plan.logits))
        size = float(expected.abs().max())
        if got.shape != expected.shape or float((got - expected).abs().max()) > _AGREEMENT * size:
            raise UnsupportedGraphError(
                "the exported graph computes something else than the model itself; Python that "
                "depends on values or on the number of samples is the usual cause."
            )


def _split(
    curvature: OutputCurvature, all_columns: bool, generator: Generator | None
) -> tuple[Iterator[Column], Iterator[Column]]:
    """All columns, or the heaviest and mixtures of the rest where there are too many."""
    if all_columns or curvature.rank <= MOST_COLUMNS or not curvature.can_mix:
        return curvature.columns(), iter(())
    source = required(
        generator,
        caller="sweep(surface)",
        otherwise=f"`exact=True` to sweep all {curvature.rank} columns per sample",
    )
    return curvature.heavy(HEAVY), curvature.mixtures(MIXTURES, source)


def _predicted(graph: ModelGraph, loss: Loss) -> fx.Node | str:
    """The node that the loss is taken of, or why it is not known."""
    if loss.own:
        return "the model computes its loss itself (`loss=None`)"
    marked = pytree.tree_unflatten(list(graph.outputs), graph.output_spec)
    if isinstance(marked, fx.Node):
        return marked
    if loss.curvature is None:
        return "the loss is a function of several outputs"
    named = getattr(marked, "logits", None)
    if named is None and isinstance(marked, dict):
        named = marked.get("logits")
    if named is None and isinstance(marked, (tuple, list)) and marked:
        named = marked[0]
    return named if isinstance(named, fx.Node) else "the model returns no tensor"
