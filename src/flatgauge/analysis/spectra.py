"""How the eigenvalues of the loss's curvature are spread, in any geometry.

A surface enters; a `Spectrum` leaves (`Spectra` for several by name): the density by Lanczos runs
from random starts, and the largest eigenvalues by a search of their own, each with its error.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.analysis.measurement import run_info
from flatgauge.analysis.request import Progress, show_progress
from flatgauge.analysis.result import Result
from flatgauge.curvature.operators import Operator, Restricted
from flatgauge.estimators.density import (
    Array,
    SpectralDensity,
    SymlogAxis,
    log_density,
    log_grid,
    resolution,
    share_between,
    spectral_density,
    symlog_axis,
)
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import check_seed, child_generator, root_seed
from flatgauge.geometry import chart
from flatgauge.geometry.chart import GEOMETRIES, Chart
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

    from flatgauge.analysis.measurement import RunInfo
    from flatgauge.report.plots.spectrum import SpectrumLine
    from flatgauge.report.tables import Table

#: Bound on a top eigenvalue's error, relative to its size, and most products to spend.
TOLERANCE, MAX_MATVECS = 1e-3, 300

#: A difference between u·Hv and v·Hu, relative to the largest value, that is noted.
_ASYMMETRY = 1e-3

#: Least width of the bells that curves are made of, in decades.
WIDTH = 0.06

#: What a geometry makes of the Hessian, as text.
_DESCRIPTIONS = {
    "weights": "H",
    "per tensor": "D H D, in units of every tensor's norm",
    "per weight": "D H D, in units of every weight's size",
    "basis paths": "the Hessian by the values of basis paths",
    "balanced": "H of the balanced form",
}


class DrawnSpectra(Result):
    """What one spectrum and several share: how they are drawn and described."""

    #: What the pictures show.
    caption = (
        "How many eigenvalues lie in a decade, over the eigenvalue, on an axis that is logarithmic "
        "for both signs and linear about zero: by stochastic Lanczos quadrature, with a band of "
        "one standard error, faint where its steps cannot separate eigenvalues from zero. Ticks "
        "below are the largest eigenvalues, the pale one is the smallest that was seen."
    )

    @property
    @abstractmethod
    def axis(self) -> SymlogAxis:
        """The axis to draw on: logarithmic for both signs, linear about zero."""

    @abstractmethod
    def by_name(self) -> Mapping[str, Spectrum]:
        """The spectra in it; one alone has no name."""

    def lines(self) -> list[SpectrumLine]:
        """The curves to draw, one per spectrum, on one grid of one axis."""
        axis, spectra = self.axis, self.by_name()
        places = log_grid([item.density for item in spectra.values()], axis, WIDTH)
        return [item.line(name, axis, places) for name, item in spectra.items()]

    @property
    def title(self) -> str:
        """What is drawn, in a line."""
        geometry = next(iter(self.by_name().values())).geometry
        return f"Spectrum of {_DESCRIPTIONS.get(geometry, f'the curvature ({geometry})')}"

    @property
    def heading(self) -> str:
        """What a page with it is called."""
        return self.title

    def tables(self) -> list[Table]:
        """The facts, the numbers and the notes."""
        from flatgauge.report.views.spectrum import spectrum_tables

        return spectrum_tables(self.by_name(), self.title)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw with matplotlib, on `ax` or in a figure of its own; returns the axes."""
        from flatgauge.report.plots.spectrum import plot_lines

        return plot_lines(self.lines(), self.axis, title=self.title, ax=ax)

    def figure(self) -> Figure:
        """Draw with plotly, for light and dark pages."""
        from flatgauge.report.plots.spectrum import figure_of_lines

        return figure_of_lines(self.lines(), self.axis)


@dataclass(frozen=True, repr=False)
class Spectrum(DrawnSpectra):
    """How the eigenvalues of the loss's curvature are spread, in one geometry.

    Attributes:
        geometry: The geometry.
        density: Nodes and weights of all probes.
        top: The largest eigenvalues, falling, each with a bound on its error.
        facts: What was measured, and how.
        matvecs: Hessian-vector products spent.
        options: The settings that it depends on.
        notes: What the reader must know.
        seconds: Wall-clock time.
    """

    kind = "spectrum"

    geometry: str
    density: SpectralDensity
    top: tuple[Estimate, ...]
    facts: RunInfo
    matvecs: int
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """The number of eigenvalues: of coordinates that take part."""
        return self.density.size

    @property
    def trace(self) -> Estimate:
        """The sum of all eigenvalues, from the first moment, with its standard error."""
        mean = self.density.mean
        return Estimate(
            self.size * mean.value, stderr=self.size * mean.stderr, matvecs=mean.matvecs
        )

    @property
    def smallest(self) -> Estimate:
        """The most negative node: one eigenvalue lies within its bound, and none need lie above.

        An inner estimate: the smallest eigenvalue of all lies at or below it.
        """
        nodes, residuals = self.density.nodes.reshape(-1), self.density.residuals.reshape(-1)
        where = int(nodes.argmin())
        bound = max(float(residuals[where]), self.density.rounding)
        return Estimate(float(nodes[where]), bound=bound, matvecs=self.density.matvecs)

    @cached_property
    def resolution(self) -> float:
        """Eigenvalues nearer to zero than this look like zero after that many steps."""
        return resolution(self.density)

    @property
    def negative(self) -> Estimate:
        """The share of eigenvalues that are surely negative: below minus the resolution."""
        return self.share(-math.inf, math.nextafter(-self.resolution, -math.inf))

    @property
    def near_zero(self) -> Estimate:
        """The share of eigenvalues within the resolution of zero."""
        return self.share(-self.resolution, self.resolution)

    def share(self, low: float, high: float) -> Estimate:
        """The share of eigenvalues in an interval.

        Args:
            low: Lower end, included; -inf for none.
            high: Upper end, included; inf for none.

        Returns:
            The share with its standard error, and a bound on what the quadrature may be off.
        """
        return share_between(self.density, low, high)

    @cached_property
    def axis(self) -> SymlogAxis:
        """The axis to draw it on: logarithmic for both signs, linear about zero."""
        return symlog_axis(self.density)

    def by_name(self) -> Mapping[str, Spectrum]:
        """Itself, without a name."""
        return {"": self}

    def line(
        self, name: str = "", axis: SymlogAxis | None = None, places: Array | None = None
    ) -> SpectrumLine:
        """The curve: eigenvalues per decade at places of an axis (its own), with its marks."""
        from flatgauge.report.plots.spectrum import SpectrumLine

        axis = axis or self.axis
        places = log_grid([self.density], axis, WIDTH) if places is None else places
        curve = log_density(self.density, axis, places, width=WIDTH)
        return SpectrumLine(
            name=name,
            places=places,
            eigenvalues=axis.value(places),
            values=curve.values.numpy(),
            stderr=curve.stderr.numpy(),
            top=np.array([item.value for item in self.top]),
            bounds=np.array([item.error for item in self.top]),
            smallest=self.smallest.value,
            resolution=self.resolution,
            single=1 / (WIDTH * math.sqrt(2 * math.pi)),
        )

    def to_frame(self) -> pd.DataFrame:
        """The curve, a row per point: eigenvalue, eigenvalues per decade, standard error."""
        import pandas as pd

        line = self.line()
        return pd.DataFrame(
            {"eigenvalue": line.eigenvalues, "per_decade": line.values, "stderr": line.stderr}
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts."""
        parts: dict[str, Any] = {"size": self.size, "resolution": self.resolution}
        for name in ("trace", "smallest", "negative", "near_zero"):
            parts[name] = _plain_estimate(getattr(self, name))
        tops = [_plain_estimate(item) | {"converged": item.converged} for item in self.top]
        return self.plain_contents(
            {"geometry": self.geometry, "facts": asdict(self.facts)}
            | parts
            | {
                "top": tops,
                "matvecs": self.matvecs,
                "options": self.options,
                "notes": self.notes,
                "seconds": self.seconds,
                "nodes": self.density.nodes,
                "weights": self.density.weights,
                "residuals": self.density.residuals,
                "curve": self.to_frame().to_dict(orient="list"),
            }
        )


def _plain_estimate(estimate: Estimate) -> dict[str, float | None]:
    """A number and its errors."""
    return {"value": estimate.value, "stderr": estimate.stderr, "bound": estimate.bound}


@dataclass(frozen=True, repr=False)
class Spectra(DrawnSpectra, Mapping[str, Spectrum]):
    """Spectra of one geometry by name, drawn over each other.

    Attributes:
        spectra: By name.
    """

    kind = "spectra"

    spectra: Mapping[str, Spectrum]

    def __getitem__(self, name: str) -> Spectrum:
        if name not in self.spectra:
            raise KeyError(
                f"there is no spectrum of {name!r}; there are {', '.join(self.spectra)}."
            )
        return self.spectra[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.spectra)

    def __len__(self) -> int:
        return len(self.spectra)

    def by_name(self) -> Mapping[str, Spectrum]:
        """The spectra."""
        return self.spectra

    @property
    def geometry(self) -> str:
        """The geometry of all of them."""
        return next(iter(self.spectra.values())).geometry

    @property
    def axis(self) -> SymlogAxis:
        """The axis they share: the finest of their own."""
        return SymlogAxis(min(item.axis.unit for item in self.values()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader must know of any of them."""
        return tuple(f"{name}: {note}" for name, item in self.items() for note in item.notes)

    def to_frame(self) -> pd.DataFrame:
        """The curves, a row per model and point: as of one spectrum, with the model first."""
        import pandas as pd

        frames = []
        for line in self.lines():
            curve = {"eigenvalue": line.eigenvalues, "per_decade": line.values}
            frames.append(pd.DataFrame({"model": line.name, **curve, "stderr": line.stderr}))
        return pd.concat(frames, ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """The geometry, and the contents of every spectrum by name."""
        spectra = {name: item.to_dict() for name, item in self.items()}
        return self.plain_contents({"geometry": self.geometry, "spectra": spectra})


@overload
def spectrum(surface: LossSurface, **settings: Any) -> Spectrum: ...


@overload
def spectrum(surface: Mapping[str, LossSurface], **settings: Any) -> Spectra: ...


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
    asked = _Settings(geometry, probes, steps, top, parameters, seed, options)
    several = isinstance(surface, Mapping)
    surfaces: dict[str, Any] = dict(surface) if isinstance(surface, Mapping) else {"": surface}
    if not surfaces:
        raise ValueError("there is no surface to compute a spectrum of; name at least one.")
    for one in surfaces.values():
        _check_surface(one)
    found = {}
    for name, one in surfaces.items():
        with one.processes.scope("spectrum"), show_progress(progress, one) as report:
            found[str(name)] = _compute_spectrum(one, asked, report)
    return Spectra(found) if several else found[""]


class _Settings(NamedTuple):
    """What was asked for."""

    geometry: str
    probes: int
    steps: int
    top: int
    parameters: str
    seed: int
    options: Mapping[str, Any]


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
