"""Compile candidates in worker processes: what cannot be built is a recorded failure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fa2tvm.device import Device
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.nouns import Failure
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec

BUILD_TIMEOUT_S = 60.0


class Builder:
    """Builds schedules of one variant for one device, several at a time.

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
        variant: Variant,
        device: Device,
        spec: WorkerSpec,
        n_workers: int,
        timeout_s: float = BUILD_TIMEOUT_S,
    ) -> None:
        self._variant = variant
        self._device = device
        self._timeout_s = timeout_s
        self._workers = [Worker(spec) for _ in range(n_workers)]

    def build(self, schedules: Sequence[Schedule]) -> list[Path | Failure]:
        """The module directory of each schedule, or why there is none, in order."""
        results: dict[int, Path | Failure] = {}
        todo = list(enumerate(schedules))[::-1]
        idle = list(self._workers)
        busy: dict[Worker, int] = {}
        while todo or busy:
            while todo and idle:
                index, schedule = todo.pop()
                worker = idle.pop()
                try:
                    worker.send(self._request(schedule), self._timeout_s)
                    busy[worker] = index
                except WorkerFailure as failure:
                    results[index] = Failure("build", str(failure))
                    idle.append(worker)
            for worker in _ready(busy):
                results[busy.pop(worker)] = _result(worker)
                idle.append(worker)
        return [results[index] for index in range(len(schedules))]

    def start(self) -> None:
        """Start the workers now, so that their imports overlap with other work."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.kill()

    def _request(self, schedule: Schedule) -> dict[str, Any]:
        return {
            "variant": self._variant.to_dict(),
            "family": schedule.family,
            "decisions": schedule.to_dict(),
            "device": self._device.to_dict(),
        }


def _ready(busy: dict[Worker, int]) -> list[Worker]:
    """Workers that have answered, ended or overrun; waits for the first of them."""
    if not busy:
        return []
    now = time.monotonic()
    next_deadline = min(worker.deadline for worker in busy)
    readable = wait([worker.connection for worker in busy], max(0.0, next_deadline - now))
    now = time.monotonic()
    return [w for w in busy if w.connection in readable or w.deadline <= now]


def _result(worker: Worker) -> Path | Failure:
    try:
        answer = worker.receive()
    except WorkerFailure as failure:
        return Failure("build", f"{failure.kind} while building: {failure}")
    if "error" in answer:
        return Failure("build", answer["reason"])
    return Path(answer["path"])


def prepare() -> None:
    """In the worker: the slow imports, before any request's time runs."""
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
