"""Compute spectra: Lanczos runs for the density, a search of its own for the top."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, overload

import torch
from torch import Generator, Tensor

from flatgauge.analysis.measurement import run_info
from flatgauge.analysis.request import Progress, show_progress
from flatgauge.analysis.spectra.overlay import Spectra
from flatgauge.analysis.spectra.single import Spectrum
from flatgauge.curvature.operators import Operator, Restricted
from flatgauge.estimators.density import SpectralDensity, spectral_density
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import check_seed, child_generator, root_seed
from flatgauge.geometry import chart
from flatgauge.geometry.chart import GEOMETRIES, Chart
from flatgauge.surface.surface import LossSurface

#: Bound on a top eigenvalue's error, relative to its size, and most products to spend.
TOLERANCE, MAX_MATVECS = 1e-3, 300

#: A difference between u·Hv and v·Hu, relative to the largest value, that is noted.
_ASYMMETRY = 1e-3


@overload
def spectrum(
    surface: LossSurface,
    *,
    geometry: str = ...,
    probes: int = ...,
    steps: int = ...,
    top: int = ...,
    parameters: str = ...,
    seed: int = ...,
    progress: Progress | bool = ...,
    **options: Any,
) -> Spectrum: ...


@overload
def spectrum(
    surface: Mapping[str, LossSurface],
    *,
    geometry: str = ...,
    probes: int = ...,
    steps: int = ...,
    top: int = ...,
    parameters: str = ...,
    seed: int = ...,
    progress: Progress | bool = ...,
    **options: Any,
) -> Spectra: ...


def spectrum(
    surface: LossSurface | Mapping[str, LossSurface],
    *,
    geometry: str = "weights",
    probes: int = 8,
    steps: int = 64,
    top: int = 10,
    parameters: str = "all",
    seed: int = 0,
    progress: Progress | bool = False,
    **options: Any,
) -> Spectrum | Spectra:
    """How the eigenvalues of the loss's curvature are spread, in a geometry.

    The density is by stochastic Lanczos quadrature from random starts. The top eigenvalues come
    from a search of their own, which goes on until each is known to 0.1 %: the ends of the runs
    are inner estimates, and show an eigenvalue that occurs twice only once. In an invariant
    geometry the whole spectrum is: bit for bit under powers of two.

    Cost:
        ``probes * steps`` Hessian products, 512 by default, and 30 to 70 more for ten top
        eigenvalues (300 at most). On LeNet-5 each takes about 1.5 gradients, all in all some
        850. Memory for ``steps`` vectors. The same spectrum is not computed twice as long as
        the model does not change.

    Reference:
        [ghorbani2019investigation] [ubaru2017fast]

    Args:
        surface: Where; or several by name, to be drawn over each other. They share the seed.
        geometry: ``"weights"`` for H; ``"per tensor"``, ``"per weight"``, ``"basis paths"`` or
            ``"balanced"``.
        probes: Random starts; the error falls with their square root.
        steps: Products per start: how finely each run resolves the spectrum.
        top: How many of the largest eigenvalues to find; 0 for none.
        parameters: ``"all"`` trainable tensors, or the weights of ``"layers"`` only.
        seed: Of everything random.
        progress: True for a bar on stderr; or a function called after every product with what is
            computed, how many products are done, and how many there are.
        **options: Of the geometry: ``skeleton=``, ``relative=`` of basis paths.

    Returns:
        The spectrum, or `Spectra` by name.

    Raises:
        TypeError: If `surface` is neither a surface nor a mapping of them.
        ValueError: If there is no such geometry or option, or a number is out of range.
        MemoryError: If the vectors of a run do not fit the surface's budget.

    Example:
        >>> from flatgauge.surface.examples import bowl
        >>> found = spectrum(bowl([1.0, 1.0, 4.0, 0.0]), top=2)
        >>> [round(item.value, 6) for item in found.top], round(found.near_zero.bound, 6)
        ([4.0, 1.0], 0.0)
    """
    _check(geometry, probes, steps, top, seed, options)
    settings = _Settings(geometry, probes, steps, top, parameters, seed, options)
    if isinstance(surface, Mapping):
        if not surface:
            raise ValueError("there is no surface to compute a spectrum of; name at least one.")
        for item in surface.values():
            _check_surface(item)
        return Spectra(
            {str(n): _spectrum_with_progress(s, settings, progress) for n, s in surface.items()}
        )
    _check_surface(surface)
    return _spectrum_with_progress(surface, settings, progress)


class _Settings(NamedTuple):
    """What was asked for."""

    geometry: str
    probes: int
    steps: int
    top: int
    parameters: str
    seed: int
    options: Mapping[str, Any]


def _spectrum_with_progress(
    surface: LossSurface, settings: _Settings, progress: Progress | bool
) -> Spectrum:
    """The spectrum of one surface, with a bar if one is wanted."""
    with surface.processes.scope("spectrum"), show_progress(progress, surface) as report:
        return _compute_spectrum(surface, settings, report)


def _compute_spectrum(surface: LossSurface, asked: _Settings, report: Progress) -> Spectrum:
    """The spectrum of one surface."""
    start = time.perf_counter()
    where = chart(surface, asked.geometry, asked.parameters, **asked.options)
    spent = where.surface.matvecs
    operator, notes = _operator(where)
    size, probes, seed = operator.shape[0], asked.probes, asked.seed
    steps, top = min(asked.steps, size), min(asked.top, size)
    _check_room(where.surface, size, steps)
    source = partial(child_generator, root_seed(Generator().manual_seed(seed)))
    watched = _CountedOperator(operator, report, probes * steps)
    density: SpectralDensity = where.surface.cache.get(
        ("spectral density", where.key, probes, steps, seed),
        lambda: spectral_density(watched, probes=probes, steps=steps, generator=source("density")),
    )
    watched.start("top eigenvalues", MAX_MATVECS)
    found: _Top = where.surface.cache.get(
        ("top eigenvalues", where.key, top, seed), lambda: _top(watched, top, source("top"))
    )
    if where.surface is not surface:
        surface.matvecs += where.surface.matvecs - spent
    settings = {"probes": probes, "steps": steps, "top": top, "tolerance": TOLERANCE}
    return Spectrum(
        geometry=where.geometry,
        density=density,
        top=found.values,
        facts=run_info(surface, seed=seed),
        matvecs=density.matvecs + found.matvecs,
        options={**settings, "parameters": where.parameters, "seed": seed, **where.settings},
        notes=(*where.notes, *notes, *found.notes),
        seconds=time.perf_counter() - start,
    )


class _Top(NamedTuple):
    """The largest eigenvalues, their cost, and what is to be said about them."""

    values: tuple[Estimate, ...] = ()
    matvecs: int = 0
    notes: tuple[str, ...] = ()


def _top(operator: Operator, count: int, generator: Generator) -> _Top:
    """Search for the largest eigenvalues."""
    if not count:
        return _Top()
    pairs = top_eigenvalues(
        operator,
        count=count,
        tolerance=TOLERANCE,
        max_matvecs=max(MAX_MATVECS, count),
        generator=generator,
    )
    values = tuple(
        Estimate(
            float(value),
            bound=float(bound),
            converged=pairs.converged or float(bound) <= TOLERANCE * abs(float(value)),
            matvecs=pairs.matvecs,
        )
        for value, bound in zip(pairs.values, pairs.bounds, strict=True)
    )
    notes = []
    if not pairs.converged:
        notes.append(
            f"after {pairs.matvecs} products not all of the {count} largest eigenvalues are known "
            f"to {TOLERANCE:.1%}; their bounds say how far"
        )
    if pairs.asymmetry > _ASYMMETRY:
        notes.append(
            f"products are not symmetric (by {pairs.asymmetry:.1g} of the largest): the function "
            "changes between passes, and the spectrum means little"
        )
    return _Top(values, pairs.matvecs, tuple(notes))


class _CountedOperator(Operator):
    """An operator that reports how many products are done."""

    def __init__(self, operator: Operator, report: Progress, total: int) -> None:
        super().__init__(operator.shape[0], operator.dtype, operator.device)
        self._operator, self._report = operator, report
        self.start("spectral density", total)

    def start(self, name: str, total: int) -> None:
        """Begin to count from zero."""
        self._name, self._done, self._total = name, 0, total

    def __matmul__(self, vectors: Tensor) -> Tensor:
        product = self._operator @ vectors
        self._done += 1
        self._report(self._name, min(self._done, self._total), self._total)
        return product


def _operator(where: Chart) -> tuple[Operator, list[str]]:
    """The curvature by the coordinates that move, and what is to be said about the others."""
    moving = where.moving
    rest = len(moving) - int(moving.sum())
    if not rest:
        return where.curvature(), []
    if rest == len(moving):
        raise ValueError(
            f"none of the {rest} coordinates moves the weights: all weights are zero; measure "
            "another geometry."
        )
    chosen = torch.nonzero(moving)[:, 0]
    why = "weights of zero" if where.parameters == "all" else "not chosen, or weights of zero"
    return Restricted(where.curvature(), chosen), [
        f"{rest} of {len(moving)} coordinates do not move ({why}) and are left out"
    ]


def _check_surface(surface: Any) -> None:
    """Refuse what is not a surface."""
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`spectrum` needs a LossSurface, or a dict of them by name, but got a "
            f"{type(surface).__name__}; make one with LossSurface(model, loss, data)."
        )


def _check(
    geometry: str, probes: int, steps: int, top: int, seed: int, options: Mapping[str, Any]
) -> None:
    """Refuse settings that mean nothing, before anything runs."""
    for name, value, least in (("probes", probes, 2), ("steps", steps, 1), ("top", top, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"`{name}={value!r}` must be a whole number of at least {least}.")
    check_seed(seed)
    known = GEOMETRIES[geometry].options if geometry in GEOMETRIES else tuple(options)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"the geometry {geometry!r} has no option {unknown[0]!r}; its options are "
            f"{', '.join(known) or 'none'}."
        )


def _check_room(surface: LossSurface, size: int, steps: int) -> None:
    """Refuse runs whose vectors do not fit."""
    each = size * surface.dtype.itemsize
    if steps * each > surface.memory:
        fitting = surface.memory // each
        raise MemoryError(
            f"{steps} steps keep as many vectors of {size:,} numbers, {steps * each / 2**30:.3g} "
            f"GiB, but the surface may use {surface.memory / 2**30:.3g} GiB; pass "
            f"`steps={max(fitting, 1)}`, or give LossSurface more `memory=`."
        )
