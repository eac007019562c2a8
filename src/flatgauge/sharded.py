"""A model whose parameters are spread over processes (`torch.distributed.fsdp.fully_shard`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatgauge.batch import Batch
from flatgauge.blame import user_code
from flatgauge.processes import Processes
from flatgauge.subject import Subject, unwrapped

T = TypeVar("T")


def subject_of(
    model: Any, dtype: torch.dtype | None, processes: Processes, *, compiles: bool = False
) -> Subject:
    """The model as a function of its parameters, sharded or not.

    Args:
        model: The user's model.
        dtype: Precision of the computation.
        processes: Who measures.
        compiles: Whether passes without derivatives go through torch.compile.

    Returns:
        The subject.

    Raises:
        ValueError: If parameters are sharded in a way that cannot be measured.
    """
    module = unwrapped(model)
    parts = [name for name, p in module.named_parameters() if hasattr(p, "full_tensor")]
    if not parts:
        return Subject(model, dtype, compiles=compiles)
    kind = getattr(dist.fsdp, "FSDPModule", ())
    if not isinstance(module, kind):
        raise ValueError(
            f"`{parts[0]}` of the model is a DTensor, but the model is not sharded as a whole by "
            "`torch.distributed.fsdp.fully_shard`; tensor parallelism cannot be measured. Load its "
            "full state dict into a plain model."
        )
    if processes.size == 1:
        raise ValueError(
            "the model is sharded by FSDP: no process can run it alone. Make the surface on all "
            "ranks, with `processes='all'`."
        )
    if compiles:
        raise ValueError(
            "the model is sharded by FSDP and is called as it is; leave `compile=True` out."
        )
    return ShardedSubject(module, dtype, processes)


class ShardedSubject(Subject):
    """A model sharded by FSDP: evaluated where it is, at values that are written into its shards.

    Vectors are whole on every rank; parameters, gradients and activations inside the model are as
    FSDP has them.

    Args:
        model: The model.
        dtype: Precision of the computation: that of the parameters.
        processes: Who measures: the ranks that the model is sharded over.

    Raises:
        ValueError: If the precision is another, or the model is sharded over other ranks.
    """

    sharded = True

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, processes: Processes) -> None:
        self._processes = processes
        self._held: Sequence[Tensor] | None = None
        self._seen: dict[str, Tensor] = {}
        self._shards: dict[str, nn.Parameter] = {}
        super().__init__(model, dtype)
        own = {parameter.dtype for parameter in model.parameters()}
        if own != {self.dtype}:
            raise ValueError(
                f"a model sharded by FSDP is measured as it is, in {', '.join(map(str, own))}, not "
                f"in {self.dtype}; convert it before it is sharded (`model.float()`)."
            )
        ranks = {p.device_mesh.size() for p in model.parameters()}  # type: ignore[attr-defined]
        if ranks != {processes.size}:
            raise ValueError(
                f"the model is sharded over {', '.join(map(str, ranks))} ranks, but "
                f"{processes.size} measure together; give `processes=` the group of its mesh."
            )

    def refresh(self) -> bool:
        """Read the model again if its parameters or buffers changed on any rank."""
        self._check_parameters()
        tables = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        now = {name: _local(value) for name, value in tables.items()}
        same = now.keys() == self._seen.keys() and all(
            torch.equal(value, self._seen[name]) for name, value in now.items()
        )
        if all(self._processes.gathered(same)):
            return False
        bad = [name for name, value in now.items() if not torch.isfinite(value).all()]
        named = self._processes.first(bad[0] if bad else None)
        if named is not None:
            raise ValueError(
                f"`{named}` of the model holds values that are nan or infinite; the training "
                "diverged, or the checkpoint is damaged."
            )
        self._seen = {name: value.clone() for name, value in now.items()}
        self._others = {
            n: v.clone() for n, v in self.model.named_buffers() if not hasattr(v, "to_local")
        }
        self._number = None
        # Whole on every rank are only those to differentiate by.
        whole: list[Any] = [tables[name] for name in self.names]
        self.leaves = tuple(p.full_tensor().detach().clone().requires_grad_() for p in whole)
        return True

    def __call__(
        self, leaves: Sequence[Tensor], batch: Batch, *, with_labels: bool, forward: bool = False
    ) -> Any:
        """Call the model at its own parameters, or at those that are held."""
        assert leaves is self.leaves or leaves is self._held
        arguments, keywords = self.arguments(batch, with_labels=with_labels)
        try:
            with user_code("the model"):
                return self.model(*arguments, **keywords)
        finally:
            if not torch.is_grad_enabled():
                self._reshard()

    def first_call(self, batch: Batch, *, with_labels: bool) -> Any:
        """Call the model; its tables are not put back, as FSDP changes them in every call."""
        return self(self.leaves, batch, with_labels=with_labels)

    def holding(self, leaves: Sequence[Tensor], action: Callable[[], T]) -> T:
        """Do something while the shards have other values."""
        # Looked up now: while the model runs, whole parameters stand in the places of shards.
        self._shards = dict(self.model.named_parameters())
        before = [(p, p.grad, _local(p).clone()) for p in self._shards.values()]
        self._held = leaves
        try:
            self._write(leaves)
            return action()
        finally:
            self._held = None
            self._reshard()
            for parameter, slope, value in before:
                _local(parameter).copy_(value)
                parameter.grad = slope

    def differentiate(self, value: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient of the mean over all ranks: theirs add up to the gradient of the sum."""
        for parameter in self._shards.values():
            parameter.grad = None
        value.backward()
        slopes: list[Any] = [self._shards[name].grad for name in self.names]
        return [None if slope is None else slope.full_tensor().detach() for slope in slopes]

    def doubled(self) -> Subject:
        """The same model: its precision cannot be changed."""
        return self

    def _write(self, leaves: Sequence[Tensor]) -> None:
        """Give every shard its part of the values."""
        if leaves is self.leaves:
            return
        from torch.distributed.tensor import distribute_tensor

        for name, leaf in zip(self.names, leaves, strict=True):
            target: Any = self._shards[name]
            part = distribute_tensor(
                leaf.detach(), target.device_mesh, target.placements, src_data_rank=None
            )
            _local(target).copy_(part.to_local())

    def _reshard(self) -> None:
        """Let go of gathered parameters: the model's tables hold shards again."""
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()


def _local(value: Tensor) -> Tensor:
    """The part of a tensor that lies here."""
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()
