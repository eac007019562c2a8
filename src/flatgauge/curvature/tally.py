"""Adding up, in double precision, what taps gather from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatgauge.curvature.taps import Parts, Places, Tap
from flatgauge.precision import wide

#: Where the largest number may be below this, or above its inverse, all are scaled before they are
#: squared.
_SMALL = 1e-6

#: What a tally adds up by part.
_SUMS = ("sums", "squares", "products", "variances", "sum_variances")


@dataclass
class Tally:
    """What one parameter has gathered so far, not yet divided by anything.

    Attributes:
        diagonal: The diagonal of its block, in its own shape.
        size: The same if no columns had cancelled, where columns are signed.
        sums: Sums over the samples, one number or one per unit, by part.
        squares: Sums of the squared shares.
        products: Sums of the shares times the samples' shares in the denominator.
        variances: What mixtures of columns leave uncertain of the sums.
        sum_variances: The same of the sum over the units.
        samples: Every sample's share, units added up, by part.
        mixed: Whether mixtures stood for some of the columns.
    """

    diagonal: Tensor | None = None
    size: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    products: dict[str, Tensor] = field(default_factory=dict)
    variances: dict[str, Tensor] = field(default_factory=dict)
    sum_variances: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, list[Tensor]] = field(default_factory=dict)
    mixed: bool = False

    def add(self, columns: Parts, mixtures: Sequence[Parts], counts: Tensor) -> None:
        """Add a chunk.

        Args:
            columns: From the columns that were passed back as they are; written over.
            mixtures: From every mixture, each of which stands for its share of the rest.
            counts: Every sample's share in the denominator (n,).
        """
        self.mixed |= bool(mixtures)
        even = bool((counts == counts[0]).all())
        for name, values in columns.items():
            places = columns.places.get(name)
            if mixtures:
                drawn = torch.stack([getattr(mixture, name) for mixture in mixtures])
                values = values + drawn.sum(0)
                # m times each mixture estimates the rest by itself; their mean is the sum.
                spread = drawn.var(0) * len(drawn)
                _add(self.variances, name, wide(spread.sum(0)), places)
                whole = drawn.flatten(2).sum(2) if drawn.dim() > 2 else drawn
                _add(self.sum_variances, name, wide((whole.var(0) * len(drawn)).sum(0)))
            own = wide(values.sum(1) if values.dim() > 1 else values)
            self.samples.setdefault(name, []).append(own)
            total = wide(values.sum(0))
            product = counts[0] * total if even else counts @ wide(values)
            _add(self.sums, name, total, places)
            _add(self.products, name, product, places)
            spare = values if values.dim() > 1 else values.clone()  # `own` may be the same.
            _add(self.squares, name, _squares(spare, total), places)

    def add_diagonal(self, diagonal: Tensor) -> None:
        """Add a chunk's diagonal."""
        self.diagonal = _added(self.diagonal, diagonal)

    def add_size(self, size: Tensor) -> None:
        """Add the size of a chunk's diagonal, of which few digits are needed."""
        self.size = size.clone() if self.size is None else self.size.add_(size)

    def numbers(self) -> dict[str, Tensor]:
        """All that is added up, by what it is and the part."""
        held = {"diagonal": self.diagonal, "size": self.size}
        found = {name: value for name, value in held.items() if value is not None}
        for kind in _SUMS:
            found |= {f"{kind} {part}": value for part, value in getattr(self, kind).items()}
        return found

    def take(self, numbers: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Take the sums of all processes, and the shares of all samples, in the place of its own.

        Args:
            numbers: As `numbers` gives them.
            rows: Every sample's share, by part.
        """
        self.diagonal, self.size = numbers.get("diagonal"), numbers.get("size")
        for kind in _SUMS:
            known = {key: value for key, value in numbers.items() if key.startswith(f"{kind} ")}
            setattr(self, kind, {key.removeprefix(f"{kind} "): v for key, v in known.items()})
        self.samples = {part: [value] for part, value in rows.items()}

    def data_error(self, name: str, counts: Tensor) -> Tensor:
        """The standard error of a part's mean, samples being drawn at random.

        The mean is a ratio, Σ share / Σ count, and its error that of the residuals
        share − mean · count.

        Args:
            name: The part.
            counts: Every sample's share in the denominator (N,).

        Returns:
            One number, or one per unit; nan for a single sample, infinite nowhere.
        """
        if name not in self.sums or len(counts) < 2:
            known = self.sums.get(name, counts.new_zeros(()))
            return torch.full_like(known, float("nan") if len(counts) < 2 else 0.0)
        total, samples = counts.sum(), len(counts)
        mean = self.sums[name] / total
        if mean.dim() == 0 and not self.mixed:  # Every share is known: no difference of squares.
            residuals = (torch.cat(self.samples[name]) - mean * counts).square().sum()
            return (residuals * samples / (samples - 1)).sqrt() / total
        residuals = (
            self.squares[name]
            - 2 * mean * self.products[name]
            + mean.square() * counts.square().sum()
        )
        return (residuals.clamp_min(0) * samples / (samples - 1)).sqrt() / total


def _squares(values: Tensor, total: Tensor) -> Tensor:
    """The sums of squares over the samples, in double precision, written over the values.

    Args:
        values: The values (n, ...).
        total: Their sums over the samples.

    Returns:
        The sums.
    """
    reached = float(total.abs().max())  # The largest value is no smaller than this over n.
    if len(values) * _SMALL < reached < 1 / _SMALL:
        return wide(values.square_().sum(0))
    lowest, highest = torch.aminmax(values)
    scale = max(-float(lowest), float(highest)) or 1.0  # Squares of small numbers vanish.
    return wide(values.div_(scale).square_().sum(0)) * scale * scale


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """A running total of large arrays in double precision, added to in place."""
    return wide(part).clone() if total is None else total.add_(part.to(total.device))


def _add(
    totals: dict[str, Tensor], name: str, values: Tensor, places: Places | None = None
) -> None:
    """Add to a total; with places, only to some of its units."""
    if places is not None:
        chosen, count = places
        values = values.new_zeros(count).index_copy_(0, chosen, values)
    totals[name] = totals[name] + values if name in totals else values


def collect(taps: Iterable[Tap]) -> dict[str, Parts]:
    """What all taps have gathered since the last time, by parameter."""
    return {name: parts for tap in taps for name, parts in tap.take().items()}
