"""How long scale inference takes beside the export it reads, on networks written by others.

The networks are those of the tests (`tests/wild`), so it runs in a checkout only, with pytorchcv
and transformers, which `make test` installs.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.graph.export import ModelGraph
from flatgauge.runtime.isolation import isolate
from flatgauge.symmetry.find import validate_model, verify_gauge
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.inference import infer_scales

UNIT = "exports"


def measured() -> Iterator[TimingRow]:
    """Time inference and check on every network.

    Yields:
        Two rows per network.

    Raises:
        FileNotFoundError: If this is no checkout.
    """
    folder = Path(__file__).parents[5] / "tests"
    if not (folder / "wild").is_dir():
        raise FileNotFoundError(
            f"`discovery` reads the networks of the tests, and there is no `{folder / 'wild'}`; "
            "run it in a checkout of the repository."
        )
    sys.path.insert(0, str(folder))
    try:
        networks = importlib.import_module("wild").WILD
    finally:
        sys.path.remove(str(folder))
    warm = torch.nn.Sequential(torch.nn.Linear(2, 2))  # The first export loads the exporter.
    ModelGraph(warm, (torch.zeros(2, 2),), {}, 0)
    for name, network in networks.items():
        yield from _timed(name, network)


def _timed(name: str, network: Any) -> Iterator[TimingRow]:
    """Inference and check, in exports."""
    model, call = validate_model(network.model(), network.inputs(seed=0))
    start = time.process_time()
    with isolate(model, torch.device("cpu")):
        graph = ModelGraph(model, call.args, call.kwargs, 0)
    exported = time.process_time()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        inference = infer_scales(graph, {key: tensor.detach() for key, tensor in state.items()})
    gauge = GaugeGroup.fixing_outputs(inference)
    inferred = time.process_time()
    verify_gauge(model, gauge, call)
    checked = time.process_time()
    export = exported - start
    setting = f"{gauge.dim:,} scales"
    parts = {"scale inference": inferred - exported, "check of scales": checked - inferred}
    for what, seconds in parts.items():
        cost = seconds / export
        yield TimingRow(name, what, OWN, cost, setting=setting, unit_seconds=export, unit=UNIT)
