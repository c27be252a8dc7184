"""What the parts of the tuner hand to each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from fa2tvm.device import Device, usable_cores
from fa2tvm.errors import ServerUnavailable
from fa2tvm.problem import Problem, Variant
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.database import Trial
from fa2tvm.tune.tracker import Server

# Candidates of one round of build, check and time; the first is small, to show a result soon.
BATCH, FIRST_BATCH = 8, 4
ROUNDS, GPU_ROUNDS = 3, 9
# On a GPU so many builds of a job are under way or waiting for a core, and so many points beside
# the default are tried first; results are measured when so many have come.
GPU_BATCH, GPU_TOGETHER = 15, 4
# Of the random data that the best are checked with again.
PROMOTION_SEED = 1
# Private memory of one worker; a kernel's scratch is a few MiB, LLVM takes a few hundred.
MEMORY_BYTES = 8 << 30

Stop = Literal["trials", "seconds", "exhausted", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a candidate has no time.

    Attributes
    ----------
    kind
        "build", "wrong", "crash", "hang", "memory" or "timing"; of a device elsewhere also "lost"
        (its server ended meanwhile) or "unserved" (there is none any more: it was not tried).
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


def is_lost(outcome: object) -> bool:
    """Whether a candidate has no time because its server ended, or there was none."""
    return isinstance(outcome, Failure) and outcome.kind in ("lost", "unserved")


def is_unserved(outcome: object) -> bool:
    """Whether a candidate was not tried because there was no server."""
    return isinstance(outcome, Failure) and outcome.kind == "unserved"


def require_served(outcomes: Iterable[object]) -> None:
    """Raise ServerUnavailable where an outcome `is_lost`."""
    for outcome in outcomes:
        if isinstance(outcome, Failure) and is_lost(outcome):
            raise ServerUnavailable(outcome.reason)


@dataclass(frozen=True)
class Options:
    """How a job runs; the defaults are those of `fa2tvm tune`.

    Attributes
    ----------
    batch, first_batch
        Candidates of one round, and of the first one.
    rounds
        Interleaved rounds of timing.
    overlap
        Whether candidates are built while others are measured: a batch is then what is being built
        at any time, the search hears of results one by one, and jobs of several variants go on
        beside each other. Not on a CPU, where builds disturb the times.
    builders
        Builds that run at the same time; one per core by default.
    build_timeout_s, run_timeout_s
        Seconds after which a build, and a check or a round of timing, count as hanging. On a CPU
        the oracle and the candidate share the cores with all else that runs there; a GPU has its
        own, and its candidates do hang.
    plugins
        Modules that every worker imports first: families that live outside fa2tvm.
    server
        Where candidates run; None is here.
    """

    batch: int = BATCH
    first_batch: int = FIRST_BATCH
    rounds: int = ROUNDS
    overlap: bool = False
    builders: int | None = None
    build_timeout_s: float = 60.0
    run_timeout_s: float = 120.0
    memory_bytes: int | None = MEMORY_BYTES
    plugins: tuple[str, ...] = ()
    server: Server | None = None

    @classmethod
    def of(cls, device: Device) -> Options:
        """The defaults of a device: a GPU leaves the cores to the builds, and times in a moment."""
        if device.kind == "llvm":
            return cls()
        # One core is the GPU's: the worker that checks and times, and the search.
        builders = max(1, usable_cores() - 1)
        return cls(
            batch=builders + 2 * GPU_TOGETHER,
            first_batch=GPU_BATCH,
            rounds=GPU_ROUNDS,
            overlap=True,
            builders=builders,
            build_timeout_s=120.0,
            run_timeout_s=30.0,
            memory_bytes=None,
        )


class BuilderLike(Protocol):
    """What a job asks of its builder."""

    def submit(
        self, variant: Variant, schedule: Schedule, order: int = 0
    ) -> Future[Path | Failure]:
        """The module of a schedule, or why there is none; lower orders are built first."""

    def start(self) -> None:
        """Get ready while other work goes on."""

    def close(self) -> None:
        """End all processes."""


class RunnerLike(Protocol):
    """What a job asks of its runner."""

    def expect(self, variant: Variant, seed: int) -> None:
        """Say that modules of a variant will be checked, so that the oracle's answers are made."""

    def check(self, path: Path, seed: int) -> Failure | None:
        """Why a module is wrong on the random data of a seed, or None."""

    def time(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        """Times of each module; the first is the default."""

    def sustain(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        """Times of each module back to back, at the clocks that power leaves."""

    def start(self) -> None:
        """Get ready while other work goes on."""

    def close(self) -> None:
        """End all processes."""


Workers = tuple[BuilderLike, RunnerLike]


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
