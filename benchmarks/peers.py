"""The other tools, each used the way its own documentation uses it.

A `Tool` takes a model and batches and computes something of the Hessian of the mean loss. A run
leaves out tools that cannot be imported (`available`) or that fail.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import matmul
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import ResidualBlock
from flatgauge.estimators.linalg import SupportsMatmul

Batches = list[tuple[Tensor, Tensor]]
Product = Callable[[Tensor], Tensor]
Number = Callable[[nn.Module, Batches], float]


@dataclass(frozen=True, eq=False)
class Tool:
    """Another tool, and what it computes of the Hessian of the mean loss; None for the rest.

    Attributes:
        name: What it is called in tables.
        package: What it is called by pip.
        module: What to import.
        product: From a model and batches to what multiplies vectors by the Hessian.
        eigenvalue: The largest eigenvalue, wanted to 1e-3.
        traces: Ways to estimate the trace, by their names in tables.
        diagonal: From a model and batches to what computes the diagonal, flat, in the order of the
            model's parameters.
        block: From a model, batches and one of the model's parameters to the Hessian's block of
            this parameter, as a matrix.
        summary: The trace, after the largest eigenvalue, both at the tool's own defaults.
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


def available(tools: Iterable[Tool], log: Callable[[str], object]) -> list[Tool]:
    """The tools that can be imported; a line to `log` for every package that cannot."""
    found: list[Tool] = []
    missing: set[str] = set()
    for tool in tools:
        try:
            importlib.import_module(tool.module)
        except Exception as error:  # A broken import can raise anything.
            if tool.package not in missing:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                log(f"skipping {tool.package}: {reason}")
            missing.add(tool.package)
        else:
            found.append(tool)
    return found


#: Warnings of torch: PyHessian calls `backward(create_graph=True)`, BackPACK has hooks on the
#: first layer and indexes with lists.
_WARNINGS = (
    r"Using backward\(\) with create_graph=True",
    "Full backward hook is firing when gradients are computed with respect to module outputs",
    "Using a non-tuple sequence for multidimensional indexing is deprecated",
)


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore torch's warnings about what the peers do."""
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def split(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector as tensors of the parameters' shapes."""
    parts = torch.split(vector, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def flatten(parts: Iterable[Tensor]) -> Tensor:
    """Tensors of the parameters' shapes as a flat vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _multiply(
    operator: Callable[[nn.Module, Batches], Any], model: nn.Module, batches: Batches
) -> Product:
    """What multiplies vectors by an operator of this model."""
    return partial(matmul, operator(model, batches))


# -- plain PyTorch, compiled ---------------------------------------------------------------------


#: Compiled products, so that a model is compiled once per batch size and not in every round.
_COMPILED: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()


def _compile(model: nn.Module) -> Callable[..., Any]:
    """Forward over reverse, compiled: from parameters, vector and batch to the product."""

    def loss(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (inputs,)), targets)

    def product(
        params: dict[str, Tensor], vector: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        gradient = torch.func.grad(lambda params: loss(params, inputs, targets))
        found: dict[str, Tensor] = torch.func.jvp(gradient, (params,), (vector,))[1]
        return found

    return torch.compile(product, dynamic=False)


def _compiled_product(model: nn.Module, batches: Batches) -> Product:
    if model not in _COMPILED:
        _COMPILED[model] = _compile(model)
    compiled = _COMPILED[model]
    params = {name: param.detach() for name, param in model.named_parameters()}
    samples = sum(len(targets) for _, targets in batches)

    def product(vector: Tensor) -> Tensor:
        parts = dict(zip(params, split(vector, list(params.values())), strict=True))
        total = torch.zeros_like(vector)
        for inputs, targets in batches:
            found = compiled(params, parts, inputs, targets)
            total.add_(flatten(found.values()), alpha=len(targets) / samples)
        return total

    compiled(params, params, *batches[0])  # Compiles, which is not timed.
    return product


COMPILED = Tool("torch.compile", "torch", "torch", product=_compiled_product)


# -- PyHessian -----------------------------------------------------------------------------------


def _pyhessian(model: nn.Module, batches: Batches) -> Any:
    from pyhessian import hessian

    # A copy: it leaves its gradients, and their graphs, in the model.
    return hessian(copy.deepcopy(model), nn.CrossEntropyLoss(), dataloader=batches, cuda=False)


def _pyhessian_product(model: nn.Module, batches: Batches) -> Product:
    tool = _pyhessian(model, batches)
    return lambda vector: flatten(tool.dataloader_hv_product(split(vector, tool.params))[1])


def _pyhessian_eigenvalue(model: nn.Module, batches: Batches) -> float:
    return float(_pyhessian(model, batches).eigenvalues(top_n=1)[0][0])


def _pyhessian_trace(model: nn.Module, batches: Batches, *, eigenvalue: bool = False) -> float:
    tool = _pyhessian(model, batches)
    if eigenvalue:
        tool.eigenvalues(top_n=1)
    samples = tool.trace()
    return float(sum(samples) / len(samples))


PYHESSIAN = Tool(
    *("PyHessian", "PyHessian", "pyhessian"),
    product=_pyhessian_product,
    eigenvalue=_pyhessian_eigenvalue,
    traces={"PyHessian": _pyhessian_trace},
    summary=partial(_pyhessian_trace, eigenvalue=True),
)


# -- curvlinops: eigenvalues by scipy's `eigsh` ---------------------------------------------------

#: Basis vectors for one eigenvalue: with scipy's own choice it costs twice as much.
_BASIS = 8

#: Products to estimate a trace with.
_PRODUCTS = 30


def _curvlinops(
    model: nn.Module, batches: Batches, params: Iterable[nn.Parameter] | None = None
) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters() if params is None else params),
        batches,
        check_deterministic=False,  # Or it starts with two more passes over the data.
    )


def _curvlinops_eigenvalue(model: nn.Module, batches: Batches) -> float:
    from scipy.sparse.linalg import eigsh

    operator = _curvlinops(model, batches).to_scipy()
    values = eigsh(operator, 1, which="LA", tol=1e-3, ncv=_BASIS, return_eigenvectors=False)
    return float(values[0])


def _curvlinops_trace(method: str, model: nn.Module, batches: Batches) -> float:
    estimate = getattr(importlib.import_module("curvlinops"), method)
    return float(estimate(_curvlinops(model, batches), _PRODUCTS))


def _curvlinops_block(model: nn.Module, batches: Batches, param: nn.Parameter) -> SupportsMatmul:
    operator: SupportsMatmul = _curvlinops(model, batches, [param])
    return operator


CURVLINOPS = Tool(
    *("curvlinops", "curvlinops-for-pytorch", "curvlinops"),
    product=partial(_multiply, _curvlinops),
    eigenvalue=_curvlinops_eigenvalue,
    traces={
        f"curvlinops, Hutch++ ({_PRODUCTS})": partial(_curvlinops_trace, "hutchpp_trace"),
        f"curvlinops, Hutchinson ({_PRODUCTS})": partial(_curvlinops_trace, "hutchinson_trace"),
    },
    block=_curvlinops_block,
)


# -- hessian-eigenthings: Lanczos for a number of steps, as it has no stopping rule ----------------

#: Lanczos steps for one eigenvalue.
_STEPS = 8


def _eigenthings(model: nn.Module, batches: Batches) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    return HessianOperator(model, batches, supervised_loss(nn.CrossEntropyLoss()))


def _eigenthings_eigenvalue(model: nn.Module, batches: Batches) -> float:
    from hessian_eigenthings import lanczos

    operator = _eigenthings(model, batches)
    result = lanczos(operator, k=1, max_iter=_STEPS, tol=1e-3, which="LA", seed=0)
    return float(result.eigenvalues[0])


EIGENTHINGS = Tool(
    *("hessian-eigenthings", "hessian-eigenthings", "hessian_eigenthings"),
    product=partial(_multiply, _eigenthings),
    eigenvalue=_eigenthings_eigenvalue,
)


# -- BackPACK: the exact diagonal of the Gauss-Newton matrix ---------------------------------------
# It is the Hessian's diagonal, as the output of these networks is linear in every parameter alone.


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
        return flatten(sums)

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


BACKPACK = Tool(
    *("BackPACK, diagonal alone", "backpack-for-pytorch", "backpack"), diagonal=_backpack_diagonal
)

PEERS = (COMPILED, PYHESSIAN, CURVLINOPS, EIGENTHINGS, BACKPACK)
