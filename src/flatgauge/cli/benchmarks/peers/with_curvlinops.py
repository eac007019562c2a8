"""curvlinops: products, estimates of the trace, single layers; eigenvalues by scipy's `eigsh`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from flatgauge.cli.benchmarks.tool import Batches, Product, Tool
from flatgauge.estimators.linalg import SupportsMatmul

#: Basis vectors for one eigenvalue: with scipy's own choice it costs twice as much.
_BASIS = 8

#: Products to estimate a trace with.
PRODUCTS = 30


def _operator(
    model: nn.Module, batches: Batches, params: Iterable[nn.Parameter] | None = None
) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters() if params is None else params),
        batches,
        check_deterministic=False,  # or it starts with two more passes over the data
    )


def _product(model: nn.Module, batches: Batches) -> Product:
    operator = _operator(model, batches)
    return lambda vector: operator @ vector


def _eigenvalue(model: nn.Module, batches: Batches) -> float:
    from scipy.sparse.linalg import eigsh

    operator = _operator(model, batches).to_scipy()
    values = eigsh(operator, 1, which="LA", tol=1e-3, ncv=_BASIS, return_eigenvectors=False)
    return float(values[0])


def _trace(how: str, model: nn.Module, batches: Batches) -> float:
    estimate = getattr(importlib.import_module("curvlinops"), how)
    return float(estimate(_operator(model, batches), PRODUCTS))


def _block(model: nn.Module, batches: Batches, param: nn.Parameter) -> SupportsMatmul:
    operator: SupportsMatmul = _operator(model, batches, [param])
    return operator


CURVLINOPS = Tool(
    "curvlinops",
    "curvlinops-for-pytorch",
    "curvlinops",
    product=_product,
    eigenvalue=_eigenvalue,
    traces={
        f"curvlinops, Hutch++ ({PRODUCTS})": partial(_trace, "hutchpp_trace"),
        f"curvlinops, Hutchinson ({PRODUCTS})": partial(_trace, "hutchinson_trace"),
    },
    block=_block,
)
