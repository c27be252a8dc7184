"""Check candidates against the oracle and time them, in a worker process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa2tvm.problem import Problem
from fa2tvm.records import problem_to_dict
from fa2tvm.tune.nouns import Failure, Measured
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec

CHECK_TIMEOUT_S = 30.0
# A candidate this many times slower than the default is timed by its warm-up call alone.
HOPELESS_RATIO = 3.0


class Runner:
    """Runs built modules of one problem.

    Parameters
    ----------
    spec
        How to start the worker.
    seed
        Of the random inputs.
    timeout_s
        Seconds after which one check or one round of timing counts as hanging.
    """

    def __init__(
        self, problem: Problem, spec: WorkerSpec, seed: int, timeout_s: float = CHECK_TIMEOUT_S
    ) -> None:
        self._setup = {"problem": problem_to_dict(problem), "seed": seed}
        self._timeout_s = timeout_s
        self._worker = Worker(spec)

    def check(self, path: Path) -> Failure | None:
        """Compare a module with the oracle; None where it is right."""
        answer = self._call("check", path)
        return answer if isinstance(answer, Failure) else None

    def time(self, paths: Sequence[Path], rounds: int) -> list[Measured | Failure]:
        """Time modules in interleaved rounds: the first is the default, which all are compared to.

        Each must have passed `check`.
        """
        runs: list[list[float]] = [[] for _ in paths]
        failed: dict[int, Failure] = {}
        hopeless: set[int] = set()
        for index, path in enumerate(paths):
            answer = self._call("time", path, warm_up=True)
            if isinstance(answer, Failure):
                failed[index] = answer
                continue
            if index and runs[0] and answer["us"] > HOPELESS_RATIO * runs[0][0]:
                hopeless.add(index)
            runs[index].append(answer["us"])
        for index in range(len(paths)):
            if index not in hopeless:
                runs[index].clear()
        for _ in range(rounds):
            for index, path in enumerate(paths):
                if index in failed or index in hopeless:
                    continue
                answer = self._call("time", path, warm_up=False)
                if isinstance(answer, Failure):
                    failed[index] = answer
                else:
                    runs[index].append(answer["us"])
        return [failed.get(index) or validated(runs[index]) for index in range(len(paths))]

    def start(self) -> None:
        """Start the worker now, so that its imports overlap with other work."""
        self._worker.start()

    def close(self) -> None:
        """End the worker."""
        self._worker.kill()

    def _call(self, what: str, path: Path, **options: Any) -> Any:
        request = {"do": what, "path": str(path), **self._setup, **options}
        try:
            answer = self._worker.call(request, self._timeout_s)
        except WorkerFailure as failure:
            return Failure(failure.kind, str(failure))
        if "error" in answer:
            kind = answer["error"] if answer["error"] in ("wrong", "memory") else "crash"
            return Failure(kind, answer["reason"])
        return answer


def validated(runs_us: Sequence[float]) -> Measured | Failure:
    """The measurement, unless a time is zero, negative or not finite."""
    bad = [us for us in runs_us if not math.isfinite(us) or us <= 0]
    if bad or not runs_us:
        shown = bad[0] if bad else "missing"
        return Failure("timing", f"a measured time is {shown}, but a time is positive and finite")
    return Measured(tuple(round(us, 2) for us in runs_us))
