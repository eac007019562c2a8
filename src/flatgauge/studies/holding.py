"""Several runs of a study, held against other processes at once."""

from __future__ import annotations

from contextlib import ExitStack

from flatgauge.studies.store import Store


class Held:
    """The runs that are held here; all are released when the block is left.

    Args:
        store: The study's folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._locks: dict[str, ExitStack] = {}

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        for run in list(self._locks):
            self.release(run)

    def take(self, run: str) -> bool:
        """Hold a run.

        Args:
            run: Its name.

        Returns:
            Whether it is held here; not if another process holds it.
        """
        if run in self._locks:
            return True
        with ExitStack() as lock:
            if not lock.enter_context(self._store.held(run)):
                return False
            self._locks[run] = lock.pop_all()
        return True

    def release(self, run: str) -> None:
        """Let others have a run.

        Args:
            run: One that is held here.
        """
        self._locks.pop(run).close()
