"""The other tools, each used the way its own documentation uses it."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.workloads import ResidualBlock
from flatgauge.estimators.matrix import SupportsMatmul

Batches = list[tuple[Tensor, Tensor]]
Product = Callable[[Tensor], Tensor]

#: Lanczos steps, or basis vectors, for one eigenvalue: hessian-eigenthings has no stopping rule.
STEPS = 8


@dataclass(frozen=True)
class Tool:
    """Another tool.

    Attributes:
        name: What it is called in tables.
        package: What it is called by pip.
        module: What to import.
    """

    name: str
    package: str
    module: str

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


@dataclass(frozen=True)
class Peer(Tool):
    """A tool that multiplies vectors by the Hessian.

    Attributes:
        product: From a model and batches to what multiplies vectors by the mean loss's Hessian.
        eigenvalue: From a model and batches to the largest eigenvalue, wanted to 1e-3.
        whole: Whether it takes all samples as one batch.
    """

    product: Callable[[nn.Module, Batches], Product]
    eigenvalue: Callable[[nn.Module, Batches], float]
    whole: bool = False


@dataclass(frozen=True)
class DiagonalPeer(Tool):
    """A tool that computes the Hessian's diagonal.

    Attributes:
        diagonal: From a model and batches to what computes the mean loss's, flat, in the order
            of the model's parameters.
    """

    diagonal: Callable[[nn.Module, Batches], Callable[[], Tensor]]


@dataclass(frozen=True)
class BlockPeer(Tool):
    """A tool that multiplies vectors by the Hessian's block of one parameter.

    Attributes:
        block: From a model, batches and one of the model's parameters to the block as a matrix.
    """

    block: Callable[[nn.Module, Batches, nn.Parameter], SupportsMatmul]


@dataclass(frozen=True)
class SummaryPeer(Tool):
    """A tool that computes the Hessian's largest eigenvalue and its trace, at its own defaults.

    Attributes:
        product: From a model and batches to one product with random numbers, to try batches out.
        trace_after_eigenvalue: From a model and batches to the trace, after the eigenvalue.
    """

    product: Callable[[nn.Module, Batches], object]
    trace_after_eigenvalue: Callable[[nn.Module, Batches], float]


AnyTool = TypeVar("AnyTool", bound=Tool)


def usable(tools: Iterable[AnyTool]) -> list[AnyTool]:
    """The tools that can be imported; says why others cannot."""
    found = []
    for tool in tools:
        reason = tool.missing()
        if reason is None:
            found.append(tool)
        else:
            print(f"skipping {tool.name}: {reason}")
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


def _pyhessian(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    # A copy: it leaves its gradients, and their graphs, in the model.
    return hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def _pyhessian_product(model: nn.Module, batches: Batches) -> Product:
    tool = _pyhessian(model, batches)
    return lambda vector: _flat(tool.dataloader_hv_product(_parts(vector, tool.params))[1])


def _pyhessian_once(model: nn.Module, batches: Batches) -> object:
    tool = _pyhessian(model, batches)
    return tool.dataloader_hv_product([torch.ones_like(p) for p in tool.params])


def _pyhessian_summary(model: nn.Module, batches: Batches) -> float:
    tool = _pyhessian(model, batches)
    tool.eigenvalues(top_n=1)
    samples = tool.trace()
    return float(sum(samples) / len(samples))


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


def _curvlinops(
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


def _curvlinops_product(model: nn.Module, batches: Batches) -> Product:
    operator = _curvlinops(model, batches)
    return lambda vector: operator @ vector


def _curvlinops_eigenvalue(model: nn.Module, batches: Batches) -> float:
    from scipy.sparse.linalg import eigsh

    operator = _curvlinops(model, batches).to_scipy()
    values = eigsh(operator, 1, which="LA", tol=1e-3, ncv=STEPS, return_eigenvectors=False)
    return float(values[0])


def _curvlinops_block(model: nn.Module, batches: Batches, param: nn.Parameter) -> SupportsMatmul:
    operator: SupportsMatmul = _curvlinops(model, batches, [param])
    return operator


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


def _backpack_diagonal(model: nn.Module, batches: Batches) -> Callable[[], Tensor]:
    backpack = importlib.import_module("backpack")
    extension = importlib.import_module("backpack.extensions").DiagGGNExact()
    # A copy: it leaves what it computes, and its hooks, in the model.
    extended = backpack.extend(_in_modules(copy.deepcopy(model)))
    loss = backpack.extend(nn.CrossEntropyLoss())
    params = list(extended.parameters())
    samples = sum(len(targets) for _, targets in batches)

    def diagonal() -> Tensor:
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in batches:
            extended.zero_grad()
            with backpack.backpack(extension):
                loss(extended(inputs), targets).backward()
            for total, param in zip(sums, params, strict=True):
                total.add_(param.diag_ggn_exact, alpha=len(targets) / samples)
        return _flat(sums)

    return diagonal


def _in_modules(model: nn.Module) -> nn.Module:
    """Write residual blocks as BackPACK reads them; its own converter knows no padding."""
    if not any(isinstance(module, ResidualBlock) for module in model.children()):
        return model
    parallel = importlib.import_module("backpack.custom_module.branching").Parallel
    modules = []
    for module in model.children():
        if isinstance(module, ResidualBlock):
            inner = (module.conv1, module.bn1, nn.ReLU(), module.conv2, module.bn2)
            modules += [parallel(nn.Sequential(*inner), _shortcut(module)), nn.ReLU()]
        else:
            modules.append(module)
    return nn.Sequential(*modules).eval()


def _shortcut(block: ResidualBlock) -> nn.Module:
    """What a residual block adds, in BackPACK's modules."""
    if not block.extra:
        return nn.Identity()
    custom = "backpack.custom_module"
    every, some = slice(None), slice(None, None, block.stride)
    sliced = importlib.import_module(f"{custom}.slicing").Slicing((every, every, some, some))
    widths = (0, 0, 0, 0, block.extra // 2, block.extra // 2)
    return nn.Sequential(sliced, importlib.import_module(f"{custom}.pad").Pad(widths))


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

#: BackPACK's is that of the Gauss-Newton matrix: the Hessian's, as the output is linear in every
#: parameter alone.
DIAGONAL_PEERS = (DiagonalPeer("BackPACK", "backpack-for-pytorch", "backpack", _backpack_diagonal),)

BLOCK_PEERS = (BlockPeer("curvlinops", "curvlinops-for-pytorch", "curvlinops", _curvlinops_block),)

SUMMARY_PEERS = (
    SummaryPeer("PyHessian", "PyHessian", "pyhessian", _pyhessian_once, _pyhessian_summary),
)
