"""Check candidates against the oracle and time them, in a worker process."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa2tvm.problem import Problem, Variant
from fa2tvm.records import problem_to_dict
from fa2tvm.tune.nouns import Failure, Measured
from fa2tvm.tune.worker import Worker, WorkerFailure, WorkerSpec

CHECK_TIMEOUT_S = 30.0
# A candidate this many times slower than the default is timed by its warm-up call alone.
HOPELESS_RATIO = 3.0
# On a GPU, whose rounds repeat within a few per cent, one this many times slower than the default
# after so many rounds is not timed any further.
FAR_BEHIND, SCREENING_ROUNDS = 1.1, 3
# Back to back for so long: power and clocks of a GPU have settled after half of it.
SUSTAINED_S = 0.4
# Failures that a worker names itself; what it calls otherwise is an exception of the candidate's.
_KINDS = ("wrong", "memory", "hang", "lost", "unserved")


class Runner:
    """Runs built modules.

    Parameters
    ----------
    spec
        How to start the worker.
    kind
        "llvm" or "cuda", as `Device.kind`.
    timeout_s
        Seconds after which one check or one round of timing counts as hanging.
    """

    def __init__(
        self, spec: WorkerSpec, kind: str = "llvm", timeout_s: float = CHECK_TIMEOUT_S
    ) -> None:
        self._device = "cuda" if kind == "cuda" else "cpu"
        self._timeout_s = timeout_s
        self._worker = Worker(spec)

    def expect(self, variant: Variant, seed: int) -> None:
        """Have the oracle's answers for a variant on a GPU made beside other work (harness.py)."""
        if self._device == "cuda":
            request = {"do": "expect", "device": self._device, "variant": variant.to_dict()}
            self._ask({**request, "seed": seed}, self._timeout_s)

    def check(self, path: Path, seed: int) -> Failure | None:
        """Compare a module with the oracle; None where it is right."""
        answer = self._call("check", path, seed=seed)
        return answer if isinstance(answer, Failure) else None

    def time(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        """Time modules in interleaved rounds: the first is the default, which all are compared to.

        Each must have passed `check`.
        """
        on = problem_to_dict(problem)
        runs: list[list[float]] = [[] for _ in paths]
        failed: dict[int, Failure] = {}
        hopeless: set[int] = set()
        for index, path in enumerate(paths):
            answer = self._call("time", path, problem=on, warm_up=True)
            if isinstance(answer, Failure):
                failed[index] = answer
                continue
            if index and runs[0] and answer["us"] > HOPELESS_RATIO * runs[0][0]:
                hopeless.add(index)
            runs[index].append(answer["us"])
        for index in range(len(paths)):
            if index not in hopeless:
                runs[index].clear()
        for number in range(rounds):
            if number == SCREENING_ROUNDS and self._device == "cuda":
                hopeless |= _far_behind(runs)
            for index, path in enumerate(paths):
                if index in failed or index in hopeless:
                    continue
                answer = self._call("time", path, problem=on, warm_up=False)
                if isinstance(answer, Failure):
                    failed[index] = answer
                else:
                    runs[index].append(answer["us"])
        return [failed.get(index) or validated(runs[index]) for index in range(len(paths))]

    def sustain(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        """Time modules back to back, in interleaved rounds."""
        on = problem_to_dict(problem)
        answers: list[list[Any]] = [[] for _ in paths]
        for _ in range(rounds):
            for path, given in zip(paths, answers, strict=True):
                given.append(self._call("sustain", path, problem=on, seconds=SUSTAINED_S))
        outcomes = []
        for given in answers:
            failure = next((a for a in given if isinstance(a, Failure)), None)
            outcomes.append(failure or validated([a["us"] for a in given]))
        return outcomes

    def start(self) -> None:
        """Start the worker now, so that its imports overlap with other work."""
        with contextlib.suppress(WorkerFailure):  # the first check says why
            self._worker.start()

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _call(self, what: str, path: Path, **options: Any) -> Any:
        request = {"do": what, "path": str(path), "device": self._device, **options}
        return self._ask(request, self._timeout_s)

    def _ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        try:
            return judged(self._worker.call(request, timeout_s))
        except WorkerFailure as failure:
            return Failure(failure.kind, str(failure))


def _far_behind(runs: Sequence[Sequence[float]]) -> set[int]:
    """Which are clearly slower than the first, the default."""
    if not runs[0]:
        return set()
    limit = FAR_BEHIND * statistics.median(runs[0])
    return {n for n, its in enumerate(runs) if n and its and statistics.median(its) > limit}


def judged(answer: dict[str, Any]) -> dict[str, Any] | Failure:
    """A worker's answer, or the failure that it tells of."""
    if "error" not in answer:
        return answer
    kind = answer["error"] if answer["error"] in _KINDS else "crash"
    return Failure(kind, answer["reason"])


def validated(runs_us: Sequence[float]) -> Measured | Failure:
    """The measurement, unless a time is zero, negative or not finite."""
    bad = [us for us in runs_us if not math.isfinite(us) or us <= 0]
    if bad or not runs_us:
        shown = bad[0] if bad else "missing"
        return Failure("timing", f"a measured time is {shown}, but a time is positive and finite")
    return Measured(tuple(round(us, 2) for us in runs_us))
