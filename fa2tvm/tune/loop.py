"""The loop of a tuning job: propose, build, check, time, write down.

Problems of one variant are tuned together: a module serves every length, so that each candidate is
built and checked once and timed on all of them. A loop is a generator that says what it waits for,
so that others go on meanwhile (interleave.py).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from fa2tvm.blocks import ceil_div
from fa2tvm.schedule import Schedule
from fa2tvm.tune.nouns import (
    GPU_BATCH,
    GPU_TOGETHER,
    PROMOTION_SEED,
    BuilderLike,
    Failure,
    JobResult,
    Measured,
    Options,
    Progress,
    RunnerLike,
    Stop,
)
from fa2tvm.tune.problem_job import Job


@dataclass
class Budget:
    """Trials and seconds that are left; the seconds run from `begin`."""

    trials: int | None
    seconds: float | None
    started: float | None = None

    def begin(self) -> None:
        """Start the clock, if it does not run yet."""
        if self.started is None:
            self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was started."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def room(self, done: int, ahead: int, seconds_per_trial: float, latency_s: float = 0.0) -> int:
        """How many more trials fit beside `ahead` that are under way.

        Parameters
        ----------
        seconds_per_trial
            0 where it is not known, or says nothing.
        latency_s
            How long a trial takes from its proposal on.
        """
        rooms = [1 << 30]
        if self.trials is not None:
            rooms.append(self.trials - done - ahead)
        if self.seconds is not None:
            left = self.seconds - self.elapsed
            if left <= latency_s:
                return 0
            if seconds_per_trial:
                rooms.append(int(left / seconds_per_trial) - ahead)
        return max(0, min(rooms))

    def seconds_left(self, done: int, seconds_per_trial: float) -> float | None:
        """Seconds until the job stops, None where nothing is known yet."""
        left = []
        if self.seconds is not None:
            left.append(self.seconds - self.elapsed)
        if self.trials is not None and seconds_per_trial:
            left.append((self.trials - done) * seconds_per_trial)
        return max(0.0, min(left)) if left else None


@dataclass(frozen=True)
class Awaited:
    """What a loop waits for: so many of these builds."""

    builds: tuple[Future[Path | Failure], ...]
    enough: int

    @property
    def is_over(self) -> bool:
        """Whether the loop can go on."""
        return sum(build.done() for build in self.builds) >= self.enough


@dataclass
class Loop:
    """Jobs of one variant in step, each with its own search, log and verdict.

    Attributes
    ----------
    order
        Builds of a lower one come first.
    pending
        What is being built or waits for it.
    clock_from, done_from
        When the budget's clock was first seen to run, and the trials that were done by then.
    proposed_at, took_s
        When each of `pending` was proposed, and how long the latest took until they were measured.
    """

    jobs: Sequence[Job]
    builder: BuilderLike
    runner: RunnerLike
    options: Options
    budget: Budget
    seed: int
    progress: Callable[[Progress], None]
    order: int = 0
    default_path: Path | None = None
    pending: dict[Schedule, Future[Path | Failure]] = field(default_factory=dict)
    clock_from: float | None = None
    done_from: int = 0
    proposed_at: dict[Schedule, float] = field(default_factory=dict)
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=GPU_BATCH))
    stopped: Stop = "interrupted"

    def steps(self, resume: bool) -> Iterator[Awaited]:
        """All of it; stops where the next step needs builds that are not there yet.

        Raises
        ------
        InfeasibleSchedule
            Where the default schedule cannot be built, is wrong or cannot be timed.
        ServerUnavailable
            Where a device elsewhere is meant, and no server is to be had any more.
        """
        earlier = [job.known(job.earlier()) if resume else {} for job in self.jobs]
        self._tell("starting")
        first = self.jobs[0].space
        variant = first.problem.variant
        default = self.builder.submit(variant, first.default, self.order)
        try:
            for seed in dict.fromkeys((self.seed, PROMOTION_SEED)):
                self.runner.expect(variant, seed)
            if self.options.overlap:
                for job, known in zip(self.jobs, earlier, strict=True):
                    job.search.expect(list(known))
                self._refill()
            yield Awaited((default,), 1)
            self._measure_default(default.result())
            for job, known in zip(self.jobs, earlier, strict=True):
                job.teach(known)
            yield from self._rounds()
        finally:
            for build in (default, *self.pending.values()):
                build.cancel()
        self._tell("done")

    @property
    def has_results(self) -> bool:
        """Whether every problem has a default that was measured."""
        return all(job.default is not None for job in self.jobs)

    def results(self) -> list[JobResult]:
        """What was found, at the end or when the loop was interrupted."""
        return [job.result(self.budget.elapsed, self.stopped) for job in self.jobs]

    def _rounds(self) -> Iterator[Awaited]:
        while True:
            room = self._refill()
            if not self.pending:
                self.stopped = self._why(room)
                return
            builds = tuple(self.pending.values())
            together = GPU_TOGETHER if self.options.overlap else len(builds)
            yield Awaited(builds, min(together, len(builds)))
            self._measure([s for s, build in self.pending.items() if build.done()])

    @property
    def _done(self) -> int:
        return max(job.done for job in self.jobs)

    @property
    def _seconds_per_trial(self) -> float:
        """Since the clock runs and trials have come; 0 where nothing is known."""
        if self.budget.started is None:
            return 0.0
        if self.clock_from is None:
            self.clock_from, self.done_from = time.monotonic(), self._done
        measured = self._done - self.done_from
        return (time.monotonic() - self.clock_from) / measured if measured else 0.0

    def _why(self, room: int) -> Stop:
        if room > 0:
            return "exhausted"
        out_of_trials = self.budget.trials is not None and self._done >= self.budget.trials
        return "trials" if out_of_trials else "seconds"

    def _refill(self) -> int:
        """Have as many candidates built as may be under way; how many more would fit then."""
        is_first = not self.options.overlap and self._done <= 1
        wanted = self.options.first_batch if is_first else self.options.batch
        ahead = len(self.pending) + (not self.has_results)
        if self.options.overlap:
            # So many are under way that their mean time says nothing of how long one takes.
            latency = statistics.median(self.took_s) if self.took_s else 0.0
            room = self.budget.room(self._done, ahead, 0.0, latency)
        else:
            room = self.budget.room(self._done, ahead, self._seconds_per_trial)
        schedules = self._propose(min(room, wanted - len(self.pending))) if room > 0 else []
        if schedules:
            self._tell("building")
        variant = self.jobs[0].space.problem.variant
        for schedule in schedules:
            self.pending[schedule] = self.builder.submit(variant, schedule, self.order)
            self.proposed_at[schedule] = time.monotonic()
        return room

    def _propose(self, most: int) -> list[Schedule]:
        """What the searches propose in turn, each its share."""
        batch: dict[Schedule, None] = {}
        for index, job in enumerate(self.jobs):
            share = ceil_div(max(0, most - len(batch)), len(self.jobs) - index)
            new = job.search.propose(share) if share else []
            batch.update(dict.fromkeys(new))
            for other in self.jobs:
                other.search.expect(new)
        return list(batch)

    def _measure_default(self, built: Path | Failure) -> None:
        failure = built if isinstance(built, Failure) else self.runner.check(built, self.seed)
        for job in self.jobs:
            outcome: Measured | Failure
            if failure is not None or isinstance(built, Failure):
                assert failure is not None
                outcome = failure
            else:
                self.default_path = built
                (outcome,) = self.runner.time(job.space.problem, [built], self.options.rounds)
            job.take_default(outcome)
        self._tell("timing")

    def _measure(self, schedules: Sequence[Schedule]) -> None:
        """Check, time and write down what has been built."""
        failed: dict[Schedule, Failure] = {}
        right: dict[Schedule, Path] = {}
        self._tell("checking")
        for schedule in schedules:
            built = self.pending.pop(schedule).result()
            failure = built if isinstance(built, Failure) else self.runner.check(built, self.seed)
            if isinstance(built, Path) and failure is None:
                right[schedule] = built
            elif failure is not None:
                failed[schedule] = failure
        self._tell("timing")
        for job in self.jobs:
            mine = [s for s in schedules if job.space.contains(s)]
            times, default = self._time(job, {s: right[s] for s in mine if s in right})
            job.take({s: failed.get(s) or times[s] for s in mine}, default)
        now, began = time.monotonic(), self.budget.started
        proposed = [self.proposed_at.pop(s) for s in schedules]
        if began is not None:  # before, they waited for other loops' builds
            self.took_s.extend(now - max(began, at) for at in proposed)
        self._tell("timing")

    def _time(
        self, job: Job, right: dict[Schedule, Path]
    ) -> tuple[dict[Schedule, Measured | Failure], Measured | Failure | None]:
        """Time modules on one problem, beside the default."""
        if not right:
            return {}, None
        assert self.default_path is not None
        paths = [self.default_path, *right.values()]
        default, *times = self.runner.time(job.space.problem, paths, self.options.rounds)
        return dict(zip(right, times, strict=True)), default

    def _tell(self, phase: str) -> None:
        """Say where it stands: best and default are those of the problem with most work."""
        job = max(self.jobs, key=lambda job: job.space.problem.flops())
        best_us = job.best_us()
        self.progress(
            Progress(
                phase=phase,
                trials=self._done,
                failed=job.failed,
                budget=self.budget.trials,
                best_us=best_us,
                default_us=job.default.us if job.default else None,
                gflops=job.space.problem.flops() / best_us / 1e3 if best_us else None,
                seconds_left=self.budget.seconds_left(self._done, self._seconds_per_trial),
            )
        )
