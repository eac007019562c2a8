"""How long scale inference takes beside the export it reads, on networks written by others.

Run with `python -m benchmarks.discovery [NAME ...]`; needs pytorchcv and transformers (`make test`
installs them). Times are process times, reported as ratios to the export of the same run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from flatgauge.graph import ModelGraph
from flatgauge.isolation import isolated
from flatgauge.symmetry.finding import check, read_arguments
from flatgauge.symmetry.gauge import closed
from flatgauge.symmetry.inference import infer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main(names: list[str]) -> None:
    """Print a row per network: dimension, export, and inference and check in exports."""
    from wild import WILD  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    warm = torch.nn.Sequential(torch.nn.Linear(2, 2))  # The first export loads the exporter.
    ModelGraph(warm, (torch.zeros(2, 2),), {}, 0)
    print(f"{'network':28}{'scales':>8}{'export':>10}{'inference':>11}{'check':>8}")
    for name in names or WILD:
        network = WILD[name]
        model, call = read_arguments(network.model(), network.inputs(seed=0))
        start = time.process_time()
        with isolated(model, torch.device("cpu")):
            graph = ModelGraph(model, call.arguments, call.keywords, 0)
        exported = time.process_time()
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            inference = infer(graph, {key: tensor.detach() for key, tensor in state.items()})
        gauge = closed(inference)
        inferred = time.process_time()
        check(model, gauge, call)
        export = exported - start
        ratios = (inferred - exported) / export, (time.process_time() - inferred) / export
        print(
            f"{name:28}{gauge.dim:8,}{export:8.1f} s{ratios[0]:11.2f}{ratios[1]:8.2f}", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
