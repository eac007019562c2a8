"""The options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def measure_names() -> list[str]:
    """The measures, for completion."""
    from flatgauge.measures import registry

    return [item.name for item in registry]


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
        autocompletion=lambda: measure_names(),
    ),
]
