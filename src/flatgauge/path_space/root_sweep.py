r"""Second derivatives by the roots of path space, in one sweep.

With D_k the tangent of the weights along root k times v_k (the weight of k grows, all that leaves
the units of its run shrinks, free weights aside),

    ∂²L/∂v_k² = v_k⁻² { E Σ_c λ_c (u_c · J D_k)² + 2 Σ_b Σ_e w_e (g_e(a) - g_e(ȧ)) }

over the units b of the run and the weights e that leave them. The columns' part comes from one
auxiliary number per sample and root; ȧ is known one layer ahead, so that the network is cut at
its layers and one short pass back through what lies between them gives g_e(ȧ) for all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from flatgauge.curvature.sweep import Sweeper
from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.places import Place, places_of
from flatgauge.path_space.runs import Runs
from flatgauge.path_space.single_edges import SingleEdges
from flatgauge.precision import wide

#: Picks some of the edges of a place.
Chosen = Callable[[Place], list[SingleEdges]]


def root_derivatives(sweeper: Sweeper, paths: BasisPaths, runs: Runs, gradient: Tensor) -> Tensor:
    """The second derivatives by the roots of runs.

    Args:
        sweeper: The sweeper.
        paths: The basis paths.
        runs: The runs.
        gradient: The loss's gradient by the paths' weights, in one row.

    Returns:
        One number per run, in double precision.
    """
    count = len(runs.roots)
    squares, tangents = sums = torch.zeros(2, count, dtype=torch.float64)

    def sweep() -> None:
        for plan, batch in sweeper.batches():
            places = places_of(paths, runs, plan, sweeper.surface.device)
            whole = _Whole(places)
            with torch.enable_grad():
                logits = sweeper.run(plan, batch, whole.handlers())
                curvature, _ = sweeper.curvature(plan, logits.detach(), batch)
                for values, factor in curvature.columns():
                    along = whole.along(logits, values.to(logits), count)
                    weighted = along if factor is None else along * factor.to(along)[:, None]
                    squares.add_((weighted * along).sum(0).cpu())
                slopes = whole.slopes(logits, sweeper.total(plan, batch))
                del logits
                cut = _Cut(places)
                sweeper.run(plan, batch, cut.handlers())
                tangents.add_(cut.tangents(slopes, runs).cpu())

    processes = sweeper.surface.processes
    processes.attempt("the sweep of paths", sweep)
    squares, tangents = processes.total(sums)
    data = (squares - 2 * tangents) / sweeper.surface.objective.count
    own = _own(paths, runs, gradient, sweeper.surface.weight_decay)
    values = paths.values[torch.from_numpy(runs.roots)]
    derivatives: Tensor = (data + own) / values.square()
    return derivatives


def _own(paths: BasisPaths, runs: Runs, gradient: Tensor, decay: float) -> Tensor:
    """What leaves the units of a run, times its gradient, twice; and what weight decay adds."""
    number = np.full(len(paths) + 1, len(runs.roots))
    number[runs.roots] = np.arange(len(runs.roots))
    amounts, places = paths.map.amounts, paths.map.places
    shares = 2 * amounts * gradient[places] + decay * amounts.square()
    sums = torch.zeros(len(runs.roots) + 1, dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(number)[paths.map.roots], shares)
    return sums[:-1] + decay * amounts[torch.from_numpy(runs.roots)].square()


class _Whole:
    """Runs the model with one auxiliary number per sample and edge or unit of a run.

    Together they are the tangents along the roots: what a root contributes grows with it, what
    leaves the units of its run shrinks, and what leaves them over free edges is given back.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._outputs: dict[fx.Node, Tensor] = {}
        self._leaves: list[tuple[Tensor, Tensor]] = []  # With the runs that they belong to.

    def handlers(self) -> dict[fx.Node, Any]:
        """What stands in for the ops."""
        return {place.node: self._handler(place) for place in self._places}

    def along(self, logits: Tensor, column: Tensor, count: int) -> Tensor:
        """A column's product with the tangent of every run.

        Args:
            logits: The model's.
            column: At the logits.
            count: How many runs there are.

        Returns:
            One number per sample and run, in double precision.
        """
        found = torch.autograd.grad(
            logits, [leaf for leaf, _ in self._leaves], column, retain_graph=True, allow_unused=True
        )
        sums = logits.new_zeros((len(logits), count + 1), dtype=torch.float64)
        for (_, runs), one in zip(self._leaves, found, strict=True):
            if one is not None:
                sums.index_add_(1, runs, one.double())
        return sums[:, :-1]  # The last one is of no run.

    def slopes(self, logits: Tensor, total: Callable[[Tensor], Tensor]) -> dict[fx.Node, Tensor]:
        """The gradient of the sum of the losses by what the ops give."""
        point = wide(logits.detach()).requires_grad_()
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

    def _handler(self, place: Place) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            given, inputs = list(arguments), arguments[place.position]
            if place.reads_runs:
                shape = [1] * inputs.dim()
                shape[0], shape[place.axis] = len(inputs), inputs.shape[place.axis]
                shrunk = self._leaf(inputs, place.columns).reshape(shape)
                given[place.position] = inputs - inputs * shrunk
            result = place.node.target(*given, **keywords)  # type: ignore[operator]
            output, *others = result if isinstance(result, tuple) else (result,)
            for edges in (*place.roots, *place.free):
                found = edges.contributions(inputs.detach(), output)
                output = edges.added(output, found, self._leaf(inputs, edges.targets))
            self._outputs[place.node] = output
            return (output, *others) if others else output

        return run

    def _leaf(self, like: Tensor, runs: Tensor) -> Tensor:
        """Numbers of zero, one per sample and run that is named."""
        leaf = like.new_zeros(len(like), len(runs)).requires_grad_()
        self._leaves.append((leaf, runs))
        return leaf


class _Cut:
    """Runs the model cut where units are entered: each layer gives a leaf, and reads the last."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._inputs: dict[fx.Node, Tensor] = {}
        self._outputs: dict[fx.Node, Tensor] = {}

    def handlers(self) -> dict[fx.Node, Any]:
        """What stands in for the ops."""
        return {place.node: self._handler(place) for place in self._places}

    def tangents(self, slopes: dict[fx.Node, Tensor], runs: Runs) -> Tensor:
        """What leaves the units of a run, with their inputs replaced by their tangents.

        Args:
            slopes: The loss's gradient by what the ops give.
            runs: The runs.

        Returns:
            The sums of weight times gradient, one per run.
        """
        # From the heads of free edges back to where what they read was written.
        back = self._passed(slopes, lambda place: place.free)
        others = {node: slopes[node] - back[node] for node in slopes}
        sums = self._products(others, lambda place: place.roots, runs)
        sums *= torch.from_numpy(runs.active)
        if runs.paired.any():
            # The second unit's tangent is what the first one's tangent sends it, less what the
            # weights between them lose.
            again = self._passed(others, lambda place: place.links)
            sent = self._products(again, lambda place: place.roots, runs)
            sums += sent * torch.from_numpy(runs.paired)
            sums -= self._products(others, lambda place: place.losses, runs)
        return sums

    def _passed(self, slopes: Mapping[fx.Node, Tensor], chosen: Chosen) -> dict[fx.Node, Tensor]:
        """Pass cotangents back over some edges, and on to what the last layers gave."""
        total = torch.zeros((), dtype=torch.float64)
        for place in self._places:
            for edges in chosen(place):
                found = edges.contributions(self._inputs[place.node], slopes[place.node])
                total = total + edges.products(found, slopes[place.node]).sum().cpu()
        zeros = {node: torch.zeros_like(output) for node, output in self._outputs.items()}
        if not total.requires_grad:
            return zeros
        passed = torch.autograd.grad(
            total, list(self._outputs.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(self._outputs, passed, strict=True)
        return zeros | {node: one for node, one in pairs if one is not None}

    def _products(self, slopes: Mapping[fx.Node, Tensor], chosen: Chosen, runs: Runs) -> Tensor:
        """What some edges contribute, times what is passed back to where they enter, by run."""
        sums = torch.zeros(len(runs.roots), dtype=torch.float64)
        for place in self._places:
            for edges in chosen(place):
                with torch.no_grad():
                    found = edges.contributions(self._inputs[place.node], slopes[place.node])
                    each = edges.products(found, slopes[place.node]).cpu()
                sums.index_add_(0, edges.targets.cpu(), each)
        return sums

    def _handler(self, place: Place) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            inputs = arguments[place.position]
            given = list(arguments)
            if place.cut:
                given[place.position] = inputs.detach()
            result = place.node.target(*given, **keywords)  # type: ignore[operator]
            output, *others = result if isinstance(result, tuple) else (result,)
            if place.cut or not output.requires_grad:
                output = output.detach().requires_grad_()
            self._inputs[place.node], self._outputs[place.node] = inputs, output
            return (output, *others) if others else output

        return run
