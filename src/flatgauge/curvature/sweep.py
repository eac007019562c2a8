"""The sweep: columns of the loss's curvature, passed back once through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.batch import Batch
from flatgauge.budget import too_little
from flatgauge.curvature.placing import place_taps
from flatgauge.curvature.plan import Plan, make_plan, without_sweep
from flatgauge.curvature.taps import Chunk, Tap, handlers_of
from flatgauge.curvature.trial import Trial
from flatgauge.curvature.workspace import Workspace
from flatgauge.estimators.probes import required
from flatgauge.exports import graph_of
from flatgauge.graph import Handler, ModelGraph, UnsupportedGraphError, in_precision
from flatgauge.isolation import isolated
from flatgauge.loss import prediction
from flatgauge.nested import map_tensors
from flatgauge.nodes import source_line
from flatgauge.objective import SHARDED
from flatgauge.output_curvature import Column, Dense, Mixable, OutputCurvature, dense, gradient
from flatgauge.surface import LossSurface

#: Up to this many columns per sample, all are swept; beyond, the heaviest and mixtures.
MOST_COLUMNS = 63

#: What is swept of more columns: the heaviest of every sample, and mixtures of the rest.
HEAVY, MIXTURES = 13, 4

#: What a chunk's activations should take (half of it where layers have many positions, which
#: need as much again for patches and gradients), and how many samples it should hold at least.
_WORKING_SET, _SMALLEST_CHUNK = 24 * 2**20, 32

#: Up to this many outputs per sample, any loss's second derivatives by them are written out.
_DENSE = 256


@dataclass(frozen=True)
class Pass:
    """One chunk of samples, run forward and ready to have columns passed back.

    Attributes:
        taps: What listens, all over the model.
        shares: Every sample's share in the denominator of the loss (n,).
        left_out: Samples that would count, but whose outputs have no loss.
        columns: The columns that are passed back as they are.
        mixtures: Random mixtures of those that are left.
    """

    taps: list[Tap]
    shares: Tensor
    left_out: int
    columns: Iterator[Column]
    mixtures: Iterator[Column]
    _chunk: Chunk
    _logits: list[Tensor]

    def pass_back(self, columns: Iterable[Column]) -> None:
        """Pass columns back through the model; the taps hear them."""
        self._chunk.pass_back(self._logits[0], columns)

    def let_go(self) -> None:
        """Free the graph now, though who looped over the passes still holds this one."""
        self._logits.clear()
        self._chunk.let_go()
        self.taps.clear()


class Sweeper:
    """Passes the columns of a loss's curvature back through a model, chunk by chunk.

    Attributes:
        plan: What is exact, and what listens where.
        loss: The loss whose curvature it is.

    Args:
        surface: The surface.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
    """

    def __init__(self, surface: LossSurface) -> None:
        if surface.subject.sharded:
            raise UnsupportedGraphError(SHARDED)
        self.surface = surface
        self.loss = surface.objective.loss
        self._subject = surface.subject
        self._plans: dict[Any, Plan] = {}
        with isolated(surface.model, surface.device):
            self.plan = self.plan_for(surface.objective.few())

    @property
    def _values(self) -> dict[str, Tensor]:
        """All parameters and buffers now."""
        return self._subject.state

    @property
    def chunk(self) -> int:
        """Samples at a time.

        Raises:
            MemoryError: If not even one sample fits the budget.
        """
        itemsize = self.surface.dtype.itemsize
        each = self.plan.numbers_per_sample() * itemsize
        fitting = self.surface.budget.swept // each
        if fitting < 1:
            raise MemoryError(too_little("sweeping one sample", each, self.surface.budget))
        room = _WORKING_SET // (2 if self.plan.has_positions() else 1)
        wanted = room // (self.plan.activations_per_sample() * itemsize)
        wanted = self.surface.most_samples or max(wanted, _SMALLEST_CHUNK)
        return int(min(wanted, fitting, self.surface.samples))

    def passes(
        self,
        names: frozenset[str],
        wanted: frozenset[str],
        *,
        all_columns: bool,
        generator: Generator | None,
        gradients: bool = False,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Pass]:
        """Run the model forward on all data.

        Args:
            names: The parameters to listen for.
            wanted: What to gather of each.
            all_columns: Whether to pass all columns back, however many there are.
            generator: Source of randomness for mixtures, where there are too many columns.
            gradients: Whether to pass back the loss's gradient, one column per sample, in the
                place of its curvature.
            scales: By layer, how much its input units vary, where that is needed.

        Yields:
            One chunk after the other.

        Raises:
            UnsupportedGraphError: If other operations run for some batches than for others.
        """
        each = self.plan.numbers_per_sample() * self.surface.dtype.itemsize
        beside = self.surface.budget.free / 2 if "columns" in wanted else 0
        self.surface.make_room(each * self.chunk + beside)
        workspace = Workspace()
        for plan, batch in self.batches():
            chunk = Chunk(batch.samples, wanted, scales or {}, workspace)
            taps = place_taps(plan, chunk, self._values, names)
            logits = self.run(plan, batch, handlers_of(taps))
            counted = self.counts_of(batch)
            kept = torch.ones_like(counted)
            if gradients:
                total = self.total(plan, batch)
                curvature: OutputCurvature = gradient(total, logits, counted)
            else:
                curvature, kept = self.curvature(plan, logits.detach(), batch)
            if isinstance(curvature, Dense):
                chunk.floor = self._floor(plan, logits.detach()) * kept
            columns, mixtures = _split(curvature, all_columns, generator)
            left_out = int(((counted > 0) & (kept == 0)).sum())
            shares = counted * kept
            found = Pass(taps, shares, left_out, columns, mixtures, chunk, [logits])
            del taps, logits, curvature, columns, mixtures
            try:
                yield found
            finally:
                found.let_go()

    def batches(self) -> Iterator[tuple[Plan, Batch]]:
        """All data in chunks, each with its plan.

        Yields:
            Plans and batches.

        Raises:
            UnsupportedGraphError: If other operations run for some batches than for others.
        """
        self._subject = self.surface.subject  # Follows the model, once for all chunks.
        with isolated(self.surface.model, self.surface.device):
            for batch in self.surface.objective.chunks(self.chunk):
                plan = self.plan_for(batch)
                if plan is not self.plan and plan.signature() != self.plan.signature():
                    raise UnsupportedGraphError(
                        "the model runs through other operations for some batches than for the "
                        "first; measure batches of one shape at a time."
                    )
                yield plan, batch

    def run(self, plan: Plan, batch: Batch, handlers: Mapping[fx.Node, Handler]) -> Tensor:
        """Run the model on a chunk.

        Args:
            plan: Of the chunk.
            batch: The chunk.
            handlers: What to call instead of an op.

        Returns:
            The logits.
        """
        return plan.graph.run(self._values, self.inputs_of(batch), handlers, plan.logits)

    def curvature(self, plan: Plan, logits: Tensor, batch: Batch) -> tuple[OutputCurvature, Tensor]:
        """The loss's curvature by the logits, and which samples have a loss.

        Args:
            plan: Of the chunk.
            logits: The chunk's.
            batch: The chunk.

        Returns:
            The curvature of the sum of the losses, and ones for samples with a loss.
        """
        kept = torch.ones(batch.samples, dtype=torch.float64, device=logits.device)
        target = batch.target
        if self.loss.curvature is not None and self._closed_form(plan):
            curvature: OutputCurvature = self.loss.curvature(logits, target)
            if not plan.heads or plan.head_axis() == curvature.axis % logits.dim():
                return curvature, kept
        if self.loss.defined is not None:
            outputs = plan.finish(logits)
            self.loss.check(outputs, target)
            kept = self.loss.defined(outputs).double()
        return dense(self.total(plan, batch), logits), kept

    def total(self, plan: Plan, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The sum of the samples' losses as a function of the logits.

        Args:
            plan: Of the chunk.
            batch: The chunk.

        Returns:
            The function.
        """

        def total(logits: Tensor) -> Tensor:
            value = self.loss.total(plan.finish(logits), batch.target)
            if self.loss.count is None:
                value = value * self.surface.objective.denominator(batch)
            return value

        return total

    def _floor(self, plan: Plan, logits: Tensor) -> Tensor:
        """The size of the terms that the loss's second derivatives by the logits are sums of."""
        if self.loss.size is None:
            return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        return self.loss.size(plan.finish(logits))

    def plan_for(self, batch: Batch) -> Plan:
        """The plan for batches of this shape."""
        leaves = self.inputs_of(batch)
        key = tuple(tuple(x.shape[1:]) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self._plans:
            self._plans[key] = self._planned(batch, key)
        return self._plans[key]

    def _graph(self, batch: Batch) -> ModelGraph:
        """Read the graph from a batch."""
        subject = self._subject
        example = batch.rows([0, 0, 0]) if batch.splittable else batch
        called = subject.arguments(example, with_labels=self.loss.own)
        arguments, keywords = map_tensors(Tensor.contiguous, called)
        model = in_precision(subject.model, subject.dtype)
        with isolated(model, subject.device):  # The exporter's own tensors must not stay in it.
            samples = 3 if batch.splittable else 0
            return graph_of(model, arguments, keywords, samples, prediction)

    def _planned(self, batch: Batch, shapes: Hashable) -> Plan:
        """Read the graph from a batch, and what can be swept of it."""
        subject = self._subject
        key = ("graph", shapes, batch.splittable, self.loss.own)
        # Reading it takes longest, and it is the same under every loss.
        graph = self.surface.origin.recall(key, lambda: self._graph(batch), lasting=True)
        reason = self._objection(batch)
        if reason is None and not graph.symbol:
            reason = "the model treats the number of samples as a constant"
        if reason is None and graph.draw is not None:
            # The model may seed its generator at every call; the graph does not.
            place = source_line(graph.draw)
            reason = (
                f"its forward pass draws random numbers{f' ({place})' if place else ''}, and the "
                "exported graph would draw others"
            )
        if reason is not None:
            return without_sweep(graph, subject.names, reason)
        (output,) = graph.outputs  # The prediction is one tensor.
        assert isinstance(output, fx.Node)
        plan = make_plan(graph, output, subject.names)
        outputs = plan.outputs_per_sample()
        if outputs > _DENSE and not self._closed_form(plan):
            reason = (
                f"the curvature of the loss by {outputs} outputs per sample is not known in closed "
                "form"
            )
            return without_sweep(graph, subject.names, reason)
        return self._tried(plan, batch.rows(slice(4))) if plan.sites else plan

    def _tried(self, plan: Plan, few: Batch) -> Plan:
        """Try a plan out on a few samples; what does not hold there is taken out of it."""
        trial = Trial(self._subject, self.inputs_of, with_labels=self.loss.own)
        trial.compare_outputs(plan, few)
        try:
            self.curvature(plan, trial.logits(plan, few), few)
        except RuntimeError as error:
            reason = f"the loss cannot be differentiated twice: {str(error).splitlines()[0]}"
            return plan.without(dict.fromkeys(plan.exact, reason))
        plan = plan.without(trial.other_gradients(plan, few))
        for order in (list(range(few.samples)), list(range(few.samples))[::-1]):
            plan = plan.without(trial.other_samples(plan, few.rows(order)))
        return plan

    def _closed_form(self, plan: Plan) -> bool:
        """Whether the loss gives its curvature by the plan's logits itself."""
        expected = [self.loss.after] if self.loss.after else []
        return self.loss.curvature is not None and plan.head_names() == expected

    def _objection(self, batch: Batch) -> str | None:
        """Why the loss is not known to be a function of one tensor with the samples in front."""
        if self.loss.own:
            return "the model computes its loss itself (`loss=None`)"
        if not batch.splittable:
            return "the batches do not have the samples in front"
        if self.loss.curvature is not None or self.loss.defined is not None:
            return None
        with torch.no_grad():
            few = self._subject.place(batch.rows(slice(1)))
            output = self._subject(self._subject.leaves, few, with_labels=False)
        return None if isinstance(output, Tensor) else "the loss is a function of several outputs"

    def inputs_of(self, batch: Batch) -> list[Any]:
        """What the model is called with, flattened."""
        called = self._subject.arguments(batch, with_labels=self.loss.own)
        return pytree.tree_leaves(map_tensors(Tensor.detach, called))

    def counts_of(self, batch: Batch) -> Tensor:
        """What every sample adds to the denominator of the loss."""
        count = self.surface.objective.denominator
        if not isinstance(batch.target, Tensor) or batch.target.is_floating_point():
            each = [count(batch) / batch.samples] * batch.samples
            return torch.tensor(each, dtype=torch.float64, device=self.surface.device)
        # Samples with the same labels have the same share.
        if batch.target.dim() == 1:
            kinds = torch.unique(batch.target, return_inverse=True)[1]
        else:
            kinds = torch.unique(batch.target.flatten(1), dim=0, return_inverse=True)[1]
        first = {int(kind): place for place, kind in enumerate(kinds.tolist())}
        known = {kind: count(batch.rows([place])) for kind, place in first.items()}
        each = [known[kind] for kind in kinds.tolist()]
        return torch.tensor(each, dtype=torch.float64, device=self.surface.device)


def sweeper_of(surface: LossSurface) -> Sweeper:
    """The sweeper of a surface, made once; so is the failure to make one.

    Args:
        surface: The surface.

    Returns:
        The sweeper.

    Raises:
        UnsupportedGraphError: If the model cannot be read as a graph.
    """

    def attempt() -> Sweeper | UnsupportedGraphError:
        try:
            return surface.processes.attempt("the graph", lambda: Sweeper(surface))
        except UnsupportedGraphError as error:
            return error

    found = surface.recall("sweeper", attempt, lasting=True)
    if isinstance(found, UnsupportedGraphError):
        raise found
    return found


def _split(
    curvature: OutputCurvature, all_columns: bool, generator: Generator | None
) -> tuple[Iterator[Column], Iterator[Column]]:
    """All columns, or the heaviest and mixtures of the rest where there are too many."""
    if all_columns or curvature.rank <= MOST_COLUMNS:
        return curvature.columns(), iter(())
    if not isinstance(curvature, Mixable) or not curvature.can_mix:
        return curvature.columns(), iter(())
    source = required(
        generator,
        caller="sweep(surface)",
        otherwise=f"`all_columns=True` to sweep all {curvature.rank} columns per sample",
    )
    return curvature.heavy(HEAVY), curvature.mixtures(MIXTURES, source)
