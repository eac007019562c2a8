"""The other tools, each used the way its own documentation uses it."""

from flatgauge.cli.benchmarks.peers.with_backpack import BACKPACK
from flatgauge.cli.benchmarks.peers.with_curvlinops import CURVLINOPS
from flatgauge.cli.benchmarks.peers.with_eigenthings import EIGENTHINGS
from flatgauge.cli.benchmarks.peers.with_pyhessian import PYHESSIAN, PYHESSIAN_WHOLE

PEERS = (PYHESSIAN, PYHESSIAN_WHOLE, CURVLINOPS, EIGENTHINGS, BACKPACK)

__all__ = ["BACKPACK", "CURVLINOPS", "EIGENTHINGS", "PEERS", "PYHESSIAN", "PYHESSIAN_WHOLE"]
