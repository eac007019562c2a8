"""The sweep: the factors of the loss's Hessian, passed back once through the whole model.

What enters: a loss surface, the names of parameters, and which parts of their Hessian blocks are
requested. What leaves, chunk of samples by chunk: a `SweepChunk`, run forward and ready to pass
factor vectors back into an accumulator for every parameter.

How it works: with every other parameter fixed, the logits f of a piecewise linear model are linear
in each single parameter θ, so that its Hessian block is exactly Σ_n Jᵀ B J over the samples, with
J = ∂f/∂θ and B the second derivatives of the sample's loss by its logits. The loss writes B as a
sum Σ_c λ_c u_c u_cᵀ over factor vectors u; each is passed back through the graph once, for all
parameters together (`accumulate`), and what arrives at an op is what its accumulator needs (`ops`,
`linear`, `conv`). The plan (`plan`) says for which parameters this is exact; it is checked against
the model itself on a few samples (`PlanCheck`). Where a sample has too many factors, random
combinations stand for them, unless `all_factors`; with `of_gradient`, the loss's gradient, one
vector per sample, is passed back in place of the factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.curvature.sweep.accumulate import ChunkContext, Moments, SweepChunk, Workspace
from flatgauge.curvature.sweep.plan import SweepPlan, build_plan, place_ops, without_sweep
from flatgauge.estimators.linalg import agrees, require_generator, to_float64
from flatgauge.graph.export import Handler, UnsupportedGraphError
from flatgauge.graph.layers import Layer
from flatgauge.graph.ops import call_op, source_line
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import Batch, map_tensors
from flatgauge.surface.losses import Factor, LossHessian, prediction, rows_of
from flatgauge.surface.model import FunctionalModel

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.conv import LayerFactors
    from flatgauge.surface.surface import LossSurface

#: Up to this many factors per sample, all are swept; beyond, the largest and random combinations.
MOST_FACTORS = 63

#: What is swept of more factors: the largest of every sample, and random combinations of the rest.
_TOP, _RANDOM = 13, 4

#: What a chunk's activations should take (half of it where layers have many positions, which
#: need as much again for patches and gradients), and how many samples it should hold at least.
_WORKING_SET, _SMALLEST_CHUNK = 24 * 2**20, 32

#: Up to this many outputs per sample, any loss's second derivatives by them are written out.
_DENSE = 256

#: How far the graph may differ from the model, relative to the size of what is compared.
_AGREEMENT = 1e-3

#: An input unit that varies by less than this many units of rounding does not vary.
_ROUNDING = 32.0


class Sweep:
    """Runs a surface's model on all data, chunk by chunk, ready to be differentiated.

    Attributes:
        plan: What is exact, and where parameters are read.
        loss: The loss whose Hessian it is.
    """

    def __init__(self, surface: LossSurface) -> None:
        self.surface = surface
        self.loss = surface.risk.loss
        self._model = surface.functional_model
        self._plans: dict[Any, SweepPlan] = {}
        with isolate(surface.model, surface.device):
            self.plan = self.plan_for(surface.risk.few())

    @property
    def chunk_size(self) -> int:
        """Samples at a time; a `MemoryError` if not even one fits the budget."""
        itemsize = self.surface.dtype.itemsize
        each = self.plan.numbers_per_sample() * itemsize
        fitting = self.surface.budget.sweep // each
        if fitting < 1:
            raise self.surface.budget.shortage("sweeping one sample", each)
        room = _WORKING_SET // (2 if self.plan.has_positions() else 1)
        wanted = room // (self.plan.activations_per_sample() * itemsize)
        wanted = self.surface.most_samples or max(wanted, _SMALLEST_CHUNK)
        return int(min(wanted, fitting, self.surface.samples))

    def chunks(
        self,
        names: frozenset[str],
        parts: frozenset[str],
        *,
        all_factors: bool,
        generator: Generator | None,
        of_gradient: bool = False,
        record: bool = False,
        input_std: Mapping[str, Tensor] | None = None,
    ) -> Iterator[SweepChunk]:
        """Run the model forward on all data; a chunk is released when the next is requested."""
        each = self.plan.numbers_per_sample() * self.surface.dtype.itemsize
        recorded = self.surface.budget.free / 2 if record else 0
        self.surface.make_room(each * self.chunk_size + recorded)
        workspace = Workspace()
        for plan, batch in self.batches():
            context = ChunkContext(batch.samples, parts, input_std or {}, workspace)
            chunk = SweepChunk(context)
            handlers = place_ops(plan, chunk, self._model.state, names, record=record)
            chunk.logits = self.run(plan, batch, handlers)
            counted, defined = self.counts_of(batch), None
            if of_gradient:
                total = self.total_loss(plan, batch)
                hessian: LossHessian = _squared_gradient(total, chunk.logits, counted)
            else:
                hessian, defined = self.loss_hessian(plan, chunk.logits.detach(), batch)
            chunk.counts = counted if defined is None else counted * defined
            chunk.left_out = int(((counted > 0) & (chunk.counts == 0)).sum())
            if isinstance(hessian, DenseHessian):
                size = self._term_size(plan, chunk.logits.detach())
                context.cancelled = size if defined is None else size * defined
            chunk.factors, chunk.random_factors = _split(hessian, all_factors, generator)
            del handlers, hessian
            try:
                yield chunk
            finally:
                chunk.release()

    def batches(self) -> Iterator[tuple[SweepPlan, Batch]]:
        """All data in chunks, each with its plan; refused if other ops run for some of them."""
        self._model = self.surface.functional_model  # Follows the model, once for all chunks.
        with isolate(self.surface.model, self.surface.device):
            for batch in self.surface.risk.chunks(self.chunk_size):
                plan = self.plan_for(batch)
                if plan is not self.plan and plan.signature() != self.plan.signature():
                    raise UnsupportedGraphError(
                        "the model runs through other operations for some batches than for the "
                        "first; measure batches of one shape at a time."
                    )
                yield plan, batch

    def run(self, plan: SweepPlan, batch: Batch, handlers: Mapping[fx.Node, Handler]) -> Tensor:
        """Run the model on a chunk up to the logits, with handlers in place of some ops."""
        return plan.graph.run(self._model.state, self.inputs_of(batch), handlers, plan.logits)

    def loss_hessian(
        self, plan: SweepPlan, logits: Tensor, batch: Batch
    ) -> tuple[LossHessian, Tensor | None]:
        """The Hessian of the sum of the losses by the logits, and which samples have a loss."""
        # Ones for those that do, zeros for others; None if all do.
        defined, target = None, batch.target
        if self._is_closed_form(plan):
            hessian: LossHessian = self.loss.hessian(logits, target)
            if not plan.heads or plan.head_axis() == hessian.axis % logits.dim():
                return hessian, None
        if self.loss.may_be_undefined:
            outputs = plan.output_of(logits)
            self.loss.check(outputs, target)
            defined = self.loss.is_defined(outputs).double()
        return _dense_hessian(self.total_loss(plan, batch), logits), defined

    def total_loss(self, plan: SweepPlan, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The sum of a chunk's losses as a function of the logits."""

        def total(logits: Tensor) -> Tensor:
            value = self.loss.total(plan.output_of(logits), batch.target)
            if not self.loss.knows_count:
                value = value * self.surface.risk.denominator(batch)
            return value

        return total

    def plan_for(self, batch: Batch) -> SweepPlan:
        """The plan for batches of this shape."""
        leaves = self.inputs_of(batch)
        key = tuple(tuple(x.shape[1:]) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self._plans:
            self._plans[key] = self._make_plan(batch)
        return self._plans[key]

    def inputs_of(self, batch: Batch) -> list[Any]:
        """What the model is called with, flattened."""
        called = self._model.arguments(batch, with_labels=self.loss.own)
        return pytree.tree_leaves(map_tensors(Tensor.detach, called))

    def counts_of(self, batch: Batch) -> Tensor:
        """What every sample adds to the denominator of the loss (n,)."""
        count = self.surface.risk.denominator
        if not isinstance(batch.target, Tensor) or batch.target.is_floating_point():
            each = [count(batch) / batch.samples] * batch.samples
            return torch.tensor(each, dtype=torch.float64, device=self.surface.device)
        # Samples with the same labels have the same count.
        if batch.target.dim() == 1:
            kinds = torch.unique(batch.target, return_inverse=True)[1]
        else:
            kinds = torch.unique(batch.target.flatten(1), dim=0, return_inverse=True)[1]
        first = {int(kind): place for place, kind in enumerate(kinds.tolist())}
        known = {kind: count(batch.rows([place])) for kind, place in first.items()}
        each = [known[kind] for kind in kinds.tolist()]
        return torch.tensor(each, dtype=torch.float64, device=self.surface.device)

    def input_std(self) -> dict[str, Tensor]:
        """Standard deviations (in,) of every layer's input units; for a constant, its size."""
        # Samples and positions (pixels, tokens) count equally; samples that the loss leaves out do
        # not count. Layers whose weight is read more than once have no one input, and are left out;
        # so are all layers where the model treats the number of samples as a constant.
        plan, surface = self.plan, self.surface
        if not plan.graph.symbol:
            return {}
        names = frozenset(name for name in plan.layers if plan.times_read(name) == 1)

        def compute() -> dict[str, Tensor]:
            found: dict[str, Moments] = {}
            for here in surface.processes.gather("inputs", lambda: self._input_moments(names)):
                for name, moments in here.items():
                    found[name] = moments.join(found.get(name))
            rounding = _ROUNDING * torch.finfo(surface.dtype).eps
            # What was exchanged between processes is on the CPU.
            return {name: each.std(rounding).to(surface.device) for name, each in found.items()}

        return surface.cache.get(("input_std", self.loss.name), compute)

    def group_layers(self, names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
        """Groups of layers whose factors fit the memory budget together, and all other layers."""
        room = self.surface.budget.factors
        groups: list[list[str]] = [[]]
        rest, used = [], 0.0
        for name in reversed(names):
            needed = self.factor_bytes(name)
            too_many = self.plan.outputs_per_sample() > MOST_FACTORS + 1
            if name not in self.plan.exact or too_many or needed > room:
                rest.append(name)
                continue
            if used + needed > room:
                groups.append([])
                used = 0.0
            groups[-1].append(name)
            used += needed
        return [group for group in groups if group], rest

    def factor_bytes(self, name: str) -> int:
        """Bytes that the factors of a layer take for all samples."""
        plan, layer = self.plan, self.plan.layers[name]
        factors = plan.outputs_per_sample()
        each = factors * plan.numbers(layer.node) + plan.numbers(layer.input)
        if plan.records_gradients(layer):
            each = factors * math.prod(layer.shape)
        return each * self.surface.dtype.itemsize * max(self.surface.data.shares)

    def _input_moments(self, names: frozenset[str]) -> dict[str, Moments]:
        """Run all data through the graph, with the moments of the layers' inputs."""
        found: dict[str, Moments] = {}
        with isolate(self.surface.model, self.surface.device):
            for batch in self.surface.risk.chunks(self.chunk_size):
                counted = self.counts_of(batch).nonzero()[:, 0].tolist()
                batch = batch if len(counted) == batch.samples else batch.rows(counted)
                plan = self.plan_for(batch)
                layers = [layer for name, layer in plan.layers.items() if name in names]
                handlers = {each.node: partial(_read_inputs, found, each) for each in layers}
                inputs = self.inputs_of(batch)
                with torch.no_grad():
                    state = self.surface.functional_model.state
                    plan.graph.run(state, inputs, handlers, plan.logits)
        return found

    def _make_plan(self, batch: Batch) -> SweepPlan:
        """Read the graph from a batch, and what can be swept of it."""
        names = self._model.names
        graphs = self.surface.origin.graphs  # They are the same under every loss.
        graph = self._model.export(batch, graphs, prediction, with_labels=self.loss.own)
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
            return without_sweep(graph, names, reason)
        (output,) = graph.outputs  # The prediction is one tensor.
        assert isinstance(output, fx.Node)
        plan = build_plan(graph, output, names)
        outputs = plan.outputs_per_sample()
        if outputs > _DENSE and not self._is_closed_form(plan):
            reason = (
                f"the curvature of the loss by {outputs} outputs per sample is not known in closed "
                "form"
            )
            return without_sweep(graph, names, reason)
        return self._checked_plan(plan, batch.rows(slice(4))) if plan.sites else plan

    def _checked_plan(self, plan: SweepPlan, few: Batch) -> SweepPlan:
        """The plan without what does not hold on a few samples."""
        check = PlanCheck(self._model, self.inputs_of)
        check.compare_outputs(plan, few)
        try:
            self.loss_hessian(plan, check.logits(plan, few), few)
        except RuntimeError as error:
            reason = f"the loss cannot be differentiated twice: {str(error).splitlines()[0]}"
            return plan.without(dict.fromkeys(plan.exact, reason))
        plan = plan.without(check.wrong_gradients(plan, few))
        for order in (list(range(few.samples)), list(range(few.samples))[::-1]):
            plan = plan.without(check.mixed_samples(plan, few.rows(order)))
        return plan

    def _objection(self, batch: Batch) -> str | None:
        """Why the loss is not known to be a function of one tensor with the samples in front."""
        if self.loss.own:
            return "the model computes its loss itself (`loss=None`)"
        if not batch.splittable:
            return "the batches do not have the samples in front"
        if self.loss.has_hessian or self.loss.may_be_undefined:
            return None
        with torch.no_grad():
            few = self._model.place(batch.rows(slice(1)))
            output = self._model(self._model.leaves, few, with_labels=False)
        return None if isinstance(output, Tensor) else "the loss is a function of several outputs"

    def _is_closed_form(self, plan: SweepPlan) -> bool:
        """Whether the loss itself gives its second derivatives by the plan's logits."""
        expected = [self.loss.last_op] if self.loss.last_op else []
        return self.loss.has_hessian and plan.head_names() == expected

    def _term_size(self, plan: SweepPlan, logits: Tensor) -> Tensor:
        """The size of the terms that the loss's second derivatives by the logits are sums of."""
        if not self.loss.may_be_undefined:
            return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        return self.loss.term_size(plan.output_of(logits))


class FactorStore:
    """The factors of some layers' blocks, as a sweep has recorded them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.factors: dict[str, list[LayerFactors]] = {name: [] for name in names}
        self.counts: list[Tensor] = []

    def add(self, chunk: SweepChunk) -> None:
        """Take what a chunk has recorded."""
        for name, recorder in chunk.recorders.items():
            if name in self.factors:
                self.factors[name].append(recorder.layer_factors())
        self.counts.append(chunk.counts)


def stored_factors(surface: LossSurface) -> dict[tuple[str, ...], FactorStore]:
    """Factors that a sweep has recorded along the way, to be taken by whoever needs them."""
    return surface.cache.get(("block_eigenvalues", "factors"), dict)


def sweep_of(surface: LossSurface) -> Sweep:
    """The sweep of a surface, made once; so is the failure to make one."""

    def attempt() -> Sweep | UnsupportedGraphError:
        try:
            return surface.processes.run("the graph", lambda: Sweep(surface))
        except UnsupportedGraphError as error:
            return error

    found = surface.cache.get(("sweep",), attempt, static=True)
    if isinstance(found, UnsupportedGraphError):
        raise found
    return found


def _read_inputs(found: dict[str, Moments], layer: Layer, *arguments: Any, **keywords: Any) -> Any:
    """Compute a layer's op, and add what goes in to the moments of its input units."""
    activation = arguments[layer.position]
    units = -1 if layer.kind == "linear" else 1
    new = Moments.of_rows(activation.movedim(units, -1).reshape(-1, activation.shape[units]))
    found[layer.name] = new.join(found.get(layer.name))
    return call_op(layer.node, *arguments, **keywords)


@dataclass
class DenseHessian(LossHessian):
    """Any symmetric B (n, outputs, outputs), by its eigenvectors and signed eigenvalues."""

    matrices: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.rank = self.matrices.shape[1]

    def factors(self) -> Iterator[Factor]:
        """The eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrices)
        for k in range(self.rank):
            yield vectors[:, :, k].reshape(len(vectors), *self.shape), values[:, k]


@dataclass
class SquaredGradient(LossHessian):
    """The squared gradient in the place of B, as one factor: the empirical Fisher information."""

    slopes: Tensor
    weights: Tensor
    rank = 1

    def factors(self) -> Iterator[Factor]:
        """The gradient itself."""
        yield self.slopes, self.weights


def _squared_gradient(
    total: Callable[[Tensor], Tensor], outputs: Tensor, counts: Tensor
) -> SquaredGradient:
    """Differentiate a sum of losses of single samples by the outputs."""
    point = to_float64(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point)
    return SquaredGradient(slope, counts.reciprocal().where(counts != 0, 0.0))


def _dense_hessian(total: Callable[[Tensor], Tensor], outputs: Tensor) -> DenseHessian:
    """Differentiate a sum of losses of single samples twice by the outputs."""
    point = to_float64(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point, create_graph=True)
        flat = rows_of(slope)
        rows = []
        for k in range(flat.shape[1]):
            if not flat.requires_grad:  # The loss is linear in the outputs.
                rows.append(torch.zeros_like(flat))
                continue
            (row,) = torch.autograd.grad(flat[:, k].sum(), point, retain_graph=True)
            rows.append(rows_of(row.detach()))
    matrices = torch.stack(rows, dim=1)
    return DenseHessian((matrices + matrices.mT) / 2, tuple(outputs.shape[1:]))


def _split(
    hessian: LossHessian, all_factors: bool, generator: Generator | None
) -> tuple[Iterator[Factor], Iterator[Factor]]:
    """All factors, or the largest and random combinations of the rest where there are too many."""
    if all_factors or hessian.rank <= MOST_FACTORS:
        return hessian.factors(), iter(())
    if not hessian.can_sample:
        return hessian.factors(), iter(())
    source = require_generator(
        generator,
        caller="block_curvature(surface)",
        otherwise=f"`all_columns=True` to sweep all {hessian.rank} factors per sample",
    )
    return hessian.top_factors(_TOP), hessian.random_factors(_RANDOM, source)


class PlanCheck:
    """Compares a plan with the model on a few samples: the graph must compute the same."""

    def __init__(self, model: FunctionalModel, inputs: Callable[[Batch], list[Any]]) -> None:
        self._model, self._inputs = model, inputs

    def logits(self, plan: SweepPlan, few: Batch) -> Tensor:
        """What the graph gives where the plan ends."""
        # Every run gets samples of its own: a model may write to them.
        inputs = self._inputs(self._model.place(few))
        with torch.no_grad():
            return plan.graph.run(self._model.state, inputs, {}, plan.logits)

    def compare_outputs(self, plan: SweepPlan, few: Batch) -> None:
        """Compare what graph and model return: an exporter may follow one branch of many."""
        output, got = self._outputs(plan, few)
        if not agrees(got, output, _AGREEMENT):
            raise UnsupportedGraphError(
                "the exported graph computes something else than the model itself; Python that "
                "depends on values or on the number of samples is the usual cause."
            )

    def wrong_gradients(self, plan: SweepPlan, few: Batch) -> dict[str, str]:
        """The parameters whose gradient by the model is not that by the graph, and why."""
        leaves = dict(zip(self._model.names, self._model.leaves, strict=True))
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
            if not absent and (own is None or other is None or not agrees(other, own, _AGREEMENT)):
                found[name] = "its gradient is not that of the graph (no_grad, custom backward)"
        return found

    def mixed_samples(self, plan: SweepPlan, few: Batch) -> dict[str, str]:
        """The parameters at which one sample's vector arrives in another's place, and why."""
        values, found = self._model.state, {}
        chunk = SweepChunk(ChunkContext(few.samples, frozenset({"trace"})))
        handlers = place_ops(plan, chunk, values, frozenset(plan.sites))
        inputs = self._inputs(self._model.place(few))
        chunk.logits = logits = plan.graph.run(values, inputs, handlers, plan.logits)
        ramp = torch.linspace(1, 2, logits[0].numel()).to(logits).view_as(logits[0])
        for sample in range(few.samples):
            vector = torch.zeros_like(logits)
            vector[sample] = ramp
            chunk.backward([(vector, None)])
            for name, parts in chunk.take().items():
                trace = parts.values["trace"]
                trace[sample] = 0
                if trace.any():
                    found[name] = "samples are mixed or reordered between it and the output"
        return found

    def _outputs(self, plan: SweepPlan, few: Batch) -> tuple[Tensor, Tensor]:
        """What the model returns, and what the graph does, both to be differentiated."""
        model = self._model
        output = model(model.leaves, model.place(few), with_labels=False)
        values = model.state | dict(zip(model.names, model.leaves, strict=True))
        inputs = self._inputs(model.place(few))
        return prediction(output), plan.output_of(plan.graph.run(values, inputs, {}, plan.logits))
