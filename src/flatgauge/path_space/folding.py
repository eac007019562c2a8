"""Batch-norms with stored statistics, read as what they are: a weight and a bias per channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.inference import StoredNorm
from flatgauge.symmetry.pattern import Floats


@dataclass(frozen=True)
class Coupling:
    """A bias that follows a weight: β moves by `slope` times what γ moves.

    Attributes:
        weight: The parameter γ.
        bias: The parameter β.
        slope: For every channel.
        spread: √(variance + ε), for every channel.
    """

    weight: str
    bias: str
    slope: Floats
    spread: Floats


@dataclass(frozen=True)
class Folded:
    """The weights of a network whose batch-norms are folded.

    y = γ (x - mean) / √(variance + ε) + β is the weight γ / √(variance + ε) and the bias
    β - γ mean / √(variance + ε) of every channel.

    Attributes:
        weights: By parameter, in double precision.
        couplings: How biases of batch-norms follow their weights for the rest to stay in place.
        absorbed: Biases of the layers before, which the batch-norms' biases stand for.
    """

    weights: dict[str, Floats]
    couplings: tuple[Coupling, ...]
    absorbed: frozenset[str]


def fold(
    gauge: GaugeGroup, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Folded:
    """Fold the batch-norms of a network.

    Args:
        gauge: Its gauge group.
        parameters: Its parameters, by name.
        buffers: Its buffers, by name.

    Returns:
        The folded weights. A batch-norm whose parameters another one reads, too, or that has no
        scale and shift, is left as it is.
    """
    values = {name: _double(value) for name, value in parameters.items()}
    couplings, absorbed = [], set()
    for norm in _single(gauge.inference.norms):
        spread = np.sqrt(_double(buffers[norm.variance]) + norm.epsilon)
        shift = _double(buffers[norm.mean])
        if norm.before is not None:
            shift = shift - _double(parameters[norm.before])
            absorbed.add(norm.before)
        values[norm.weight] = _double(parameters[norm.weight]) / spread
        values[norm.bias] = _double(parameters[norm.bias]) - values[norm.weight] * shift
        couplings.append(Coupling(norm.weight, norm.bias, shift / spread, spread))
    return Folded(values, tuple(couplings), frozenset(absorbed))


def _single(norms: tuple[StoredNorm, ...]) -> list[StoredNorm]:
    """The norms whose parameters are their own."""
    parts = {norm: {norm.weight, norm.bias, norm.before} - {None} for norm in norms}
    seen = Counter(name for names in parts.values() for name in names)
    return [norm for norm, names in parts.items() if all(seen[name] == 1 for name in names)]


def _double(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
