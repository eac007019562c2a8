"""What is asked of a loss around a point: its worst case in a ball, its mean under noise.

A functional knows no model: it takes the loss as a function of the displacement u from the
point, in the coordinates of some geometry.
"""

from flatgauge.functionals.expectation import expected_increase
from flatgauge.functionals.worst_case import largest_increase

__all__ = ["expected_increase", "largest_increase"]
