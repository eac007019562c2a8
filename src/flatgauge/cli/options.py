"""The options that commands share, in the panels in which `--help` shows them."""

from __future__ import annotations

from typing import Annotated

import typer

from flatgauge.cli import completion

MODEL, DATA, WHAT = "Model", "Data", "What to measure"
OUTPUT, RUNNING = "Output", "Running"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/to/file.py:factory or package.module:factory.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Checkpoint: .safetensors, or a .pt of tensors only.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="float32 or float64; the model's own if not given.",
        rich_help_panel=MODEL,
        autocompletion=completion.complete_dtype,
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
MoreWeights = Annotated[
    list[str] | None,
    typer.Option(
        help="Checkpoint for the last model; another way to name one, may be repeated.",
        rich_help_panel=MODEL,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="DATA",
        help="digits, mnist:DIR, fashion-mnist:DIR, cifar10:DIR, a .npz, or file.py:factory.",
        rich_help_panel=DATA,
        autocompletion=completion.complete_data,
    ),
]
LossName = Annotated[
    str,
    typer.Option(
        "--loss",
        metavar="NAME",
        help="cross_entropy, mse, nll, l1, binary_cross_entropy, output (the model's own), "
        "file.py:function, or auto: the model's own if it differs from cross-entropy, else that.",
        rich_help_panel=DATA,
        autocompletion=completion.complete_loss,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="train or test.",
        rich_help_panel=DATA,
        autocompletion=completion.complete_split,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(metavar="N", help="Take only the first N samples.", rich_help_panel=DATA),
]
Mean = Annotated[
    str | None,
    typer.Option(metavar="M,…", help="Per channel, e.g. .485,.456,.406.", rich_help_panel=DATA),
]
Std = Annotated[
    str | None,
    typer.Option(metavar="S,…", help="Per channel, e.g. .229,.224,.225.", rich_help_panel=DATA),
]
WeightDecay = Annotated[
    float,
    typer.Option(metavar="X", help="Adds ½ · X · ‖θ‖² to the loss.", rich_help_panel=DATA),
]
_MEASURE = (
    "A measure (see `flatgauge catalogue`), with options if wanted: hessian_trace:tolerance=0.05; "
    "balanced:NAME measures the balanced form of the model; repeat for several. Without -m: "
)
Measures = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        "-m",
        metavar="NAME",
        help=f"{_MEASURE}all.",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_measure,
    ),
]
CertifiedMeasures = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        "-m",
        metavar="NAME",
        help=f"{_MEASURE}those of the shared sweep.",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_measure,
    ),
]
Gauge = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="balanced: measure the way to write it of smallest norm.",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_gauge,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT),
]
Save = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Keep the results as JSON, rewritten whole after every finished measure.",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the report as one self-contained page.",
        rich_help_panel=OUTPUT,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PART",
        help="Leave certificate, spectrum or landscape out of the page; repeat for several.",
        rich_help_panel=OUTPUT,
        autocompletion=completion.complete_part,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=2**32 - 1,
        help="Seed of everything random.",
        rich_help_panel=RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="CPU threads to use.", rich_help_panel=RUNNING),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1, mps.",
        rich_help_panel=RUNNING,
        autocompletion=completion.complete_device,
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Bound on the memory of the whole process, e.g. 4GiB; half of what is free if not "
        "given. On a GPU, of what is taken beside model and data.",
        rich_help_panel=RUNNING,
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=RUNNING),
]


def examples(*lines: str) -> str:
    """The end of a command's help: a line for every example."""
    return "\n\n".join(["Examples:", *lines])
