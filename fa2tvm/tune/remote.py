"""A runner whose device is elsewhere: modules are built here, checked and timed over there.

This module is also the role of a local worker process (worker.py), which holds the session of TVM's
RPC: TVM's client waits without a limit, and is ended as any other worker when its time is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fa2tvm import files
from fa2tvm.device import Device
from fa2tvm.errors import ServerUnavailable
from fa2tvm.manifest import LIBRARY, MANIFEST
from fa2tvm.problem import Problem
from fa2tvm.records import versions
from fa2tvm.tune import tracker
from fa2tvm.tune.nouns import Failure, Measured, is_lost, is_unserved
from fa2tvm.tune.runner import Runner, judged
from fa2tvm.tune.serving import ANSWER, OPEN, PUT
from fa2tvm.tune.tracker import Server
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec, shorten

# What a request takes beside the time that the other side's worker has for it: the network.
_MARGIN_S = 15.0
# Over there a worker is started for each session.
_START_S = 120.0
# Servers that one batch may lose; then the rest of it counts as lost, too.
_MOST_LOSSES = 3
Outcome = Measured | Failure


class RemoteRunner(Runner):
    """Runs modules on a server of a tracker; one server serves one job at a time.

    A candidate whose server is lost is a failed trial ("lost"), and the job goes on with another
    server of the key. Where none is to be had in time, what is left is "unserved", at once.

    Parameters
    ----------
    spec
        Its limits are those of the worker at the server.
    device
        What the server must be.
    timeout_s
        As for `Runner`, at the server.
    """

    def __init__(self, spec: WorkerSpec, server: Server, device: Device, timeout_s: float) -> None:
        super().__init__(_link(spec.scratch), device.kind, timeout_s + _MARGIN_S)
        limits = {"memory_bytes": spec.memory_bytes, "threads": spec.threads}
        self._wanted = {
            "server": server.to_dict(),
            "slug": device.slug,
            "worker": {"plugins": spec.plugins, **limits},
        }
        self._at_server = {"timeout_s": timeout_s}
        self._connect_s = server.timeout_s + _MARGIN_S
        self._connected = False
        self._unserved: Failure | None = None

    def check(self, path: Path, seed: int) -> Failure | None:
        """As `Runner.check`; a server that is lost meanwhile is replaced once."""
        failure = super().check(path, seed)
        if failure is None or failure.kind != "lost":
            return failure
        again = super().check(path, seed)
        return failure if again is not None and again.kind == "unserved" else again

    def time(self, problem: Problem, paths: Sequence[Path], rounds: int) -> list[Outcome]:
        """As `Runner.time`, all of it on one server."""
        measure = super().time
        return _on_one_server(paths, lambda some: measure(problem, some, rounds))

    def sustain(self, problem: Problem, paths: Sequence[Path], rounds: int) -> list[Outcome]:
        """As `Runner.sustain`, all of it on one server."""
        measure = super().sustain
        return _on_one_server(paths, lambda some: measure(problem, some, rounds))

    def _ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        if self._unserved is not None:
            return self._unserved
        if not self._connected:
            answer = self._through({"do": "connect", **self._wanted}, self._connect_s)
            if isinstance(answer, Failure):
                self._unserved = replace(answer, kind="unserved")
                return self._unserved
            self._connected = True
            timeout_s += _START_S
        answer = self._through({**request, **self._at_server}, timeout_s)
        if isinstance(answer, Failure) and answer.kind == "lost":
            self._connected = False
        return answer

    def _through(self, request: dict[str, Any], timeout_s: float) -> Any:
        """The answer, whose failures are the candidate's, unless the way to the server broke."""
        try:
            return judged(self._worker.call(request, timeout_s))
        except WorkerFailure as failure:
            return Failure("lost", f"the session with the server ended: {failure}")


def _on_one_server(
    paths: Sequence[Path], measure: Callable[[Sequence[Path]], list[Outcome]]
) -> list[Outcome]:
    """Measure anew what is left where a server was lost: only times of one machine compare.

    The first, the default, is not blamed for a loss: it has run before.
    """
    settled: dict[int, Outcome] = {}
    lost: Outcome = Failure("lost", "")
    for _ in range(_MOST_LOSSES):
        left = [index for index in range(len(paths)) if index not in settled]
        found = dict(zip(left, measure([paths[i] for i in left]), strict=True))
        void = [outcome for outcome in found.values() if is_lost(outcome)]
        if not void:
            return [outcome for _, outcome in sorted((settled | found).items())]
        lost = void[-1]
        for index, outcome in found.items():
            if index and isinstance(outcome, Failure) and not is_unserved(outcome):
                settled[index] = outcome
        if is_unserved(lost):
            break
    return [settled.get(index, lost) for index in range(len(paths))]


def about(server: Server) -> dict[str, Any]:
    """What a server of a key says of itself: its `device`, `versions` and `machine`.

    Raises
    ------
    ServerUnavailable
        Where none is to be had in time, or another version runs there.
    """
    with files.scratch("fa2tvm-serve-") as scratch:
        worker = Worker(_link(scratch))
        request = {"do": "connect", "server": server.to_dict(), "worker": {"plugins": ()}}
        try:
            answer = worker.call(request, server.timeout_s + _MARGIN_S)
        except WorkerFailure as failure:
            raise ServerUnavailable(
                f"key {server.key!r} of the tracker at {server.tracker} cannot be used "
                f"({failure}); look at the server's output."
            ) from failure
        finally:
            worker.close()
    if "error" in answer:
        raise ServerUnavailable(answer["reason"])
    return answer


# In the worker process.


class _Link(NamedTuple):
    """A session of this process, its functions, and the modules that the server has by now."""

    session: Any
    put: Any
    answer: Any
    sent: set[str]

    def send(self, module: Path) -> None:
        """Have the server keep a module, once."""
        if module.name not in self.sent:
            text = (module / MANIFEST).read_text(encoding="utf-8")
            self.put(module.name, text, bytearray((module / LIBRARY).read_bytes()))
            self.sent.add(module.name)


_links: list[_Link] = []


def _link(scratch: Path) -> WorkerSpec:
    return WorkerSpec(__name__, scratch)


def prepare() -> None:
    """The slow import, before any request's time runs."""
    import tvm.rpc  # noqa: F401


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Answer `connect`, or hand a request of the runner's to the server."""
    if request["do"] == "connect":
        try:
            return _connect(request)
        except ServerUnavailable as error:
            return {"error": "unserved", "reason": str(error)}
    (link,) = _links
    try:
        if "path" in request:
            link.send(Path(request["path"]))
        answer: dict[str, Any] = json.loads(link.answer(json.dumps(request)))
    except (RuntimeError, ValueError) as error:
        _links.clear()
        return {"error": "lost", "reason": shorten(f"the server was lost ({error})")}
    return answer


def _connect(request: dict[str, Any]) -> dict[str, Any]:
    """Open a session with a server that is the device and the version that are wanted."""
    _links.clear()
    server = Server(**request["server"])
    session = tracker.request(server)
    try:
        answer = session.get_function(OPEN)(json.dumps(request["worker"]))
        link = _Link(session, session.get_function(PUT), session.get_function(ANSWER), set())
    except (RuntimeError, AttributeError) as error:
        raise ServerUnavailable(
            f"the server of key {server.key!r} cannot be used "
            f"({shorten(str(error))}); start it with `fa2tvm serve` of this version."
        ) from error
    found: dict[str, Any] = json.loads(answer)
    there, here = (
        {name: version for name, version in which.items() if name != "torch"}
        for which in (found["versions"], versions())
    )
    if there != here:
        raise ServerUnavailable(
            f"the server of key {server.key!r} has {there}, but this job {here}; install the same."
        )
    slug = found["device"]["slug"]
    if slug != request.get("slug", slug):
        raise ServerUnavailable(
            f"the server of key {server.key!r} is {slug}, but the job is for {request['slug']}; "
            "give the key of such a server."
        )
    _links.append(link)
    return found
