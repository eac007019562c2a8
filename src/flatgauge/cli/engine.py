"""Where a study runs: the options of `flatgauge study` for Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flatgauge.cli.options import RUNNING

if TYPE_CHECKING:
    from flatgauge.studies import RayEngine

#: The panel in which `--help` shows what only Ray has.
_RAY = "Running on Ray (--engine ray)"

Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(
        help="local: processes of this machine; ray: a task of Ray per network.",
        rich_help_panel=RUNNING,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Of the cluster's head; auto for the cluster that this machine is part of. If not "
        "given: RAY_ADDRESS, else Ray is started on this machine.",
        rich_help_panel=_RAY,
    ),
]
TaskCpus = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Processors of a task, and so many threads; 1 if not given.",
        rich_help_panel=_RAY,
    ),
]
TaskGpus = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="GPUs reserved for a task, for networks of your own that use them; 0 if not given.",
        rich_help_panel=_RAY,
    ),
]
TaskMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory reserved for a task, e.g. 4GiB; none if not given.",
        rich_help_panel=_RAY,
    ),
]
Retries = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Try a run again so often whose worker or node was lost; 3 if not given.",
        rich_help_panel=_RAY,
    ),
]
Wait = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Wait so long for the cluster, and for a node on which a task fits; 60 if not given.",
        rich_help_panel=_RAY,
    ),
]

#: What the options are called in Python.
_OPTIONS = {
    "address": "address",
    "task_cpus": "cpus",
    "task_gpus": "gpus",
    "task_memory": "memory",
    "retries": "retries",
    "wait": "wait",
}


def read_engine(ctx: typer.Context) -> RayEngine | None:
    """The engine that the options of a command describe.

    Args:
        ctx: The command.

    Returns:
        Ray as it is to be used; None for processes of this machine.

    Raises:
        ValueError: If options do not go together.
    """
    name, words = ctx.params["engine"], _given_options(ctx.params)
    if name != "ray":
        if words:
            word = next(iter(words)).replace("_", "-")
            raise ValueError(f"`--{word}` is for Ray; add `--engine ray`, or leave it out.")
        return None
    if ctx.params["workers"] is not None:
        raise ValueError(
            f"`--workers {ctx.params['workers']}` are processes of this machine; on Ray as many "
            "tasks run at once as fit: leave it out, and give what a task needs (`--task-cpus`)."
        )
    from flatgauge.studies import RayEngine

    return RayEngine(**{_OPTIONS[word]: value for word, value in words.items()})


def _given_options(params: dict[str, Any]) -> dict[str, Any]:
    """Those options for Ray that were given."""
    return {word: params[word] for word in _OPTIONS if params[word] is not None}
