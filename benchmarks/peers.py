"""The other tools, each used the way its own documentation uses it."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
Product = Callable[[Tensor], Tensor]

#: Lanczos steps, or basis vectors, for one eigenvalue: hessian-eigenthings has no stopping rule.
STEPS = 8


@dataclass(frozen=True)
class Peer:
    """Another tool.

    Attributes:
        name: What it is called in tables.
        package: What it is called by pip.
        module: What to import.
        product: From a model and batches to what multiplies vectors by the mean loss's Hessian.
        eigenvalue: From a model and batches to the largest eigenvalue, wanted to 1e-3.
        whole: Whether it takes all samples as one batch.
    """

    name: str
    package: str
    module: str
    product: Callable[[nn.Module, Batches], Product]
    eigenvalue: Callable[[nn.Module, Batches], float]
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
            return f"{type(error).__name__}: {error}"
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out torch's warning about `backward(create_graph=True)`, which PyHessian calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        yield


def _pyhessian(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    # A copy: it leaves its gradients, and their graphs, in the model.
    return hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def _pyhessian_product(model: nn.Module, batches: Batches) -> Product:
    tool = _pyhessian(model, batches)
    return lambda vector: _flat(tool.dataloader_hv_product(_parts(vector, tool.params))[1])


def _pyhessian_eigenvalue(model: nn.Module, batches: Batches) -> float:
    return float(_pyhessian(model, batches).eigenvalues(top_n=1)[0][0])


def _pyhessian_whole(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    (batch,) = batches
    tool = hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), data=batch, cuda=False)
    tool.model.zero_grad()  # as its own methods do; else the model and its graph never go away
    return tool


def _pyhessian_whole_product(model: nn.Module, batches: Batches) -> Product:
    from pyhessian.utils import hessian_vector_product

    tool = _pyhessian_whole(model, batches)

    def product(vector: Tensor) -> Tensor:
        return _flat(hessian_vector_product(tool.gradsH, tool.params, _parts(vector, tool.params)))

    return product


def _pyhessian_whole_eigenvalue(model: nn.Module, batches: Batches) -> float:
    return float(_pyhessian_whole(model, batches).eigenvalues(top_n=1)[0][0])


def _curvlinops(model: nn.Module, batches: Batches) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        batches,
        check_deterministic=False,  # or it starts with two more passes over the data
    )


def _curvlinops_product(model: nn.Module, batches: Batches) -> Product:
    operator = _curvlinops(model, batches)
    return lambda vector: operator @ vector


def _curvlinops_eigenvalue(model: nn.Module, batches: Batches) -> float:
    from scipy.sparse.linalg import eigsh

    operator = _curvlinops(model, batches).to_scipy()
    values = eigsh(operator, 1, which="LA", tol=1e-3, ncv=STEPS, return_eigenvectors=False)
    return float(values[0])


def _eigenthings(model: nn.Module, batches: Batches) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    return HessianOperator(model, batches, supervised_loss(nn.CrossEntropyLoss()))


def _eigenthings_product(model: nn.Module, batches: Batches) -> Product:
    operator = _eigenthings(model, batches)
    return lambda vector: operator @ vector


def _eigenthings_eigenvalue(model: nn.Module, batches: Batches) -> float:
    from hessian_eigenthings import lanczos

    operator = _eigenthings(model, batches)
    result = lanczos(operator, k=1, max_iter=STEPS, tol=1e-3, which="LA", seed=0)
    return float(result.eigenvalues[0])


def _parts(vector: Tensor, params: list[Tensor]) -> list[Tensor]:
    """A flat vector as tensors of the parameters' shapes."""
    parts = torch.split(vector, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def _flat(parts: Any) -> Tensor:
    """Tensors of the parameters' shapes as a flat vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


PEERS = (
    Peer("PyHessian", "PyHessian", "pyhessian", _pyhessian_product, _pyhessian_eigenvalue),
    Peer(
        "PyHessian, one batch",
        "PyHessian",
        "pyhessian",
        _pyhessian_whole_product,
        _pyhessian_whole_eigenvalue,
        whole=True,
    ),
    Peer(
        "curvlinops",
        "curvlinops-for-pytorch",
        "curvlinops",
        _curvlinops_product,
        _curvlinops_eigenvalue,
    ),
    Peer(
        "hessian-eigenthings",
        "hessian-eigenthings",
        "hessian_eigenthings",
        _eigenthings_product,
        _eigenthings_eigenvalue,
    ),
)
