"""What a page shows beside numbers: certificates, gauges, spectra and landscapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flatgauge.analysis.certificate import Certificate, certify
from flatgauge.analysis.landscapes.grid import landscape
from flatgauge.analysis.request import Progress
from flatgauge.analysis.spectra import spectrum
from flatgauge.cli.options import PagePart
from flatgauge.report.rendering import Drawable
from flatgauge.runtime.distributed import GroupError
from flatgauge.surface.arguments import shared_processes
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import surface_gauge
from flatgauge.symmetry.gauge import GaugeGroup

#: Samples on which models are certified: invariance does not depend on how many.
CERTIFIED = 200

#: Samples that spectra and landscapes are of, at most: they take hundreds of passes.
DRAWN = 2000

#: Random starts of a spectrum, and products for each.
PROBES, STEPS = 3, 40

#: Points along a line, and along each side of a plane.
LINE, PLANE = 41, 15


@dataclass
class PageExtras:
    """What a page shows beside numbers; `vars` of it are keywords of `Report.to_html`.

    Attributes:
        certificates: By name of the model.
        gauges: By name of the model.
        spectra: In several geometries.
        landscapes: In several spaces.
        remarks: What could not be shown, and why.
    """

    certificates: dict[str, Certificate] = field(default_factory=dict)
    gauges: dict[str, GaugeGroup] = field(default_factory=dict)
    spectra: list[Drawable] = field(default_factory=list)
    landscapes: list[Drawable] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def compute_extras(
    surfaces: Mapping[str, LossSurface],
    *,
    parts: Iterable[str] = tuple(PagePart),
    samples: int = DRAWN,
    seed: int = 0,
    progress: Progress | None = None,
    found: PageExtras | None = None,
) -> PageExtras:
    """Compute what a page shows beside numbers.

    Args:
        surfaces: By name of the model.
        parts: Which of `PagePart`.
        samples: How many samples spectra and landscapes are of, at most.
        seed: Of everything random.
        progress: Called before each piece with its name, how many are done, and how many there
            are.
        found: What is filled, piece by piece, for one who may be interrupted.

    Returns:
        What was found. A piece that a model does not allow is a remark.

    Raises:
        GroupError: If the processes that measure together cannot go on.
    """
    wanted = {PagePart(part) for part in parts}
    found = PageExtras() if found is None else found
    processes = shared_processes(surfaces.values())
    pieces = _pieces(dict(surfaces), wanted, seed, found, samples)
    if any(surface.samples > samples for surface in surfaces.values()) and wanted - {
        PagePart.CERTIFICATE
    }:
        found.remarks.append(f"pictures are of the first {samples:,} samples")
    for done, (name, compute) in enumerate(pieces):
        if progress is not None:
            progress(name, done, len(pieces))
        try:
            processes.run(name, compute)
        except GroupError:
            raise
        except Exception as error:  # The user's model is read and run in ways of many kinds.
            found.remarks.append(f"no {name}: {str(error) or type(error).__name__}")
    return found


def _pieces(
    surfaces: dict[str, LossSurface],
    wanted: set[PagePart],
    seed: int,
    found: PageExtras,
    samples: int,
) -> list[tuple[str, Callable[[], None]]]:
    """What is to be computed, by name."""
    several = len(surfaces) > 1
    few = {n: s.subset(samples) if s.samples > samples else s for n, s in surfaces.items()}
    drawn: Any = few if several else next(iter(few.values()))
    pieces: list[tuple[str, Callable[[], None]]] = []

    def add_certificate(name: str, surface: LossSurface) -> None:
        found.gauges[name] = surface_gauge(surface)
        found.certificates[name] = certify(
            surface.subset(CERTIFIED), trials=1 if several else 3, seed=seed
        )

    def spread(geometry: str) -> None:
        found.spectra.append(
            spectrum(drawn, geometry=geometry, probes=PROBES, steps=STEPS, seed=seed)
        )

    def drawing(space: str, dims: int) -> None:
        points = LINE if dims == 1 else PLANE
        found.landscapes.append(landscape(drawn, space=space, dims=dims, points=points, seed=seed))

    if PagePart.CERTIFICATE in wanted:
        for name, surface in surfaces.items():
            pieces.append((f"certificate of {name}", partial(add_certificate, name, surface)))
    if PagePart.SPECTRUM in wanted:
        for geometry in ("weights", "per weight"):
            pieces.append((f"spectrum ({geometry})", partial(spread, geometry)))
    if PagePart.LANDSCAPE in wanted:
        for space, dims in (("layers", 1), ("filters", 2), ("basis_paths", 2)):
            pieces.append((f"landscape ({space})", partial(drawing, space, dims)))
    return pieces
