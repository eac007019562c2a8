"""The options of the commands, in the panels in which `--help` shows them.

`SurfaceOptions` are the options that all commands on a model share; `surface_command` adds them to
a command's own, so that each is declared once.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flatgauge.cli.application import app

MODEL, DATA, WHAT = "Model", "Data", "What to measure"
OUTPUT, RUNNING = "Output", "Running"
_PANELS = (None, MODEL, DATA, WHAT, OUTPUT, RUNNING)


def option(help: str, panel: str, *names: str, metavar: str | None = None, **more: Any) -> Any:
    """An option of a command: its text, its panel, and its name where that is not its own."""
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, **more)


def examples(*lines: str) -> str:
    """The end of a command's help: a line for every example."""
    return "\n\n".join(["Examples:", *lines])


def complete_measure(incomplete: str) -> list[str]:
    """Measures that begin like this, also of the balanced form of the model."""
    contents = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    names = [row["name"] for row in json.loads(contents)]
    if "balanced:".startswith(incomplete) or incomplete.startswith("balanced:"):
        names += [f"balanced:{name}" for name in names]
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/to/file.py:factory or package.module:factory.",
        show_default=False,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL CHECKPOINT...",
        help="A model (file.py:factory) and the checkpoints to load into it; for other "
        "architectures, further models, each with the checkpoints that follow it. A model without "
        "checkpoint is taken as its factory makes it.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    option("Checkpoint: .safetensors, or a .pt of tensors only.", MODEL, metavar="FILE"),
]
MoreWeights = Annotated[
    list[str] | None,
    option("Checkpoint for the last model; another way to name one, may be repeated.", MODEL),
]

_MEASURE = (
    "A measure (see `flatgauge catalogue`), with options if wanted: hessian_trace:tolerance=0.05; "
    "balanced:NAME measures the balanced form of the model; repeat for several. Without -m: "
)


def measures_option(default: str) -> Any:
    """The option for measures, of which these are measured without it."""
    names = ("--measure", "-m")
    complete: dict[str, Any] = {"metavar": "NAME", "autocompletion": complete_measure}
    return option(f"{_MEASURE}{default}.", WHAT, *names, **complete)


Measures = Annotated[list[str] | None, measures_option("all")]
Gauge = Annotated[
    Literal["balanced"] | None,
    option("balanced: measure the way to write it of smallest norm.", WHAT),
]
Json = Annotated[bool, option("Print JSON instead of a table.", OUTPUT, "--json")]
Save = Annotated[
    str | None,
    option(
        "Keep the results as JSON, rewritten whole after every finished measure.",
        OUTPUT,
        metavar="FILE",
    ),
]
Html = Annotated[
    str | None, option("Write the report as one self-contained page.", OUTPUT, metavar="FILE")
]


class PagePart(StrEnum):
    """What a page shows beside numbers."""

    CERTIFICATE = "certificate"
    SPECTRUM = "spectrum"
    LANDSCAPE = "landscape"


Without = Annotated[
    list[PagePart] | None, option("Leave this out of the page; repeat for several.", OUTPUT)
]
Seed = Annotated[
    int,
    option("Seed of everything random.", RUNNING, metavar="N", min=0, max=2**32 - 1),
]
Threads = Annotated[int | None, option("CPU threads to use.", RUNNING, metavar="N", min=1)]
Debug = Annotated[bool, option("Show the traceback of an error.", RUNNING, "--debug")]

_LOSS = (
    "cross_entropy, mse, nll, l1, binary_cross_entropy, output (the model's own), "
    "file.py:function, or auto: the model's own if it differs from cross-entropy, else that."
)
_MEMORY = (
    "Bound on the memory of the whole process, e.g. 4GiB; half of what is free if not given. On a "
    "GPU, of what is taken beside model and data."
)


@dataclass(frozen=True, kw_only=True)
class SurfaceOptions:
    """The options that all commands on a model share: data, loss, and how to run."""

    data: Annotated[
        str,
        option(
            "digits, mnist:DIR, fashion-mnist:DIR, cifar10:DIR, a .npz, or file.py:factory.",
            DATA,
            metavar="DATA",
        ),
    ]
    loss: Annotated[str, option(_LOSS, DATA, metavar="NAME")] = "auto"
    split: Annotated[Literal["train", "test"], option("Which part of the data.", DATA)] = "train"
    limit: Annotated[int | None, option("Take only the first N samples.", DATA, metavar="N")] = None
    mean: Annotated[
        str | None, option("Per channel, e.g. .485,.456,.406.", DATA, metavar="M,…")
    ] = None
    std: Annotated[str | None, option("Per channel, e.g. .229,.224,.225.", DATA, metavar="S,…")] = (
        None
    )
    weight_decay: Annotated[float, option("Adds ½ · X · ‖θ‖² to the loss.", DATA, metavar="X")] = (
        0.0
    )
    dtype: Annotated[
        Literal["float32", "float64"] | None,
        option("Precision; the model's own if not given.", MODEL),
    ] = None
    seed: Seed = 0
    threads: Threads = None
    device: Annotated[str, option("cpu, cuda, cuda:1, mps.", RUNNING, metavar="NAME")] = "cpu"
    memory: Annotated[str, option(_MEMORY, RUNNING, metavar="SIZE")] = "auto"
    debug: Debug = False


def surface_command(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function as a command on models: its first argument is the shared options.

    Args:
        *lines: Examples for the help.

    Returns:
        A decorator. The command has the function's own options and the shared ones, panel by
        panel.
    """
    shared = inspect.signature(SurfaceOptions, eval_str=True).parameters

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        @functools.wraps(function)
        def command(**words: Any) -> None:
            options = SurfaceOptions(**{name: words.pop(name) for name in shared})
            function(options, **words)

        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared.values())]
        every.sort(key=lambda param: _PANELS.index(_panel(param.annotation)))
        command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        command.__annotations__ = {param.name: param.annotation for param in every}
        app.command(epilog=examples(*lines))(command)
        return function

    return register


def _panel(annotation: Any) -> str | None:
    """The panel of an option; None for an argument."""
    panel: str | None = annotation.__metadata__[0].rich_help_panel
    return panel
