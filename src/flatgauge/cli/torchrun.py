"""Under `torchrun`: one command run by all ranks together, of which the first prints and writes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatgauge.runtime.distributed import ProcessGroup

#: Commands that sum over samples, and so can be run by many ranks.
TOGETHER = ("measure", "certify", "landscape", "spectrum", "compare")

#: Commands that several processes would only repeat.
_ALONE = ("demo", "study")

#: Seconds in which a rank that torchrun stops may still report why the others have stopped.
_GRACE = 10


class Stopped(SystemExit):
    """The end of a rank that `torchrun` stops."""


def rank() -> int:
    """The number of this process among those that `torchrun` has started."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def under_torchrun() -> bool:
    """Whether `torchrun` has started several processes."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def processes() -> ProcessGroup | None:
    """Who runs the command together; None for this process alone."""
    if not under_torchrun():
        return None
    from flatgauge.runtime.distributed import resolve_processes

    return resolve_processes("all")


def device_of(name: str) -> str:
    """The device of this rank: with `cuda`, every rank of a machine takes one of its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if under_torchrun() and name == "cuda" else name


def run_together(run: Callable[[], Any]) -> None:
    """Run a command line on all ranks.

    Args:
        run: What runs it in one process.

    Raises:
        ValueError: If it is a command for one process.
        SystemExit: With the code of the command.
    """
    words = sys.argv[1:]
    command = next((word for word in words if not word.startswith("-")), "")
    if rank():  # Only the first rank prints.
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as it runs
    if command in _ALONE:
        raise ValueError(
            f"`flatgauge {command}` runs in one process, and torchrun has started "
            f"{os.environ['WORLD_SIZE']}; start it without torchrun. "
            f"Several ranks can {', '.join(TOGETHER)}."
        )
    if command not in TOGETHER or {"-h", "--help"} & set(words):
        if not rank():
            run()
        sys.exit(0)
    import torch
    import torch.distributed as dist

    from flatgauge.runtime.distributed import DEFAULT_TIMEOUT

    signal.signal(signal.SIGTERM, _on_sigterm)
    pairs = zip(words, [*words[1:], ""], strict=True)
    cuda = any(f"{word}={after}".startswith("--device=cuda") for word, after in pairs)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=DEFAULT_TIMEOUT)
    group = processes()
    assert group is not None
    code: Any = 0
    with group.scope(f"flatgauge {command}"):
        try:
            run()
        except SystemExit as end:  # As every command line ends, well or not.
            code = end.code
    dist.destroy_process_group()
    sys.exit(code)


def reports_error(error: BaseException) -> bool:
    """Whether this rank reports an error: the first one does, unless it is the one that is lost."""
    from flatgauge.runtime.distributed import GroupError

    return not rank() or (isinstance(error, GroupError) and error.lost == 0 and rank() == 1)


def _on_sigterm(number: int, frame: Any) -> None:
    """Torchrun stops all ranks when one has ended: leave time to report which, then stop."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(_GRACE)


def _stop(number: int, frame: Any) -> None:
    text = "error: stopped by torchrun: another rank has ended, or the job was cancelled"
    if not rank():
        print(text, file=sys.__stderr__, flush=True)
    raise Stopped(128 + signal.SIGTERM)
