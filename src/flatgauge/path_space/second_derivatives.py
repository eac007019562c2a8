"""Second derivatives of the loss by the values of basis paths, as far as one sweep gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import block_curvature
from flatgauge.curvature.sweep import MOST_COLUMNS, sweeper_of
from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.root_sweep import root_derivatives
from flatgauge.path_space.runs import runs_of
from flatgauge.surface import LossSurface


@dataclass(frozen=True)
class SecondDerivatives:
    """The diagonal of the Hessian in path space.

    Attributes:
        values: One per basis path; zero where it is not known.
        known: Where it is, exactly.
        gradient: The first derivatives.
        notes: Why the others are not known.
    """

    values: Tensor
    known: Tensor
    gradient: Tensor
    notes: tuple[str, ...]


def second_derivatives(
    surface: LossSurface,
    paths: BasisPaths,
    *,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> SecondDerivatives:
    """Find the second derivatives of the loss by the values of basis paths.

    A path value that no other weight is divided by moves one weight: its second derivative is
    that weight's, in other units. For roots see `root_sweep`.

    Args:
        surface: The surface.
        paths: The basis paths of its model.
        all_columns: Whether to sweep also with 64 or more outputs.
        generator: Of those who swept before; nothing is drawn from it here.

    Returns:
        The derivatives. What is not known is curved, read in ways that cannot be swept, or
        belongs to a run of more than two units or to a residual stream.

    Raises:
        UnsupportedGraphError: If the model cannot be swept.
    """

    def found() -> SecondDerivatives:
        source = None if generator is None else generator.clone_state()
        return _found(surface, paths, source, all_columns=all_columns)

    return surface.recall(("second derivatives", paths.skeleton, all_columns), found)


def _found(
    surface: LossSurface, paths: BasisPaths, generator: Generator | None, *, all_columns: bool
) -> SecondDerivatives:
    sweeper = sweeper_of(surface)
    mapping = paths.map
    whole = mapping.joined(surface.split(surface.gradient()))
    gradient = mapping.pulled(mapping.uncoupled(whole))
    values, known = torch.zeros_like(gradient), torch.zeros(len(paths), dtype=torch.bool)
    outputs = sweeper.plan.outputs_per_sample()
    if outputs > MOST_COLUMNS + 1 and not all_columns:
        note = f"not swept, as there are {outputs} outputs (`all_columns=True` sweeps them)"
        return SecondDerivatives(values, known, gradient, (note,))
    if sweeper.loss.defined is not None:
        note = "not swept, as some outputs may have no loss"
        return SecondDerivatives(values, known, gradient, (note,))
    blocks = block_curvature(
        surface, ("diagonal",), all_columns=all_columns, estimate=False, generator=generator
    )
    diagonal, swept = torch.zeros_like(whole), torch.zeros(len(whole), dtype=torch.bool)
    for name, block in blocks.items():
        if name in paths.edges.starts:
            span = paths.edges.span(name)
            diagonal[span] = block.values["diagonal"].double().cpu().reshape(-1)
            swept[span] = block.exact
    roots = torch.zeros(len(paths), dtype=torch.bool)
    roots[paths.roots] = True
    alone = swept[mapping.places] & ~roots & ~mapping.follows
    values[alone] = (diagonal[mapping.places] * mapping.slopes.square())[alone]
    runs = runs_of(paths, sweeper.plan)
    if len(runs.roots):
        chosen = torch.from_numpy(runs.roots)
        values[chosen] = root_derivatives(sweeper, paths, runs, whole)
        alone[chosen] = True
    notes = []
    missing = int((~alone & roots).sum())
    if missing:
        notes.append(
            f"{missing} of {int(roots.sum())} roots share runs of several units or feed back into "
            "themselves: by products"
        )
    if int((~alone & ~roots).sum()):
        reasons = sorted(set(blocks.missing.values()))
        why = reasons[0] if reasons else "a batch-norm's scale moves its bias along"
        notes.append(f"{int((~alone & ~roots).sum())} further paths by products: {why}")
    return SecondDerivatives(values, alone, gradient, tuple(notes))
