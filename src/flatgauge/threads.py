"""How many threads the numerical libraries of this process use."""

from __future__ import annotations


def set_threads(threads: int | None) -> None:
    """Let every numerical library of this process use so many threads, and no more.

    Args:
        threads: How many; None leaves the libraries' own choice.
    """
    if threads is None:
        return
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)
