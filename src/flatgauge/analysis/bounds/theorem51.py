"""Theorem 5.1 of Yi et al. 2019: how far the loss rises when basis paths move a little.

A surface of a multilayer perceptron enters `theorem_bound`, the terms of the bound leave; for any
other network one term without a value says what the theorem does not cover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatgauge.analysis.bounds.terms import Term
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.graph.export import ModelGraph
from flatgauge.graph.layers import Layer, find_layers
from flatgauge.graph.ops import op_name, shape_of
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import tensors
from flatgauge.surface.losses import prediction
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.basis_paths import BasisPaths, surface_paths

#: Operations that a plain multilayer perceptron is made of, and what only moves numbers.
_LAYERS = ("linear", "addmm", "mm", "matmul")
_MOVES = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "clone", "alias", "detach")
_KEPT = ("dropout", "contiguous", "relu")

#: What may turn a weight, but no activation.
_TURNS = ("t", "transpose", "permute", "numpy_T")

#: How far paths may move, relative to the smallest |u_b|: then every divisor keeps 1 / √2 of it.
ROOM = 1 - math.sqrt(0.5)

#: The default ε, relative to the smallest |u_b|.
_STEP = 0.01

_NAME = "max l(v') - l(v) at most"

_GAP = (
    "the printed proof takes |v + δ| ≥ √((v² + δ²) / 2) in (37), which fails for δ of the other "
    "sign beyond 0.27 |v|, counts non-basis paths as (L-1) d₁, and needs fixed activations; "
    "integrated along the segment the inequality holds without them for ε up to this"
)


@dataclass(frozen=True)
class _Sizes:
    """What the theorem reads off a network."""

    depth: int
    inputs: int
    width: int
    outputs: int
    notes: tuple[str, ...]
    biases: int


def theorem_bound(surface: LossSurface, *, skeleton: str, epsilon: float | None) -> list[Term]:
    r"""Return the terms of a bound on the rise of the training loss within ε of the basis paths.

    Definition:
        .. math:: 2 C C_L d_0 d_1^{L-1} d_L \Big(1 + 2^{(3L+4)/2} (L-1) d_1 d_L \psi \Big) \epsilon,
                  \qquad \psi = \max_{s \le L} \epsilon^{s-1}
                  \frac{\max |v|^{2L+1-s}}{\min |v|^{2L}}
    """
    sizes = _sizes(surface)
    if isinstance(sizes, str):
        return [Term(_NAME, math.nan, note=f"the theorem does not cover this network: {sizes}")]
    paths = surface_paths(surface, skeleton)
    if paths.dropped:
        missing = f"{len(paths.dropped)} hidden units are on no path of non-zero value"
        return [Term(_NAME, math.nan, note=f"the theorem does not cover this network: {missing}")]
    largest, smallest = float(paths.values.abs().max()), float(paths.values.abs().min())
    limit = ROOM * paths.smallest
    if epsilon is None:
        epsilon = _STEP * (paths.smallest if paths.hidden else largest)
    norm, margin = _inputs(surface, paths, sizes)
    slope, slope_note = _slope(surface)
    log_psi = _log_psi(sizes.depth, epsilon, largest, smallest)
    logs = _logs(sizes, norm, slope, epsilon, log_psi)
    stated = "; ".join(["bias-free, equal widths, as stated", *sizes.notes][bool(sizes.notes) :])
    facts = [
        Term("ε", epsilon, note="how far v moves, in Euclidean length"),
        Term("ε allowed", limit, note=f"(1 - 1/√2) of the smallest |u_b|; {_GAP}"),
        Term(
            *("ε of fixed activations", margin),
            note="(32) for the first layer: up to this none of its activations changes on the "
            "data; the theorem as printed asks it of all layers",
        ),
        Term("C", norm, note="largest norm of an input, from the data: all that (33) uses"),
        Term("C_L", slope, note=slope_note),
        Term("L", sizes.depth, note="layers of weights"),
        Term("d_0", sizes.inputs, note=stated),
        Term("d_1", sizes.width, note=stated),
        Term("d_L", sizes.outputs, note="outputs"),
        Term("max |v|", largest, note=f"{len(paths)} basis paths, {paths.skeleton} skeleton"),
        Term("min |v|", smallest, note="ψ is infinite where it is zero" if not smallest else ""),
        Term("log10 ψ(v)", log_psi / math.log(10), note="(max |v|)^2L / (min |v|)^2L for small ε"),
    ]
    if epsilon > limit:
        beyond = f"`epsilon={epsilon:.3g}` is beyond the ε allowed, {limit:.3g}: no bound is known"
        return [*facts, Term(_NAME, math.nan, note=beyond)]
    note = "of the training loss, not of the 0-1 loss; no statement about other data"
    if epsilon > margin:
        note += "; ε is beyond (32), so that it is the repaired proof that holds (docs/bounds.md)"
    return [*facts, *_result(logs, note)]


def _result(logs: tuple[float, float], note: str) -> list[Term]:
    """The two summands, their sum, and its logarithm."""
    both = (
        math.inf if math.inf in logs else max(logs) + math.log1p(math.exp(-abs(logs[0] - logs[1])))
    )
    if both == math.inf:
        note += "; infinite, as a path has value zero"
    elif _power(both) == math.inf:
        note += "; too large for a float: see log10"
    return [
        Term("from basis paths", _power(logs[0]), part=True, note="2 C C_L d_0 d_1^(L-1) d_L ε"),
        Term("from other paths", _power(logs[1]), part=True, note="the same times the ψ term"),
        Term(_NAME, _power(logs[0]) + _power(logs[1]), note=note),
        Term("log10 of it", both / math.log(10)),
    ]


def _power(log: float) -> float:
    """The number of a logarithm, infinite where it is beyond floats."""
    return math.exp(log) if log < 709 else math.inf


def _log_psi(depth: int, epsilon: float, largest: float, smallest: float) -> float:
    """The logarithm of ψ."""
    if not smallest:
        return math.inf
    return max(
        (s - 1) * math.log(epsilon)
        + (2 * depth + 1 - s) * math.log(largest)
        - 2 * depth * math.log(smallest)
        for s in range(1, depth + 1)
    )


def _logs(
    sizes: _Sizes, norm: float, slope: float, epsilon: float, log_psi: float
) -> tuple[float, float]:
    """The logarithms of the two summands."""
    if norm == 0 or slope == 0:
        return -math.inf, -math.inf
    first = math.log(2 * norm * slope * epsilon)
    first += math.log(sizes.inputs * sizes.outputs) + (sizes.depth - 1) * math.log(sizes.width)
    if sizes.depth == 1:
        return first, -math.inf
    factor = (3 * sizes.depth + 4) / 2 * math.log(2)
    factor += math.log((sizes.depth - 1) * sizes.width * sizes.outputs)
    return first, first + factor + log_psi


def _sizes(surface: LossSurface) -> _Sizes | str:
    """Depth and widths of a multilayer perceptron, or what else the network is."""
    graph = sweep_of(surface).plan.graph
    layers = find_layers(graph)
    other = _other(graph, surface, layers)
    if other:
        return other
    shapes = [layer.canonical(torch.empty(layer.shape)).shape for layer in layers.values()]
    biases = sum(layer.bias is not None for layer in layers.values())
    widths = [int(shape[1]) for shape in shapes[:-1]]
    inputs = int(shapes[0][2])
    notes = []
    if len(set(widths)) > 1:
        notes.append(f"d_1 is the largest of the widths {widths}")
    if biases:
        notes.append(f"{biases} biases count as that many inputs of constant 1, in d_0 and in C")
    return _Sizes(
        len(shapes),
        inputs + biases,
        max(widths, default=1),
        int(shapes[-1][1]),
        tuple(notes),
        biases,
    )


def _other(graph: ModelGraph, surface: LossSurface, layers: dict[str, Layer]) -> str:
    """What is in the network besides linear layers and ReLUs, "" if nothing."""
    # Sizes are not activations.
    ops = [n for n in graph.nodes if op_name(n) and isinstance(n.meta.get("val"), Tensor)]
    ends = ("log_softmax", "_log_softmax") if surface.loss_name == "nll" else ()
    allowed = (*_LAYERS, *_MOVES, *_KEPT)
    turns = [
        node for node in ops if op_name(node) in _TURNS and node.args[0] in graph.parameter_names
    ]
    strange = {op_name(node) for node in ops if op_name(node) not in allowed and node not in turns}
    strange -= {op_name(n) for n in ops[-1:] if op_name(n) in ends}
    if strange:
        return f"it has {', '.join(sorted(strange))}, where the theorem has linear layers and ReLUs"
    count = sum(op_name(node) in _LAYERS for node in ops)
    if not layers or count != len(layers) or any(x.kind != "linear" for x in layers.values()):
        return "it is not a chain of linear layers with weights of their own"
    if any(len(node.users) > 1 for node in ops) or len(graph.outputs) != 1:
        return "it has branches"
    if len(graph.inputs) != 1:
        return f"it has {len(graph.inputs)} inputs"
    first = next(iter(layers.values()))
    entering = math.prod(map(int, shape_of(graph.inputs[0])[1:]))
    flat = all(len(shape_of(layer.node)) == 2 for layer in layers.values())
    if not flat or entering != first.shape[first.in_axis]:
        return "its layers are applied at several positions of a sample"
    return ""


def _inputs(surface: LossSurface, paths: BasisPaths, sizes: _Sizes) -> tuple[float, float]:
    """The largest norm of an input, and how far paths may move the first layer without a flip."""
    graph = sweep_of(surface).plan.graph
    first = next(iter(find_layers(graph).values()))
    values: dict[str, Tensor] = {}
    start = 0
    for name, places in paths.entries:
        values[name] = paths.values[start : start + len(places)]
        start += len(places)
    weights = values[first.name].reshape(first.shape)
    matrix = weights if first.out_axis == 0 else weights.T  # (out, in)
    shift = values[first.bias] if first.bias is not None else torch.zeros(len(matrix))
    chunk = surface.chunk

    def read() -> tuple[float, float]:
        largest, margin = 0.0, math.inf
        for batch in surface.risk.chunks(chunk):
            (given,) = tensors(batch.inputs)
            x = given.detach().cpu().double().reshape(len(given), -1)
            squares = x.square().sum(1) + (first.bias is not None)
            largest = max(largest, float(x.square().sum(1).max()))
            if sizes.depth > 1:
                reach = (x @ matrix.T + shift).abs() / squares.sqrt()[:, None]
                margin = min(margin, float(reach.nan_to_num(0.0).min()))
        return largest, margin

    found = surface.processes.gather("the inputs", read)
    largest = max(one for one, _ in found)
    return math.sqrt(largest + sizes.biases), min(margin for _, margin in found)


def _slope(surface: LossSurface) -> tuple[float, str]:
    """The Lipschitz constant of the loss by the outputs, and where it is from."""
    if surface.loss_name in ("cross_entropy", "nll"):
        return math.sqrt(2), "of cross-entropy by the logits: at most √2"
    objective, subject = surface.risk, surface.functional_model
    chunk = surface.chunk

    def read() -> float:
        largest = 0.0
        for batch in objective.chunks(chunk):
            outputs = prediction(subject(subject.leaves, batch, with_labels=False)).detach()
            outputs.requires_grad_()
            mean = objective.loss.total(outputs, batch.target)
            total = mean if objective.loss.knows_count else mean * objective.denominator(batch)
            (gradient,) = torch.autograd.grad(total, outputs)
            norms = gradient.flatten(1).double().norm(dim=1)
            largest = max(largest, float(norms.max()))
        return largest

    with isolate(surface.model, surface.device):
        largest = max(surface.processes.gather("slopes of the loss", read))
    largest *= surface.samples / objective.count
    return largest, (
        f"largest slope of {surface.loss_name} by the outputs on the data: an estimate, as the "
        "loss may be steeper nearby"
    )
