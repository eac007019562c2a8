"""Run a program on several ranks: real processes on this machine, bounded in time."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

#: Seconds after which every process of a group is killed.
LIMIT = 150.0


def on_ranks(size: int, program: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list:
    """What a function of a module gives on every rank; an exception in its place, as text.

    Ranks that are killed, or do not end in time, give None.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        call = (program.__module__, program.__qualname__, arguments)
        processes = [
            context.Process(target=_run, args=(rank, size, folder, call), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        for process in processes:
            process.join(max(end - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder, f"{rank}.pickle") for rank in range(size)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _run(rank: int, size: int, folder: str, call: tuple[str, str, tuple]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    module, name, arguments = call
    try:
        found = getattr(importlib.import_module(module), name)(*arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        if os.environ.get("SHOW_TRACEBACKS"):
            traceback.print_exc()
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(found))
    part.rename(Path(folder, f"{rank}.pickle"))
