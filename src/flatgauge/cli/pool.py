"""`flatgauge pool`: which measure follows the generalization of checkpoints of one's own?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from flatgauge.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    RUNNING,
    WHAT,
    Debug,
    Json,
    Measures,
    examples,
)
from flatgauge.cli.output import print_json
from flatgauge.cli.streams import show
from flatgauge.cli.study import print_pool, report_pool, run_pool

if TYPE_CHECKING:
    from flatgauge.studies import Pool


@app.command(
    epilog=examples(
        "flatgauge pool nets.py:make runs/*.pt --data cifar10:data --samples 2000",
        "flatgauge pool --manifest runs.csv --data data.npz --factors optimiser,lr --resume",
    )
)
def pool(
    ctx: typer.Context,
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.py:NAME]",
            help="Makes the model; not needed where the manifest names it.",
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...", help="Files with weights of it.", show_default=False
        ),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV or JSON with one line per network: checkpoint, and if you have them factory, "
            "name, group, normalisation, test_loss, ... and columns of your own.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Training data: digits, mnist:DIR, cifar10:DIR, file.npz or file.py:name.",
            rich_help_panel=DATA,
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Test data; the split `test` of --data if not given.",
            rich_help_panel=DATA,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Training samples to read.", rich_help_panel=DATA),
    ] = None,
    test_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Test samples to read.", rich_help_panel=DATA),
    ] = None,
    loss: Annotated[
        str, typer.Option(metavar="NAME", help="The loss.", rich_help_panel=DATA)
    ] = "cross_entropy",
    measures: Measures = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="What they are to follow: loss_gap, accuracy_gap, test_loss, test_accuracy, or a "
            "column of the manifest.",
            rich_help_panel=WHAT,
        ),
    ] = "loss_gap",
    factors: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Columns of the manifest that differ by design.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    rescaling: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help='Rewrite every network and measure again, e.g. "units 1/100..100".',
            rich_help_panel=WHAT,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder of the pool.", rich_help_panel=OUTPUT),
    ] = Path("pool"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue with what is in the folder; also to let a second process help.",
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
    seed: Annotated[int, typer.Option(min=0, help="Of all.", rich_help_panel=RUNNING)] = 0,
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
    """Measure checkpoints of your own, and see which measure follows their generalization.

    Every finished row is kept at once; after an interruption --resume continues.
    """
    from flatgauge.cli.session import read_measures

    settings: dict[str, Any] = {
        "name": out.name,
        "data": data,
        "test_data": test,
        "samples": samples,
        "test_samples": test_samples,
        "loss": loss,
        "measures": read_measures(measures or []),
        "target": target,
        "factors": _names(factors) or (),
        "rescaling": rescaling,
        "seed": seed,
    }
    declared = _declare(factory, checkpoints or [], manifest, settings)
    result = run_pool(out.name, declared, out, None, resume, workers, read_engine(ctx))
    report = report_pool(result, "")
    if json:
        print_json(result.to_dict())
    else:
        print_pool(result)
        show(f"\n{report}")


def _declare(
    factory: str | None, checkpoints: list[str], manifest: Path | None, settings: dict[str, Any]
) -> Pool:
    """The pool that was asked for; an error says what is missing."""
    from flatgauge.studies import Pool

    if settings["data"] is None:
        raise ValueError("`--data` is missing; name the training data, such as `--data digits`.")
    if manifest is not None and not checkpoints:
        return Pool.from_manifest(manifest, factory=factory, **settings)
    if manifest is None and factory and checkpoints:
        return Pool.from_checkpoints(factory, checkpoints, **settings)
    raise ValueError(
        "name what makes the model and its checkpoints, as in `flatgauge pool nets.py:make "
        "runs/*.pt`, or give `--manifest FILE`."
    )


def _names(text: str | None) -> list[str] | None:
    """Names with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
