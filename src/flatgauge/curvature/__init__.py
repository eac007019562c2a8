"""Curvature as linear operators: `shape`, `dtype`, `device`, `@` and `dense()`."""

from flatgauge.curvature.hessian import Hessian
from flatgauge.curvature.operator import Operator

__all__ = ["Hessian", "Operator"]
