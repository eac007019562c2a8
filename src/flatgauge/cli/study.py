"""`flatgauge study`: the papers' experiments by name."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatgauge.cli.application import app
from flatgauge.cli.engine import (
    Address,
    Engine,
    Retries,
    TaskCpus,
    TaskGpus,
    TaskMemory,
    Wait,
    read_engine,
)
from flatgauge.cli.options import DATA, OUTPUT, RUNNING, WHAT, Debug, Json, examples
from flatgauge.cli.output import is_styled, print_json, shows_progress
from flatgauge.cli.streams import log, show

if TYPE_CHECKING:
    from flatgauge.studies import PoolResult, RayEngine, Study
    from flatgauge.studies.pool import NetworkPool


@app.command(
    epilog=examples(
        "flatgauge study",
        "flatgauge study random-labels",
        "flatgauge study batch-size --preset medium --data data --out batches",
        "flatgauge study batch-size --preset medium --data data --out batches --resume",
        "flatgauge study batch-size --engine ray --address auto --out batches --resume",
    )
)
def study(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="random-labels, batch-size, init-batch, mnist-layers or rescaling; lists them if "
            "not given.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        Literal["quick", "medium", "paper"],
        typer.Option(
            help="quick (minutes, on the digits), medium (about an hour, on subsets), paper (as "
            "published).",
            rich_help_panel=WHAT,
        ),
    ] = "quick",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="One pool of several; may be repeated.", rich_help_panel=WHAT
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Holds the files of MNIST and CIFAR-10; `quick` needs none.",
            rich_help_panel=DATA,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The study's folder; study-NAME-SIZE if not given.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with what is in the folder; also to let a second process help.",
            rich_help_panel=RUNNING,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Processes of one thread each; one per core if not given.",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    task_cpus: TaskCpus = None,
    task_gpus: TaskGpus = None,
    task_memory: TaskMemory = None,
    retries: Retries = None,
    wait: Wait = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Repeat an experiment of the papers: train a pool of networks, measure them, correlate.

    Every finished network and its row are kept at once; after an interruption --resume goes on.
    """
    if name is None:
        _list()
        return
    from flatgauge.studies.published import published_study

    parts = _select(published_study(name, preset), only or [])
    place = out or Path(f"study-{name}-{preset}")
    ray = read_engine(ctx)
    found = {}
    with nullcontext() if ray is None else ray.connect():
        for part, pool in parts.items():
            found[part] = run_pool(part, pool, place / part, data, resume, workers, ray)
            told = report_pool(found[part], _command(name, preset, part, pool))
            if not json:
                show(f"\n{name}, {part}")
                print_pool(found[part])
                show(f"\n{told}")
    if json:
        print_json({"command": sys.argv[1:]} | {k: v.to_dict() for k, v in found.items()})


def run_pool(
    part: str,
    pool: NetworkPool,
    place: Path,
    data: Path | None,
    resume: bool,
    workers: int | None,
    ray: RayEngine | None,
) -> PoolResult:
    """Run one pool; say what is kept if it is interrupted."""
    total = len(pool.members)
    many = 1 if ray is not None else min(workers or _cores(), total)
    processes = "1 process" if many == 1 else f"{many} processes"
    where = processes if ray is None else f"{ray.cpus:g} CPU each on Ray"
    log(f"{part}: {total} networks, {where}, in {place}")
    try:
        # Ray prints what it lost.
        with nullcontext() if ray is None else redirect_stdout(sys.stderr):
            return pool.run(
                place,
                data=data,
                resume=resume,
                workers=many,
                progress=shows_progress(),
                engine=ray or "local",
            )
    except KeyboardInterrupt:
        from flatgauge.studies.store import PoolStore

        trained, measured = len(list(place.glob("models/*.s*"))), len(PoolStore(place).rows())
        log(
            f"interrupted: of {total} networks {trained} are trained and {measured} measured, in "
            f"{place}; --resume goes on"
        )
        raise typer.Exit(130) from None


def _cores() -> int:
    """How many processes can work at once."""
    import os

    # What this process may use, where the system tells; a container has fewer than the machine.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_pool(result: PoolResult) -> None:
    """Print what was found for a person at a terminal, or for a file."""
    if not is_styled():
        show(repr(result))
        return
    from rich.console import Console

    from flatgauge.report.tables import print_tables

    print_tables(result.tables(), Console())


def _list() -> None:
    """Print what there is."""
    from flatgauge.studies.published import STUDIES

    for one in STUDIES.values():
        show(f"{one.name}  ({one.paper})\n    {one.about}")
        for preset in ("quick", "medium", "paper"):
            pools = [
                f"{part}: {len(pool.runs())} networks" for part, pool in one.parts(preset).items()
            ]
            show(f"    --preset {preset:<7} {'; '.join(pools)}")


def _select(parts: dict[str, Study], only: list[str]) -> dict[str, Study]:
    """The pools asked for."""
    unknown = [name for name in only if name not in parts]
    if unknown:
        raise ValueError(
            f"`--only {unknown[0]}` is no part of this study; it has {', '.join(parts)}."
        )
    return {name: pool for name, pool in parts.items() if not only or name in only}


def report_pool(result: PoolResult, command: str) -> str:
    """Write the page, and say where it is; a pool without one does not keep others from theirs."""
    if result.included_frame.empty:
        return f"no report, as no network counts; see {result.write_results()}"
    return f"report: {result.write(command=command).resolve()}"


def _command(name: str, preset: str, part: str, pool: Study) -> str:
    """The command that repeats one pool."""
    data = "" if pool.recipe.data in ("digits", "noise") else " --data DIR"
    return f"flatgauge study {name} --preset {preset} --only {part}{data}"
