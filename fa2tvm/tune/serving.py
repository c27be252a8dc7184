"""`fa2tvm serve`: a device for tuning jobs elsewhere, offered through TVM's RPC tracker.

TVM's server forks one process for each job's session. In it, checks and timings run in a worker
process of their own (worker.py), as they do in a local job: a candidate that crashes, hangs or eats
memory ends that worker, and neither session nor server.

Whoever reaches the port can run code here, as with every RPC server of TVM: it listens on loopback
unless it is told to trust a network.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import struct
from pathlib import Path
from typing import Any, NoReturn

import tvm_ffi

from fa2tvm.device import Device
from fa2tvm.errors import ServerUnavailable
from fa2tvm.manifest import LIBRARY, MANIFEST
from fa2tvm.records import versions
from fa2tvm.tune.provenance import machine
from fa2tvm.tune.tracker import Server, require_tracker
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec, die_with

# The functions that a session calls.
OPEN, PUT, ANSWER = "fa2tvm.tune.open", "fa2tvm.tune.put", "fa2tvm.tune.answer"
# A client that has connected says what it wants within this time, or the next one is served.
_HANDSHAKE_S = 30
# A client whose machine is gone is noticed after 60 + 6 * 10 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_RECEIVE_S = struct.Struct("ll")  # struct timeval

_log = logging.getLogger("fa2tvm.serve")


class _Listener(socket.socket):
    """A listening socket that knows its latest connection."""

    latest: socket.socket | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """As `socket.accept`; a peer that says nothing is not waited for."""
        self.latest, address = super().accept()
        _wait_at_most(self.latest, _HANDSHAKE_S)
        return self.latest, address


def serve(device: Device, server: Server, host: str, port: int) -> NoReturn:
    """Offer a device under a key of a tracker, to one job at a time, until the process is ended.

    Parameters
    ----------
    server
        Tracker and key.
    host, port
        Where to listen; port 0 takes a free one.

    Raises
    ------
    ServerUnavailable
        Where no tracker answers at the start, or the port cannot be had.
    """
    from tvm.rpc.server import _listen_loop

    multiprocessing.set_start_method("fork", force=True)
    with _listener(host, port) as listener:
        session = _Session(device, listener)
        for name, function in ((OPEN, session.open), (PUT, session.put), (ANSWER, session.answer)):
            tvm_ffi.register_global_func(name, function, override=True)
        # The address that the tracker names to clients; None is where it sees this server.
        reported = None if host == "0.0.0.0" else host
        port, home = listener.getsockname()[1], Path.cwd()
        require_tracker(server)
        _log.warning("%s at %s:%d serves key %s", device.slug, host, port, server.key)
        try:
            while True:
                try:
                    _listen_loop(listener, port, server.key, server.address, None, reported)
                except (RuntimeError, AssertionError, ValueError, IndexError, OSError) as error:
                    # A session's process was killed, a peer spoke another language, or the tracker
                    # has been away for a minute: the next session or tracker is awaited.
                    _log.warning("goes on after %s: %s", type(error).__name__, error)
                    os.chdir(home)
                    if listener.latest is not None:  # else the client would not hear of the end
                        listener.latest.close()
        finally:
            # Python waits for them when it ends.
            for session_process in multiprocessing.active_children():
                session_process.kill()


def _listener(host: str, port: int) -> _Listener:
    listener = _Listener(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind((host, port))
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise ServerUnavailable(
            f"port {port} of {host} cannot be listened on ({error}); choose another with --port or "
            "--host."
        ) from error
    return listener


def _wait_at_most(connection: socket.socket, seconds: int) -> None:
    """Have the kernel end a read after so long; 0 is never.

    Python's own timeouts make a socket non-blocking, which TVM's session does not expect.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_S.pack(seconds, 0))


class _Session:
    """What a job calls; each session has a copy of it, in a process and a folder of its own."""

    def __init__(self, device: Device, listener: _Listener) -> None:
        self._device = device
        self._listener = listener
        self._server = os.getpid()
        self._worker: Worker | None = None

    def open(self, text: str) -> str:
        """Start the worker with a job's limits; the answer says what it runs on."""
        die_with(self._server)
        if self._listener.latest is not None:
            _wait_at_most(self._listener.latest, 0)
        wanted = json.loads(text)
        self._worker = Worker(
            WorkerSpec("fa2tvm.tune.harness", Path.cwd(), tuple(wanted.pop("plugins")), **wanted)
        )
        about = {"device": self._device.to_dict(), "versions": versions(), "machine": machine()}
        return json.dumps(about)

    def put(self, name: str, manifest: str, library: bytes) -> str:
        """Keep a module in the session's folder, which ends with it."""
        folder = Path.cwd() / Path(name).name
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / MANIFEST).write_text(manifest, encoding="utf-8")
        (folder / LIBRARY).write_bytes(bytes(library))
        return ""

    def answer(self, text: str) -> str:
        """One request of the runner's to the worker (harness.serve), within its time."""
        assert self._worker is not None
        request = json.loads(text)
        if "path" in request:
            request["path"] = os.fspath(Path.cwd() / Path(request["path"]).name)
        try:
            return json.dumps(self._worker.call(request, request.pop("timeout_s")))
        except WorkerFailure as failure:
            return json.dumps({"error": failure.kind, "reason": str(failure)})
