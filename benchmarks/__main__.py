"""`python -m benchmarks`: what everything costs beside other tools, judged by targets."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import workloads
from benchmarks.comparison import TimedComparison
from benchmarks.peers import PEERS, Tool, available
from benchmarks.picture import draw
from benchmarks.quantities import QUANTITIES
from benchmarks.results import Results, markdown
from benchmarks.targets import judge_rows
from benchmarks.timing import machine
from flatgauge.analysis.files import atomic_write, check_writable

#: What `--quick` measures: some minutes at most, to see it work.
_QUICK = {
    "workloads": ["W1", "W2"],
    "quantities": ["product", "trace", "sweep", "units", "eigenvalue", "layers"],
}


def run(
    names: Sequence[str] = tuple(workloads.KINDS),
    quantities: Sequence[str] = tuple(QUANTITIES),
    *,
    rounds: int = 3,
    scale: float = 1.0,
    data: str | None = None,
    tools: Sequence[Tool] = PEERS,
    log: Callable[[str], object] = lambda line: None,
    save: Callable[[Results], object] = lambda results: None,
    strict: bool = False,
) -> Results:
    """Measure quantities on workloads, one after the other.

    Args:
        names: The workloads.
        quantities: What of them; those that are not measured on a workload are left out there.
        rounds: How many rounds count.
        scale: What share of the samples to take.
        data: The folder with MNIST and CIFAR-10; None for synthetic images.
        tools: The other tools; those that cannot be imported are left out.
        log: Called with lines on progress, and on what is left out.
        save: Called with the results so far whenever a quantity is finished.
        strict: Whether what fails ends the run; else it is noted, and the run goes on.

    Returns:
        The results.

    Raises:
        ValueError: If a number is none to go by.
    """
    if rounds < 1:
        raise ValueError(f"`rounds={rounds}` times nothing; use at least 1.")
    if not 0 < scale < float("inf"):
        raise ValueError(f"`scale={scale:g}` is no share of the samples; use 1 for all of them.")
    begin = time.monotonic()
    found = available(tools, log)
    images = "synthetic" if data is None else "MNIST and CIFAR-10"
    results = Results(machine() | {"rounds": rounds, "scale": scale, "data": images})

    for name in names:
        wanted = [quantity for quantity in quantities if name in QUANTITIES[quantity][1]]
        if not wanted:
            continue
        workload = workloads.load(name, scale=scale, folder=data)
        comparison = TimedComparison(workload, found, rounds=rounds, log=log)
        results.workloads[name] = comparison.description()
        for quantity in wanted:
            log(f"{time.monotonic() - begin:6.0f} s  {name}: {quantity}")
            try:
                results.rows = judge_rows([*results.rows, *QUANTITIES[quantity][0](comparison)])
            except Exception as error:  # One that fails must not lose hours of others.
                if strict:
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                results.failures.append(f"{name}, {quantity}: {reason}")
                log(f"failed: {results.failures[-1]}")
            results.notes += [f"{name}, {quantity}: {note}" for note in comparison.notes]
            comparison.notes.clear()
            save(results)
    results.complete = True
    save(results)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        words: Its arguments; those of the process if not given.

    Returns:
        The exit code: 2 if something could not be measured, 130 if interrupted.
    """
    parser = _parser()
    options = parser.parse_args(words)
    if options.quick:
        if options.workloads is options.quantities is None:
            vars(options).update(_QUICK)
        options.rounds, options.scale = options.rounds or 1, options.scale or 0.02
    latest: list[Results] = []

    def save(results: Results) -> None:
        latest[:] = [results]
        if options.json is not None:
            atomic_write(options.json, results.to_json())
        if options.markdown is not None:
            atomic_write(options.markdown, results.to_markdown())

    code = 0
    try:
        for path in filter(None, (options.json, options.markdown, options.png)):
            check_writable(path)
        run(
            options.workloads or tuple(workloads.KINDS),
            options.quantities or tuple(QUANTITIES),
            rounds=3 if options.rounds is None else options.rounds,
            scale=1.0 if options.scale is None else options.scale,
            data=options.data,
            log=partial(print, file=sys.stderr),
            save=save,
            strict=options.debug,
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    for results in latest:
        for name in dict.fromkeys(row.workload for row in results.rows):
            rows = [row for row in results.rows if row.workload == name]
            print(f"{results.about(name)}\n\n{markdown(rows)}\n")
        if options.png is not None:
            draw(results.rows, options.png)
        code = code or (2 if results.failures else 0)
    return code


def _parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time flatgauge beside other tools, in gradients over the same data, and judge "
        "it by targets. Tools that are not installed are left out. At full size: hours.",
    )
    about = ", ".join(f"{name} is {kind.about}" for name, kind in workloads.KINDS.items())
    parser.add_argument("--workloads", nargs="+", choices=[*workloads.KINDS], help=about)
    parser.add_argument("--quantities", nargs="+", choices=[*QUANTITIES])
    few = "one round on 200 samples of W1 and W2, too few to judge by"
    parser.add_argument("--quick", action="store_true", help=few)
    parser.add_argument("--scale", type=float, help="share of the samples; default 1")
    parser.add_argument("--data", help="folder with MNIST and CIFAR-10; else synthetic images")
    parser.add_argument("--rounds", type=int, help="how many count; default 3")
    parser.add_argument("--json", type=Path, help="file of the results, after every quantity")
    parser.add_argument("--markdown", type=Path, help="file of the tables, after every quantity")
    parser.add_argument("--png", type=Path, help="file of a picture of the costs")
    parser.add_argument("--debug", action="store_true", help="stop at the first failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
