"""A certificate: what moved and what did not when a model was rewritten."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.printable import printable
from flatgauge.report.certificate_table import certificate_text
from flatgauge.report.json_text import json_text, plain

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Row:
    """One measure under one group of rewritings.

    Attributes:
        measure: Its name.
        group: The group.
        claimed: Whether the measure claims to be invariant to it.
        before: The value as the model is given.
        verdict: "holds", "FAILS", "moves" (not claimed, and it does), "still" (not claimed, and
            it did not), "unproven" (claimed, but too noisy to tell), "unmeasured" (the measure
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
        trials: Moves per group and kind of factor.
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
        contents: dict[str, Any] = plain({"passed": self.passed} | asdict(self))
        return contents

    def to_json(self, path: str | Path | None = None) -> str:
        """The certificate as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        return json_text(self.to_dict(), path)

    def __repr__(self) -> str:
        return printable(certificate_text(self))
