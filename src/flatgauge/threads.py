"""How many threads the numerical libraries of this process use."""

from __future__ import annotations

import os

#: The most threads for every processor; and so many in any case, as a container may hide some.
_EACH, _ANYWHERE = 4, 64


def set_threads(threads: int | None) -> None:
    """Let every numerical library of this process use so many threads, and no more.

    Args:
        threads: How many; None leaves the libraries' own choice.

    Raises:
        ValueError: If there are so many that the libraries could not start them.
    """
    if threads is None:
        return
    processors = os.cpu_count() or 1
    most = max(_EACH * processors, _ANYWHERE)
    if not 1 <= threads <= most:
        raise ValueError(
            f"{threads} threads cannot be used: this machine has {processors} processors; give a "
            f"number from 1 to {most}, best {processors} or fewer."
        )
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)
