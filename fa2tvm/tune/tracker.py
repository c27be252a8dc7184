"""Servers of a tracker of TVM's RPC: which are meant, and one that is free, or why there is none.

TVM's own client waits without a limit for a server, and a minute for a tracker; here all of it ends
in time, with a sentence.
"""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from fa2tvm.errors import ServerUnavailable, UnsupportedProblem, require_at_least, shown

# One attempt to reach a tracker, and the pause between two.
_ATTEMPT_S, _PAUSE_S = 10.0, 0.5


@dataclass(frozen=True)
class Server:
    """Where candidates run: any server that a tracker has under a key.

    Attributes
    ----------
    tracker
        Its HOST:PORT.
    key
        What the servers are called there.
    timeout_s
        Seconds that a job waits for a server to be free.
    machine
        What such a server says it runs on (`provenance.machine`).

    Raises
    ------
    UnsupportedProblem
        Where the tracker is no HOST:PORT, the key is empty or has blanks, or the time is no number.
    """

    tracker: str
    key: str
    timeout_s: float = 60.0
    machine: dict[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        host, _, port = self.tracker.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UnsupportedProblem(
                f"tracker is {shown(self.tracker)}, but it must be HOST:PORT, like 127.0.0.1:9190; "
                "change it."
            )
        if self.key.split() != [self.key]:
            raise UnsupportedProblem(
                f"key is {shown(self.key)}, but it must be one word; give that of the servers."
            )
        require_at_least(0, server_timeout=self.timeout_s)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the tracker."""
        host, _, port = self.tracker.rpartition(":")
        return host, int(port)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def require_tracker(server: Server) -> None:
    """Raise ServerUnavailable where nobody listens at a tracker's address."""
    try:
        socket.create_connection(server.address, _ATTEMPT_S).close()
    except OSError as error:
        raise ServerUnavailable(
            f"no tracker answers at {server.tracker} ({error}); start one there with python -m "
            "tvm.exec.rpc_tracker, or name another."
        ) from error


def request(server: Server) -> Any:
    """A session with a free server: a `tvm.rpc.RPCSession`.

    Raises
    ------
    ServerUnavailable
        Where none is free within the server's time.
    """
    deadline = time.monotonic() + server.timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            require_tracker(server)
            return _connect(server, max(left, _PAUSE_S))
        except (ServerUnavailable, OSError, RuntimeError) as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise ServerUnavailable(_why(server, error)) from error
        time.sleep(_PAUSE_S)


def _connect(server: Server, seconds: float) -> Any:
    """One attempt: the next free server, waited for in the tracker's queue."""
    import tvm.rpc

    socket.setdefaulttimeout(seconds)
    try:
        tracker = tvm.rpc.connect_tracker(*server.address)
        try:
            return tracker.request(server.key, max_retry=1)
        finally:
            tracker.close()
    finally:
        socket.setdefaulttimeout(None)


def _why(server: Server, error: Exception) -> str:
    """Why no server was to be had, from what the tracker says now."""
    import tvm.rpc

    if isinstance(error, ServerUnavailable):
        return str(error)
    socket.setdefaulttimeout(_ATTEMPT_S)
    try:
        servers = tvm.rpc.connect_tracker(*server.address).summary()["server_info"]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as strange:
        return (
            f"what listens at {server.tracker} is no tracker of TVM ({_first_line(strange)}); name "
            "another."
        )
    finally:
        socket.setdefaulttimeout(None)
    keys = [str(found["key"]).removeprefix("server:") for found in servers]
    if server.key not in keys:
        others = ", ".join(sorted(set(keys))) or "none at all"
        return (
            f"key is {server.key!r}, but the tracker at {server.tracker} has no server of it "
            f"(it has: {others}); start `fa2tvm serve` or give another key."
        )
    return (
        f"no server of key {server.key!r} was free within {server.timeout_s:g} s (the tracker at "
        f"{server.tracker} has {keys.count(server.key)}; {_first_line(error)}); wait longer with "
        "--server-timeout, or start another."
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
