"""Rewrite a model in every way that its structure allows, and see which numbers move.

A surface enters `certify`, a `Certificate` leaves: one row per measure and group of transforms.
`InvarianceTest` measures the model as it is, then after each transform, and puts it back.
`largest_change` compares what moved with what rounding, solvers and random numbers may move, and
`verdict` judges it by what the measure claims. Where a claim fails in single precision, the same
transform is measured again in double precision and judged there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatgauge.analysis.measurement import run_measures
from flatgauge.analysis.request import Progress, Request, resolve_measures, show_progress
from flatgauge.analysis.result import Result
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import FLOAT32_RTOL, FLOAT64_RTOL, check_seed
from flatgauge.measures.registry import GROUPS, registry
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import ModelCall, example_call, surface_gauge
from flatgauge.symmetry.gauge import cloned_state, state_of
from flatgauge.symmetry.transforms import (
    TRANSFORM_GROUPS,
    Transform,
    Transforms,
    find_transforms,
)

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.report.tables import Table

#: Samples on which outputs and signs are compared.
_SAMPLES = 256

#: What a change must exceed to count as one: below it, an unclaimed invariance "did not show".
MOVED = 1e-3

#: How many of its own standard errors a random estimate may move; where that is more than the
#: estimate itself, standing still shows nothing.
_ERRORS, _MOST = 5.0, 1.0

#: How well a search from random starts finds its maximum again when the units change places.
_SEARCH = 0.05

#: Activations with a kink at zero.
_KINKED = ("relu", "relu_", "leaky_relu", "leaky_relu_", "_prelu_kernel", "clamp_min")


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
        >>> from flatgauge.surface.examples import two_weights
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
    # By default those that share the sweep.
    shared = [item.name for item in registry if item.needs().parts]
    requests = resolve_measures(shared if measures is None else measures)
    strict = measures not in (None, "all")
    twin = surface.copy()
    with surface.processes.scope("certify"), show_progress(progress, twin) as notify:
        call = example_call(twin, _SAMPLES)
        transforms = find_transforms(twin.model, surface_gauge(twin), call, log2_range=log2_range)
        test = InvarianceTest(twin, requests, call, seed, strict=strict)
        found = _run_trials(test, transforms, trials, seed, notify)
        return Certificate(
            rows=tuple(_rows(test, requests, transforms, found)),
            kept=tuple(_check_group(group, test, *found[group]) for group in transforms),
            scales=transforms.gauge.dim,
            pinned=tuple(str(pin) for pin in transforms.gauge.pinned),
            model=type(twin.model).__name__,
            samples=twin.samples,
            dtype=str(twin.dtype).removeprefix("torch."),
            trials=trials,
            seed=seed,
            notes=tuple(twin.notes),
        )


#: What powers of two did, and what other members of a group did.
_Trials = tuple[list["Trial"], list["Trial"]]


def _run_trials(
    test: InvarianceTest, transforms: Transforms, trials: int, seed: int, notify: Progress
) -> dict[str, _Trials]:
    """Measure under random members of every group."""
    plan = [
        (group, exact)
        for group, kind in transforms.items()
        for exact in ((True, False) if kind.has_exact_members else (False,))
        for _ in range(trials)
    ]
    found: dict[str, _Trials] = {group: ([], []) for group in transforms}
    for done, (group, exact) in enumerate(plan):
        notify(group, done, len(plan))
        generator = Generator().manual_seed(seed * 10_007 + done)
        transform = transforms[group].draw(generator, powers_of_two=exact)
        found[group][0 if exact else 1].append(test.measure_under(transform))
    return found


def _rows(
    test: InvarianceTest,
    requests: list[Request],
    transforms: Transforms,
    found: Mapping[str, _Trials],
) -> Iterator[CertificateRow]:
    """One row for every measure and group."""
    for request in requests:
        value = test.baseline[request.name].value
        for group in GROUPS:
            row = CertificateRow(request.name, group, group in request.claims, value)
            exact, other = found.get(group, ([], []))
            absent = transforms.absent.get(group)
            if group == "output_shift" and any(t.loss_change > MOVED for t in other):
                absent = "the loss sees a shift of the outputs: it is another function"
            yield replace(row, note=absent) if absent else _judged_row(row, test, exact, other)


def _judged_row(
    row: CertificateRow, test: InvarianceTest, exact: list[Trial], other: list[Trial]
) -> CertificateRow:
    """A row with its verdict, from what powers of two did and what other members did."""
    name, before = row.measure, test.baseline[row.measure]
    estimates = [trial.estimates[name] for trial in (*exact, *other)]
    broken = next((e for e in (before, *estimates) if math.isnan(e.value)), None)
    if broken is not None:
        failed = row.claimed and broken is not before
        note = "; ".join(broken.notes)
        return replace(row, verdict="FAILS" if failed else "unmeasured", note=note)
    search = row.group == "permutation" and before.lower_bound
    # Powers of two must not change one bit; other members may change what rounding changes.
    bits = largest_change((before, trial.estimates[name]) for trial in exact)
    loose = largest_change(
        ((before, trial.estimates[name]) for trial in other),
        FLOAT64_RTOL if test.in_float64 else FLOAT32_RTOL,
        solver=test.in_float64 or not exact,
        search=search,
    )
    # Rounding in single precision can push a ReLU over its kink, and an invariant measure jumps.
    if row.claimed and not test.in_float64 and not loose.within:
        pairs = [test.repeat_in_float64(trial, name) for trial in other]
        fine = largest_change(pairs, FLOAT64_RTOL, solver=True, search=search)
        if fine.within:
            signs = sum(trial.flipped_signs for trial in other) if exact else 0
            flips = f" ({signs} ReLU signs flipped)" if signs else ""
            note = f"moved by {loose.relative:.0e} in float32{flips}; judged in float64"
            row, loose = replace(row, note=note), fine
    furthest = max(estimates, key=lambda e: relative_change(before.value, e.value)).value
    moved = relative_change(before.value, furthest) > MOVED
    # Random numbers are the same before and after, except for units that change places.
    redrawn = row.group == "permutation"
    row = replace(row, after=furthest, verdict=verdict(row.claimed, moved, bits, loose, redrawn))
    if row.verdict == "unproven":
        row = replace(row, note="its own error is larger than the value: nothing is shown")
    if not exact:
        return replace(row, change=loose.relative, allowed=loose.allowed)
    row = replace(row, change=bits.relative, allowed=bits.allowed)
    return replace(row, change_any=loose.relative, allowed_any=loose.allowed) if other else row


def _check_group(
    group: str, test: InvarianceTest, exact: list[Trial], other: list[Trial]
) -> GroupCheck:
    """What a group did to the function."""
    kind, rounding = TRANSFORM_GROUPS[group], 1e-9 if test.in_float64 else 1e-4
    outputs = max((trial.output_change for trial in exact), default=None)
    outputs_any = max((trial.output_change for trial in other), default=None)
    return GroupCheck(
        group=group,
        moves=len(exact) + len(other),
        outputs=outputs,
        outputs_any=outputs_any,
        loss=max(trial.loss_change for trial in (*exact, *other)),
        flipped=sum(trial.flipped_signs for trial in other) if kind.has_exact_members else 0,
        signs=test.signs * len(other) if kind.has_exact_members else 0,
        held=not kind.preserves_outputs or max(outputs or 0.0, outputs_any or 0.0) <= rounding,
    )


# -- measuring under transforms ----------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What one transform did.

    Attributes:
        output_change: The largest change of any output, relative to the largest output.
        loss_change: The relative change of the loss.
        flipped_signs: How many ReLU inputs changed their sign.
    """

    transform: Transform
    estimates: dict[str, Estimate]
    output_change: float
    loss_change: float
    flipped_signs: int


class InvarianceTest:
    """Measures a model as it is, and again after transforms.

    Attributes:
        baseline: The measures of the model as it is, by name.
        signs: How many ReLU inputs are compared, on the samples of `call`.
    """

    def __init__(
        self,
        surface: LossSurface,
        requests: list[Request],
        call: ModelCall,
        seed: int,
        *,
        strict: bool,
    ) -> None:
        self._surface, self._requests, self._call = surface, requests, call
        self._seed, self._strict = seed, strict
        self._state = cloned_state(state_of(surface.model))
        self.in_float64 = surface.dtype is torch.float64
        self.baseline = self._measure()
        self._outputs, self._signs = outputs_and_signs(surface.model, call)
        self._loss = surface.value()
        self.signs = sum(s.numel() for s in self._signs)
        self._repeated: dict[int, dict[str, Estimate]] = {}

    def measure_under(self, transform: Transform) -> Trial:
        """Rewrite the model, measure again, and put it back."""
        model = self._surface.model
        try:
            transform.apply(model)
            outputs, signs = outputs_and_signs(model, self._call)
            flipped = (int((a != b).sum()) for a, b in zip(self._signs, signs, strict=False))
            return Trial(
                transform,
                self._measure(),
                output_change=_output_change(self._outputs, outputs),
                loss_change=relative_change(self._loss, self._surface.value()),
                flipped_signs=sum(flipped),
            )
        finally:
            with torch.no_grad():
                for name, tensor in state_of(model).items():
                    tensor.copy_(self._state[name])

    def repeat_in_float64(self, trial: Trial, name: str) -> tuple[Estimate, Estimate]:
        """A measure before and after the same transform, in double precision."""
        if id(trial) not in self._repeated:
            self._repeated[id(trial)] = self._precise.measure_under(trial.transform).estimates
        return self._precise.baseline[name], self._repeated[id(trial)][name]

    @cached_property
    def _precise(self) -> InvarianceTest:
        """The same in double precision."""
        surface, call = self._surface.copy(torch.float64), self._call.in_float64()
        return InvarianceTest(surface, self._requests, call, self._seed, strict=self._strict)

    def _measure(self) -> dict[str, Estimate]:
        """All measures of the model as it stands."""
        found = run_measures(self._surface, self._requests, seed=self._seed, strict=self._strict)
        return {request.name: estimate for request, estimate in found}


class _SignRecorder(TorchDispatchMode):
    """Records the signs of what every kinked activation reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record signs."""
        if func._schema.name.rpartition("::")[2] in _KINKED:
            self.signs.append(args[0].detach() > 0)
        return func(*args, **(kwargs or {}))


def outputs_and_signs(model: nn.Module, call: ModelCall) -> tuple[list[Tensor], list[Tensor]]:
    """A model's outputs on an example, and the signs of what each of its ReLUs reads."""
    recorder = _SignRecorder()
    with recorder:
        outputs = call(model)
    return outputs, recorder.signs


# -- judging changes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """How far a number moved, and how far a claim of invariance lets it move, both relative."""

    relative: float
    allowed: float

    @property
    def within(self) -> bool:
        """Whether it moved no further than allowed."""
        return self.relative <= self.allowed


def verdict(claimed: bool, moved: bool, exact: Change, other: Change, redrawn: bool) -> str:
    """The `CertificateRow.verdict`, by the changes under powers of two and under other members."""
    if not claimed:
        return "moves" if moved else "still"
    if not (exact.within and other.within):
        return "FAILS"
    noisy = any(one.relative > MOVED and one.allowed > _MOST for one in (exact, other))
    return "unproven" if noisy and not redrawn else "holds"


def largest_change(
    pairs: Iterable[tuple[Estimate, Estimate]],
    rounding: float = 0.0,
    *,
    solver: bool = False,
    search: bool = False,
) -> Change:
    """The change that most exceeds what errors, rounding, a solver or a search may make."""
    worst = Change(0.0, math.inf)
    for before, after in pairs:
        change, size = relative_change(before.value, after.value), abs(before.value) or 1.0
        # What stands still keeps its error, too: a larger one afterwards excuses nothing.
        error = math.hypot(before.stderr, min(after.stderr, 2 * before.stderr))
        noise = 0.0 if math.isnan(error) else _ERRORS * error / size
        bound = 10 * max(before.bound or 0.0, after.bound or 0.0) / size if solver else 0.0
        spread = max(_SEARCH, *(_search_spread(e) / size for e in (before, after))) if search else 0
        allowed = max(rounding, bound, spread) + noise
        if change - allowed >= worst.relative - worst.allowed:
            worst = Change(change, allowed)
    return worst


def relative_change(before: float, after: float) -> float:
    """How much a number changed, relative to its size."""
    if before == after:
        return 0.0
    return abs(after - before) / abs(before) if before and math.isfinite(before) else math.inf


def _search_spread(estimate: Estimate) -> float:
    """How far the starts of a search ended apart."""
    # The start along the gradient moves with the units: only what others find beyond it changes.
    rises = [value for key, value in estimate.details.items() if key.startswith("start ")]
    return max(rises) - min(rises) if rises else 0.0


def _output_change(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest change of any output, relative to the largest output."""
    worst = 0.0
    for one, other in zip(before, after, strict=True):
        if not torch.equal(one, other):
            size = float(one.double().abs().max())
            change = float((one.double() - other.double()).abs().max()) / (size or 1.0)
            worst = max(worst, math.inf if math.isnan(change) else change)
    return worst


# -- the record --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CertificateRow:
    """One measure under one group of transforms.

    Attributes:
        measure: Its name.
        group: The group.
        claimed: Whether the measure claims to be invariant to it.
        before: The value as the model is given.
        verdict: "holds", "FAILS", "moves" (not claimed, and it does), "still" (not claimed, and
            it did not), "unproven" (claimed, but too noisy to show it), "unmeasured" (the measure
            cannot be taken here), or "absent" (the model has no such group).
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
    verdict: str = "absent"
    after: float | None = None
    change: float | None = None
    allowed: float = 0.0
    change_any: float | None = None
    allowed_any: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class GroupCheck:
    """What the transforms of a group did to the function itself.

    Attributes:
        group: The group.
        moves: How many members were tried.
        outputs: The largest change of any output under powers of two, relative to the largest
            output; 0 means that no bit changed.
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
class Certificate(Result):
    """What moved and what did not, measure by measure and group by group.

    Attributes:
        rows: One for every measure and group.
        kept: What every group did to outputs and loss.
        scales: The number of independent scales of the model's gauge group.
        pinned: Ops that allow no scaling, as text.
        model: What was certified.
        samples: On how many samples.
        dtype: In which precision.
        trials: Moves per group and kind of factor.
        seed: Of the moves and the measures.
        notes: What the reader must know.
    """

    kind = "certificate"

    rows: tuple[CertificateRow, ...]
    kept: tuple[GroupCheck, ...]
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
    def failures(self) -> tuple[CertificateRow, ...]:
        """The claims that do not hold."""
        return tuple(row for row in self.rows if row.verdict == "FAILS")

    def to_frame(self) -> pd.DataFrame:
        """One row per measure and group.

        Returns:
            A frame with the attributes of `CertificateRow` as columns.
        """
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows])

    @property
    def verdict(self) -> str:
        """Whether all claims hold, and which do not, in a sentence."""
        tried = [row for row in self.rows if row.claimed and row.verdict in ("holds", "FAILS")]
        broken = [kept.group for kept in self.kept if not kept.held]
        parts = [f"outputs changed under {', '.join(broken)}"] if broken else []
        if failures := self.failures:
            names = ", ".join(f"{row.measure} under {row.group}" for row in failures)
            parts.append(f"{len(failures)} of {len(tried)} claims do not hold: {names}")
        if parts:
            return "; ".join(parts)
        return f"all {len(tried)} claims hold" if tried else "there was no claim to be tried"

    def worst_case(self, measure: str) -> float | None:
        """The value furthest from zero that a measure reached without a change of any output.

        Args:
            measure: Its name.

        Returns:
            The value; None where it did not move.
        """
        moved = [
            row.after
            for row in self.rows
            if row.measure == measure
            and row.verdict in ("moves", "FAILS")
            and row.after is not None
            and TRANSFORM_GROUPS[row.group].preserves_outputs
        ]
        return max(moved, key=abs, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The contents, with `passed`. Numbers that JSON cannot hold are "inf" and "nan".
        """
        return self.plain_contents({"passed": self.passed} | asdict(self))

    def tables(self) -> list[Table]:
        """What transforms did to the function and to the measures, and the verdict.

        Returns:
            The tables.
        """
        from flatgauge.report.views.certificate import certificate_tables

        return certificate_tables(self)
