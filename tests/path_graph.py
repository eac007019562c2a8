"""A network as a directed graph of weights: one edge per weight and tap.

Read as the definition of basis paths reads them: an edge goes from an input, a constant (a bias)
or a hidden unit (a channel, whatever its positions) to a hidden unit or an output. Activations
and pools add no edges, and channels joined by an addition are one unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from cases import Case
from torch import Tensor, nn

INPUT, CONSTANT, OUTPUT = "input", "constant", "output"


@dataclass(frozen=True)
class Edge:
    """One weight: which entry of which parameter, what it connects, and when it is used."""

    name: str
    index: int
    tail: str
    head: str
    time: int
    diagonal_out: bool = False  # The paper's skeleton leaves the tail along it.
    diagonal_in: bool = False  # The paper's skeleton enters the head along it.
    factor: float = 1.0  # The edge weighs `factor` times the entry ...
    mean: float = 0.0  # ... less `mean` times the weight of the scale in front of it.
    scale: int = -1


@dataclass
class Graph:
    """A case together with its edges."""

    case: Case
    edges: list[Edge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.case.model.eval()  # The stored statistics count, and stay.

    @property
    def units(self) -> list[str]:
        ends = {INPUT, CONSTANT, OUTPUT}
        seen = [end for edge in self.edges for end in (edge.tail, edge.head) if end not in ends]
        return list(dict.fromkeys(seen))

    def linear(
        self, name: str, tails: list[str], heads: list[str], time: int, *, positions: int = 1
    ) -> None:
        """A matrix (out, in); in may be channels times positions, flattened."""
        for o, head in enumerate(heads):
            for i, tail in enumerate(tails):
                for p in range(positions):
                    centre = p == positions // 2
                    self.edges.append(
                        Edge(
                            name,
                            (o * len(tails) + i) * positions + p,
                            tail,
                            head,
                            time,
                            diagonal_out=centre and o == i % len(heads),
                            diagonal_in=centre and i == o % len(tails),
                        )
                    )

    def conv(
        self,
        name: str,
        tails: list[str],
        heads: list[str],
        time: int,
        *,
        taps: int,
        groups: int = 1,
        transposed: bool = False,
    ) -> None:
        """A kernel (out, in / groups, taps), or (in, out / groups, taps) if transposed."""
        inner, outer = len(tails) // groups, len(heads) // groups
        for g in range(groups):
            for o in range(outer):
                for i in range(inner):
                    for t in range(taps):
                        plain = ((g * outer + o) * inner + i) * taps + t
                        turned = ((g * inner + i) * outer + o) * taps + t
                        self.edges.append(
                            Edge(
                                name,
                                turned if transposed else plain,
                                tails[g * inner + i],
                                heads[g * outer + o],
                                time,
                                diagonal_out=t == taps // 2 and o == i % outer,
                                diagonal_in=t == taps // 2 and i == o % inner,
                            )
                        )

    def bias(self, name: str, heads: list[str], time: int) -> None:
        for o, head in enumerate(heads):
            self.edges.append(Edge(name, o, CONSTANT, head, time))

    def norm(
        self,
        name: str,
        module: nn.Module,
        tails: list[str],
        heads: list[str],
        time: int,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Stored statistics: a diagonal layer γ/√(var + eps) and a bias β − γ mean/√(var + eps).

        A bias of the layer in front is folded in with the mean: it is no edge of its own.
        """
        for o, (tail, head) in enumerate(zip(tails, heads, strict=True)):
            factor = 1 / math.sqrt(module.running_var[o].item() + module.eps)
            self.edges.append(Edge(f"{name}.weight", o, tail, head, time, True, True, factor))
        for o, head in enumerate(heads):
            scale = len(self.edges) - len(heads)
            mean = module.running_mean[o].item() - (0.0 if bias is None else bias[o].item())
            self.edges.append(Edge(f"{name}.bias", o, CONSTANT, head, time, mean=mean, scale=scale))

    def weights(self) -> list[float]:
        """What every edge weighs, read off the model."""
        entries = {name: p.detach().reshape(-1) for name, p in self.case.model.named_parameters()}
        found: list[float] = []
        for edge in self.edges:
            weight = edge.factor * entries[edge.name][edge.index].item()
            found.append(weight - edge.mean * found[edge.scale] if edge.scale >= 0 else weight)
        return found

    def parameters(self, weights: Tensor) -> dict[str, Tensor]:
        """The model's parameters when the edges weigh this much: differentiable."""
        state = dict(self.case.model.named_parameters())
        factor = torch.tensor([edge.factor for edge in self.edges], dtype=torch.float64)
        mean = torch.tensor([edge.mean for edge in self.edges], dtype=torch.float64)
        scale = torch.tensor([max(edge.scale, 0) for edge in self.edges])
        entries = (weights + mean * weights[scale]) / factor
        found = {}
        for name, tensor in state.items():
            mine = [n for n, edge in enumerate(self.edges) if edge.name == name]
            place = torch.tensor([self.edges[n].index for n in mine])
            flat = tensor.detach().reshape(-1).clone()
            found[name] = (
                flat.index_put((place,), entries[torch.tensor(mine)]).view(tensor.shape)
                if mine
                else tensor.detach()
            )
        return found
