"""Losses of class labels: softmax cross-entropy and its kin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatgauge.loss import Loss, prediction
from flatgauge.output_curvature import Softmax
from flatgauge.precision import wide
from flatgauge.targets import check_distribution

#: The label that PyTorch and Hugging Face leave out of a loss.
IGNORED = -100


def _labels(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring logits and class labels to the shapes (M, C) and (M,) or (M, C) of torch."""
    if target.is_floating_point():
        return logits, target
    fits = logits.shape[:1] + logits.shape[2:] == target.shape
    if not fits and logits.shape[:-1] == target.shape:  # (N, T, C): one label per position
        logits, target = logits.flatten(0, -2), target.flatten()
    return logits, target.long()


def cross_entropy(
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    second: bool = False,
) -> Loss:
    """Softmax cross-entropy of logits (N, C), (N, C, ...) or (N, T, C)."""
    # With `second`, classes are the second dimension where both readings fit.

    def total(output: Any, target: Tensor) -> Tensor:
        logits, labels = _labels(prediction(output), target)
        return F.cross_entropy(
            logits,
            labels,
            weight=None if weight is None else weight.to(logits),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    def count(target: Tensor) -> float:
        return _label_count(target, weight, ignore_index)

    def check(output: Any, target: Any) -> None:
        logits = prediction(output)
        check_labels("cross_entropy", logits, target, ignore_index)
        if not second:
            _check_layout("cross_entropy", logits, target)

    def curvature(logits: Tensor, target: Tensor) -> Softmax:
        return _softmax_curvature(logits, target, weight, ignore_index, label_smoothing)

    plain = weight is None and ignore_index == IGNORED and label_smoothing == 0
    return Loss(
        *("cross_entropy", total, count, check),
        curvature=curvature,
        ignored=ignore_index,
        own_differs="refuse" if plain else "ignore",
    )


def nll(*, weight: Tensor | None = None, ignore_index: int = IGNORED, second: bool = False) -> Loss:
    """Negative log-likelihood of log-probabilities, for models that end in log-softmax."""

    def total(output: Any, target: Tensor) -> Tensor:
        logs, labels = _labels(prediction(output), target)
        scale = None if weight is None else weight.to(logs)
        return F.nll_loss(logs, labels, weight=scale, ignore_index=ignore_index, reduction="sum")

    def count(target: Tensor) -> float:
        return _label_count(target, weight, ignore_index)

    def check(output: Any, target: Any) -> None:
        logits = prediction(output)
        if isinstance(target, Tensor) and target.is_floating_point():
            raise ValueError(
                f"`loss='nll'` needs integer class labels, but got {target.dtype} targets of shape "
                f"{tuple(target.shape)}; give labels, or for class probabilities use "
                "`loss='cross_entropy'` on a model that ends before its log-softmax."
            )
        check_labels("nll", logits, target, ignore_index)
        if not second:
            _check_layout("nll", logits, target)

    def curvature(logits: Tensor, target: Tensor) -> Softmax:
        return _softmax_curvature(logits, target, weight, ignore_index, 0.0)

    return Loss(
        *("nll", total, count, check),
        curvature=curvature,
        after="log_softmax",
        ignored=ignore_index,
    )


def normalized_cross_entropy(ignored: int = IGNORED) -> Loss:
    """Cross-entropy of logits divided by their standard deviation over the classes.

    Equation (20) to (22) of Tsuzuku et al. 2019: neither scaling nor shifting the outputs
    changes it. A sample with constant logits has none.

    Args:
        ignored: The label that is left out.

    Returns:
        The loss.
    """
    name = "normalized_cross_entropy"

    def total(output: Any, target: Tensor) -> Tensor:
        logits = prediction(output)
        kept = defined(logits)
        # Constant logits are replaced before they are divided by zero, not after.
        safe = torch.arange(logits.shape[1], device=logits.device).to(logits)
        logits = torch.where(kept[:, None], logits, safe)
        labels = target.long()
        labels = labels.where(kept & (labels != ignored), IGNORED)
        spread = logits.std(dim=1, correction=0, keepdim=True)
        return F.cross_entropy(logits / spread, labels, ignore_index=IGNORED, reduction="sum")

    def check(output: Any, target: Any) -> None:
        logits = prediction(output)
        labels = isinstance(target, Tensor) and not target.is_floating_point()
        if not labels or logits.dim() != 2 or target.shape != logits.shape[:1]:
            kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
            shape = f" of shape {tuple(target.shape)}" if isinstance(target, Tensor) else ""
            raise ValueError(
                f"`surrogate={name!r}` is a loss of outputs (N, classes) and class labels (N,), "
                f"but the outputs have shape {tuple(logits.shape)} and the targets are {kind}"
                f"{shape}; pass `surrogate=None` to measure the surface's own loss."
            )
        check_labels(name, logits, target, ignored)

    def count(target: Tensor) -> float:
        return _label_count(target, None, ignored)

    def defined(logits: Tensor) -> Tensor:
        return (logits != logits[:, :1]).any(dim=1)

    def size(logits: Tensor) -> Tensor:
        variance = wide(logits.detach()).var(dim=1, correction=0)
        return (1 / variance).where(defined(logits), 0.0)

    return Loss(name, total, count, check, defined=defined, size=size)


def _softmax_curvature(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> Softmax:
    """Every position's share in the loss times (diag p − p pᵀ)."""
    last = logits.dim() > 2 and _labels(logits, target)[0].shape != logits.shape  # (N, T, C)
    axis = -1 if last else 1
    moved = wide(logits.detach()).movedim(axis, -1)  # (n, ..., classes)
    classes = moved.shape[-1]
    scale = moved.new_ones(classes) if weight is None else weight.to(moved)
    if target.is_floating_point():
        shares = target.to(moved).movedim(axis, -1) @ scale
        shares = (1 - smoothing) * shares + smoothing * scale.mean()
    else:
        labels = target.long()
        kept = (labels != ignore_index).to(moved)
        labels = labels.where(labels != ignore_index, 0)
        shares = kept * ((1 - smoothing) * scale[labels] + smoothing * scale.mean())

    def restore(columns: Tensor) -> Tensor:
        return columns.reshape(moved.shape).movedim(-1, axis)

    probabilities = moved.softmax(-1).reshape(len(moved), -1, classes)
    shares = shares.reshape(len(moved), -1)
    return Softmax(probabilities, shares, restore, logits.dtype, axis % logits.dim())


def _label_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """The denominator that torch uses for class labels or class probabilities."""
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    target = target.long()  # Compared with -100, torch takes a uint8 of 156 for it.
    kept = target[target != ignore_index]
    if weight is None:
        return float(kept.numel())
    return float(weight.cpu().double()[kept.long().cpu()].sum())


def check_labels(name: str, logits: Tensor, target: Any, ignore_index: int | None = None) -> None:
    """Refuse labels that torch would answer with an index error, or silently misread."""
    if not isinstance(target, Tensor) or logits.dim() < 2:
        raise ValueError(
            f"`loss={name!r}` needs outputs of shape (N, classes) and a tensor of labels, but got "
            f"outputs of shape {tuple(logits.shape)} and a {type(target).__name__} as targets."
        )
    if target.is_floating_point():
        if target.shape != logits.shape:
            raise ValueError(
                f"`loss={name!r}` got {target.dtype} targets of shape {tuple(target.shape)} for "
                f"outputs of shape {tuple(logits.shape)}; give integer class labels of shape (N,) "
                "or class probabilities of the outputs' shape, or use `loss='mse'`."
            )
        check_distribution(name, logits, target)
        return
    shaped, labels = _labels(logits, target)
    classes = shaped.shape[1]
    if shaped.shape[:1] + shaped.shape[2:] != labels.shape:
        raise ValueError(
            f"`loss={name!r}` got labels of shape {tuple(target.shape)} for outputs of shape "
            f"{tuple(logits.shape)}; labels need the outputs' shape without the class dimension."
        )
    if classes == 1:
        raise ValueError(
            f"`loss={name!r}` over one class is the constant 0 and has no curvature; use "
            "`loss='binary_cross_entropy'` for one logit, or give the model one output per class."
        )
    kept = labels if ignore_index is None else labels[labels != ignore_index]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        ignored = "" if ignore_index is None else f" (or be {ignore_index} to be ignored)"
        raise ValueError(
            f"labels run from {int(kept.min())} to {int(kept.max())}, but the model has "
            f"{classes} outputs, so labels must lie in 0..{classes - 1}{ignored}; check the "
            "model's last layer and the labels."
        )


def _check_layout(name: str, logits: Tensor, target: Tensor) -> None:
    """Refuse outputs whose classes may be the second dimension as well as the last."""
    function = {"cross_entropy": "cross_entropy", "nll": "nll_loss"}[name]
    first = logits.shape[:1] + logits.shape[2:] == target.shape
    if logits.dim() > 2 and first and logits.shape[:-1] == target.shape:
        raise ValueError(
            f"`loss={name!r}` got outputs of shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(target.shape)}: the classes may be the second dimension or the last. If the "
            f"second, pass `loss=F.{function}`; if the last, pass "
            f"`loss=lambda o, t: F.{function}(o.flatten(0, -2), t.flatten())`."
        )
