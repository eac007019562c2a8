"""hessian-eigenthings: products, and Lanczos for so many steps, as it has no stopping rule."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatgauge.cli.benchmarks.tool import Batches, Product, Tool

#: Lanczos steps for one eigenvalue.
STEPS = 8


def _operator(model: nn.Module, batches: Batches) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    return HessianOperator(model, batches, supervised_loss(nn.CrossEntropyLoss()))


def _product(model: nn.Module, batches: Batches) -> Product:
    operator = _operator(model, batches)
    return lambda vector: operator @ vector


def _eigenvalue(model: nn.Module, batches: Batches) -> float:
    from hessian_eigenthings import lanczos

    operator = _operator(model, batches)
    result = lanczos(operator, k=1, max_iter=STEPS, tol=1e-3, which="LA", seed=0)
    return float(result.eigenvalues[0])


EIGENTHINGS = Tool(
    "hessian-eigenthings",
    "hessian-eigenthings",
    "hessian_eigenthings",
    product=_product,
    eigenvalue=_eigenvalue,
)
