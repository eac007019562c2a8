"""What the bounds on the 0-1 error share: errors, terms, confidence intervals, noisy networks.

`ZeroOne` is the error sample by sample, at any weights. A bound is a list of `Term`. `BoundContext`
holds what it is computed with and draws networks around the trained one; `error_terms` and
`held_out_terms` turn the errors of the draws into terms with confidence intervals by the binary
divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import with_surrogate
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import IGNORED
from flatgauge.surface.losses import prediction
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd

#: The columns of the table, in order.
COLUMNS = ("bound", "term", "value", "lower", "upper", "part", "note")

#: Gives the values of the parameters of one network after the other.
Networks = Callable[[], list[Tensor]]

ASSUMED = (
    "presumes that the surface's data are the training set, all of it, and an i.i.d. sample; that "
    "the architecture, and parameters that count as given, were fixed without looking at it; and "
    "that the model was not picked among others by the value of this bound"
)

#: Halvings of an interval of length one: to the last bit of a number near one.
_HALVINGS = 60

#: The surrogate loss of normalized sharpness.
NORMALIZED = "normalized_cross_entropy"

#: The term that compares the network with its noisy draws on held-out data.
_NOISE_PRICE = "(A) L_D(f) - L_D(Q)"


class NotCoveredError(ValueError):
    """A bound says nothing about a model of this kind."""


# -- terms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One term of a bound.

    Attributes:
        value: Its value; nan where there is none, for the reason that the note gives.
        lower: Where it was estimated, what it is at least with the confidence of the note.
        upper: And at most.
        part: Whether it is one of the parts that add up to the bound.
    """

    name: str
    value: float
    lower: float = math.nan
    upper: float = math.nan
    part: bool = False
    note: str = ""


def total(terms: Iterable[Term]) -> float:
    """What the parts add up to."""
    return math.fsum(term.value for term in terms if term.part)


def vacuous_term(value: float) -> Term:
    """Whether a bound on an error says anything."""
    vacuous = not value < 1
    note = "it is 1 or more, and no error is" if vacuous else "it is below 1: it says something"
    return Term("vacuous", float(vacuous), note=f"1 for yes, 0 for no: {note}")


def table(bounds: Iterable[tuple[str, Sequence[Term]]]) -> pd.DataFrame:
    """All terms of all bounds, one row each."""
    import pandas as pd

    rows = [
        (name, term.name, term.value, term.lower, term.upper, term.part, term.note)
        for name, terms in bounds
        for term in terms
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


# -- confidence intervals ----------------------------------------------------------------------


def binary_divergence(found: float, true: float) -> float:
    """Return kl(p‖q), in nats, of a coin that falls with probability p from one with q.

    It is infinite where q leaves no room for p.

    Example:
        >>> round(binary_divergence(0.5, 0.25), 4)
        0.1438
    """
    terms = 0.0
    for p, q in ((found, true), (1 - found, 1 - true)):
        if p > 0:
            terms += p * math.log(p / q) if q > 0 else math.inf
    return max(terms, 0.0)


def upper_mean(found: float, count: int, delta: float) -> float:
    r"""Return what the mean of numbers in [0, 1] is at most, with confidence 1 − δ.

    Chernoff's bound holds for independent numbers anywhere in [0, 1] (Hoeffding 1963).

    Definition:
        .. math:: \max \{ q : \operatorname{kl}(\hat p \| q) \le \ln(1/\delta) / n \}

    Example:
        None of 100 draws failed; (1 − q)^100 = 0.05 has the solution:

        >>> round(upper_mean(0.0, 100, 0.05), 6), round(1 - 0.05**0.01, 6)
        (0.029513, 0.029513)
    """
    return _edge(found, 1.0, lambda q: binary_divergence(found, q) <= -math.log(delta) / count)


def lower_mean(found: float, count: int, delta: float) -> float:
    """What the mean of numbers in [0, 1] is at least, with confidence 1 − δ; see `upper_mean`."""
    return _edge(found, 0.0, lambda q: binary_divergence(found, q) <= -math.log(delta) / count)


def _edge(inside: float, outside: float, holds: Callable[[float], bool]) -> float:
    """Where something ceases to hold, from the side where it does not: never too tight."""
    if holds(outside):
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return outside


# -- the 0-1 loss ------------------------------------------------------------------------------


class ZeroOne:
    """The 0-1 loss on the samples of a surface, of its model at any weights.

    A sample is wrong unless the output of its label is larger than every other: ties are wrong,
    and so are outputs that are not numbers. `samples` counts those with a label.
    """

    def __init__(self, surface: LossSurface, data: LossSurface | None = None) -> None:
        """Read classes and labels from the model and the samples of `data`; None: its own."""
        self._surface = surface
        self._data = data or surface
        loss = self._data.risk.loss
        self._ignored = IGNORED if loss.ignored is None else loss.ignored
        few, subject = self._data.risk.few(), surface.functional_model
        with isolate(surface.model, surface.device), torch.no_grad():
            outputs = prediction(subject(subject.leaves, subject.place(few), with_labels=False))
        self.classes = _classes(outputs, few.target)
        # Under a loss that counts every label once, whatever weights the surface's own has.
        self._risk = with_surrogate(self._data, NORMALIZED).risk
        self.samples = len(self.wrong(subject.leaves))

    def wrong(self, leaves: Sequence[Tensor]) -> Tensor:
        """Which samples with a label the network with these parameters classifies wrongly."""
        surface, subject, chunk = self._surface, self._surface.functional_model, self._data.chunk

        def judge() -> Tensor:
            found = [torch.zeros(0, dtype=torch.bool)]
            for batch in self._risk.chunks(chunk):
                placed = subject.place(batch)
                outputs = prediction(subject(leaves, placed, with_labels=False))
                found.append(self._wrong_samples(outputs, placed.target).cpu())
            return torch.cat(found)

        with isolate(surface.model, surface.device), torch.no_grad():
            same = subject.with_state(leaves)
            return torch.cat(self._data.processes.gather("the 0-1 loss", judge, same=same))

    def _wrong_samples(self, outputs: Tensor, target: Any) -> Tensor:
        """Which samples of a chunk are wrong."""
        _classes(outputs, target)
        labels = target.long()
        kept = labels != self._ignored
        outputs, labels = outputs[kept], labels[kept, None]
        own = outputs.gather(1, labels)
        others = outputs.scatter(1, labels, -torch.inf).max(1, keepdim=True).values
        return ~(own > others)[:, 0]


def _classes(outputs: Tensor, target: Any) -> int:
    """The number of classes, where outputs and targets are such."""
    shape = tuple(outputs.shape)
    labels = isinstance(target, Tensor) and not target.is_floating_point()
    if not labels or target.dtype is torch.bool:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"a bound on the 0-1 loss needs class labels, but the targets are {kind} and the "
            f"outputs have shape {shape}; give integer labels (N,) and a model with one output "
            "per class. For regression there is no 0-1 loss to bound."
        )
    if outputs.dim() != 2 or outputs.shape[1] < 2 or target.shape != outputs.shape[:1]:
        raise ValueError(
            f"a bound on the 0-1 loss needs outputs (N, classes) for at least two classes and "
            f"labels (N,), one per independent sample, but the outputs have shape {shape} and the "
            f"labels {tuple(target.shape)}; give the model one output per class, and one label "
            "to a sample."
        )
    return outputs.shape[1]


# -- errors of networks under noise ------------------------------------------------------------


@dataclass(frozen=True)
class BoundContext:
    """What a bound is computed with.

    Attributes:
        data: The 0-1 loss on the training data.
        held_out: The 0-1 loss on data that the model has not seen, if there are any.
        delta: The probability with which the bound may fail, draws included.
        source: Gives a source of randomness for a purpose.
    """

    surface: LossSurface
    data: ZeroOne
    held_out: ZeroOne | None
    delta: float
    draws: int
    source: Callable[[str], Generator]

    @property
    def confidence(self) -> str:
        """How sure a bound is."""
        return f"with confidence {1 - self.delta:g} over data and draws, for this bound alone"

    def error(self, leaves: Sequence[Tensor]) -> float:
        """The error on the training data of the network with these parameters."""
        return float(self.data.wrong(leaves).double().mean())

    def draw_errors(self, networks: Networks) -> tuple[Tensor, Tensor | None]:
        """The error of every draw (draws,), and which held-out samples it gets wrong (draws, n)."""
        errors, wrong = [], []
        for _ in range(self.draws):
            leaves = networks()
            errors.append(self.error(leaves))
            if self.held_out is not None:
                wrong.append(self.held_out.wrong(leaves))
        found = torch.tensor(errors, dtype=torch.float64)
        return found, torch.stack(wrong).double() if wrong else None


def error_terms(context: BoundContext, errors: Tensor, *, absolute: bool) -> list[Term]:
    """Return the network's own error, what noise changes, and what more the draws may have missed.

    Noise changes the error by the mean of the draws minus the own error or, if `absolute`, by the
    size of that; intervals take half of δ.
    """
    own = context.error(context.surface.functional_model.leaves)
    mean, count = float(errors.mean()), len(errors)
    each = context.delta / (4 if absolute else 2)  # A size is bounded by both ends at once.
    most, least = upper_mean(mean, count, each), lower_mean(mean, count, each)
    if not absolute:
        return [
            Term("L_S(f)", own, part=True, note="the network's own error on its training data"),
            Term(
                *("(C) L_S(Q) - L_S(f)", mean - own, least - own, most - own),
                part=True,
                note=f"from {count} draws; lower and upper each with confidence {1 - each:g}",
            ),
            Term(
                *("allowance for the draws", most - mean),
                part=True,
                note="how far the mean of the draws may lie below L_S(Q): inverted binary kl",
            ),
        ]
    size = abs(mean - own)
    largest = max(most - own, own - least, 0.0)
    smallest = 0.0 if least <= own <= most else min(abs(most - own), abs(least - own))
    return [
        Term("l(v) on the training data", own, part=True, note="the network's own error"),
        Term(
            *("F_PSI-expected", size, smallest, largest),
            part=True,
            note=f"|E l(v+u) - l(v)| from {count} draws; lower and upper with confidence "
            f"{1 - 2 * each:g}",
        ),
        Term(
            *("allowance for the draws", largest - size),
            part=True,
            note="how much larger it may be: inverted binary kl",
        ),
    ]


def held_out_terms(context: BoundContext, seen: Tensor | None, bound: float) -> list[Term]:
    """Return how much worse than its noisy draws the network is on data that it has not seen.

    `seen` says which of the held-out samples every draw gets wrong (draws, samples), `bound` is
    on L_D(Q). Each interval may fail with probability δ.
    """
    delta = context.delta
    if context.held_out is None or seen is None:
        unknown = (
            "unknown without held-out data; the bound is one on the network under noise, not on "
            "the network itself. Pass `holdout=`."
        )
        return [Term(_NOISE_PRICE, math.nan, note=unknown)]
    wrong = context.held_out.wrong(context.surface.functional_model.leaves).double()
    draws, samples = seen.shape
    difference = float((wrong - seen.mean(0)).mean())
    # Samples: numbers in [-1, 1]. Draws: errors in [0, 1]. Hoeffding for both, δ / 2 each.
    width = math.sqrt(2 * math.log(4 / delta) / samples) + math.sqrt(
        math.log(4 / delta) / (2 * draws)
    )
    error, half = float(wrong.mean()), delta / 2
    sure = f"confidence {1 - delta:g} of its own"
    return [
        Term(
            *(_NOISE_PRICE, difference, difference - width, difference + width),
            note=f"on {samples} held-out samples and {draws} draws; lower and upper with {sure}",
        ),
        Term(
            *("L_D(f) at most", bound + difference + width),
            note=f"the bound plus the upper end of (A): confidence {max(0.0, 1 - 2 * delta):g}",
        ),
        Term(
            *("L_D(f) on held-out data", error),
            lower_mean(error, samples, half),
            upper_mean(error, samples, half),
            note=f"what these {samples} samples say without any bound, with {sure}",
        ),
    ]
