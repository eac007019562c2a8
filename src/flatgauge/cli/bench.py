"""`flatgauge bench`: what everything costs, beside other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatgauge.cli import completion
from flatgauge.cli.application import app, end
from flatgauge.cli.interrupts import INTERRUPTED
from flatgauge.cli.options import DATA, OUTPUT, RUNNING, WHAT, Debug, Threads, examples
from flatgauge.cli.output import check_form, styled
from flatgauge.cli.places import check_places
from flatgauge.cli.streams import show, tell

if TYPE_CHECKING:
    from flatgauge.cli.benchmarks.plan import BenchPlan
    from flatgauge.cli.benchmarks.results import Results
    from flatgauge.cli.benchmarks.row import TimingRow


@app.command(
    epilog=examples(
        "flatgauge bench --quick",
        "flatgauge bench --workloads W1,W2 --quantities product,trace --rounds 5",
        "flatgauge bench --data data --json bench.json --markdown bench.md --png bench.png",
    )
)
def bench(
    ctx: typer.Context,
    *,
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="W1 (MLP 784-512⁵-10), W2 (LeNet-5), W3 (ResNet-20), W1K (the MLP with 1,000 "
            "classes); all if not given.",
            rich_help_panel=WHAT,
            autocompletion=completion.complete_workloads,
        ),
    ] = None,
    quantities: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…",
            help="product, trace, sweep, units, eigenvalue, layers, classes, together, growth (all "
            "of these if not given); paths, discovery, stacking.",
            rich_help_panel=WHAT,
            autocompletion=completion.complete_quantities,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="See it work in minutes: one round on 200 samples of W1 and W2, too few to judge "
            "by; with --workloads or --quantities, what they name.",
            rich_help_panel=WHAT,
        ),
    ] = False,
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Take this share of the samples; 1 if not given.",
            rich_help_panel=DATA,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Holds the files of MNIST and CIFAR-10; without it, images are synthetic.",
            rich_help_panel=DATA,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the results as JSON, rewritten whole after every finished quantity.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the tables.", rich_help_panel=OUTPUT),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the costs.", rich_help_panel=OUTPUT)
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How many count; 3 if not given.", rich_help_panel=RUNNING
        ),
    ] = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Time flatgauge beside other tools, in gradients over the same data, and judge it by targets.

    The unit G is the processor time of one gradient by plain PyTorch.

    Tools that are not installed are left out; `make bench` installs them.

    At full size on two cores it takes hours.
    """
    check_places(ctx.params, "json", "markdown", "png")
    from flatgauge.cli.benchmarks.plan import QUICK, BenchPlan
    from flatgauge.cli.benchmarks.suite import run
    from flatgauge.cli.session import set_threads

    set_threads(threads)
    check_form(png)
    usual = QUICK if quick else BenchPlan()
    # Who names workloads or quantities wants all that belongs to them, also quickly.
    what = usual if workloads is quantities is None else BenchPlan()
    plan = BenchPlan(
        workloads=_words(workloads) or what.workloads,
        quantities=_words(quantities) or what.quantities,
        rounds=rounds or usual.rounds,
        scale=usual.scale if scale is None else scale,
        data=None if data is None else str(data),
    )
    _check_drawable(plan, png)
    latest: list[Results] = []

    def kept(results: Results) -> None:
        latest[:] = [results]
        _write(results, json, markdown)

    try:
        results = run(
            plan,
            tell=tell,
            kept=kept,
            shown=_show,
            strict=debug,
        )
    except KeyboardInterrupt:
        where = f"in {json}" if json is not None else "above"
        told = f"what is finished is {where}" if latest else "nothing is finished"
        tell(f"interrupted: {told}")
        end(INTERRUPTED)
    if png is not None:
        from flatgauge.cli.benchmarks.picture import draw

        draw(results.rows, png)
    for place in filter(None, (json, markdown, png)):
        tell(f"wrote {place}")
    if results.failures:  # Each was told when it happened.
        tell(f"error: {len(results.failures)} of the quantities failed")
        end(2)


def _show(about: str, rows: list[TimingRow]) -> None:
    """Print one section."""
    from flatgauge.cli.benchmarks.table import markdown, rich_print

    show(about + "\n")
    if styled():
        rich_print(rows)
    else:
        show(markdown(rows) + "\n")


def _write(results: Results, json: Path | None, markdown: Path | None) -> None:
    """Write what is finished."""
    from flatgauge.analysis.files import atomic_write

    if json is not None:
        atomic_write(json, results.to_json())
    if markdown is not None:
        atomic_write(markdown, results.to_markdown())


def _check_drawable(plan: BenchPlan, png: Path | None) -> None:
    """Refuse to draw where there will be nothing to draw."""
    if png is not None and not plan.drawable:
        raise ValueError(
            f"`--png {png}` draws costs in gradients, and there are none in "
            f"{', '.join(plan.quantities)}; leave it out, or name another quantity."
        )


def _words(text: str | None) -> list[str]:
    """Words with commas between them, each once."""
    words = [] if text is None else [word.strip() for word in text.split(",")]
    return list(dict.fromkeys(filter(None, words)))
