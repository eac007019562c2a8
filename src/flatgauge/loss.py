"""A loss taken apart: a sum over samples, and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


def prediction(output: Any) -> Tensor:
    """The tensor that a named loss compares: the output, its `logits`, or its first item.

    Args:
        output: What the model returned.

    Returns:
        The tensor.

    Raises:
        TypeError: If there is no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    candidate = getattr(output, "logits", None)
    if candidate is None and isinstance(output, Mapping):
        candidate = output.get("logits")
    if candidate is None and isinstance(output, (tuple, list)) and output:
        candidate = output[0]
    if not isinstance(candidate, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} with no `logits`; a named loss needs a "
            "tensor. Pass `loss=` a callable (output, target) -> mean loss that takes it apart."
        )
    return candidate
