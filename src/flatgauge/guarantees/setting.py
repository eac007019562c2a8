"""What every bound on the 0-1 loss is computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.guarantees.zero_one import ZeroOne
from flatgauge.surface import LossSurface

#: Gives the values of the parameters of one network after the other.
Networks = Callable[[], list[Tensor]]

ASSUMED = (
    "presumes that the surface's data are the training set, all of it, and an i.i.d. sample; that "
    "the architecture, and parameters that count as given, were fixed without looking at it; and "
    "that the model was not picked among others by the value of this bound"
)


@dataclass(frozen=True)
class Setting:
    """What a bound is computed with.

    Attributes:
        surface: Model and training data.
        data: The 0-1 loss on the training data.
        heldout: The 0-1 loss on data that the model has not seen, if there are any.
        delta: The probability with which the bound may fail, draws included.
        draws: Networks to draw.
        source: Gives a source of randomness for a purpose.
    """

    surface: LossSurface
    data: ZeroOne
    heldout: ZeroOne | None
    delta: float
    draws: int
    source: Callable[[str], Generator]

    @property
    def confidence(self) -> str:
        """How sure a bound is."""
        return f"with confidence {1 - self.delta:g} over data and draws, for this bound alone"

    def own_error(self) -> float:
        """The error of the network itself on the training data."""
        return float(self.data.wrong(self.surface.subject.leaves).double().mean())

    def errors(self, networks: Networks) -> tuple[Tensor, Tensor | None]:
        """Draw networks.

        Args:
            networks: Gives one after the other.

        Returns:
            The error of every draw on the training data (draws,), and which of the held-out
            samples it gets wrong (draws, samples).
        """
        errors, seen = [], []
        for _ in range(self.draws):
            leaves = networks()
            errors.append(float(self.data.wrong(leaves).double().mean()))
            if self.heldout is not None:
                seen.append(self.heldout.wrong(leaves))
        found = torch.tensor(errors, dtype=torch.float64)
        return found, torch.stack(seen).double() if seen else None
