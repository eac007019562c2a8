"""Another tool: what it is called, what it can compute, and whether it is there."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from flatgauge.estimators.linalg import SupportsMatmul

Batches = list[tuple[Tensor, Tensor]]
Product = Callable[[Tensor], Tensor]
Number = Callable[[nn.Module, Batches], float]


@dataclass(frozen=True, eq=False)
class Tool:
    """Another tool, and what it computes of the Hessian of the mean loss; None for what it has not.

    Attributes:
        name: What it is called in tables.
        package: What it is called by pip.
        module: What to import.
        product: From a model and batches to what multiplies vectors by the Hessian.
        eigenvalue: The largest eigenvalue, wanted to 1e-3.
        traces: Ways to estimate the trace, by what they are called in tables.
        diagonal: From a model and batches to what computes the diagonal, flat, in the order of the
            model's parameters.
        block: From a model, batches and one of the model's parameters to the Hessian's block of
            this parameter, as a matrix.
        summary: The trace, after the largest eigenvalue, both at the tool's own defaults.
        whole: Whether it takes all samples as one batch.
    """

    name: str
    package: str
    module: str
    product: Callable[[nn.Module, Batches], Product] | None = None
    eigenvalue: Number | None = None
    traces: Mapping[str, Number] = field(default_factory=dict)
    diagonal: Callable[[nn.Module, Batches], Callable[[], Tensor]] | None = None
    block: Callable[[nn.Module, Batches, nn.Parameter], SupportsMatmul] | None = None
    summary: Number | None = None
    whole: bool = False

    @property
    def version(self) -> str:
        """The installed version."""
        return importlib.metadata.version(self.package)

    def missing(self) -> str | None:
        """Why it cannot be used, if so."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a broken import can raise anything
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None


def usable(tools: Iterable[Tool], tell: Callable[[str], object]) -> list[Tool]:
    """Look which tools can be imported.

    Args:
        tools: The tools.
        tell: Called with a line for every package that cannot.

    Returns:
        Those that can.
    """
    found: list[Tool] = []
    told: set[str] = set()
    for tool in tools:
        reason = tool.missing()
        if reason is None:
            found.append(tool)
        elif tool.package not in told:
            told.add(tool.package)
            tell(f"skipping {tool.package}: {reason}")
    return found


#: What torch warns of: PyHessian calls `backward(create_graph=True)`, BackPACK has hooks on the
#: first layer and indexes with lists.
_WARNINGS = (
    r"Using backward\(\) with create_graph=True",
    "Full backward hook is firing when gradients are computed with respect to module outputs",
    "Using a non-tuple sequence for multidimensional indexing is deprecated",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out torch's warnings about what the peers do."""
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield
