"""The directions in which the loss bends most: leading eigenvectors of the Hessian."""

from __future__ import annotations

from torch import Generator, Tensor

from flatgauge.analysis.landscapes.space import Straight
from flatgauge.curvature.operators import Hessian
from flatgauge.estimators.eigenvalues import top_eigenvalues


class AlongEigenvectors(Straight):
    """Unit vectors; the second derivative of the loss along each is its eigenvalue."""

    name = "eigenvectors"
    title = "The loss along eigenvectors of the Hessian"
    words = "leading eigenvectors of the Hessian"
    extent = 0.5

    def draw_directions(self, dims: int, generator: Generator) -> list[Tensor]:
        """The eigenvectors of the largest eigenvalues, largest first."""
        basis = self.surface.budget.lanczos_vectors(count=dims)
        pairs = top_eigenvalues(Hessian(self.surface), count=dims, basis=basis, generator=generator)
        names = [f"eigenvalue {number + 1}" for number in range(dims)]
        self.details = dict(zip(names, pairs.values.tolist(), strict=True))
        if not pairs.converged:
            bounds = ", ".join(f"{bound:.1g}" for bound in pairs.bounds.tolist())
            self.notes = (
                f"the eigenvectors have not converged after {pairs.matvecs} products: the "
                f"eigenvalues are known to within {bounds}",
            )
        return [vector.to(self._point) for vector in pairs.vectors.T]
