"""How a memory budget is shared out between vectors, a Lanczos basis, graphs and columns."""

from __future__ import annotations

from dataclasses import dataclass

from flatgauge.memory import format_bytes

#: Vectors of the model's size that are in use at a time at most: the surface's own copy of the
#: parameters, gradients, products and their sums, a diagonal in double precision. Peaks are tested.
IN_HAND = 10

#: Basis vectors that a search for eigenvalues keeps if it may, and how many more than values it
#: cannot do without.
BASIS, LEAST = 40, 3

#: Of what the vectors leave: the shares of a Lanczos basis, and of a chunk that is swept; they are
#: never held together.
_BASIS, _SWEPT = 1 / 3, 0.6

#: Vectors that each further column of a Hessian product takes: itself, its product, and the sum
#: over chunks in double precision.
COLUMN = 4


@dataclass(frozen=True)
class Budget:
    """What may be taken on top of what the process held when the surface was made.

    Attributes:
        total: All of it, in bytes.
        size: The number of trainable parameters p.
        itemsize: Bytes of one number in the precision of the computation.
    """

    total: int
    size: int
    itemsize: int

    @property
    def vector(self) -> int:
        """One vector of the model's size."""
        return self.size * self.itemsize

    @property
    def in_hand(self) -> int:
        """The vectors of the model's size that every measurement uses."""
        return IN_HAND * self.vector

    @property
    def free(self) -> int:
        """What these vectors leave; negative if they do not fit."""
        return self.total - self.in_hand

    @property
    def passes(self) -> int:
        """For Hessian products: a chunk at work, and kept graphs, while a basis is held."""
        return self.free - self.basis() * self.vector

    @property
    def swept(self) -> int:
        """For a chunk that is swept."""
        return int(_SWEPT * self.free)

    def columns(self, most: int) -> int:
        """How many vectors may be multiplied by the Hessian together.

        Args:
            most: As many as are wanted.

        Returns:
            At least one. A chunk at work takes half of what products have, and columns beyond the
            first the other half.
        """
        return max(1, min(most, 1 + int(self.passes // (2 * COLUMN * self.vector))))

    def basis(self, length: int | None = None, count: int = 1) -> int:
        """How many basis vectors a search for eigenvalues may keep.

        Args:
            length: The numbers in a vector; None for one per parameter.
            count: The number of eigenvalues.

        Returns:
            40 (or 2 count + 20) where they fit, and never fewer than count + 3: with fewer vectors
            the search restarts more often, and finds the same.
        """
        length = self.size if length is None else length
        fitting = int(_BASIS * max(self.free, 0) // (length * self.itemsize))
        return max(count + LEAST, min(fitting, max(2 * count + 20, BASIS)))


def too_little(what: str, needed: float, budget: Budget) -> str:
    """Say that a budget is too small, and what to do.

    Args:
        what: What does not fit.
        needed: The bytes that it needs, beside the vectors.
        budget: The budget.

    Returns:
        The message.
    """
    vectors = budget.in_hand + budget.basis() * budget.vector
    narrower = "measure in float32, " if budget.itemsize > 4 else ""
    return (
        f"{what} needs about {format_bytes(needed)}, beside {format_bytes(vectors)} for vectors of "
        f"{budget.size:,} parameters, but the budget is {format_bytes(budget.total)}; raise "
        f"`memory=` to {format_bytes(1.1 * (2 * needed + vectors))} or more, {narrower}"
        "or freeze parameters (`requires_grad_(False)`)."
    )
