"""Whether a cluster answers at an address, asked before Ray is: Ray itself waits for minutes."""

from __future__ import annotations

import os
import socket
import time

#: What opens a conversation in HTTP/2, which Ray's servers speak: a greeting and empty settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

#: Bytes of the head of a frame, where the kind of frame stands, and the kind of settings.
_HEAD, _KIND, _SETTINGS = 9, 3, 4

#: Seconds between two tries, and at most for one.
_PAUSE, _PATIENCE = 0.2, 5.0

#: Addresses that Ray finds out about itself, at once.
_BY_NAME = ("auto", "local")


def check_address(address: str, wait: float) -> None:
    """Wait until a cluster answers.

    Args:
        address: ``HOST:PORT``, with ``ray://`` in front for a Ray client; ``auto`` and ``local``
            are not looked at.
        wait: Seconds to wait at most.

    Raises:
        ValueError: If it is no address.
        ConnectionError: If nothing answers in time, or something that is not Ray.
    """
    if address in _BY_NAME:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"`address={address!r}` is no address of a Ray cluster; write HOST:PORT, as "
            "`ray start --head` prints it (port 6379 if not told otherwise), or auto for the "
            "cluster that this machine is part of."
        )
    deadline = time.monotonic() + wait
    while True:
        left = deadline - time.monotonic()
        why = _refusal(host.strip("[]"), int(port), max(0.1, min(_PATIENCE, left)))
        if why is None:
            return
        if time.monotonic() + _PAUSE > deadline:
            raise ConnectionError(
                f"no Ray cluster answers at `{address}` within {wait:g} s ({why}); see that it "
                "runs (`ray status` on its head), that the port can be reached from here, or wait "
                "longer for it (`--wait`, or `wait=`)."
            )
        time.sleep(_PAUSE)


def _refusal(host: str, port: int, seconds: float) -> str | None:
    """Why a server is not one of Ray's, as far as can be seen; None if it seems to be."""
    try:
        with socket.create_connection((host, port), timeout=seconds) as line:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return None  # What is said is encrypted.
            line.sendall(_GREETING)
            answer = b""
            while len(answer) < _HEAD and (more := line.recv(_HEAD - len(answer))):
                answer += more
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    right = len(answer) == _HEAD and answer[_KIND] == _SETTINGS
    return None if right else "what answers there is not Ray"
