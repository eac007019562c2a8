"""What measuring a surface will take of its memory budget, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flatgauge.curvature.sweep.backprop import Sweep, sweep_of
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.runtime.isolation import isolate
from flatgauge.runtime.resources import format_bytes, resident_bytes
from flatgauge.surface.derivatives import KEPT, WORKING
from flatgauge.surface.surface import LossSurface


@dataclass(frozen=True)
class MemoryEstimate:
    """What measuring takes at most, by part, in bytes.

    A sweep (with its columns) and Hessian products (with graphs and a basis) come one after the
    other: what counts is the larger of the two, in addition to the vectors.

    Attributes:
        budget: What may be taken on top of what the process held when the surface was made.
        resident: What the process holds now; None where the system does not say.
        vectors: A copy of the parameters, and vectors of their size: gradients, sums, diagonals.
        basis: The Lanczos basis of a search for the largest eigenvalue.
        basis_vectors: How many vectors it has at most; with fewer, the search restarts more often.
        chunk: Hessian products of a chunk at work.
        chunk_samples: How many samples that is.
        graphs: Graphs kept between products.
        graphs_kept: Of how many chunks; the graphs of the rest are computed again.
        chunks: How many chunks there are.
        swept: A chunk that is swept; zero where nothing is.
        swept_samples: How many samples that is.
        columns: Columns kept from a sweep, for the eigenvalues of layers.
    """

    budget: int
    resident: int | None
    vectors: int
    basis: int
    basis_vectors: int
    chunk: int
    chunk_samples: int
    graphs: int
    graphs_kept: int
    chunks: int
    swept: int = 0
    swept_samples: int = 0
    columns: int = 0

    @property
    def total(self) -> int:
        """The most that is taken at a time."""
        return self.vectors + max(self.basis + self.chunk + self.graphs, self.swept + self.columns)

    @property
    def fits(self) -> bool:
        """Whether that is within the budget."""
        return self.total <= self.budget

    def __str__(self) -> str:
        kept = "all" if self.graphs_kept == self.chunks else f"{self.graphs_kept}"
        rest = "" if self.graphs_kept == self.chunks else "; the rest is computed again"
        many = "s" * (self.chunk_samples > 1)
        parts = [
            f"{format_bytes(self.vectors)} for vectors",
            f"{format_bytes(self.chunk)} for chunks of {self.chunk_samples} sample{many}",
            f"{format_bytes(self.graphs)} for graphs ({kept} of {self.chunks} chunks{rest})",
            f"{format_bytes(self.basis)} for {self.basis_vectors} Lanczos vectors",
        ]
        if self.swept:
            parts.append(f"or {format_bytes(self.swept + self.columns)} for sweeps")
        now = "" if self.resident is None else f"; {format_bytes(self.resident)} resident"
        return f"memory: budget {format_bytes(self.budget)}{now}, about {', '.join(parts)}"


def memory_estimate(surface: LossSurface, *, sweep: bool = True) -> MemoryEstimate:
    """Estimate what measuring a surface takes, before it is measured.

    Args:
        surface: The surface.
        sweep: Whether measures are asked for that sweep; reading the model for it takes seconds.

    Returns:
        The estimate.

    Raises:
        MemoryError: If not even one sample fits, with what to do.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> memory_estimate(two_weights(2.0, 3.0)).fits
        True
    """
    budget, share = surface.budget, max(surface.data.shares)
    samples = min(surface.chunk, share)
    with isolate(surface.model, surface.device):
        graph = surface.risk.graph_bytes(samples)
    chunks = math.ceil(share / samples)
    room = (budget.hvp() / graph - WORKING) / KEPT if graph else chunks
    kept = max(0, min(chunks, int(room)))
    vectors = min(budget.lanczos_vectors(), surface.size)
    parts = MemoryEstimate(
        budget=budget.total,
        resident=resident_bytes(),
        vectors=budget.reserved_bytes,
        basis=vectors * budget.vector,
        basis_vectors=vectors,
        chunk=int(WORKING * graph),
        chunk_samples=samples,
        graphs=int(KEPT * kept * graph),
        graphs_kept=kept,
        chunks=chunks,
    )
    sweeper = _sweeper(surface) if sweep else None
    if sweeper is None:
        return parts
    each = sweeper.plan.numbers_per_sample() * surface.dtype.itemsize
    groups, _ = sweeper.group_layers(list(sweeper.plan.layers))
    sizes = [sum(sweeper.factor_bytes(name) for name in group) for group in groups]
    return replace(
        parts,
        swept=sweeper.chunk_size * each,
        swept_samples=sweeper.chunk_size,
        columns=max(sizes, default=0),
    )


def _sweeper(surface: LossSurface) -> Sweep | None:
    """What sweeps the surface, if anything can be swept."""
    try:
        found = sweep_of(surface)
    except UnsupportedGraphError:
        return None
    return found if found.plan.exact else None
