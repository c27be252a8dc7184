"""Compile candidates in worker processes: what cannot be built is a recorded failure."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fa2tvm import compile
from fa2tvm.device import Device
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.nouns import Failure
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec

BUILD_TIMEOUT_S = 60.0
# How far builds make way for what else runs here: the worker that checks and times, and the search.
_NICE = 10
_Built: TypeAlias = "Future[Path | Failure]"
_ENDED = Failure("build", "the job ended before it was built")


@dataclass(frozen=True)
class _Job:
    """A build that waits for a worker."""

    variant: Variant
    schedule: Schedule
    built: _Built


class Builder:
    """Builds schedules for one device, several at a time.

    Parameters
    ----------
    spec
        How to start a worker.
    n_workers
        Builds that run at the same time.
    timeout_s
        Seconds after which one build counts as hanging.
    """

    def __init__(
        self,
        device: Device,
        spec: WorkerSpec,
        n_workers: int,
        timeout_s: float = BUILD_TIMEOUT_S,
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._workers = [Worker(spec) for _ in range(n_workers)]
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._waiting: queue.PriorityQueue[tuple[float, int, _Job | None]] = queue.PriorityQueue()
        self._made: dict[tuple[Variant, Schedule], _Built] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, variant: Variant, schedule: Schedule, order: int = 0) -> _Built:
        """The module directory of a schedule, or why there is none, as soon as it is known.

        Nothing is built twice, nor what the user's cache holds.

        Parameters
        ----------
        order
            Lower ones are built first; of one order, what came first.
        """
        with self._lock:
            known = self._made.get((variant, schedule))
            if known is not None and not known.cancelled():
                return known
            built: _Built = Future()
            if self._closed:
                built.set_result(_ENDED)
                return built
            self._made[variant, schedule] = built
        kept = compile.cached(variant, schedule, self._device)
        if kept is not None:
            built.set_result(kept)
            return built
        self._start_threads()
        self._waiting.put((order, next(self._numbers), _Job(variant, schedule, built)))
        return built

    def start(self) -> None:
        """Start the workers now, so that their imports overlap with other work."""
        for worker in self._workers:
            with contextlib.suppress(WorkerFailure):  # the first build says why
                worker.start()

    def close(self) -> None:
        """End every worker; a build that another thread waits for ends too."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.close()
        for _ in self._threads:
            self._waiting.put((-math.inf, next(self._numbers), None))
        for thread in self._threads:
            thread.join()
        for built in self._made.values():
            if not built.done() and built.set_running_or_notify_cancel():
                built.set_result(_ENDED)

    def _start_threads(self) -> None:
        with self._lock:
            if not self._threads and not self._closed:
                for worker in self._workers:
                    thread = threading.Thread(target=self._serve, args=(worker,), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _serve(self, worker: Worker) -> None:
        """One worker's builds, one after the other."""
        while (job := self._waiting.get()[2]) is not None:
            if not job.built.set_running_or_notify_cancel():
                continue
            try:
                answer = worker.call(self._request(job.variant, job.schedule), self._timeout_s)
            except WorkerFailure as failure:
                while_building = f"{failure.kind} while building: {failure}"
                job.built.set_result(Failure("build", while_building))
                continue
            failed = Failure("build", answer["reason"]) if "error" in answer else None
            job.built.set_result(failed or Path(answer["path"]))

    def _request(self, variant: Variant, schedule: Schedule) -> dict[str, Any]:
        return {
            "variant": variant.to_dict(),
            "family": schedule.family,
            "decisions": schedule.to_dict(),
            "device": self._device.to_dict(),
        }


def prepare() -> None:
    """In the worker: the slow imports, before any request's time runs."""
    os.nice(_NICE)
    import tvm  # noqa: F401

    import fa2tvm.compile  # noqa: F401


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """In the worker: build one schedule; exceptions are answered by the worker's loop."""
    from fa2tvm.compile import build

    variant = Variant(**request["variant"])
    schedule = schedule_from_dict(request["family"], variant.pass_, request["decisions"])
    row = request["device"]
    device = Device(**{**row, "features": tuple(row["features"])})
    return {"path": str(build(variant, schedule, device))}
