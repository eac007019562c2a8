"""The table of rules: what an op does to sums over the paths that reach its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from flatgauge.graph import UnsupportedGraphError
from flatgauge.nodes import arguments_of, op_name, shape_of, source_line
from flatgauge.precision import wide

#: The sums of an op's output, one per entry; a list where it has several outputs, None for an
#: output that no path runs through (places, truth values).
Sums = Tensor | list[Tensor | None] | None
Rule = Callable[["Step"], Sums]

#: The rules by the name of the op. To add one, write a function under `@rule("op", ...)`.
RULES: dict[str, Rule] = {}

#: What is said of ops without a rule; of all others, that nothing is known.
_REASONS = {
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "instance_norm"),
        "it divides by statistics of the sample itself",
    ),
    **dict.fromkeys(
        ("gelu", "silu", "sigmoid", "tanh", "softmax", "_softmax", "log_softmax", "_log_softmax",
         "elu", "softplus", "mish", "exp", "log_sigmoid", "selu", "celu"),
        "it is not piecewise linear",
    ),
    "hardswish": "it multiplies two activations",
    "scaled_dot_product_attention": "it multiplies activations with each other",
}  # fmt: skip


def home(device: torch.device) -> torch.device:
    """Where numbers in double precision live: on the CPU where a device has none."""
    return torch.device("cpu") if device.type == "mps" else device


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Declare a function to be the rule of some ops.

    Args:
        *ops: Their names, without namespace and overload.

    Returns:
        The decorator.
    """

    def declare(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, op
            RULES[op] = function
        return function

    return declare


@dataclass(frozen=True)
class Step:
    """One op while paths are carried through it.

    What depends on the input is an *activation*, and is known by its sums over paths. All other
    tensors are *weights*, and are known by their values: parameters, buffers, constants, and
    whatever is computed from those alone.

    Attributes:
        node: The op in the graph.
        sums: The sums of all activations so far.
        values: The values of all weights.
        order: The power that every weight along a path is raised to.
    """

    node: fx.Node
    sums: Mapping[fx.Node, Sums]
    values: Mapping[fx.Node, Any]
    order: float

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        return arguments_of(self.node)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) output."""
        return shape_of(self.node)

    def __getitem__(self, name: str) -> Tensor:
        """What stands for the argument of that name in a sum or product: see `tensor`."""
        return self.tensor(self.arguments[name])

    def tensor(self, argument: Any) -> Tensor:
        """What stands for an argument in a sum or product.

        Args:
            argument: A tensor or a number.

        Returns:
            The sums of an activation; the size of a weight, raised to the order.
        """
        if self.is_activation(argument):
            found = self.sums[argument]
            assert isinstance(found, Tensor)
            return found
        value = self.value(argument)
        known = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        return self.power(known)

    def paths(self, argument: Any) -> Any:
        """What stands for an argument of an op that is run as it is.

        Args:
            argument: A tensor, or a list of an op's outputs.

        Returns:
            As `tensor`, but whole numbers and truth values stay themselves: they say where.
        """
        if self.is_activation(argument):
            return self.sums[argument]
        value = self.value(argument)
        real = isinstance(value, Tensor) and value.is_floating_point()
        return self.power(value) if real else value

    def value(self, argument: Any) -> Any:
        """The value of a weight, in double precision.

        Args:
            argument: The weight, or anything that is no tensor, which stays itself.

        Returns:
            The value.
        """
        if self.is_activation(argument):
            self.refuse("it takes an activation where only weights can be read")
        value = self.values[argument] if isinstance(argument, fx.Node) else argument
        if isinstance(value, Tensor):
            return wide(value) if value.is_floating_point() else value.to(home(value.device))
        return value

    def is_activation(self, argument: Any) -> bool:
        """Whether an argument depends on the input."""
        return isinstance(argument, fx.Node) and argument in self.sums

    def power(self, value: Tensor) -> Tensor:
        """The size of a weight, raised to the order."""
        size = wide(value).abs()
        return size if self.order == 1 else size.pow(self.order)

    def run(self) -> Any:
        """The op itself on sums in the place of activations, and on sizes of weights."""
        keywords = {key: value for key, value in self.node.kwargs.items() if key != "dtype"}
        arguments, keywords = fx.node.map_arg((self.node.args, keywords), self.paths)
        return self.node.target(*arguments, **keywords)  # type: ignore[operator]

    def several(self, sums: Tensor) -> Sums:
        """Sums as the first output of an op that also gives places or statistics."""
        outputs = self.node.meta["val"]
        if not isinstance(outputs, (tuple, list)):
            return sums
        return [sums, *[None] * (len(outputs) - 1)]

    def refuse(self, reason: str) -> NoReturn:
        """Say that paths cannot be carried through this op.

        Args:
            reason: Why.

        Raises:
            UnsupportedGraphError: Always.
        """
        line = source_line(self.node)
        where = f" ({line})" if line else ""
        raise UnsupportedGraphError(
            f"paths cannot be summed through `{op_name(self.node)}`{where}: {reason}. Path norms "
            "are those of networks of linear maps, ReLUs, pooling and the like; leave `path_norm` "
            "out by naming other `measures=`."
        )


def apply_rule(step: Step) -> Sums:
    """Carry sums through one op by its rule, or refuse.

    Args:
        step: The op.

    Returns:
        The sums of its outputs.

    Raises:
        UnsupportedGraphError: If it has no rule, or reads what its rule cannot take.
    """
    op = op_name(step.node)
    if any(step.sums.get(source, source) is None for source in step.node.all_input_nodes):
        step.refuse("it reads whole numbers or truth values, which no path runs through")
    if op not in RULES:
        step.refuse(_REASONS.get(op, "it is not known to be piecewise linear"))
    return RULES[op](step)
