"""Time two versions of the library in the same rounds, and compare what they take.

    python tools/timing.py --old BEFORE/src --new src
    python tools/timing.py --old BEFORE/src --new src --only "W1 sweep" --scale 0.2 --rounds 3

Each version runs in a long-lived process of its own, with one thread. In every round both do the
same job one after the other, each round starting with the other one, and the ratio new/old of
their processor times is taken; what the machine does at the same time touches both. Printed are
the median of the ratios with the smallest and the largest, the seconds, and how far the results
are apart. Before a job is timed, a copy of the surface is made, which knows the model's graph but
none of its numbers. The first round is a warm-up.

`--memory` runs every job once more in two fresh processes, which pay for everything (imports,
export, checks), and prints their seconds and how far memory rose above what was held before.

Only public names are used; `ADAPTERS` bridges those that differ between the versions. The networks
are those of the benchmarks, W1 (MLP), W2 (LeNet-5) and W3 (ResNet-20), trained alike in both.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

Action = Callable[[], float]

#: Samples of each kind of job at full scale, by workload.
SAMPLES = {
    "product": {"W1": 4000, "W2": 4000, "W3": 500},
    "trace": {"W1": 2000, "W2": 2000, "W3": 200},
    "sweep": {"W1": 2000, "W2": 1000, "W3": 200},
    "eigenvalues": {"W1": 1000, "W2": 1000, "W3": 100},
    "certificate": {"W1": 200, "W2": 200, "W3": 40},
    "gauge": {"W3": 20},
}
JOBS = [f"{workload} {job}" for job, sizes in SAMPLES.items() for workload in sizes]

#: Where the benchmarks have lived, the latest first.
BENCHMARKS = ("benchmarks", "flatgauge.cli.benchmarks", "flatgauge.bench")


class Worker:
    """A process that runs jobs on one version of the library.

    Args:
        source: The folder that holds `flatgauge/`.
        scale: Share of the samples to take.
    """

    def __init__(self, source: Path, scale: float) -> None:
        path = os.pathsep.join([str(source), str(source.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", "--scale", str(scale)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: str) -> Outcome:
        """Do a job once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(job + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended during `{job}`; its error is above")
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass
class Outcome:
    """What a job took: processor seconds, bytes above what was held before, and its result."""

    seconds: float
    memory: int
    value: float


def compare(job: str, workers: list[Worker], rounds: int) -> str:
    """Time one job in both versions; a line of the table."""
    outcomes: list[tuple[Outcome, Outcome]] = []
    for number in range(rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        done = {index: workers[index].run(job) for index in order}
        outcomes.append((done[0], done[1]))
    del outcomes[0]  # The warm-up.
    ratios = sorted(new.seconds / old.seconds for old, new in outcomes)
    old, new = (statistics.median(pair[side].seconds for pair in outcomes) for side in (0, 1))
    return (
        f"{job:16} {statistics.median(ratios):6.3f} {ratios[0]:6.3f}-{ratios[-1]:<6.3f} "
        f"{old:8.3f} s {new:8.3f} s  {_difference(*outcomes[-1])}"
    )


def compare_fresh(job: str, sources: list[Path], scale: float) -> str:
    """Run one job in fresh processes; a line of the table."""
    outcomes = []
    for source in sources:
        worker = Worker(source, scale)
        outcomes.append(worker.run(f"fresh {job}"))
        worker.close()
    old, new = outcomes
    return (
        f"{job:16} {new.memory / max(old.memory, 1):6.3f} {old.memory >> 20:6} MiB "
        f"{new.memory >> 20:6} MiB {old.seconds:8.2f} s {new.seconds:8.2f} s"
    )


def _difference(old: Outcome, new: Outcome) -> str:
    """How far two results are apart."""
    if old.value == new.value:
        return "same value"
    return f"values differ by {abs(new.value - old.value) / (abs(old.value) or 1.0):.0e}"


def serve(scale: float) -> None:
    """Answer jobs, one per line of the standard input, until it ends."""
    import torch

    torch.set_num_threads(1)
    prepared: dict[str, Callable[[], Action]] = {}
    for line in sys.stdin:
        job = line.strip().removeprefix("fresh ")
        if line.startswith("fresh "):
            action = prepare(job, scale, warm=False)()
        else:
            if job not in prepared:
                prepared.clear()
                prepared[job] = prepare(job, scale, warm=True)
            action = prepared[job]()
        gc.collect()
        held = _reset_peak()
        start = time.process_time()
        value = action()
        seconds = time.process_time() - start
        del action
        answer = {"seconds": seconds, "memory": max(_peak() - held, 0), "value": value}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def prepare(job: str, scale: float, *, warm: bool) -> Callable[[], Action]:
    """Set a job up once; what comes back prepares a round, which is not timed either."""
    import torch

    import flatgauge as fg

    workload, kind = job.split()
    samples = max(round(SAMPLES[kind][workload] * scale), 20)
    model, inputs, targets = load(workload, scale)
    if kind == "gauge":
        sizes = count(2)  # Another one each time: no version may know the graph already.
        return lambda: lambda: float(fg.find_gauge(model, inputs[: next(sizes)]).dim)
    data = (inputs[:samples], targets[:samples])
    surface = fg.LossSurface(model, "cross_entropy", data, memory="2GiB")
    if warm and kind != "product":
        fg.curvature.block_curvature(surface, generator=torch.Generator().manual_seed(0))
    copy = ADAPTERS["copy"] if warm else lambda surface: surface
    if kind == "product":
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(sum(p.numel() for p in model.parameters()), 6, generator=generator)
        if warm:
            surface.hvp(vectors[:, 0])  # Keeps the graphs.
        return lambda: lambda: sum(float(surface.hvp(v).norm()) for v in vectors.T)

    def round_of_job() -> Action:
        twin = copy(surface)
        if kind == "certificate":
            return lambda: float(fg.certify(twin, trials=1).passed)
        if kind == "sweep":
            generator = torch.Generator().manual_seed(0)
            return lambda: block_sum(fg.curvature.block_curvature(twin, generator=generator))
        name = {"trace": "hessian_trace", "eigenvalues": "kappa_max"}[kind]
        return lambda: float(fg.measure(twin, measures=[name])[name].value)

    return round_of_job


def copy_surface(surface: Any) -> Any:
    """A surface that shares the model's graph, but no numbers."""
    return surface.copy() if hasattr(surface, "copy") else surface.twin()


def block_sum(blocks: Any) -> float:
    """One number for all parts of all blocks."""
    return sum(float(part.sum()) for name in blocks for part in blocks[name].values.values())


ADAPTERS: dict[str, Callable[[Any], Any]] = {"copy": copy_surface}


@cache
def load(name: str, scale: float) -> tuple[Any, Any, Any]:
    """A trained network and its data, as many as the largest job needs."""
    for home in BENCHMARKS:
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(f"{home}.workloads")
            share = max(sizes.get(name, 0) for sizes in SAMPLES.values()) * scale
            workload = module.load(name, scale=share / module.KINDS[name].samples)
            return workload.model, workload.inputs, workload.targets
    raise ModuleNotFoundError(f"no workloads in any of {', '.join(BENCHMARKS)}")


def _reset_peak() -> int:
    """Forget the peak of this process's memory where the system allows it; what is held now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most bytes that this process held in memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Compare two versions, or serve as one of the workers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--old", type=Path, help="source folder of the old version")
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parents[1] / "src")
    parser.add_argument("--only", default="*", help=f"glob pattern of jobs: {', '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples")
    parser.add_argument("--memory", action="store_true", help="fresh processes: peak and first use")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        serve(given.scale)
        return
    if given.old is None:
        parser.error("--old is needed")
    jobs = [job for job in JOBS if fnmatch(job, given.only)]
    sources = [given.old.resolve(), given.new.resolve()]
    if given.memory:
        print_line(f"{'fresh process':16} ratio   peak old   peak new   seconds old, new")
        for job in jobs:
            print_line(compare_fresh(job, sources, given.scale))
        return
    workers = [Worker(source, given.scale) for source in sources]
    print_line(f"{'job':16} new/old  (range)      old       new      result")
    for job in jobs:
        print_line(compare(job, workers, given.rounds))
    for worker in workers:
        worker.close()


def print_line(line: str) -> None:
    """Print at once, so that a long run can be watched."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
