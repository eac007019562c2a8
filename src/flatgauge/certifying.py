"""Rewrite a model in every way it allows, and see which numbers move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Generator

from flatgauge.asking import wanted_of
from flatgauge.curvature.taps import PARTS
from flatgauge.judging import MOVED, judge
from flatgauge.measures import GROUPS, registry
from flatgauge.progress import Progress, shown
from flatgauge.randomness import check_seed
from flatgauge.report import Certificate, Kept, Row
from flatgauge.retrial import Outcome, Retrial, Wanted
from flatgauge.surface import LossSurface
from flatgauge.symmetry.calling import call_of
from flatgauge.symmetry.rewriting import KEEPING, RESCALINGS, Rewritings, find_rewritings

#: Samples on which outputs and signs are compared.
_SAMPLES = 256


def certify(
    surface: LossSurface,
    *,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | str | None = None,
    trials: int = 3,
    log2_range: float = 6.0,
    seed: int = 0,
    progress: Progress | bool = False,
) -> Certificate:
    """Prove, on your own model, which measures do not see how it is written.

    A copy of the model is rewritten by random members of every group that it has: rescaled
    layer by layer and unit by unit, by powers of two and by arbitrary factors; hidden units
    permuted; outputs scaled and shifted; weight moved between identical branches. After every move
    all measures are taken again. A measure that claims invariance must not change:
    bit-identical for power-of-two factors, within rounding otherwise.

    Args:
        surface: What to certify; neither it nor its model is changed.
        measures: Names, or a mapping from names to options; None for those that share the sweep,
            "all" for every measure.
        trials: Moves per group and kind of factor.
        log2_range: Every independent scale is moved by up to this many powers of two.
        seed: Of the moves and of everything random in the measures.
        progress: True for a bar on stderr; or a function called before each move with its name,
            how many are done, and how many there are.

    Returns:
        The certificate; `.passed` says whether every claim holds.

    Raises:
        ValueError: If an argument is out of range, the surface has a weight decay, or a measure
            does not exist or fails.
        TypeError: If `surface` is of the wrong kind.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> names = ["hessian_trace", "riemannian_max_eigenvalue"]
        >>> certificate = certify(two_weights(2.0, 3.0), measures=names)
        >>> certificate.passed
        True
        >>> frame = certificate.to_frame().set_index(["measure", "group"])
        >>> frame.loc[[(name, "nodewise") for name in names], "change"].round(2).tolist()
        [77.77, 0.0]
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`surface` is a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ValueError(f"`trials={trials!r}` must be a whole number of at least 1.")
    check_seed(seed)
    if not isinstance(log2_range, (int, float)) or not 1 <= log2_range < math.inf:
        raise ValueError(
            f"`log2_range={log2_range!r}` must be a finite number of at least 1: half of the moves "
            "are by powers of two."
        )
    if surface.weight_decay:
        raise ValueError(
            f"the surface has `weight_decay={surface.weight_decay:g}`, a penalty on the weights "
            "that changes with every way to write the network, so that nothing is invariant; "
            "certify the surface without it."
        )
    wanted = _wanted(measures)
    twin = surface.twin()
    with surface.processes.together("certify"), shown(progress, twin) as tell:
        return _certified(twin, wanted, measures, trials, log2_range, seed, tell)


def _certified(
    twin: LossSurface,
    wanted: Wanted,
    measures: Any,
    trials: int,
    log2_range: float,
    seed: int,
    tell: Progress,
) -> Certificate:
    """Certify a surface whose model may be changed."""
    call = call_of(twin, _SAMPLES)
    rewritings = find_rewritings(twin.model, call, log2_range=log2_range)
    plan = [
        (group, exact)
        for group in rewritings.draws
        for exact in ((True, False) if group in RESCALINGS else (False,))
        for _ in range(trials)
    ]
    retrial = Retrial(twin, wanted, call, seed, strict=measures not in (None, "all"))
    moved: dict[tuple[str, bool], list[Outcome]] = {}
    for done, (group, exact) in enumerate(plan):
        tell(f"{group}", done, len(plan))
        generator = Generator().manual_seed(seed * 10_007 + done)
        outcome = retrial.after(rewritings.draws[group](generator, exact))
        moved.setdefault((group, exact), []).append(outcome)
    return Certificate(
        rows=tuple(_rows(retrial, wanted, rewritings, moved)),
        kept=tuple(_kept(group, moved, retrial) for group in rewritings.draws),
        scales=rewritings.gauge.dim,
        pinned=tuple(str(pin) for pin in rewritings.gauge.pinned),
        model=type(twin.model).__name__,
        samples=twin.samples,
        dtype=str(twin.dtype).removeprefix("torch."),
        trials=trials,
        seed=seed,
        notes=tuple(twin.notes),
    )


def _rows(
    retrial: Retrial,
    wanted: Wanted,
    rewritings: Rewritings,
    moved: dict[tuple[str, bool], list[Outcome]],
) -> Iterator[Row]:
    """One row for every measure and group."""
    for item, options in wanted:
        value = retrial.before[item.name].value
        for group in GROUPS:
            row = Row(item.name, group, group in item.claims(options), value)
            exact, other = moved.get((group, True), []), moved.get((group, False), [])
            absent = rewritings.absent.get(group)
            if group == "output_shift" and max((o.loss for o in other), default=0.0) > MOVED:
                absent = "the loss sees a shift of the outputs: it is another function"
            yield replace(row, note=absent) if absent else judge(row, retrial, exact, other)


def _kept(group: str, moved: dict[tuple[str, bool], list[Outcome]], retrial: Retrial) -> Kept:
    """What a group did to the function."""
    exact, other = moved.get((group, True), []), moved.get((group, False), [])
    outputs = max((o.outputs for o in exact), default=None)
    outputs_any = max((o.outputs for o in other), default=None)
    rounding = 1e-9 if retrial.double else 1e-4
    rescaled = group in RESCALINGS
    return Kept(
        group=group,
        moves=len(exact) + len(other),
        outputs=outputs,
        outputs_any=outputs_any,
        loss=max(o.loss for o in (*exact, *other)),
        flipped=sum(o.flipped for o in other) if rescaled else 0,
        signs=retrial.signs * len(other) if rescaled else 0,
        held=group not in KEEPING or max(outputs or 0.0, outputs_any or 0.0) <= rounding,
    )


def _wanted(measures: Any) -> Wanted:
    """The measures to certify."""
    if measures is None:
        return [(item, {}) for item in registry if set(item.needs) & set(PARTS)]
    return wanted_of(measures)
