"""What flatgauge costs beside its peers. Scripts that print and write, and assert nothing."""

import os

# Before torch is imported. Threads that wait for each other in a loop burn processor time, which
# is what is measured: beside other work on two cores it comes out six times too large.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
