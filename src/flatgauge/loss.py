"""A loss taken apart: a sum over samples, and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from flatgauge.output_curvature import OutputCurvature


@dataclass(frozen=True)
class Loss:
    """A mean loss, taken apart: the mean over a data set is the sum of totals / sum of counts.

    Attributes:
        name: How it is called in reports.
        total: The sum of the loss over a chunk, from the model's output and the target.
        count: What that sum is divided by; None where it is still to be found.
        check: Refuses targets that do not fit the output.
        own: Whether the model computes the loss itself (`output.loss`).
        curvature: The second derivatives of the total by the prediction, where they are known
            in closed form; with `after`, by what goes into that last operation of the model.
        after: The operation that the model is expected to end in.
        defined: Says which samples have a loss, where that depends on the outputs; the others add
            nothing to the total, and are not to be counted.
        size: Of the terms that the second derivatives by every sample's outputs are sums of, where
            these may cancel altogether.
        ignored: The label that is left out, where there is one.
        notes: How what the user gave was read.
        own_differs: What to do where the model computes another loss from the same labels:
            ``"ignore"`` it, ``"refuse"``, or ``"take"`` the model's.
    """

    name: str
    total: Callable[[Any, Any], Tensor]
    count: Callable[[Any], float] | None
    check: Callable[[Any, Any], None] = lambda output, target: None
    own: bool = False
    curvature: Callable[[Tensor, Any], OutputCurvature] | None = None
    after: str | None = None
    defined: Callable[[Tensor], Tensor] | None = None
    size: Callable[[Tensor], Tensor] | None = None
    ignored: int | None = None
    notes: tuple[str, ...] = ()
    own_differs: Literal["ignore", "refuse", "take"] = "ignore"


def prediction(output: Any) -> Tensor:
    """The tensor that a named loss compares: the output, its `logits`, or its first numbers.

    Args:
        output: What the model returned.

    Returns:
        The tensor.

    Raises:
        TypeError: If there is no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    candidate = _logits(output)
    if candidate is None:
        candidate = next(iter(_numbers(output)), None)
    if not isinstance(candidate, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} with no `logits`; a named loss needs a "
            "tensor. Pass `loss=` a callable (output, target) -> mean loss that takes it apart."
        )
    return candidate


def check_choice(loss: Loss, output: Any, target: Any) -> list[str]:
    """Refuse an output of several tensors, unless the first is the only one that fits the targets.

    Args:
        loss: The loss.
        output: What the model returned.
        target: The targets of the same samples.

    Returns:
        Notes on what was chosen.

    Raises:
        ValueError: If none of them fits, another than the first, or several.
    """
    if loss.count is None or isinstance(output, Tensor) or _logits(output) is not None:
        return []
    found = _numbers(output)
    if len(found) < 2:
        return []
    fitting = [place for place, tensor in enumerate(found) if _fits(loss, tensor, target)]
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found)
    if fitting == [0]:
        return [f"the model returns tensors of shapes {shapes}; the loss is taken of the first"]
    targets = f" of shape {tuple(target.shape)}" if isinstance(target, Tensor) else ""
    raise ValueError(
        f"the model returns {len(found)} tensors, of shapes {shapes}; {len(fitting)} of them fit "
        f"the targets{targets}, so the loss {loss.name!r} cannot choose the first. Return one "
        "tensor, or a dict that has it as `logits`; or pass a function that picks it, such as "
        "`loss=lambda output, target: F.cross_entropy(output[1], target)`."
    )


def _logits(output: Any) -> Any:
    """What an output calls its logits; None where it has none."""
    candidate = getattr(output, "logits", None)
    return output.get("logits") if candidate is None and isinstance(output, Mapping) else candidate


def _numbers(output: Any) -> list[Tensor]:
    """The floating-point tensors of a tuple or list; what is nested in it (caches) is not one."""
    items = output if isinstance(output, (tuple, list)) else ()
    return [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]


def _fits(loss: Loss, tensor: Tensor, target: Any) -> bool:
    """Whether a loss takes a tensor with the targets."""
    try:
        loss.check(tensor, target)
    except ValueError:
        return False
    return True
