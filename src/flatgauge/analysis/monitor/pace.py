"""Keep measuring within a share of the training time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """Weighs the time that measuring takes against the time that training takes.

    The training time is what passes outside of `measuring`. A measurement is expected to take as
    long as the last one did; before the first, as long as the caller guesses. It is allowed only
    if all measuring, that one included, then stays within the share of the training time so far,
    so what one takes longer than expected is paid back before the next; and only if the time since
    the last one pays for it, so that what was saved up is not spent all at once.

    Args:
        share: Of the training time; None for no bound.
        clock: Gives the time in seconds.

    Attributes:
        spent: Seconds that measuring took so far.
        expected: Seconds that the next measurement is expected to take.

    Example:
        >>> now = [0.0]
        >>> pace = Pace(0.1, clock=lambda: now[0])
        >>> with pace.measuring():
        ...     now[0] += 2.0
        >>> now[0] += 30.0  # of training: 10 % of it pay for one measurement, and not for two
        >>> pace.allows()
        False
        >>> now[0] += 10.0
        >>> pace.allows()
        True
    """

    def __init__(
        self, share: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.share = share
        self.spent = self.expected = 0.0
        self._clock = clock
        self._start = clock()
        self._trained = 0.0  # until the last measurement

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start, measuring included."""
        return self._clock() - self._start

    @property
    def training(self) -> float:
        """Seconds that training took so far."""
        return self.elapsed_seconds - self.spent

    def allows(self) -> bool:
        """Whether one more measurement stays within the share."""
        if self.share is None:
            return True
        since = self.training - self._trained
        return (
            self.spent + self.expected <= self.share * self.training
            and self.expected <= self.share * since
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count what happens inside as measuring, and expect the next to take as long.

        Yields:
            Nothing.
        """
        before = self._clock()
        try:
            yield
        finally:
            self.expected = self._clock() - before
            self.spent += self.expected
            self._trained = self.training
