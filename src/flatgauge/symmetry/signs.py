"""On which side of their kink a model's ReLUs are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatgauge.symmetry.rescaling import Call

#: Activations with a kink at zero.
_KINKED = ("relu", "relu_", "leaky_relu", "leaky_relu_", "_prelu_kernel", "clamp_min")


class _Watching(TorchDispatchMode):
    """Notes the signs of what every kinked activation reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and note signs."""
        if func._schema.name.rpartition("::")[2] in _KINKED:
            self.signs.append(args[0].detach() > 0)
        return func(*args, **(kwargs or {}))


def outputs_and_signs(model: nn.Module, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """A model's outputs on an example, and the signs of what its ReLUs read on the way.

    Args:
        model: The model.
        call: The example.

    Returns:
        All tensors in its output; and one of truth values per activation, in the order in which
        they run.
    """
    watching = _Watching()
    with watching:
        outputs = call(model)
    return outputs, watching.signs
