"""Which of several processes does not get on."""

from __future__ import annotations

import statistics

#: How many times the median of the finished networks is long.
_LONG = 10


class Watch:
    """Knows the last run that every process has reported, and when.

    A process is named if it reports nothing for longer than `patience`, and for longer than ten
    times the median between two reports; while there is none, for ten times `patience`.

    Args:
        patience: Seconds.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._at: dict[int, tuple[str | None, float]] = {}
        self._took: list[float] = []
        self._named: set[int] = set()

    def report(self, pid: int, run: str | None, now: float) -> None:
        """A process reports the run that it has come to.

        Args:
            pid: The process.
            run: The name of the run; None if the process has just been started.
            now: The time in seconds.
        """
        before, since = self._at.get(pid, (None, now))
        if before is not None:
            self._took.append(now - since)
        self._at[pid] = run, now
        self._named.discard(pid)

    def end(self, pid: int) -> None:
        """A process has ended.

        Args:
            pid: The process.
        """
        self._at.pop(pid, None)

    def warnings(self, now: float) -> list[str]:
        """Name processes that have worked on one network for long.

        Args:
            now: The time in seconds.

        Returns:
            What to say of each that has not been named yet.
        """
        usual = statistics.median(self._took) if self._took else self._patience
        limit = max(self._patience, _LONG * usual)
        found = []
        for pid, (run, since) in self._at.items():
            if now - since > limit and pid not in self._named:
                self._named.add(pid)
                last = "no run" if run is None else f"run `{run}`"
                found.append(
                    f"process {pid} has reported nothing for {now - since:.0f} s, last {last}; if "
                    f"it hangs, end it (`kill {pid}`): another process then takes its run, and "
                    "what is finished is kept."
                )
        return found
