"""PyHessian, over batches and with all samples in one."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from flatgauge.cli.benchmarks.peers.flat import joined, split
from flatgauge.cli.benchmarks.tool import Batches, Product, Tool


def _batched(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    # A copy: it leaves its gradients, and their graphs, in the model.
    return hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def _product(model: nn.Module, batches: Batches) -> Product:
    tool = _batched(model, batches)
    return lambda vector: joined(tool.dataloader_hv_product(split(vector, tool.params))[1])


def _eigenvalue(model: nn.Module, batches: Batches) -> float:
    return float(_batched(model, batches).eigenvalues(top_n=1)[0][0])


def _trace(model: nn.Module, batches: Batches) -> float:
    return _mean(_batched(model, batches).trace())


def _summary(model: nn.Module, batches: Batches) -> float:
    tool = _batched(model, batches)
    tool.eigenvalues(top_n=1)
    return _mean(tool.trace())


def _mean(samples: list[float]) -> float:
    return float(sum(samples) / len(samples))


def _whole(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    (batch,) = batches
    tool = hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), data=batch, cuda=False)
    tool.model.zero_grad()  # as its own methods do; else the model and its graph never go away
    return tool


def _whole_product(model: nn.Module, batches: Batches) -> Product:
    from pyhessian.utils import hessian_vector_product

    tool = _whole(model, batches)

    def product(vector: Tensor) -> Tensor:
        parts = split(vector, tool.params)
        return joined(hessian_vector_product(tool.gradsH, tool.params, parts))

    return product


def _whole_eigenvalue(model: nn.Module, batches: Batches) -> float:
    return float(_whole(model, batches).eigenvalues(top_n=1)[0][0])


PYHESSIAN = Tool(
    "PyHessian",
    "PyHessian",
    "pyhessian",
    product=_product,
    eigenvalue=_eigenvalue,
    traces={"PyHessian": _trace},
    summary=_summary,
)

PYHESSIAN_WHOLE = Tool(
    "PyHessian, one batch",
    "PyHessian",
    "pyhessian",
    product=_whole_product,
    eigenvalue=_whole_eigenvalue,
    whole=True,
)
