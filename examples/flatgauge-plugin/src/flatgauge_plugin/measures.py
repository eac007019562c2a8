"""A measure: the product of the layers' norms."""

import math

from flatgauge import Estimate
from flatgauge.measures import measure


@measure(
    symbol="∏ ‖W‖",
    paper="the example of a plug-in",
    geometry="one scale per layer",
    functional="norm",
    invariant_to={"layerwise", "permutation"},
    cost="nothing",
    kind="capacity",
)
def norm_product(surface):
    """Product of the Frobenius norms of all weight matrices and kernels."""
    weights = {key: w for key, w in surface.split(surface.point).items() if w.dim() > 1}
    layers = {key: float(w.double().norm()) for key, w in weights.items()}
    return Estimate(math.prod(layers.values()), exact=True, layers=layers)
