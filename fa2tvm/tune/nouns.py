"""What the parts of the tuner hand to each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from fa2tvm.problem import Problem
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.database import Trial

# Candidates of one round of build, check and time.
BATCH = 8
ROUNDS = 3
# Private memory of one worker; a kernel's scratch is a few MiB, LLVM takes a few hundred.
MEMORY_BYTES = 8 << 30

Stop = Literal["trials", "seconds", "exhausted", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a candidate has no time.

    Attributes
    ----------
    kind
        "build", "wrong", "crash", "hang", "memory" or "timing".
    reason
        One sentence.
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Measured:
    """Times of one candidate: one mean of several calls per round, in microseconds."""

    runs_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.runs_us)


@dataclass(frozen=True)
class Options:
    """How a job runs; the defaults are those of `fa2tvm tune`.

    Attributes
    ----------
    builders
        Builds that run at the same time; one per core by default.
    build_timeout_s, run_timeout_s
        Seconds after which a build, and a check or a round of timing, count as hanging.
    plugins
        Modules that every worker imports first: families that live outside fa2tvm.
    """

    batch: int = BATCH
    rounds: int = ROUNDS
    builders: int | None = None
    build_timeout_s: float = 60.0
    run_timeout_s: float = 30.0
    memory_bytes: int | None = MEMORY_BYTES
    plugins: tuple[str, ...] = ()


class BuilderLike(Protocol):
    """What a job asks of its builder."""

    def build(self, schedules: Sequence[Schedule]) -> list[Path | Failure]:
        """The module of each schedule, or why there is none."""

    def start(self) -> None:
        """Get ready while other work goes on."""

    def close(self) -> None:
        """End all processes."""


class RunnerLike(Protocol):
    """What a job asks of its runner."""

    def check(self, path: Path) -> Failure | None:
        """Why a module is wrong, or None."""

    def time(self, paths: Sequence[Path], rounds: int) -> list[Measured | Failure]:
        """Times of each module; the first is the default."""

    def start(self) -> None:
        """Get ready while other work goes on."""

    def close(self) -> None:
        """End all processes."""


@dataclass(frozen=True)
class Progress:
    """Where a job stands; sent after every step.

    Attributes
    ----------
    phase
        "starting", "building", "checking", "timing" or "done".
    trials, failed, budget
        Candidates finished, those of them without a time, and the most there may be (or None).
    best_us, default_us
        Median microseconds so far; None before the first.
    gflops
        Of the best.
    seconds_left
        Until the time is up; without a time limit, an estimate from the trials so far.
    """

    phase: str
    trials: int
    failed: int
    budget: int | None
    best_us: float | None
    default_us: float | None
    gflops: float | None
    seconds_left: float | None


@dataclass(frozen=True)
class JobResult:
    """What a job found.

    Attributes
    ----------
    folder
        Where its log and job.json are.
    default, best
        Trials of the default schedule and of the fastest one (the default itself if none is).
    trials, failed
        Candidates of this run, and those of them without a time.
    stopped
        Why the job ended.
    message
        The outcome in one sentence.
    """

    problem: Problem
    family: str
    folder: Path
    default: Trial
    best: Trial
    trials: int
    failed: int
    seconds: float
    stopped: Stop
    message: str

    @property
    def ratio(self) -> float:
        """Default's time over the best one's, measured in the same rounds."""
        return 1 / self.best.relative

    def best_schedule(self) -> Schedule:
        """The fastest schedule."""
        return schedule_from_dict(self.family, self.problem.variant.pass_, self.best.decisions)
