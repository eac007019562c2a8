"""The open runs of a study that are trained faster together than one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from flatgauge.studies.holding import Held
from flatgauge.studies.preparing import Prepared, prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.stacking import SIZE, stack_key, train_stacked, worth_stacking
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study


def train_open_runs(
    study: Study,
    store: Store,
    folder: str | None,
    *,
    size: int = SIZE,
    listener: Callable[[str], None] | None = None,
) -> None:
    """Train what is worth training together, beside other processes, and keep every network.

    Networks come out as if each was trained alone. Each is held from the moment it enters a
    stack until it is on disk; those that another process holds, or that are there, are left out.

    Args:
        study: The study.
        store: Its folder.
        folder: Where data sets are.
        size: The most networks in training at any time.
        listener: Called with the name of every run that is on disk.
    """
    runs = study.runs()
    groups: dict[Hashable, list[str]] = {}
    for run, recipe in runs.items():
        if _is_open(store, run):
            prepared = prepare(recipe, folder)
            if worth_stacking(recipe, prepared):
                groups.setdefault(stack_key(recipe, prepared), []).append(run)
    for group in groups.values():
        if len(group) > 1:
            with Held(store) as held:
                jobs = _jobs({run: runs[run] for run in group}, store, held, folder)
                for run, trained in train_stacked(jobs, size=size):
                    store.keep_model(run, runs[run], trained)
                    held.release(run)
                    if listener is not None:
                        listener(run)


def _is_open(store: Store, run: str) -> bool:
    """Whether a run has neither a network nor a row."""
    return not store.has_row(run) and not store.has_model(run)


def _jobs(
    recipes: dict[str, Recipe], store: Store, held: Held, folder: str | None
) -> Iterator[tuple[str, Recipe, Prepared]]:
    """Runs that nobody else holds, each held from now on."""
    for run, recipe in recipes.items():
        if held.take(run):
            # Looked at again once it is held: another process may have finished it meanwhile.
            if _is_open(store, run):
                yield run, recipe, prepare(recipe, folder)
            else:
                held.release(run)
