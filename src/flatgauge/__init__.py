"""How flat is the minimum of a trained network, whatever way it is written?

import flatgauge as fg

surface = fg.LossSurface(model, "cross_entropy", loader)
print(fg.measure(surface))

The public names stand in ``__init__.pyi``. They are looked up at first use, so that the command
line answers before torch is loaded.
"""

from lazy_loader import attach_stub

#: Packages that are reached as `fg.measures.kappa_max`, without an import of their own.
_PACKAGES = {
    *("analysis", "curvature", "estimators", "functionals", "geometry", "measures", "symmetry")
}

__getattr__, __dir__, _names = attach_stub(__name__, __file__)
__all__ = [name for name in _names if name not in {*_PACKAGES, "__version__"}]
