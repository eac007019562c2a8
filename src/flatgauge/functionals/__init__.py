"""What is asked of a loss around a point: worst case in a ball, mean under noise, top curvature.

A functional knows no model: it takes the loss as a function of the displacement u from the
point, or its curvature, in the coordinates of some geometry.
"""

from flatgauge.functionals.expectation import expected_increase
from flatgauge.functionals.top_eigenvalue import top_eigenvalue
from flatgauge.functionals.worst_case import largest_increase

__all__ = ["expected_increase", "largest_increase", "top_eigenvalue"]
