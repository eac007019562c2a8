"""The lines of a benchmark's table, and what every benchmark is asked for and writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import rounds, workloads
from benchmarks.peers import Tool

#: Larger errors are flagged: results that far apart are not of the same matrix, and eigenvalues
#: are asked for to this accuracy.
AGREEMENT = 1e-3

COLUMNS = ("workload", "what", "tool", "batch", "cost / G", "spread", "/ best peer", "error")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        workload: On which network and data.
        what: What was computed.
        tool: By what.
        batch: Samples at a time.
        cost: In gradients, the median of all rounds.
        spread: In gradients, the cheapest and the dearest round.
        to_best_peer: Cost divided by that of the best peer that reads batches; None without one.
        error: Relative to flatgauge in double precision.
        gradient_seconds: Processor time of the unit, the median of all rounds.
        allowed: Larger errors are flagged.
    """

    workload: str
    what: str
    tool: str
    batch: int
    cost: float
    spread: tuple[float, float]
    to_best_peer: float | None
    error: float
    gradient_seconds: float
    allowed: float = AGREEMENT

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        flag = "" if self.error <= self.allowed else f" (over {self.allowed:.0e})"
        return (
            self.workload,
            self.what,
            self.tool,
            str(self.batch),
            f"{self.cost:.2f}",
            "–".join(f"{end:.2f}" for end in self.spread),
            "" if self.to_best_peer is None else f"{self.to_best_peer:.2f}",
            f"{self.error:.0e}{flag}",
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parser(module: str, description: str, *, eigen: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have.

    Args:
        module: The benchmark's name in this package.
        description: What it does.
        eigen: What `--eigen` adds.

    Returns:
        What reads them.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=description
    )
    names = workloads.STANDARD
    options.add_argument("--workloads", nargs="*", choices=names, default=names)
    options.add_argument("--scale", type=float, default=1.0, help="share of the samples")
    options.add_argument(
        "--data", "--folder", metavar="DIR", dest="data", help="folder of MNIST and CIFAR-10"
    )
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--rounds", type=int, default=5, help="that count; 0 for none")
    options.add_argument(
        "--eigen", type=int, nargs="?", const=3, default=0, metavar="ROUNDS", help=eigen
    )
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--markdown", type=Path, metavar="FILE")
    return options


def show(
    options: argparse.Namespace,
    tools: Iterable[Tool],
    sections: Iterable[tuple[str, Sequence[Row]]],
) -> None:
    """Print sections as they come, then all of them; write what the user wants written.

    Args:
        options: What the user asked for.
        tools: The other tools.
        sections: For every workload a line on it and its rows.
    """
    facts = rounds.machine() | {"rounds": options.rounds, "data": options.data or "synthetic"}
    facts |= {tool.package: tool.version for tool in tools}
    text = [", ".join(f"{name} {value}" for name, value in facts.items())]
    rows: list[Row] = []
    for about, found in sections:
        text.append(about)
        print(f"{about}\n\n{table(found)}\n", flush=True)
        rows += found
    markdown = "\n\n".join([*text, table(rows)])
    print(markdown)
    if options.markdown:
        options.markdown.write_text(markdown + "\n")
    if options.json:
        content = {"machine": facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
