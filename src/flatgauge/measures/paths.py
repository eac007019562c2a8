"""Measures that read the weights along paths, and no loss.

`path_norm` (Neyshabur et al. 2015; Gonon et al. 2024) is the norm of all paths from an input or
bias to an output, `basis_path_ratio` says how unequal the values of basis paths are.
"""

from __future__ import annotations

import math
import sys

from torch import fx

from flatgauge.estimators.estimate import Estimate
from flatgauge.graph.export import ModelGraph
from flatgauge.measures.declaration import measure
from flatgauge.measures.registry import RESCALINGS
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.losses import prediction
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.basis_paths import surface_paths
from flatgauge.symmetry.path_sums import path_sum


@measure(
    symbol="‖Φ(θ)‖_q",
    paper="Neyshabur et al. 2015; Gonon et al. 2024",
    geometry="none: it reads weights, not the loss",
    functional="norm of the paths",
    kind="capacity",
    invariant_to=RESCALINGS | {"permutation", "branches"},
    cost="one forward pass of one sample",
)
def path_norm(surface: LossSurface, *, order: float = 1.0) -> Estimate:
    r"""Norm of the products of weights along all paths from an input or bias to an output.

    Definition:
        .. math:: \|\Phi(\theta)\|_q = \Big( \sum_{\text{paths } p} \prod_{w \in p} |w|^q
                  \Big)^{1/q}

        for networks of linear maps and piecewise linear ops. A path starts at an entry of the
        input or at a bias (anything that is added and does not depend on the input) and ends at
        an entry of the prediction. A batch-norm is a factor and a bias per channel, a mean of k
        entries has weights 1/k, of a maximum the paths of all entries count. A leaky ReLU counts
        with the steeper of its slopes; so does a PReLU. Clamping passes; a bound on the far side
        of zero is a bias. What is computed from weights alone (a weight norm) is one weight.
        Tied weights and weights that are not trained count wherever the graph reads them.

    Invariance:
        layerwise, nodewise, rows, permutation, branches. Along a path through a unit, what enters
        is multiplied by c and what leaves by 1/c. Weight moved between proportional branches adds
        up to the same sum of sizes for ``order=1`` only.

    Cost:
        One forward pass of one sample in double precision, whatever the data.

    Reference:
        [neyshabur2015norm], [gonon2024path]

    Args:
        surface: Where to measure. Of the data, only the shape of the first sample counts.
        order: The q of the norm, at least 1; 2 is Neyshabur's.

    Returns:
        The norm, exact.

    Raises:
        ValueError: If the order is out of range, the network is not piecewise linear, or the sum
            is too large for double precision.

    Example:
        One path, of weights 2 and -3:

        >>> from flatgauge.surface.examples import two_weights
        >>> path_norm(two_weights(2.0, -3.0)).value
        6.0
    """
    if not (math.isfinite(order) and order >= 1):
        raise ValueError(
            f"`order={order!r}` is not an order of a norm; use a number of at least 1."
        )
    graph, samples = surface.cache.get(("path_norm",), lambda: _graph(surface), static=True)
    with isolate(surface.model, surface.device):
        total = path_sum(graph, surface.functional_model.state, order) / samples
    if not math.isfinite(total):
        raise ValueError(
            "the sum over the paths of this network is larger than any number in double precision "
            "(1.8e308); `path_norm` cannot distinguish networks of this depth and width."
        )
    tiny = order > 1 and total < sys.float_info.min
    if tiny and path_sum(graph, surface.functional_model.state, 1.0) > 0:
        raise ValueError(
            f"`order={order!r}` makes the sum over the paths smaller than any number in double "
            "precision; take a smaller order."
        )
    value = total if order == 1 else total ** (1 / order)
    return Estimate(value, exact=True, options={"order": order})


def _graph(surface: LossSurface) -> tuple[ModelGraph, int]:
    """The graph for one sample, or for as many as cannot be taken apart, and how many these are."""
    subject, own = surface.functional_model, surface.risk.loss.own
    batch = surface.risk.example(1)
    graph = subject.export(batch, surface.graphs, prediction, with_labels=own, samples=0)
    assert all(isinstance(output, fx.Node) for output in graph.outputs)
    return graph, batch.samples


@measure(
    symbol="max|v| / min|v|",
    paper="Yi et al. 2019, Theorem 5.1, whose skeleton is the diagonal one",
    geometry="basis paths",
    functional="ratio",
    kind="capacity",
    invariant_to=RESCALINGS | {"permutation"},
    cost="no pass over the data",
    not_with={("skeleton", "diagonal"): ("permutation",)},
)
def basis_path_ratio(surface: LossSurface, *, skeleton: str = "strongest") -> Estimate:
    r"""Ratio of the largest to the smallest path value; strongest skeleton by default.

    Definition:
        .. math:: \frac{\max_k |v_k|}{\min_k |v_k|}

        over the basis paths whose value is not zero: a weight of zero is not an edge. Theorem 5.1
        of the paper bounds the ε-sharpness in path space by a power of it.

    Invariance:
        layerwise, nodewise, rows, permutation. (Not permutation with ``skeleton="diagonal"``, or
        where the strongest skeleton is tied. A shift of the outputs changes the last bias.)

    Cost:
        No pass over the data.

    Reference:
        [yi2019positively]

    Args:
        surface: Where to measure.
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.

    Returns:
        The ratio; the largest and the smallest value are in `details`.

    Raises:
        ValueError: If the skeleton does not exist, or all path values are zero.
        UnsupportedGraphError: If the model has no basis paths.

    Example:
        With one hidden unit between one input and one output there is one path:

        >>> from flatgauge.surface.examples import two_weights
        >>> basis_path_ratio(two_weights(2.0, 3.0)).value
        1.0
    """
    paths = surface_paths(surface, skeleton)
    sizes = paths.values.abs()
    alive = sizes[sizes > 0]
    if not len(alive):
        raise ValueError("no basis path has a value other than zero, so there is no ratio.")
    largest, smallest = float(alive.max()), float(alive.min())
    notes = []
    if len(alive) < len(sizes):
        notes.append(f"{len(sizes) - len(alive)} of {len(sizes)} paths have the value zero")
    return Estimate(
        largest / smallest,
        exact=True,
        details={"largest |v|": largest, "smallest |v|": smallest, "smallest |u|": paths.smallest},
        options={"skeleton": skeleton},
        notes=(*notes, *paths.notes),
    )
