"""Rescaling orbits: the chart at their balanced point, and tangent vectors along and across them.

In: a loss surface. Out: `Balanced`, the geometry of weights at the form of the network with the
smallest norm; a basis of the directions along which rescaling layers moves the weights (the
vertical space of Rangamani et al. 2019, §2 and §3), and the part of a vector that is orthogonal to
them (its horizontal part), read off the exponents that every tensor has in the layer-wise gauge
group.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.geometry.chart import Weights, norm
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.balance import balanced_surface
from flatgauge.symmetry.find import surface_gauge


class Balanced(Weights):
    """θ + u on a balanced copy of the model: of all ways to write it, that of smallest norm."""

    geometry = "balanced"
    point = r"\bar\theta + u \text{ with } \bar\theta \text{ the balanced weights}"

    def __init__(self, surface: LossSurface, parameters: str = "all") -> None:
        balanced, notes = balanced_surface(surface)
        super().__init__(balanced, parameters)
        self.notes = notes


def vertical_basis(surface: LossSurface) -> Tensor:
    r"""The directions along which rescaling layers moves the weights and changes no output.

    Definition:
        The tangent space of the orbit of all layer-wise rescalings: vectors
        :math:`(\beta_i \theta_i)_i` with one number per parameter tensor. For a chain of layers
        without biases, :math:`\sum_i \beta_i = 0` (Lemma 2.4); with biases, the numbers
        :math:`\gamma_i` of biases are :math:`\beta_1 + \dots + \beta_i` (Lemma 2.6). For other
        models it is read off the gauge group.

    Args:
        surface: Where.

    Returns:
        A basis (dimension, parameters), orthonormal in the metric
        :math:`g(\eta, \xi) = \sum_i \langle \eta_i, \xi_i \rangle / \|\theta_i\|^2`.

    Example:
        In ``(b relu(a))²`` a grows as b shrinks:

        >>> from flatgauge.surface.examples import two_weights
        >>> vertical_basis(two_weights(2.0, 3.0)).abs()  # (2, -3) / √2
        tensor([[1.4142, 2.1213]], dtype=torch.float64)
    """
    names, exponents = _exponents(surface)
    params = {name: value.double() for name, value in surface.params.items()}
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    basis = torch.zeros(exponents.shape[1], surface.size, dtype=torch.float64)
    for row, column in zip(basis, exponents.T, strict=True):
        moved = {n: float(share) * params[n] for n, share in zip(names, column, strict=True)}
        row.copy_(_flat(zeros | moved))
    return basis


def horizontal_projection(surface: LossSurface, vector: Tensor) -> Tensor:
    r"""The part of a tangent vector that is orthogonal to all rescalings of layers.

    Definition:
        The orthogonal complement of `vertical_basis` in the metric
        :math:`g(\eta, \xi) = \sum_i \langle \eta_i, \xi_i \rangle / \|\theta_i\|^2`: the lifted
        representation of a tangent vector of the quotient manifold. For a chain of layers without
        biases, :math:`\eta` is horizontal if and only if
        :math:`\langle \eta_i, \theta_i \rangle / \|\theta_i\|^2` is the same number for all
        layers. The Riemannian gradient :math:`\|\theta_i\|^2 \nabla_i L` always is (Remark 2).

    Args:
        surface: Where.
        vector: A direction in weight space (parameters,), in the order of `surface.point`.

    Returns:
        Its horizontal part, of the same shape, in double precision.

    Raises:
        ValueError: If the vector has another length.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> surface = two_weights(2.0, 3.0)
        >>> horizontal_projection(surface, torch.tensor([2.0, 0.0]))  # half along (2, 3)
        tensor([1.0000, 1.5000], dtype=torch.float64)
    """
    if vector.shape != (surface.size,):
        raise ValueError(
            f"`vector` has shape {tuple(vector.shape)}, but the surface has "
            f"{surface.size} parameters; give one number for each, in the order of "
            "`surface.point` (`surface.flatten` makes it of tensors by name)."
        )
    names, exponents = _exponents(surface)
    given = {name: part.double() for name, part in surface.split(vector.double()).items()}
    params = {name: value.double() for name, value in surface.params.items()}
    # In units of its tensor, how far the vector points along each.
    along = np.array(
        [float((given[n] * params[n]).sum()) / float(params[n].square().sum()) for n in names]
    )
    vertical = exponents @ (exponents.T @ along)
    for name, share in zip(names, vertical, strict=True):
        given[name] = given[name] - float(share) * params[name]
    return _flat(given)


def _exponents(surface: LossSurface) -> tuple[list[str], NDArray[np.float64]]:
    """The tensors that have a norm, and orthonormal columns: their exponents in every generator."""
    gauge = surface_gauge(surface, layerwise=True)
    params = surface.params
    rows = {name: gauge.rows(name).toarray()[0] for name in gauge.names}
    none = np.zeros(gauge.dim)
    # A tensor that is not trainable has no coordinates: only moves that leave it alone count.
    fixed = np.array([row for name, row in rows.items() if name not in params])
    names = [name for name, value in params.items() if norm(value) > 0]
    moved = np.array([rows.get(name, none) for name in names]).reshape(len(names), gauge.dim)
    if len(fixed):
        moved = moved @ _null_space(fixed)
    left, sizes, _ = np.linalg.svd(moved, full_matrices=False)
    independent = sizes > 1e-10 * max(sizes.max(initial=0.0), 1.0)
    columns: NDArray[np.float64] = left[:, independent]
    return names, columns


def _null_space(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Orthonormal columns that span what a matrix sends to zero."""
    _, sizes, right = np.linalg.svd(matrix)
    rank = int((sizes > 1e-10 * max(sizes.max(initial=0.0), 1.0)).sum())
    kernel: NDArray[np.float64] = right[rank:].T
    return kernel


def _flat(parts: dict[str, Tensor]) -> Tensor:
    """Tensors in the surface's order as one vector."""
    return torch.cat([part.reshape(-1) for part in parts.values()])
