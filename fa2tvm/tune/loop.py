"""The loop of a tuning job: propose, build, check, time, write down."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.records import program_version, tuning_key, versions
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.database import Trial, TrialLog
from fa2tvm.tune.nouns import (
    BuilderLike,
    Failure,
    JobResult,
    Measured,
    Options,
    Progress,
    RunnerLike,
    Stop,
)
from fa2tvm.tune.provenance import utc_now
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import Space

# The first round is small, to show a result soon.
FIRST_BATCH = 4


@dataclass
class Budget:
    """Trials and seconds that are left."""

    trials: int | None
    seconds: float | None
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def room(self, done: int, seconds_per_trial: float) -> int:
        """How many more trials fit."""
        rooms = [1 << 30]
        if self.trials is not None:
            rooms.append(self.trials - done)
        if self.seconds is not None:
            left = self.seconds - self.elapsed
            unknown = FIRST_BATCH if left > 0 else 0
            rooms.append(int(left / seconds_per_trial) if seconds_per_trial else unknown)
        return max(0, min(rooms))

    def seconds_left(self, done: int, seconds_per_trial: float) -> float | None:
        """Seconds until the job stops, None where nothing is known yet."""
        left = []
        if self.seconds is not None:
            left.append(self.seconds - self.elapsed)
        if self.trials is not None and seconds_per_trial:
            left.append((self.trials - done) * seconds_per_trial)
        return max(0.0, min(left)) if left else None


@dataclass
class Job:
    """State of a running job."""

    space: Space
    log: TrialLog
    builder: BuilderLike
    runner: RunnerLike
    options: Options
    budget: Budget
    progress: Callable[[Progress], None]
    done: int = 0
    failed: int = 0
    default: Trial | None = None
    default_path: Path | None = None
    best: Trial | None = None
    loop_started: float = 0.0

    @property
    def key(self) -> str:
        """What its trials belong to."""
        problem, device = self.space.problem, self.space.device
        program = program_version(self.space.family, problem.variant.pass_)
        return tuning_key(problem, self.space.family, device.slug, program, versions())

    def run(self, search: Search, resume: bool) -> JobResult:
        """The whole job, after its workers and its search exist."""
        earlier = self._earlier() if resume else []
        self._tell("starting")
        stopped: Stop = "interrupted"
        try:
            self._measure_default(search)
            self._teach(search, earlier)
            stopped = self._loop(search)
        except KeyboardInterrupt:
            if self.default is None:
                raise
        self._tell("done")
        return self._result(search, stopped)

    def _loop(self, search: Search) -> Stop:
        self.loop_started = time.monotonic()
        first_trials = self.done
        while True:
            measured = self.done - first_trials
            per_trial = (time.monotonic() - self.loop_started) / measured if measured else 0.0
            room = self.budget.room(self.done, per_trial)
            if room <= 0:
                out_of_trials = self.budget.trials is not None and self.done >= self.budget.trials
                return "trials" if out_of_trials else "seconds"
            batch = search.propose(min(room, self.options.batch if measured else FIRST_BATCH))
            if not batch:
                return "exhausted"
            search.report(batch, self._try(batch))

    def _measure_default(self, search: Search) -> None:
        """Trial 0: everything is compared with it, and it is what a user gets without tuning."""
        schedule = self.space.default
        self._tell("building")
        (built,) = self.builder.build([schedule])
        times: Measured | Failure
        if isinstance(built, Failure):
            times = built
        else:
            self.default_path = built
            times = self.runner.check(built) or self.runner.time([built], self.options.rounds)[0]
        if isinstance(times, Failure):
            self._write(schedule, times, None)
            raise InfeasibleSchedule(
                f"default schedule {schedule.to_dict()} of {self.space.problem.name} failed "
                f"({times.kind}: {times.reason}); correct the kernel before tuning it."
            )
        self.default = self.best = self._write(schedule, times, times.us)
        search.report([schedule], [times.us * 1e-6])
        self._tell("timing")

    def _earlier(self) -> list[Trial]:
        """Trials of this very problem, kernel and versions; others never apply."""
        name, key = self.space.problem.name, self.key
        return [t for t in self.log.load() if t.key == key and t.problem == name]

    def _teach(self, search: Search, earlier: Sequence[Trial]) -> None:
        """Hand earlier trials to the population and the cost model, in today's microseconds."""
        schedules: list[Schedule] = []
        seconds: list[float | None] = []
        for trial in earlier:
            try:
                schedule = schedule_from_dict(
                    self.space.family, self.space.problem.variant.pass_, trial.decisions
                )
            except InfeasibleSchedule:
                continue
            if not self.space.contains(schedule) or schedule == self.space.default:
                continue
            schedules.append(schedule)
            seconds.append(self._todays_seconds(trial))
            self._keep_if_best(trial)
        search.report(schedules, seconds)

    def _try(self, batch: Sequence[Schedule]) -> list[float | None]:
        """Build, check, time and write down one batch; seconds of each, None where it failed."""
        trials: dict[Schedule, Trial] = {}
        right: dict[Schedule, Path] = {}
        self._tell("building")
        for schedule, built in zip(batch, self.builder.build(batch), strict=True):
            if isinstance(built, Path):
                right[schedule] = built
            else:
                trials[schedule] = self._write(schedule, built, None)
        self._tell("checking")
        for schedule, path in list(right.items()):
            failure = self.runner.check(path)
            if failure is not None:
                del right[schedule]
                trials[schedule] = self._write(schedule, failure, None)
        self._tell("timing")
        trials |= self._time(right)
        self._tell("timing")
        return [self._todays_seconds(trials[schedule]) for schedule in batch]

    def _time(self, right: dict[Schedule, Path]) -> dict[Schedule, Trial]:
        """Time modules beside the default and write them down."""
        if not right:
            return {}
        assert self.default_path is not None
        paths = [self.default_path, *right.values()]
        default, *times = self.runner.time(paths, self.options.rounds)
        us_default = default.us if isinstance(default, Measured) else None
        trials = {}
        for (schedule, path), outcome in zip(right.items(), times, strict=True):
            trials[schedule] = self._write(schedule, outcome, us_default)
            self._keep_if_best(trials[schedule])
            shutil.rmtree(path, ignore_errors=True)
        return trials

    def _todays_seconds(self, trial: Trial) -> float | None:
        """Seconds on the clock of trial 0, so that batches of a drifting machine compare."""
        if trial.us is None or self.default is None or self.default.us is None:
            return None
        return trial.relative * self.default.us * 1e-6

    def _keep_if_best(self, trial: Trial) -> None:
        if trial.us is None:
            return
        if self.best is None or trial.relative < self.best.relative:
            self.best = trial

    def _write(
        self, schedule: Schedule, outcome: Measured | Failure, us_default: float | None
    ) -> Trial:
        if isinstance(outcome, Measured) and us_default is None:
            outcome = Failure("timing", "the default schedule could not be timed beside it")
        measured = isinstance(outcome, Measured)
        trial = self.log.append(
            key=self.key,
            problem=self.space.problem.name,
            decisions=schedule.to_dict(),
            us=outcome.us if isinstance(outcome, Measured) else None,
            us_default=us_default if measured else None,
            runs_us=outcome.runs_us if isinstance(outcome, Measured) else (),
            error=outcome.kind if isinstance(outcome, Failure) else None,
            reason=outcome.reason if isinstance(outcome, Failure) else None,
            date=utc_now(),
        )
        self.done += 1
        self.failed += not measured
        return trial

    def _tell(self, phase: str) -> None:
        best, default = self.best, self.default
        best_seconds = self._todays_seconds(best) if best else None
        best_us = best_seconds * 1e6 if best_seconds else None
        flops = self.space.problem.flops()
        measured = max(self.done - 1, 0)
        per_trial = (time.monotonic() - self.loop_started) / measured if measured else 0.0
        self.progress(
            Progress(
                phase=phase,
                trials=self.done,
                failed=self.failed,
                budget=self.budget.trials,
                best_us=best_us,
                default_us=default.us if default else None,
                gflops=flops / best_us / 1e3 if best_us else None,
                seconds_left=self.budget.seconds_left(self.done, per_trial),
            )
        )

    def _result(self, search: Search, stopped: Stop) -> JobResult:
        assert self.default is not None
        assert self.best is not None
        return JobResult(
            problem=self.space.problem,
            family=self.space.family,
            folder=self.log.folder,
            default=self.default,
            best=self.best,
            trials=self.done,
            failed=self.failed,
            seconds=self.budget.elapsed,
            stopped=stopped,
            message=self._message(search, stopped),
        )

    def _message(self, search: Search, stopped: Stop) -> str:
        why = {
            "trials": "the trials are used up",
            "seconds": "the time is up",
            "exhausted": f"no feasible point of the {self.space.size} is left",
            "interrupted": "it was interrupted",
        }[stopped]
        if stopped == "exhausted" and search.rejections:
            reason, count = search.rejections.most_common(1)[0]
            why += f" ({count} proposals were refused: {reason.rstrip('.')})"
        stopped_because = f"Stopped after {self.done} trials because {why};"
        if self.best is None or self.best == self.default:
            return f"{stopped_because} the default schedule stays the best."
        return (
            f"{stopped_because} the best schedule is {1 / self.best.relative:.2f} times as fast as "
            "the default."
        )
