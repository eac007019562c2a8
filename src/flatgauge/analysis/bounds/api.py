"""All bounds of a surface in one table: what flatness proves about the error on other data.

A surface of model and training data enters `bounds`, a frame with one row per term leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Generator

from flatgauge.analysis.bounds.pac_bayes import (
    FEWEST_BITS,
    FROZEN,
    MOST_BITS,
    PRIORS,
    normalized_bound,
    path_bound,
)
from flatgauge.analysis.bounds.terms import (
    NORMALIZED,
    BoundContext,
    NotCoveredError,
    Term,
    ZeroOne,
    table,
)
from flatgauge.analysis.bounds.theorem51 import theorem_bound
from flatgauge.curvature.block_diagonal import SURROGATES
from flatgauge.estimators.linalg import child_generator, root_seed
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.basis_paths import check_skeleton

if TYPE_CHECKING:
    import pandas as pd

#: The bounds, in the order of the table.
BOUNDS = ("normalized", "basis paths", "theorem 5.1")

#: What options that are whole numbers may be.
_RANGES = {"draws": (1, 10**9), "bits": (FEWEST_BITS, MOST_BITS), "seed": (0, 2**32 - 1)}


def bounds(
    surface: LossSurface,
    *,
    only: str | Sequence[str] | None = None,
    holdout: Any = None,
    delta: float = 0.05,
    draws: int = 100,
    bits: int = 8,
    frozen: str = "told",
    surrogate: str | None = NORMALIZED,
    prior: str = "paper",
    skeleton: str = "strongest",
    epsilon: float | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """What flatness proves about the error on other data, term by term.

    ``"normalized"`` is the PAC-Bayes bound of [tsuzuku2019normalized] on the 0-1 error of the
    network under the noise of normalized sharpness; ``"basis paths"`` that of [yi2019positively]
    (8) under noise on basis paths; ``"theorem 5.1"`` their bound on the rise of the training loss
    near the point. Bounds of networks of any size are mostly vacuous; the terms say why. See
    ``docs/bounds.md``.

    Args:
        surface: Model and *training* data: class labels, one per sample.
        only: Which of the bounds; None for all that the model has.
        holdout: Data that the model has not seen, as a pair ``(inputs, targets)``, a loader or a
            surface; they say what the network's own error is, next to that under noise.
        delta: The probability with which each bound may fail.
        draws: Networks to draw around the trained one.
        bits: Of the hyperprior per row and column: it holds 2^bits scales.
        frozen: Whether frozen parameters are ``"told"``, and cost their bits, or were ``"given"``
            before the data were seen (a pretrained part, trained on other data).
        surrogate: The loss whose curvature shapes the noise; None for the surface's own.
        prior: Of ``"normalized"``: ``"paper"`` for one as wide as the noise, ``"optimal"`` for the
            width that makes the divergence smallest, at the price of one more scale per layer.
            The table has both divergences.
        skeleton: Of the basis paths, ``"strongest"`` or ``"diagonal"``.
        epsilon: How far basis paths move in theorem 5.1; None for a hundredth of the smallest
            |u_b|.
        seed: Of everything that is drawn.

    Returns:
        A frame with one row per term: bound, term, value, lower and upper (where it was
        estimated), part (whether it is one of those that add up to the bound), note.

    Raises:
        TypeError: If `surface` is not a surface.
        ValueError: If an option is out of range, or data have no class labels.
        NotCoveredError: If a bound that was asked for by name says nothing about the model.
        UnsupportedGraphError: If it needs basis paths, and the model has none.

    Example:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs = torch.randn(1000, 2, generator=generator)
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[9.0, 0.0], [-9.0, 0.0]]))
        >>> labels = (inputs[:, 0] < 0).long()
        >>> surface = LossSurface(model, "cross_entropy", (inputs, labels))
        >>> frame = bounds(surface, only="normalized").set_index("term")
        >>> frame.loc[["L_S(f)", "vacuous"], "value"].tolist()
        [0.0, 0.0]
        >>> bool(frame.value["L_D(Q) at most"] < 0.5)
        True
    """
    wanted = _bounds_named(surface, only)
    _check_numbers(delta, epsilon, draws=draws, bits=bits, seed=seed)
    _check_choices(frozen=frozen, surrogate=surrogate, prior=prior, skeleton=skeleton)
    source = partial(child_generator, root_seed(Generator().manual_seed(seed)))
    context: BoundContext | None = None
    if set(wanted) & {"normalized", "basis paths"}:
        data = ZeroOne(surface)
        context = BoundContext(
            surface, data, _held_out_data(surface, holdout), delta, draws, source
        )

    def compute(name: str) -> list[Term]:
        if name == "theorem 5.1":
            return theorem_bound(surface, skeleton=skeleton, epsilon=epsilon)
        assert context is not None
        if name == "basis paths":
            return path_bound(context, skeleton=skeleton, frozen=frozen)
        return normalized_bound(context, bits=bits, frozen=frozen, surrogate=surrogate, prior=prior)

    found = []
    for name in wanted:
        try:
            terms = surface.processes.run(name, partial(compute, name))
        except (UnsupportedGraphError, NotCoveredError) as error:
            if only is not None:
                raise
            terms = [Term("not available", math.nan, note=str(error))]
        found.append((name, terms))
    return table(found)


def _held_out_data(surface: LossSurface, holdout: Any) -> ZeroOne | None:
    """The 0-1 loss on data that the model has not seen."""
    if holdout is None:
        return None
    if holdout is surface:
        raise ValueError(
            "`holdout` is the surface itself, whose data the model was trained on; give data that "
            "it has not seen."
        )
    if not isinstance(holdout, LossSurface):
        holdout = LossSurface(
            surface.model,
            "cross_entropy",
            holdout,
            dtype=surface.dtype,
            chunk=surface.most_samples,
            processes=surface.processes,
        )
    return ZeroOne(surface, holdout)


def _bounds_named(surface: LossSurface, only: str | Sequence[str] | None) -> tuple[str, ...]:
    """Which bounds to compute."""
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`bounds` needs a LossSurface, but got a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    wanted = BOUNDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    if not wanted or not set(wanted) <= set(BOUNDS):
        raise ValueError(f"`only={only!r}` names no bound; the bounds are {', '.join(BOUNDS)}.")
    return wanted


def _check_numbers(delta: float, epsilon: float | None, **whole: int) -> None:
    """Refuse numbers that are out of range."""
    if not 0 < delta < 1:
        raise ValueError(f"`delta={delta!r}` must lie between 0 and 1, such as 0.05.")
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise ValueError(f"`epsilon={epsilon!r}` must be a finite number above 0.")
    for name, value in whole.items():
        least, most = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"`{name}={value!r}` must be a whole number from {least} to {most}.")


def _check_choices(*, frozen: str, surrogate: str | None, prior: str, skeleton: str) -> None:
    """Refuse names that mean nothing."""
    if frozen not in FROZEN:
        raise ValueError(
            f"`frozen={frozen!r}` is unknown; use 'told' (frozen parameters cost their bits) or "
            "'given' (they were fixed before the data were seen)."
        )
    if surrogate is not None and surrogate not in SURROGATES:
        known = ", ".join(map(repr, SURROGATES))
        raise ValueError(
            f"`surrogate={surrogate!r}` is unknown; use {known}, or None for the surface's own "
            "loss."
        )
    if prior not in PRIORS:
        raise ValueError(
            f"`prior={prior!r}` is unknown; use 'paper' (as wide as the noise) or 'optimal' (as "
            "wide as makes the divergence smallest)."
        )
    check_skeleton(skeleton)
