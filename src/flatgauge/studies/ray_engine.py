"""Where a study runs on Ray: the cluster, what every task needs of it, how often it is tried."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flatgauge.runtime.resources import parse_bytes
from flatgauge.studies.ray_address import check_address


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Run a study as tasks of Ray, one for every network.

    Attributes:
        address: Of a cluster: ``"HOST:PORT"`` of its head, or ``"auto"`` for the one that this
            machine is part of; None takes that of the environment variable ``RAY_ADDRESS``, and if
            there is none starts Ray on this machine for the time of the study. If the process is
            connected already, that connection is used.
        cpus: Processors of a task, and so many threads.
        gpus: Graphics processors that are reserved for a task, for networks of your own that use
            them; flatgauge itself trains and measures the networks of a study on processors.
        memory: That is reserved for a task, as ``"2GiB"``; None reserves none.
        retries: How often a run is tried again whose worker or node was lost.
        wait: Seconds to wait for a cluster at the address, and for a node on which a task fits.

    Example:
        >>> RayEngine(address="10.0.0.1:6379", cpus=2, memory="4GiB").needs
        {'CPU': 2, 'GPU': 0, 'memory': 4294967296}
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    memory: str | int | None = None
    retries: int = 3
    wait: float = 60.0

    def __post_init__(self) -> None:
        for name, above in (("cpus", True), ("gpus", False), ("wait", True)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and (value > 0 or (value == 0 and not above))):
                least = "above 0" if above else "of at least 0"
                raise ValueError(f"`{name}={value!r}` must be a finite number {least}.")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value > 1 and value != int(value):
                raise ValueError(f"`{name}={value!r}` must be a whole number, or below 1.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"`retries={self.retries!r}` must be a whole number of at least 0.")
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def needs(self) -> dict[str, float]:
        """What a task reserves, by the names that Ray has for it."""
        memory = 0 if self.memory is None else parse_bytes(self.memory)
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": memory}

    @property
    def threads(self) -> int:
        """Threads of a task: no more than the processors that it has."""
        return max(1, int(self.cpus))

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Connect to the cluster; several studies in one block share the connection.

        Yields:
            The module `ray`.

        Raises:
            ConnectionError: If there is no cluster at the address.
        """
        ray = imported_ray()
        if ray.is_initialized():
            yield ray
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        check_address(address, self.wait)
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            settings["include_dashboard"] = False
        try:
            ray.init(address=address, **settings)
        except ConnectionError as error:
            raise ConnectionError(
                f"`{address}` is no Ray cluster that can be used from here ({error}); start one "
                "with `ray start --head`, give the address that it prints, or leave the address "
                "out to start Ray on this machine."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def imported_ray() -> Any:
    """The module `ray`, which is imported only when it is needed.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "studies on Ray need Ray, which is not installed; run "
            '`pip install "flatgauge[ray]"` here and on all nodes of the cluster.'
        ) from error
    return ray
