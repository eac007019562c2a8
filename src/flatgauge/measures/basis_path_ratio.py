"""How unequal the values of basis paths are."""

from __future__ import annotations

from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.registry import RESCALINGS, measure
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.paths.basis import surface_paths


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
