r"""Second derivatives of the loss by the values of basis paths, as far as one sweep gives them.

In: a surface and its basis paths. Out: `SecondDerivatives`, the diagonal of the Hessian in path
space. A path value that no other weight is divided by moves one weight: its second derivative is
that weight's, in other units. For the root v_k of a chain of units (`chains`), let D_k be v_k times
the tangent of the weights along it: the weight of k grows, all that leaves the units of the chain
shrinks, free weights aside. Then

    ∂²L/∂v_k² = v_k⁻² { E Σ_c λ_c (u_c · J D_k)² + 2 Σ_b Σ_e w_e (g_e(a) - g_e(ȧ)) }

over the units b of the chain and the weights e that leave them. The first sum comes from one
auxiliary number per sample and root (`_TangentRun`); ȧ is known one layer ahead, so that the
network is cut at its layers, and one short pass back through what lies between them gives g_e(ȧ)
for all weights at once (`_CutRun`). Not known are the derivatives by weights that are curved or
cannot be swept, and by roots that one sweep cannot handle (`find_chains`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator, Tensor, fx

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.sweep.backprop import MOST_FACTORS, Sweep, sweep_of
from flatgauge.curvature.sweep.plan import SweepPlan
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.layers import Layer
from flatgauge.graph.ops import arguments_of
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.incidence import NO_UNIT, Integers
from flatgauge.symmetry.paths.chains import Chains, find_chains

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.basis import BasisPaths


@dataclass(frozen=True)
class SecondDerivatives:
    """The diagonal of the Hessian in path space, zero where not `known`; `notes` say why."""

    values: Tensor
    known: Tensor
    gradient: Tensor
    notes: tuple[str, ...]


def path_second_derivatives(
    surface: LossSurface,
    paths: BasisPaths,
    *,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> SecondDerivatives:
    """Find the diagonal of the Hessian in path space; `generator` only shares earlier sweeps."""

    def compute() -> SecondDerivatives:
        source = None if generator is None else generator.clone_state()
        return _second_derivatives(surface, paths, source, all_columns=all_columns)

    return surface.cache.get(("second derivatives", paths.skeleton, all_columns), compute)


def _second_derivatives(
    surface: LossSurface, paths: BasisPaths, generator: Generator | None, *, all_columns: bool
) -> SecondDerivatives:
    sweep, mapping = sweep_of(surface), paths.map
    slopes = mapping.to_row(surface.split(surface.gradient()))
    gradient = mapping.pull_back(slopes)
    values, known = torch.zeros_like(gradient), torch.zeros(len(paths), dtype=torch.bool)
    outputs = sweep.plan.outputs_per_sample()
    if outputs > MOST_FACTORS + 1 and not all_columns:
        note = f"not swept, as there are {outputs} outputs (`all_columns=True` sweeps them)"
        return SecondDerivatives(values, known, gradient, (note,))
    if sweep.loss.may_be_undefined:
        note = "not swept, as some outputs may have no loss"
        return SecondDerivatives(values, known, gradient, (note,))
    blocks = block_curvature(
        surface, ("diagonal",), all_columns=all_columns, estimate=False, generator=generator
    )
    diagonal, swept = torch.zeros_like(slopes), torch.zeros(len(slopes), dtype=torch.bool)
    for name, block in blocks.items():
        if name in paths.edges.starts:
            span = paths.edges.span(name)
            diagonal[span] = block.values["diagonal"].double().cpu().reshape(-1)
            swept[span] = block.exact
    is_root = torch.zeros(len(paths), dtype=torch.bool)
    is_root[paths.roots] = True
    known = swept[mapping.places] & ~is_root & ~mapping.moves_a_bias
    values[known] = (diagonal[mapping.places] * mapping.slopes.square())[known]
    chains = find_chains(paths, sweep.plan)
    if len(chains.roots):
        roots = torch.from_numpy(chains.roots)
        values[roots] = _root_derivatives(sweep, paths, chains, slopes)
        known[roots] = True
    notes = []
    missing = int((~known & is_root).sum())
    if missing:
        notes.append(
            f"{missing} of {int(is_root.sum())} roots belong to chains of several units or feed "
            "back into themselves: by products"
        )
    missing = int((~known & ~is_root).sum())
    if missing:
        reasons = sorted(set(blocks.missing.values()))
        why = reasons[0] if reasons else "a batch-norm's scale moves its bias along"
        notes.append(f"{missing} further paths by products: {why}")
    return SecondDerivatives(values, known, gradient, tuple(notes))


def _root_derivatives(sweep: Sweep, paths: BasisPaths, chains: Chains, slopes: Tensor) -> Tensor:
    """The second derivatives by the roots of chains, from the gradient by all weights."""
    count = len(chains.roots)
    squares, tangents = sums = torch.zeros(2, count, dtype=torch.float64)

    def sweep_batches() -> None:
        for plan, batch in sweep.batches():
            places = _places(paths, chains, plan, sweep.surface.device)
            whole = _TangentRun(places)
            with torch.enable_grad():
                logits = sweep.run(plan, batch, whole.handlers())
                curvature, _ = sweep.loss_hessian(plan, logits.detach(), batch)
                for values, factor in curvature.factors():
                    along = whole.along(logits, values.to(logits), count)
                    weighted = along if factor is None else along * factor.to(along)[:, None]
                    squares.add_((weighted * along).sum(0).cpu())
                backward = whole.output_gradients(logits, sweep.total_loss(plan, batch))
                del logits
                cut = _CutRun(places)
                sweep.run(plan, batch, cut.handlers())
                tangents.add_(cut.tangents(backward, chains).cpu())

    processes = sweep.surface.processes
    processes.run("the sweep of paths", sweep_batches)
    squares, tangents = processes.all_sum(sums)
    data = (squares - 2 * tangents) / sweep.surface.risk.count
    own = _gradient_and_decay(paths, chains, slopes, sweep.surface.weight_decay)
    values = paths.values[torch.from_numpy(chains.roots)]
    derivatives: Tensor = (data + own) / values.square()
    return derivatives


def _gradient_and_decay(paths: BasisPaths, chains: Chains, slopes: Tensor, decay: float) -> Tensor:
    """What leaves the units of a chain, times its gradient, twice; and what weight decay adds."""
    number = np.full(len(paths) + 1, len(chains.roots))
    number[chains.roots] = np.arange(len(chains.roots))
    amounts, places = paths.map.amounts, paths.map.places
    shares = 2 * amounts * slopes[places] + decay * amounts.square()
    sums = torch.zeros(len(chains.roots) + 1, dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(number)[paths.map.roots], shares)
    return sums[:-1] + decay * amounts[torch.from_numpy(chains.roots)].square()


# -- where weights are read ----------------------------------------------------------------------


@dataclass(frozen=True)
class SingleEdges:
    """Some weights (or biases) that one op reads, each with its own contribution to the output.

    Attributes:
        layer: The layer whose weights they are; None for biases.
        weights: Their values (edges,).
        rows: The output units that they enter.
        columns: The input units that they leave; empty for biases.
        taps: Their positions in the kernel; empty for biases.
        chains: The chain that each belongs to.
        axis: The axis of the op's output along which units lie.
    """

    layer: Layer | None
    weights: Tensor
    rows: Tensor
    columns: Tensor
    taps: Tensor
    chains: Tensor
    axis: int

    def contributions(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What every edge adds to its output unit, laid out like the output, one slice per edge."""
        weights = self.weights.to(outputs)
        if self.layer is None:
            shape = list(outputs.shape)
            shape[self.axis] = len(weights)
            return self._along_axis(weights, outputs).expand(shape)
        if self.layer.kind == "linear":
            return inputs.index_select(-1, self.columns) * weights
        kernels = weights.new_zeros(len(weights), 1, *self.layer.shape[2:])
        kernels.flatten(1)[torch.arange(len(weights)), self.taps] = weights
        node = self.layer.node
        arguments = arguments_of(node) | {
            "input": inputs.index_select(1, self.columns),
            "weight": kernels,
            "bias": None,
            "groups": len(weights),
        }
        found: Tensor = node.target(*arguments.values())  # type: ignore[operator]
        return found

    def add_scaled(self, outputs: Tensor, contributions: Tensor, factors: Tensor) -> Tensor:
        """The outputs with every contribution added once more, times a factor (n, edges)."""
        shape = [1] * outputs.dim()
        shape[0], shape[self.axis] = factors.shape
        return outputs.index_add(self.axis, self.rows, contributions * factors.reshape(shape))

    def products(self, contributions: Tensor, gradients: Tensor) -> Tensor:
        """Every edge's contribution times the gradient at its output unit, summed: (edges,)."""
        each = contributions * gradients.index_select(self.axis, self.rows)
        return each.movedim(self.axis, 0).flatten(1).sum(1, dtype=torch.float64)

    def _along_axis(self, values: Tensor, like: Tensor) -> Tensor:
        """Values laid out along the axis of units."""
        shape = [1] * like.dim()
        shape[self.axis] = -1
        return values.reshape(shape)


@dataclass
class Place:
    """An op that reads weights.

    Attributes:
        layer: Its layer; None for a batch-norm.
        columns: For every input unit, the chain it is in; the number of chains where in none.
        reads_chains: Whether any of them is in one.
        is_cut: Whether any weight enters or leaves a unit there.
        edges: Those of its weights and biases that are roots of chains (``"root"``), free edges
            of their units (``"free"``), inner edges of chains (``"inner"``) and those of them that
            are not free (``"lost"``).
    """

    node: fx.Node
    layer: Layer | None
    columns: Tensor
    reads_chains: bool = False
    is_cut: bool = False
    edges: dict[str, list[SingleEdges]] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Which of the op's arguments is the activation."""
        return 0 if self.layer is None else self.layer.position

    @property
    def axis(self) -> int:
        """The axis of the op's input and output along which units lie."""
        return -1 if self.layer is not None and self.layer.kind == "linear" else 1


def _places(
    paths: BasisPaths, chains: Chains, plan: SweepPlan, device: torch.device
) -> list[Place]:
    """Every layer, and every batch-norm with a root: where the weights of chains are read."""
    units = np.flatnonzero(chains.chain_of[:-1] != NO_UNIT)
    lost = ~np.isin(chains.inner_edges, paths.skeleton_edges.leaving)
    kinds = {
        "root": (paths.places[chains.roots], np.arange(len(chains.roots))),
        "free": (paths.skeleton_edges.leaving[units], chains.chain_of[units]),
        "inner": (chains.inner_edges, chains.inner_chains),
        "lost": (chains.inner_edges[lost], chains.inner_chains[lost]),
    }
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    found: dict[fx.Node, Place] = {}
    for layer in plan.layers.values():
        place = found[layer.node] = Place(layer.node, layer, empty)
        if layer.name not in plan.sites or layer.name not in paths.edges.starts:
            continue
        tails = torch.from_numpy(paths.edges.part(paths.edges.tails, layer.name))
        input_units = layer.canonical(tails)[:, 0, :, 0].reshape(-1)
        chain = torch.from_numpy(chains.chain_of)[input_units]
        place.columns = torch.where(chain == NO_UNIT, len(chains.roots), chain).to(device)
        place.reads_chains = bool((chain != NO_UNIT).any())
        span = paths.edges.span(layer.name)
        ends = paths.edges.heads[span], paths.edges.tails[span]
        place.is_cut = any(bool((end != NO_UNIT).any()) for end in ends)
        for kind, (places, targets) in kinds.items():
            edges = _single_edges(paths, layer.name, layer, places, targets, place.axis, device)
            if len(edges.weights):
                place.edges.setdefault(kind, []).append(edges)
    for name, site in plan.sites.items():
        if site.role in ("bias", "norm") and name in paths.edges.starts:
            place = found.get(site.node, Place(site.node, None, empty))
            edges = _single_edges(paths, name, None, *kinds["root"], place.axis, device)
            if len(edges.weights):
                found[site.node] = place
                place.edges.setdefault("root", []).append(edges)
    return list(found.values())


def _single_edges(
    paths: BasisPaths,
    name: str,
    layer: Layer | None,
    places: Integers,
    chains: Integers,
    axis: int,
    device: torch.device,
) -> SingleEdges:
    """Those of some edges that belong to a parameter: weights of a layer, or biases."""
    span = paths.edges.span(name)
    chosen = np.flatnonzero((places >= span.start) & (places < span.stop))
    index = torch.from_numpy(places[chosen] - span.start)
    weights = torch.from_numpy(paths.edges.weights[places[chosen]])
    rows, columns, taps = index, index[:0], index[:0]
    if layer is not None:
        size = span.stop - span.start
        order = layer.canonical(torch.arange(size).reshape(layer.shape))
        position = torch.empty(size, dtype=torch.int64)
        position[order.reshape(-1)] = torch.arange(size)
        group, row, column, taps = torch.unravel_index(position[index], order.shape)
        rows, columns = group * order.shape[1] + row, group * order.shape[2] + column
    return SingleEdges(
        layer,
        weights.to(device),
        rows.to(device),
        columns.to(device),
        taps.to(device),
        torch.from_numpy(chains[chosen]).to(device),
        axis,
    )


# -- two runs of the model -----------------------------------------------------------------------


class _Run:
    """Runs the model with other inputs and outputs at some ops."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._outputs: dict[fx.Node, Tensor] = {}

    def handlers(self) -> dict[fx.Node, Callable[..., Any]]:
        """What stands in for the ops."""
        return {place.node: partial(self._run, place) for place in self._places}

    def _run(self, place: Place, *arguments: Any, **keywords: Any) -> Any:
        given, inputs = list(arguments), arguments[place.position]
        given[place.position] = self._change_input(place, inputs)
        result = place.node.target(*given, **keywords)  # type: ignore[operator]
        output, *others = result if isinstance(result, tuple) else (result,)
        self._outputs[place.node] = output = self._change_output(place, inputs, output)
        return (output, *others) if others else output

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        raise NotImplementedError


class _TangentRun(_Run):
    """Runs the model with one auxiliary number per sample and edge or unit of a chain.

    Together they are the tangents along the roots: what a root contributes grows with it, what
    leaves the units of its chain shrinks, and what leaves them over free edges is given back.
    """

    def __init__(self, places: list[Place]) -> None:
        super().__init__(places)
        self._leaves: list[tuple[Tensor, Tensor]] = []  # With the chains that they belong to.

    def along(self, logits: Tensor, column: Tensor, count: int) -> Tensor:
        """A column at the logits times the tangent of each of `count` chains: (n, chains)."""
        found = torch.autograd.grad(
            logits, [leaf for leaf, _ in self._leaves], column, retain_graph=True, allow_unused=True
        )
        sums = logits.new_zeros((len(logits), count + 1), dtype=torch.float64)
        for (_, chains), one in zip(self._leaves, found, strict=True):
            if one is not None:
                sums.index_add_(1, chains, one.double())
        return sums[:, :-1]  # The last one is of no chain.

    def output_gradients(
        self, logits: Tensor, total: Callable[[Tensor], Tensor]
    ) -> dict[fx.Node, Tensor]:
        """The gradient of the sum of the losses by the outputs of the ops."""
        point = to_float64(logits.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(total(point), point)
        reached = {node: out for node, out in self._outputs.items() if out.requires_grad}
        found = torch.autograd.grad(
            logits, list(reached.values()), slope.to(logits), allow_unused=True
        )
        passed = dict(zip(reached, found, strict=True))
        return {
            node: torch.zeros_like(output) if passed.get(node) is None else passed[node]
            for node, output in self._outputs.items()
        }

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        if not place.reads_chains:
            return inputs
        shape = [1] * inputs.dim()
        shape[0], shape[place.axis] = len(inputs), inputs.shape[place.axis]
        return inputs - inputs * self._leaf(inputs, place.columns).reshape(shape)

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        for edges in (*place.edges.get("root", ()), *place.edges.get("free", ())):
            found = edges.contributions(inputs.detach(), output)
            output = edges.add_scaled(output, found, self._leaf(inputs, edges.chains))
        return output

    def _leaf(self, like: Tensor, chains: Tensor) -> Tensor:
        """Zeros, one per sample and entry of `chains`."""
        leaf = like.new_zeros(len(like), len(chains)).requires_grad_()
        self._leaves.append((leaf, chains))
        return leaf


class _CutRun(_Run):
    """Runs the model cut where units are entered: each layer gives a leaf, and reads the last."""

    def __init__(self, places: list[Place]) -> None:
        super().__init__(places)
        self._inputs: dict[fx.Node, Tensor] = {}

    def tangents(self, gradients: dict[fx.Node, Tensor], chains: Chains) -> Tensor:
        """Σ weight · gradient over what leaves each chain, its inputs replaced by tangents."""
        active = torch.from_numpy(chains.active_units)
        # From the heads of free edges back to where what they read was written.
        back = self._pass_back(gradients, "free")
        others = {node: gradients[node] - back[node] for node in gradients}
        sums = self._products(others, "root", chains)
        sums *= active > 0
        if (active == 2).any():
            # The second unit's tangent is what the first one's tangent sends it, less what the
            # weights between them lose.
            again = self._pass_back(others, "inner")
            sums += self._products(again, "root", chains) * (active == 2)
            sums -= self._products(others, "lost", chains)
        return sums

    def _pass_back(self, gradients: Mapping[fx.Node, Tensor], kind: str) -> dict[fx.Node, Tensor]:
        """Pass gradients back over some edges, and on to the outputs of the last layers."""
        total = torch.zeros((), dtype=torch.float64)
        for place in self._places:
            for edges in place.edges.get(kind, ()):
                found = edges.contributions(self._inputs[place.node], gradients[place.node])
                total = total + edges.products(found, gradients[place.node]).sum().cpu()
        zeros = {node: torch.zeros_like(output) for node, output in self._outputs.items()}
        if not total.requires_grad:
            return zeros
        passed = torch.autograd.grad(
            total, list(self._outputs.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(self._outputs, passed, strict=True)
        return zeros | {node: one for node, one in pairs if one is not None}

    def _products(self, gradients: Mapping[fx.Node, Tensor], kind: str, chains: Chains) -> Tensor:
        """What some edges contribute, times the gradient where they enter, summed by chain."""
        sums = torch.zeros(len(chains.roots), dtype=torch.float64)
        for place in self._places:
            for edges in place.edges.get(kind, ()):
                with torch.no_grad():
                    found = edges.contributions(self._inputs[place.node], gradients[place.node])
                    each = edges.products(found, gradients[place.node]).cpu()
                sums.index_add_(0, edges.chains.cpu(), each)
        return sums

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        return inputs.detach() if place.is_cut else inputs

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        self._inputs[place.node] = inputs
        if place.is_cut or not output.requires_grad:
            return output.detach().requires_grad_()
        return output
