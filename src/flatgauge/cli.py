"""The command line: arguments in, a public function called, its result printed."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flatgauge.report import Report
    from flatgauge.surface import LossSurface

app = typer.Typer(
    name="flatgauge",
    help="How flat is the minimum of a trained network, whatever way it is written?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: What a wrong call, file or model raises, with a message that says what to do.
_TEACHING = (ValueError, TypeError, OSError, ImportError, MemoryError, AttributeError)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads to use.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Model = Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory.")]
Data = Annotated[
    str,
    typer.Option(
        help="digits, mnist:DIR, fashion-mnist:DIR, cifar10:DIR, a .npz, or file.py:factory."
    ),
]
Weights = Annotated[
    str | None, typer.Option(help="Checkpoint: .safetensors, or a .pt of tensors only.")
]
LossName = Annotated[
    str,
    typer.Option(
        "--loss",
        help="cross_entropy, mse, nll, l1, binary_cross_entropy, output (the model's own), "
        "or file.py:function.",
    ),
]
Split = Annotated[str, typer.Option(help="train or test.")]
Limit = Annotated[int | None, typer.Option(help="Take only the first N samples.")]
Mean = Annotated[str | None, typer.Option(help="Per channel, e.g. .485,.456,.406.")]
Std = Annotated[str | None, typer.Option(help="Per channel, e.g. .229,.224,.225.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32 or float64; the model's own if not given.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Memory = Annotated[str, typer.Option(help="What may be used, e.g. 2GiB.")]
WeightDecay = Annotated[float, typer.Option(help="Adds ½ · this · ‖θ‖² to the loss.")]
Measures = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        "-m",
        help="A measure (see `flatgauge catalogue`), with options if wanted: "
        "hessian_trace:tolerance=0.05; balanced:NAME measures the balanced form of the model; "
        "repeat for several.",
        autocompletion=lambda: _measure_names(),
    ),
]


def _version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        typer.echo(metadata.version("flatgauge"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How flat is the minimum of a trained network, whatever way it is written?"""


@app.command(epilog="Example: flatgauge measure nets.py:lenet --weights lenet.pt --data mnist:data")
def measure(
    ctx: typer.Context,
    model: Model,
    data: Data,
    weights: Weights = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    split: Split = "train",
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    weight_decay: WeightDecay = 0.0,
    gauge: Annotated[
        str | None, typer.Option(help="balanced: measure the way to write it of smallest norm.")
    ] = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how flat a trained model's minimum is, by every measure or by those named."""
    import flatgauge as fg
    from flatgauge.command import read_measures, set_threads

    set_threads(threads)
    wanted = read_measures(measures or [])
    with redirect_stdout(sys.stderr):  # What the user's own code prints is no result.
        surface, notes = _opened(ctx)
        watched = sys.stderr.isatty()
        report = fg.measure(surface, measures=wanted, gauge=gauge, seed=seed, progress=watched)
    _print_report(report, json, notes)


@app.command(
    epilog="Example: flatgauge certify nets.py:lenet --weights lenet.pt --data mnist:data "
    "--limit 200"
)
def certify(
    ctx: typer.Context,
    model: Model,
    data: Data,
    weights: Weights = None,
    loss: LossName = "cross_entropy",
    measures: Measures = None,
    every: Annotated[bool, typer.Option("--all", help="Certify every measure.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Moves per group and kind of factor.")] = 3,
    log2_range: Annotated[
        float, typer.Option(help="How far scales are moved, in powers of two.")
    ] = 6.0,
    split: Split = "train",
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    memory: Memory = "auto",
    weight_decay: WeightDecay = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Rewrite a model in every way it allows and see which measures move; exit 1 if a claim fails.

    Without -m, the measures that share the sweep are certified. What is proved does not depend on
    the number of samples: a few hundred (--limit) are enough.
    """
    import flatgauge as fg
    from flatgauge.command import read_certified, set_threads

    set_threads(threads)
    wanted = read_certified(measures or [], every=every)
    with redirect_stdout(sys.stderr):
        surface, notes = _opened(ctx)
        certificate = fg.certify(
            surface,
            measures=wanted,
            trials=trials,
            log2_range=log2_range,
            seed=seed,
            progress=sys.stderr.isatty(),
        )
    if json:
        _print_json({"notes": notes} | certificate.to_dict())
    elif sys.stdout.isatty():
        from flatgauge.report.certificate_table import rich_print

        rich_print(certificate)
    else:
        typer.echo(repr(certificate))
    sys.exit(0 if certificate.passed else 1)


@app.command(epilog="Example: flatgauge catalogue hessian_trace")
def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A measure, to be explained in full.", autocompletion=lambda: _measure_names()
        ),
    ] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")] = False,
    debug: Debug = False,
) -> None:
    """List every measure, what it is and what it is invariant to."""
    from flatgauge.measures import catalogue as frame
    from flatgauge.measures import registry
    from flatgauge.report.catalogue import explain, markdown_page, overview

    if json:
        rows = frame()
        chosen = rows if name is None else rows[rows["name"] == registry[name].name]
        typer.echo(chosen.to_json(orient="records", indent=2, force_ascii=False))
    elif name is not None:
        typer.echo(explain(name))
    else:
        typer.echo(markdown_page() if markdown else overview())


@app.command()
def demo(threads: Threads = None, seed: Seed = 0, debug: Debug = False) -> None:
    """Train a small network on digits, measure it, rescale it, and measure again."""
    from flatgauge.command import set_threads
    from flatgauge.demo import run

    set_threads(threads or 1)  # For a network this small one thread is the fastest.
    run(typer.echo, seed=seed)


def main() -> None:
    """Run the command line; errors are one line on stderr unless ``--debug`` is given."""
    # Idle threads of one numerical library must not spin while another one works: on two cores
    # that costs half of the time and more. Read when torch is loaded, so set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except BrokenPipeError:
        sys.stderr.close()  # The reader (`| head`) has had enough; that is no error.
        sys.exit(0)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        hint = "" if isinstance(error, _TEACHING) else " (--debug shows the traceback)"
        typer.echo(f"error: {error}{hint}", err=True)
        sys.exit(2)


def _measure_names() -> list[str]:
    """The measures, for completion."""
    from flatgauge.measures import registry

    return [item.name for item in registry]


def _opened(ctx: typer.Context) -> tuple[LossSurface, list[str]]:
    """The surface that the options of a command describe; notes on it are told, and given back."""
    import inspect

    from flatgauge.command import open_surface

    words = {name: ctx.params[name] for name in inspect.signature(open_surface).parameters}
    surface, notes = open_surface(**words)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return surface, notes


def _print_json(contents: dict[str, Any]) -> None:
    """Print results for a program, with the command that they came from."""
    import json

    command = {"command": sys.argv[1:]}
    typer.echo(json.dumps(command | contents, indent=2, ensure_ascii=False))


def _print_report(report: Report, json: bool, notes: list[str]) -> None:
    """Print a report for a program, a person at a terminal, or a file."""
    if json:
        _print_json({"notes": notes} | report.to_dict())
    elif sys.stdout.isatty():
        from flatgauge.report.table import rich_print

        rich_print(report.facts, report.estimates)
    else:
        typer.echo(repr(report))
