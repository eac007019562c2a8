"""The certificate: rewrite a model in every way it allows, and see which numbers move."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Generator

from flatgauge.curvature.taps import PARTS
from flatgauge.judging import MOVED, Judgement, judge
from flatgauge.loss import prediction
from flatgauge.measures import GROUPS, registry
from flatgauge.measuring import wanted_of
from flatgauge.report.certificate import certificate_text
from flatgauge.retrial import Outcome, Retrial, Wanted
from flatgauge.surface import LossSurface
from flatgauge.symmetry.rescaling import Call
from flatgauge.symmetry.rewriting import RESCALINGS, Rewritings, find_rewritings

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str, int, int], None]

#: Samples on which outputs and signs are compared.
_SAMPLES = 256

#: The groups that keep every output.
_KEEPING = ("layerwise", "nodewise", "rows", "permutation", "branches")


@dataclass(frozen=True)
class Row:
    """One measure under one group of rewritings.

    Attributes:
        measure: Its name.
        group: The group.
        claimed: Whether the measure claims to be invariant to it.
        before: The value as the model is given.
        verdict: "holds", "FAILS", "moves" (not claimed, and it does), "still" (not claimed, and
            it did not), or "absent" (the model has no such group).
        after: The value furthest from the one before, None where none was taken.
        change: The largest relative change under powers of two, for groups that rescale; under
            any members for the others. None where nothing was tried.
        allowed: What a claim allows there.
        change_any: The largest relative change under arbitrary factors, None where there are none.
        allowed_any: What a claim allows there.
        note: Why a group is absent, or what else the reader must know.
    """

    measure: str
    group: str
    claimed: bool
    before: float
    verdict: str
    after: float | None
    change: float | None
    allowed: float
    change_any: float | None
    allowed_any: float
    note: str


@dataclass(frozen=True)
class Kept:
    """What a group of rewritings did to the function itself.

    Attributes:
        group: The group.
        moves: How many members were tried.
        outputs: The largest change of any output under powers of two, beside the largest output;
            0 means that no bit changed.
        outputs_any: The same under arbitrary factors, None where there are none.
        loss: The largest relative change of the loss.
        flipped: How many ReLU inputs changed their sign under arbitrary factors.
        signs: How many ReLU inputs were compared.
        held: Whether the outputs stayed the same to rounding, where they should.
    """

    group: str
    moves: int
    outputs: float | None
    outputs_any: float | None
    loss: float
    flipped: int
    signs: int
    held: bool


@dataclass(frozen=True, repr=False)
class Certificate:
    """What moved and what did not, measure by measure and group by group.

    Attributes:
        rows: One for every measure and group.
        kept: What every group did to outputs and loss.
        scales: The number of independent scales of the model's gauge group.
        pinned: Ops that allow no scaling, in words.
        model: What was certified.
        samples: On how many samples.
        dtype: In which precision.
        trials: Moves of powers of two per group.
        seed: Of the moves and the measures.
        notes: What the reader must know.
    """

    rows: tuple[Row, ...]
    kept: tuple[Kept, ...]
    scales: int
    pinned: tuple[str, ...]
    model: str
    samples: int
    dtype: str
    trials: int
    seed: int
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every claim holds, and no rescaling changed the function."""
        return not self.failures and all(kept.held for kept in self.kept)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The claims that do not hold."""
        return tuple(row for row in self.rows if row.verdict == "FAILS")

    def to_frame(self) -> pd.DataFrame:
        """One row per measure and group.

        Returns:
            A frame with the attributes of `Row` as columns.
        """
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The contents, with `passed`. Numbers that JSON cannot hold are "inf" and "nan".
        """

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(item) for item in value]
            odd = isinstance(value, float) and not math.isfinite(value)
            return str(value) if odd else value

        contents: dict[str, Any] = plain({"passed": self.passed} | asdict(self))
        return contents

    def to_json(self, path: str | Path | None = None) -> str:
        """The certificate as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __repr__(self) -> str:
        return certificate_text(self)


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
    all measures are taken again. A measure that claims a group must not move: by powers of
    two not by one bit.

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
        ValueError: If `trials` is not positive, a measure does not exist or fails.
        TypeError: If `surface` is of the wrong kind.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> certificate = certify(two_weights(2.0, 3.0), measures=["hessian_trace", "rho_sum"])
        >>> certificate.passed
        True
        >>> frame = certificate.to_frame().set_index(["measure", "group"])
        >>> frame.loc[("hessian_trace", "nodewise"), "verdict"]
        'moves'
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`surface` is a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ValueError(f"`trials={trials!r}` must be a whole number of at least 1.")
    wanted = _wanted(measures)
    twin = surface.twin()
    if progress is True:
        from flatgauge.report.progress import bar

        with bar(twin) as listener:
            return _certified(twin, wanted, measures, trials, log2_range, seed, listener)
    listener_given = progress if callable(progress) else None
    return _certified(twin, wanted, measures, trials, log2_range, seed, listener_given)


def _certified(
    twin: LossSurface,
    wanted: Wanted,
    measures: Any,
    trials: int,
    log2_range: float,
    seed: int,
    progress: Progress | None,
) -> Certificate:
    """Certify a surface whose model may be changed."""
    call = _call(twin)
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
        if progress is not None:
            progress(f"{group}", done, len(plan))
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
    for item, _ in wanted:
        value = retrial.before[item.name].value
        for group in GROUPS:
            claimed = group in item.invariant_to
            exact, other = moved.get((group, True), []), moved.get((group, False), [])
            absent = rewritings.absent.get(group)
            if group == "output_shift" and max((o.loss for o in other), default=0.0) > MOVED:
                absent = "the loss sees a shift of the outputs: it is another function"
            judged = (
                Judgement("absent", note=absent)
                if absent
                else judge(item.name, group, retrial, exact, other, claimed=claimed)
            )
            yield Row(item.name, group, claimed, value, **vars(judged))


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
        held=group not in _KEEPING or max(outputs or 0.0, outputs_any or 0.0) <= rounding,
    )


def _call(surface: LossSurface) -> Call:
    """What the model is called with for the first samples, and what of its output counts."""
    loss = surface.objective.loss
    batch = next(surface.objective.chunks(min(_SAMPLES, surface.samples)))
    arguments, keywords = surface.subject.arguments(batch, with_labels=loss.own)
    if loss.own:
        return Call(arguments, keywords, lambda output: output.loss)
    if loss.curvature is not None:
        return Call(arguments, keywords, prediction)
    return Call(arguments, keywords)


def _wanted(measures: Any) -> Wanted:
    """The measures to certify."""
    if measures is None:
        return [(item, {}) for item in registry if set(item.needs) & set(PARTS)]
    return wanted_of(None if measures == "all" else measures)
