"""What is measured on the workloads: a function per quantity, listed in `QUANTITIES`.

Each takes a `TimedComparison` and returns rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks import workloads
from benchmarks.comparison import ALL_PARTS, TimedComparison, distance, flat_parts, relative_error
from benchmarks.peers import Batches, Number, Tool
from benchmarks.results import AGREEMENT, LIMIT, OWN, TimingRow
from benchmarks.timing import Action, Entry
from benchmarks.workloads import Workload
from flatgauge.analysis.measurement import measure
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.blocks import Blocks
from flatgauge.curvature.operators import Hessian
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.linalg import SupportsMatmul
from flatgauge.surface.surface import LossSurface


def _peer(
    quantity: str, name: str, batches: Batches, prepare: Callable[[], Action], once: bool = False
) -> Entry:
    """Something that another tool does."""
    return Entry(quantity, name, prepare, len(batches[0][1]), True, once)


def _peer_number(
    quantity: str, name: str, number: Number, model: nn.Module, batches: Batches, once: bool = False
) -> Entry:
    """A number by another tool, whose random vectors are the same in every round."""

    def compute() -> float:
        torch.manual_seed(0)
        return number(model, batches)

    return _peer(quantity, name, batches, lambda: compute, once)


# -- one Hessian-vector product -------------------------------------------------------------------


def measure_product(comparison: TimedComparison) -> list[TimingRow]:
    """One product by every tool.

    flatgauge keeps first-order graphs; its first product builds them, and beyond the memory budget
    there are none. For perceptrons, what the matrix products of a kept graph cost, with all units,
    is in a line of its own: only what leaves out silent units can be cheaper.
    """
    expected = comparison.precise().hvp(comparison.vector)
    chunk, vector = comparison.surface().chunk, comparison.vector

    def first() -> Action:
        return lambda: comparison.surface().hvp(vector)

    def recomputed() -> Action:
        return partial(comparison.surface(memory="1MiB", chunk=chunk).hvp, vector)

    entries = [
        *_products(comparison),
        Entry("product", f"{OWN}, first product", first, chunk),
        Entry("product", f"{OWN}, no kept graphs", recomputed, chunk),
    ]
    rows = comparison.compare(entries, lambda _, result: distance(result, expected))
    counts = multiplications(comparison.workload.model)
    if counts is not None:
        limit = counts[1] / counts[0]
        rows.append(TimingRow(comparison.workload.name, "product", LIMIT, limit))
    return rows


def _products(comparison: TimedComparison) -> list[Entry]:
    """A product with graphs that are kept, the memory budget allowing, and by other tools."""

    def prepare() -> Action:
        surface = comparison.surface()
        surface.hvp(comparison.vector)
        return partial(surface.hvp, comparison.vector)

    return [
        Entry("product", OWN, prepare, comparison.surface().chunk),
        *(
            _peer("product", t.name, batches, partial(comparison.prepare_product, t, batches))
            for t, batches in comparison.peers("product")
        ),
    ]


def multiplications(model: nn.Module) -> tuple[int, int] | None:
    """Multiplications of matrix products per sample of a perceptron, None for other networks.

    For a gradient every layer is multiplied by forward, by its weight's gradient and by its
    input's, but for the first, whose input needs none. For a Hessian product with kept activations
    and gradients each of these becomes two by the product rule: one with the vector's weights (or
    the kept activation), one with what comes from the layer before. The first layer's input is not
    moved, which saves one of two forward, one of two at its weight, and its input's gradient.

    Returns:
        Those of a gradient, and of a product.
    """
    layers = [module for module in model.children() if isinstance(module, nn.Linear)]
    sizes = [layer.weight.numel() for layer in layers]
    biases = sum(layer.out_features for layer in layers)
    alone = sum(sizes) + biases == sum(param.numel() for param in model.parameters())
    if not (isinstance(model, nn.Sequential) and sizes and alone):
        return None
    return 3 * sum(sizes) - sizes[0], 6 * sum(sizes) - 4 * sizes[0]


# -- sweeps ---------------------------------------------------------------------------------------


def measure_trace(comparison: TimedComparison) -> list[TimingRow]:
    """The trace of the Hessian: exactly by a sweep, or by other tools' estimates.

    The model's graph is read once and kept, as it is for users who measure more than one thing;
    what that costs is in a line of its own. Estimates come with the error that they had in this
    run: a peer is eligible whatever its error.
    """
    expected = float(comparison.expected["trace"].sum())

    def error(_: str, result: Any) -> float:
        return relative_error(_trace(result) if isinstance(result, Blocks) else result, expected)

    entries = _sweeps(comparison, "trace", ("trace",))
    for tool, batches in comparison.peers("traces"):
        for name, number in tool.traces.items():
            model = comparison.workload.model
            entries.append(_peer_number("trace", name, number, model, batches, once=True))
    return comparison.compare(entries, error)


def _trace(blocks: Blocks) -> float:
    """The trace of all blocks together."""
    return sum(float(block.values["trace"]) for block in blocks.values())


def _sweeps(
    comparison: TimedComparison, quantity: str, parts: Sequence[str], *, export: bool = True
) -> list[Entry]:
    """A sweep of a model whose graph is read, and with `export` of one whose graph is not."""
    prepare, chunk = partial(comparison.prepare_sweep, parts), comparison.sweep_chunk
    entries = [Entry(quantity, OWN, prepare, chunk)]
    if export:

        def anew() -> Action:
            return lambda: block_curvature(comparison.surface(), parts)

        entries.append(Entry(quantity, f"{OWN}, with export", anew, chunk, once=True))
    return entries


def measure_sweep(comparison: TimedComparison) -> list[TimingRow]:
    """One sweep for all parts of all layers, and the diagonal alone by BackPACK.

    All parts are trace, diagonal, incoming and outgoing forms of every unit and relative flatness.
    """
    entries = [*_sweeps(comparison, "all parts", ALL_PARTS), *_diagonals(comparison)]
    return comparison.compare(entries, partial(_sweep_error, comparison.expected))


def measure_units(comparison: TimedComparison) -> list[TimingRow]:
    """A sweep for the forms of what leaves units, one for what enters them: without peers."""
    entries = []
    for side in ("outgoing", "incoming"):
        entries += _sweeps(comparison, f"{side} forms", (side,), export=False)
    return comparison.compare(entries, partial(_sweep_error, comparison.expected))


def _diagonals(comparison: TimedComparison) -> list[Entry]:
    """The diagonal by other tools."""

    def prepare(tool: Tool, batches: Batches) -> Action:
        assert tool.diagonal is not None
        return tool.diagonal(comparison.workload.model, batches)

    return [
        _peer("all parts", tool.name, batches, partial(prepare, tool, batches))
        for tool, batches in comparison.peers("diagonal", prepare)
    ]


def _sweep_error(expected: dict[str, Tensor], _: str, result: Any) -> float:
    """The error of the worst part."""
    parts = flat_parts(result) if isinstance(result, Blocks) else {"diagonal": result}
    return max(distance(value, expected[part]) for part, value in parts.items())


# -- eigenvalues to 1e-3 --------------------------------------------------------------------------


def measure_eigenvalue(comparison: TimedComparison) -> list[TimingRow]:
    """The Hessian's largest eigenvalue from nothing; peers further off are not eligible."""
    quantity = "top eigenvalue"
    expected = _eigenvalue(comparison.precise(), tolerance=1e-6, seed=1)

    def prepare() -> Action:
        return lambda: _eigenvalue(comparison.surface())

    entries = [Entry(quantity, OWN, prepare, comparison.surface().chunk)]
    for tool, batches in comparison.peers("eigenvalue"):
        assert tool.eigenvalue is not None
        model = comparison.workload.model
        entries.append(_peer_number(quantity, tool.name, tool.eigenvalue, model, batches))

    def error(_: str, result: float) -> float:
        return relative_error(result, expected)

    return comparison.compare(entries, error, reliable=AGREEMENT)


def _eigenvalue(surface: LossSurface, *, tolerance: float = AGREEMENT, seed: int = 0) -> float:
    generator = Generator().manual_seed(seed)
    pairs = top_eigenvalues(Hessian(surface), tolerance=tolerance, generator=generator)
    return float(pairs.values[0])


def measure_layers(comparison: TimedComparison) -> list[TimingRow]:
    """The largest eigenvalue of every layer's block.

    By the same Lanczos from the same start vectors: flatgauge's on what one sweep keeps, the
    others' on products with the block of one layer at a time.
    """
    quantity, surface = "layers' top eigenvalues", comparison.sweep_surface
    layers = sweep_of(surface).plan.layers
    names = [name for name in surface.names if name in layers]
    options: dict[str, Any] = {"tolerance": AGREEMENT, "max_matvecs": 300}

    def compute(surface: LossSurface, seed: int = 0, **changed: Any) -> dict[str, float]:
        generator = Generator().manual_seed(seed)
        found = block_eigenvalues(surface, names, generator=generator, **options | changed)
        return {name: pair.value for name, pair in found.items()}

    expected = compute(comparison.precise(), seed=1, tolerance=1e-6)

    def prepare() -> Action:
        return partial(compute, surface.copy())

    def blocks(tool: Tool, batches: Batches) -> dict[str, SupportsMatmul]:
        assert tool.block is not None
        model = comparison.workload.model
        # In flatgauge's order: the same start vectors.
        return {n: tool.block(model, batches, model.get_parameter(n)) for n in reversed(names)}

    def trial(tool: Tool, batches: Batches) -> Action:
        found = list(blocks(tool, batches).values())
        return lambda: [block @ torch.ones(block.shape[0]) for block in (found[0], found[-1])]

    def prepare_peer(tool: Tool, batches: Batches) -> Action:
        found, generator = blocks(tool, batches), Generator().manual_seed(0)
        return lambda: {
            name: float(top_eigenvalues(block, generator=generator, **options).values[0])
            for name, block in found.items()
        }

    entries = [Entry(quantity, OWN, prepare, comparison.sweep_chunk)]
    for tool, batches in comparison.peers("block", trial):
        action = partial(prepare_peer, tool, batches)
        entries.append(_peer(quantity, tool.name, batches, action, once=True))
    comparison.notes.append(f"{len(names)} layers")

    def error(_: str, result: Any) -> float:
        return max(relative_error(result[name], expected[name]) for name in names)

    return comparison.compare(entries, error)


# -- many classes, all measures -------------------------------------------------------------------


def measure_classes(comparison: TimedComparison) -> list[TimingRow]:
    """Trace and diagonal where a sample has too many classes to sweep them all.

    Both come from one sweep, which is timed for each. The errors are against all classes.
    """
    parts, chunk = ("trace", "diagonal"), comparison.sweep_chunk
    everything = partial(comparison.prepare_sweep, parts, all_columns=True)
    expected = everything()()

    def error(quantity: str, result: Blocks) -> float:
        if quantity == "trace":
            return relative_error(_trace(result), _trace(expected))
        return distance(flat_parts(result)["diagonal"], flat_parts(expected)["diagonal"])

    entries = []
    for part in parts:
        entries += [
            Entry(part, OWN, partial(comparison.prepare_sweep, parts), chunk),
            Entry(part, f"{OWN}, all columns", everything, chunk, once=True),
        ]
    return comparison.compare(entries, error)


#: What is measured together.
TOGETHER = (
    *("kappa_max", "kappa_sum", "kappa_trace_max", "kappa_trace_sum", "rho_max", "rho_sum"),
    *("relative_flatness", "matrix_normalized_sharpness", "normalized_sharpness"),
    *("fisher_rao_norm", "path_norm", "hessian_trace", "hessian_max_eigenvalue"),
    *("riemannian_max_eigenvalue", "riemannian_max_eigenvalue_nodewise", "psi_trace"),
)


def measure_together(comparison: TimedComparison) -> list[TimingRow]:
    """All measures by one call of `fg.measure`, beside PyHessian's eigenvalue and trace.

    At the defaults of both, from nothing (the export of the model included). The error is that of
    the trace.
    """
    expected = float(comparison.expected["trace"].sum())
    seconds: dict[str, float] = {}

    def compute() -> float:
        report = measure(comparison.surface(), measures=TOGETHER)
        seconds.update({name: estimate.seconds for name, estimate in report.items()})
        return report["hessian_trace"].value

    quantity = "measures together"
    entries = [Entry(quantity, OWN, lambda: compute, comparison.surface().chunk, once=True)]
    for tool, batches in comparison.peers("summary"):
        assert tool.summary is not None
        arguments = (quantity, tool.name, tool.summary, comparison.workload.model, batches)
        entries.append(_peer_number(*arguments, once=True))
    rows = comparison.compare(entries, lambda _, result: relative_error(result, expected))
    whole = sum(seconds.values())
    parts = ", ".join(f"{name} {one / whole:.0%}" for name, one in seconds.items())
    comparison.notes.append(f"of the measures' time after the sweep: {parts}")
    return rows


# -- growth with samples, width and classes --------------------------------------------------------


def measure_growth(comparison: TimedComparison) -> list[TimingRow]:
    """Product and sweep of the perceptron over samples, width and classes.

    Where a cost in gradients stays level, it grows as a gradient does.
    """
    rows = []
    for setting, workload, classes in _settings(comparison.workload):
        here = TimedComparison(
            workload, comparison.tools, rounds=comparison.rounds, log=comparison.log
        )
        entries = [*_products(here), *_sweeps(here, "all parts", ALL_PARTS, export=False)]
        if classes <= 10:  # More are more than BackPACK's memory bears.
            entries += _diagonals(here)
        rows += here.compare(entries, lambda quantity, result: None, setting=setting)
    return rows


def _settings(largest: Workload) -> Iterator[tuple[str, Workload, int]]:
    """The name of each setting, its workload, and how many classes that has."""

    def build(samples: int, width: int = 512, classes: int = 10) -> Workload:
        about, model = f"MLP 784-{width}⁵-{classes}", partial(workloads.mlp, classes, width)
        batches = (250, 500, 1000)
        kind = workloads.Kind(about, model, None, (1, 28, 28), samples, batches, 1, classes)
        return workloads.build_workload(kind, largest.name, scale=largest.scale)

    for samples in (1000, 3000, 10_000):
        workload = build(samples)
        yield f"N = {len(workload.inputs):,}", workload, 10
    for width in (64, 128, 256, 512, 1024):
        yield f"width {width}", build(2000, width=width), 10
    for classes in (10, 100, 1000):
        yield f"{classes:,} classes", build(1000, classes=classes), classes


#: By name, in this order: the function, and the workloads that it is for.
QUANTITIES: dict[str, tuple[Callable[[TimedComparison], list[TimingRow]], tuple[str, ...]]] = {
    "product": (measure_product, workloads.STANDARD),
    "trace": (measure_trace, workloads.STANDARD),
    "sweep": (measure_sweep, workloads.STANDARD),
    "units": (measure_units, workloads.STANDARD),
    "eigenvalue": (measure_eigenvalue, workloads.STANDARD),
    "layers": (measure_layers, workloads.STANDARD),
    "classes": (measure_classes, (workloads.MANY_CLASSES,)),
    "together": (measure_together, workloads.STANDARD),
    "growth": (measure_growth, ("W1",)),
}
