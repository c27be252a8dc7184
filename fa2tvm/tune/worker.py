"""A worker process: it may crash, hang or eat memory, and the job goes on without it.

The parent holds one end of a socket; requests and answers are JSON. The worker dies with its parent
(PR_SET_PDEATHSIG on Linux, end of file on the socket elsewhere). Where the parent ends it, what the
worker has started itself, a linker or another compiler, ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_REASON_CHARACTERS = 400
# Starting a worker imports torch or tvm, on a busy machine.
_START_TIMEOUT_S = 120.0
# An answer that has begun to arrive is here in this time, and has a few hundred bytes.
_REST_S, _MOST_BYTES = 5, 1 << 20


@dataclass(frozen=True)
class WorkerSpec:
    """How to start a worker.

    Attributes
    ----------
    role
        Module whose `prepare()` does the slow imports and whose `serve(request)` answers.
    plugins
        Modules to import first: kernel families that live outside fa2tvm.
    scratch
        Folder for its standard error; also its FA2TVM_HOME, so that it leaves nothing behind.
    memory_bytes
        Limit of its private memory, or None for no limit.
    threads
        OpenMP threads; None leaves them to PyTorch, as a user's process does.
    """

    role: str
    scratch: Path
    plugins: tuple[str, ...] = ()
    memory_bytes: int | None = None
    threads: int | None = None


class WorkerFailure(Exception):
    """A request got no answer: `kind` is "crash", "hang", "memory" or "closed"."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Worker:
    """The parent's handle; a process is started on the first request and after each failure."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._greeted = False
        self._closed = False
        self._lifecycle = threading.RLock()
        self._deadline = 0.0
        self._timeout_s = 0.0
        self._log = spec.scratch / f"{spec.role.rpartition('.')[2]}-{id(self):x}.log"

    @property
    def connection(self) -> Connection:
        """Readable when an answer has arrived or the process has ended."""
        assert self._connection is not None
        return self._connection

    @property
    def deadline(self) -> float:
        """`time.monotonic()` at which the pending request counts as hanging."""
        return self._deadline

    def start(self) -> None:
        """Start the process; does nothing while one is running.

        Raises
        ------
        WorkerFailure
            Where no process can be started, or the worker is closed: a job was interrupted while
            another of its threads builds.
        """
        with self._lifecycle:
            if self._closed:
                raise WorkerFailure("closed", "the job has ended")
            if self._process is None:
                self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "FA2TVM_HOME": str(self.spec.scratch / "home"),
        }
        if self.spec.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.spec.threads)
        try:
            with self._log.open("ab") as log:
                # A session of its own: the worker and all that it starts can be ended at once.
                starting = _starter().submit(
                    subprocess.Popen,
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
                self._process = starting.result()
        except OSError as error:
            ours.close()
            raise WorkerFailure("crash", f"no worker can be started ({error})") from error
        finally:
            theirs.close()
        # What a candidate has made of its process may send half an answer.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _REST_S, 0))
        self._connection = Connection(ours.detach())
        hello = {
            "role": self.spec.role,
            "plugins": self.spec.plugins,
            "memory_bytes": self.spec.memory_bytes,
        }
        # One that has died already is noticed when its answer is awaited.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(hello).encode())

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises
        ------
        WorkerFailure
            Where the process dies or the time is over; the next call gets a fresh process.
        """
        self.send(request, timeout_s)
        self.connection.poll(max(0.0, self._deadline - time.monotonic()))
        return self.receive()

    def send(self, request: dict[str, Any], timeout_s: float) -> None:
        """Send a request without waiting; its time starts when the worker is up."""
        self.start()
        if not self._greeted:
            self._await_hello()
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        try:
            self.connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._death() from None

    def receive(self) -> dict[str, Any]:
        """The answer to the pending request, which must have arrived or be overdue.

        Raises
        ------
        WorkerFailure
            As `call`.
        """
        if not self.connection.poll(0):
            self.kill()
            raise WorkerFailure("hang", f"no answer within {self._timeout_s:g} s")
        try:
            answer: dict[str, Any] = json.loads(self.connection.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError):
            raise self._death() from None
        except ValueError:
            self.kill()
            raise WorkerFailure("crash", "the worker's answer was garbled") from None
        return answer

    def kill(self) -> None:
        """End the process with all that it has started, and reap it."""
        with self._lifecycle:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                self._process = None
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._greeted = False

    def close(self) -> None:
        """End the process for good."""
        with self._lifecycle:
            self._closed = True
            self.kill()

    def _await_hello(self) -> None:
        if not self.connection.poll(_START_TIMEOUT_S):
            self.kill()
            raise WorkerFailure("crash", f"the worker did not start within {_START_TIMEOUT_S:g} s")
        try:
            self.connection.recv_bytes()
        except (EOFError, OSError):
            raise self._death() from None
        self._greeted = True

    def _death(self) -> WorkerFailure:
        """Why the process ended, from its exit status and the end of its standard error."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.kill()
        how = f"exit status {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        said = self._log.read_text(errors="replace").strip()[-2000:]
        last = said.splitlines()[-1] if said else ""
        out_of_memory = "bad_alloc" in said or "Cannot allocate memory" in said
        self._log.write_text("")
        kind = "memory" if out_of_memory else "crash"
        return WorkerFailure(kind, shorten(f"the worker died ({how}) {last}"))


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """A thread that lasts as long as this process and starts all workers.

    The kernel sends PR_SET_PDEATHSIG when the thread that started a process ends, not its process.
    """
    os.register_at_fork(after_in_child=_starter.cache_clear)
    return ThreadPoolExecutor(1, thread_name_prefix="fa2tvm-workers")


def shorten(text: str) -> str:
    """A reason on one line, not longer than a log needs."""
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARACTERS else line[: _REASON_CHARACTERS - 1] + "…"


def main(handle: int, parent: int) -> None:
    """Serve requests until the parent closes the socket."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(handle)
    hello = json.loads(connection.recv_bytes())
    role = importlib.import_module(hello["role"])
    serve: Callable[[dict[str, Any]], dict[str, Any]] = role.serve
    for plugin in hello["plugins"]:
        importlib.import_module(plugin)
    role.prepare()
    if hello["memory_bytes"]:
        _limit_memory(hello["memory_bytes"])
    connection.send_bytes(b"{}")
    requests = _requests(connection)
    while True:
        request = next(requests)
        try:
            answer = serve(request)
        except MemoryError:
            answer = {"error": "memory", "reason": "the memory limit of the worker was reached"}
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            answer = {"error": "exception", "reason": shorten(f"{type(error).__name__}: {error}")}
        connection.send_bytes(json.dumps(answer).encode())


def _requests(connection: Connection) -> Any:
    """Requests as they come; a thread reads them, so that the parent's end is noticed at once."""
    import queue

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                inbox.put(json.loads(connection.recv_bytes()))
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield inbox.get()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
