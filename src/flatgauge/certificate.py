"""The certificate: rewrite a model in every way it allows, and see which numbers move."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from flatgauge.curvature.taps import PARTS
from flatgauge.estimators import Estimate
from flatgauge.loss import prediction
from flatgauge.measures import GROUPS, Measure, registry
from flatgauge.measuring import estimates_of, wanted_of
from flatgauge.report.certificate import certificate_text
from flatgauge.surface import LossSurface
from flatgauge.symmetry.rescaling import Call
from flatgauge.symmetry.rewriting import RESCALINGS, Rewritings, find_rewritings
from flatgauge.symmetry.signs import relu_signs

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str, int, int], None]

#: What a change must exceed to count as one: below it, an unclaimed invariance "did not show".
MOVED = 1e-3

#: Samples on which outputs and signs are compared.
_SAMPLES = 256

#: How many of its own standard errors a random estimate may move.
_ERRORS = 5.0

#: How well a search from random starts finds its maximum again when the units change places.
_SEARCH = 0.05

#: The groups that keep every output.
_KEEPING = ("layerwise", "nodewise", "rows", "permutation", "branches")


@dataclass(frozen=True)
class Row:
    """One measure under one group of rewritings.

    Attributes:
        measure: Its name.
        group: The group.
        claimed: Whether the measure claims to be invariant to it.
        change: The largest relative change under powers of two, for groups that rescale;
            under any members for the others. None where the group does not apply.
        allowed: What the claim allows.
        change_any: The largest relative change under arbitrary factors, None where there are none.
        allowed_any: What the claim allows there.
        before: The value as the model is given.
        after: The value that is furthest from it.
        verdict: "holds", "FAILS", "moves" (not claimed, and it does), "still" (not claimed, and
            it did not), or "absent" (the model has no such group).
        note: Why a group is absent or a value was not compared.
    """

    measure: str
    group: str
    claimed: bool
    change: float | None
    allowed: float
    change_any: float | None
    allowed_any: float
    before: float
    after: float
    verdict: str
    note: str = ""


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
    wanted: list[tuple[Measure, dict[str, Any]]],
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
    trial = _Trial(twin, wanted, call, seed, strict=measures not in (None, "all"))
    moved: dict[tuple[str, bool], list[_Outcome]] = {}
    for done, (group, exact) in enumerate(plan):
        if progress is not None:
            progress(f"{group}", done, len(plan))
        generator = Generator().manual_seed(seed * 10_007 + done)
        outcome = trial.after(rewritings.draws[group](generator, exact))
        moved.setdefault((group, exact), []).append(outcome)
    return Certificate(
        rows=tuple(_rows(trial, wanted, rewritings, moved, twin.dtype)),
        kept=tuple(_kept(group, moved, trial.signs, twin.dtype) for group in rewritings.draws),
        scales=rewritings.gauge.dim,
        pinned=tuple(str(pin) for pin in rewritings.gauge.pinned),
        model=type(twin.model).__name__,
        samples=twin.samples,
        dtype=str(twin.dtype).removeprefix("torch."),
        trials=trials,
        seed=seed,
        notes=tuple(twin.notes),
    )


@dataclass(frozen=True)
class _Outcome:
    """What one move did."""

    estimates: dict[str, Estimate]
    outputs: float
    loss: float
    flipped: int


class _Trial:
    """A surface measured as it is, and again after every move."""

    def __init__(
        self,
        twin: LossSurface,
        wanted: list[tuple[Measure, dict[str, Any]]],
        call: Call,
        seed: int,
        *,
        strict: bool,
    ) -> None:
        self._twin, self._wanted, self._call = twin, wanted, call
        self._seed, self._strict = seed, strict
        self._state = {k: v.detach().clone() for k, v in _state(twin.model).items()}
        self.before = self._measured()
        self._outputs = call(twin.model)
        self._loss = twin.value()
        self._signs = relu_signs(twin.model, call)
        self.signs = sum(s.numel() for s in self._signs)

    def after(self, rewrite: Callable[[nn.Module], None]) -> _Outcome:
        """Rewrite the model, measure again, and put it back."""
        try:
            rewrite(self._twin.model)
            outputs = self._call(self._twin.model)
            loss = self._twin.value()
            signs = relu_signs(self._twin.model, self._call)
            return _Outcome(
                self._measured(),
                outputs=_change(self._outputs, outputs),
                loss=relative(self._loss, loss),
                flipped=sum(int((a != b).sum()) for a, b in zip(self._signs, signs, strict=False)),
            )
        finally:
            with torch.no_grad():
                for name, tensor in _state(self._twin.model).items():
                    tensor.copy_(self._state[name])

    def _measured(self) -> dict[str, Estimate]:
        found, _ = estimates_of(self._twin, self._wanted, seed=self._seed, strict=self._strict)
        return found


def _rows(
    trial: _Trial,
    wanted: list[tuple[Measure, dict[str, Any]]],
    rewritings: Rewritings,
    moved: dict[tuple[str, bool], list[_Outcome]],
    dtype: torch.dtype,
) -> list[Row]:
    """One row for every measure and group."""
    rows = []
    for item, _ in wanted:
        before = trial.before[item.name]
        for group in GROUPS:
            claimed = group in item.invariant_to
            empty = Row(
                item.name, group, claimed, None, 0.0, None, 0.0, before.value, before.value, ""
            )
            if group in rewritings.absent:
                note = rewritings.absent[group]
                rows.append(replace(empty, verdict="absent", note=note))
            elif group == "output_shift" and _seen(moved[group, False]):
                note = "the loss sees a shift of the outputs: it is another function"
                rows.append(replace(empty, verdict="absent", note=note))
            else:
                exact = [o.estimates[item.name] for o in moved.get((group, True), [])]
                other = [o.estimates[item.name] for o in moved.get((group, False), [])]
                rows.append(_judged(empty, before, exact, other, dtype))
    return rows


def _judged(
    row: Row, before: Estimate, exact: list[Estimate], other: list[Estimate], dtype: torch.dtype
) -> Row:
    """Fill in what a measure did under one group, and judge its claim."""
    if math.isnan(before.value) or any(math.isnan(e.value) for e in (*exact, *other)):
        note = next((n for e in (before, *exact, *other) for n in e.notes), "")
        return replace(row, verdict="FAILS" if row.claimed else "absent", note=note)
    main, second = (exact, other) if exact else (other, [])
    fine = dtype is torch.float64
    rounding = 1e-10 if fine else 1e-5
    change, allowed = _worst(before, main, 0.0 if exact else rounding, solver=not exact)
    change_any, allowed_any = _worst(before, second, rounding, solver=fine)
    if row.group == "permutation" and before.lower_bound:
        allowed = max(allowed, _SEARCH)
    ahead = change <= allowed and (not second or change_any <= allowed_any)
    if row.claimed:
        verdict = "holds" if ahead else "FAILS"
    else:
        verdict = "moves" if max(change, change_any) > MOVED else "still"
    furthest = max((*exact, *other), key=lambda e: relative(before.value, e.value))
    return replace(
        row,
        change=change,
        allowed=allowed,
        change_any=change_any if second else None,
        allowed_any=allowed_any,
        after=furthest.value,
        verdict=verdict,
    )


def _worst(
    before: Estimate, after: list[Estimate], rounding: float, *, solver: bool
) -> tuple[float, float]:
    """The largest relative change, and what is allowed for the estimate it came from."""
    worst, allowed = 0.0, math.inf
    for estimate in after:
        change = relative(before.value, estimate.value)
        size = abs(before.value) or 1.0
        noise = _ERRORS * (before.stderr + estimate.stderr) / size
        bound = 10 * max(before.bound or 0.0, estimate.bound or 0.0) / size if solver else 0.0
        limit = max(rounding, bound) + noise
        if change - limit >= worst - allowed:
            worst, allowed = change, limit
    return worst, allowed if after else rounding


def _kept(
    group: str, moved: dict[tuple[str, bool], list[_Outcome]], signs: int, dtype: torch.dtype
) -> Kept:
    """What a group did to the function."""
    exact, other = moved.get((group, True), []), moved.get((group, False), [])
    outputs = max((o.outputs for o in exact), default=None)
    outputs_any = max((o.outputs for o in other), default=None)
    rounding = 1e-9 if dtype is torch.float64 else 1e-4
    rescaled = group in RESCALINGS
    return Kept(
        group=group,
        moves=len(exact) + len(other),
        outputs=outputs,
        outputs_any=outputs_any,
        loss=max(o.loss for o in (*exact, *other)),
        flipped=sum(o.flipped for o in other) if rescaled else 0,
        signs=signs * len(other) if rescaled else 0,
        held=group not in _KEEPING or max(outputs or 0.0, outputs_any or 0.0) <= rounding,
    )


def _seen(outcomes: list[_Outcome]) -> bool:
    """Whether the loss changed."""
    return max(outcome.loss for outcome in outcomes) > MOVED


def relative(before: float, after: float) -> float:
    """How much a number changed, beside its size."""
    if before == after:
        return 0.0
    return abs(after - before) / abs(before) if before else math.inf


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest change of any output, beside the largest output."""
    worst = 0.0
    for one, other in zip(before, after, strict=True):
        if not torch.equal(one, other):
            size = float(one.double().abs().max())
            worst = max(worst, float((one.double() - other.double()).abs().max()) / (size or 1.0))
    return worst


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


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


def _wanted(measures: Any) -> list[tuple[Measure, dict[str, Any]]]:
    """The measures to certify."""
    if measures is None:
        return [(item, {}) for item in registry if set(item.needs) & set(PARTS)]
    return wanted_of(None if measures == "all" else measures)
