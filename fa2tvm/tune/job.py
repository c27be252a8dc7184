"""One tuning job: propose, build, check, time, write down; until trials or time run out."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from fa2tvm.device import Device
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.lookup import family_for, home
from fa2tvm.problem import Problem
from fa2tvm.records import program_version, tuning_key, versions
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.builder import Builder, Failure
from fa2tvm.tune.database import Trial, TrialLog, job_lock
from fa2tvm.tune.provenance import utc_now, write_job
from fa2tvm.tune.runner import Measured, Runner
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import Space
from fa2tvm.tune.worker import WorkerSpec

# Candidates of one round of build, check and time; the first round is smaller, to show a result.
BATCH = 8
FIRST_BATCH = 4
ROUNDS = 3
# Private memory of one worker; a kernel's scratch is a few MiB, LLVM takes a few hundred.
MEMORY_BYTES = 8 << 30

Stop = Literal["trials", "seconds", "exhausted", "interrupted"]


class BuilderLike(Protocol):
    """What a job asks of its builder."""

    def build(self, schedules: Sequence[Schedule]) -> list[Path | Failure]: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


class RunnerLike(Protocol):
    """What a job asks of its runner."""

    def check(self, path: Path) -> Failure | None: ...
    def time(self, paths: Sequence[Path], rounds: int) -> list[Measured | Failure]: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


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
        assert self.best.us is not None and self.best.us_default is not None
        return self.best.us_default / self.best.us

    def best_schedule(self) -> Schedule:
        """The fastest schedule."""
        return schedule_from_dict(self.family, self.problem.variant.pass_, self.best.decisions)


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


def tune(
    problem: Problem,
    device: Device,
    *,
    trials: int | None = 64,
    seconds: float | None = None,
    seed: int = 0,
    resume: bool = True,
    out: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    family: str | None = None,
    options: Options | None = None,
    workers: tuple[BuilderLike, RunnerLike] | None = None,
) -> JobResult:
    """Search for the fastest schedule of a problem on a device.

    Every finished trial is on disk at once, in `<out>/<device>/<pass>/<problem>/`. An interrupt
    (Ctrl-C) ends the job with what it has found.

    Parameters
    ----------
    trials, seconds
        The job stops at whichever comes first; None is no limit.
    seed
        Of the search and of the random inputs.
    resume
        Whether earlier trials of the same problem, kernel and versions teach this search.
    out
        Root of the logs; `<home>/tuning_logs` by default.
    workers
        Builder and runner in place of the worker processes.

    Raises
    ------
    InfeasibleSchedule
        Where the default schedule does not fit, or cannot be built, or is wrong.
    JobBusy
        Where another process tunes into the same folder.
    UnsupportedProblem
        Where no family runs on the device.
    """
    family = family or family_for(device)
    options = options or Options()
    space = Space.of(problem, device, family)
    root = out if out is not None else home() / "tuning_logs"
    folder = root / device.slug / problem.variant.pass_ / problem.name
    with job_lock(folder), tempfile.TemporaryDirectory(prefix="fa2tvm-tune-") as scratch:
        builder, runner = workers or make_workers(problem, device, seed, Path(scratch), options)
        job = _Job(
            space=space,
            log=TrialLog(folder),
            builder=builder,
            runner=runner,
            options=options,
            budget=_Budget(trials, seconds),
            progress=progress or (lambda _: None),
        )
        write_job(folder, space, seed, trials, seconds)
        try:
            runner.start()
            builder.start()
            return job.run(Search(space, seed, options.batch), resume)
        finally:
            builder.close()
            runner.close()


def make_workers(
    problem: Problem, device: Device, seed: int, scratch: Path, options: Options
) -> tuple[Builder, Runner]:
    """Worker processes that build and run a problem's candidates; modules go into `scratch`."""

    def spec(role: str, threads: int) -> WorkerSpec:
        limit = options.memory_bytes if device.kind == "llvm" else None
        return WorkerSpec(f"fa2tvm.tune.{role}", scratch, options.plugins, limit, threads)

    builder = Builder(
        problem.variant,
        device,
        spec("builder", 1),
        n_workers=options.builders or max(1, device.cores),
        timeout_s=options.build_timeout_s,
    )
    return builder, Runner(problem, spec("harness", device.cores), seed, options.run_timeout_s)


@dataclass
class _Budget:
    """Trials and seconds that are left."""

    trials: int | None
    seconds: float | None
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
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
        left = []
        if self.seconds is not None:
            left.append(self.seconds - self.elapsed)
        if self.trials is not None and seconds_per_trial:
            left.append((self.trials - done) * seconds_per_trial)
        return max(0.0, min(left)) if left else None


@dataclass
class _Job:
    """State of a running job."""

    space: Space
    log: TrialLog
    builder: BuilderLike
    runner: RunnerLike
    options: Options
    budget: _Budget
    progress: Callable[[Progress], None]
    done: int = 0
    failed: int = 0
    default: Trial | None = None
    default_path: Path | None = None
    best: Trial | None = None
    loop_started: float = 0.0

    @property
    def key(self) -> str:
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
        assert self.default is not None and self.default.us is not None
        schedules, seconds = [], []
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
            if trial.us is None or trial.us_default is None:
                seconds.append(None)
                continue
            seconds.append(trial.us / trial.us_default * self.default.us * 1e-6)
            self._keep_if_best(trial)
        search.report(schedules, seconds)

    def _try(self, batch: Sequence[Schedule]) -> list[float | None]:
        """Build, check, time and write down one batch; seconds of each, None where it failed."""
        self._tell("building")
        outcomes: list[Path | Measured | Failure] = list(self.builder.build(batch))
        us_default: float | None = None
        self._tell("checking")
        for index, built in enumerate(outcomes):
            if isinstance(built, Path):
                outcomes[index] = self.runner.check(built) or built
        right = [(index, path) for index, path in enumerate(outcomes) if isinstance(path, Path)]
        self._tell("timing")
        if right:
            assert self.default_path is not None
            paths = [self.default_path, *(path for _, path in right)]
            reference, *times = self.runner.time(paths, self.options.rounds)
            us_default = reference.us if isinstance(reference, Measured) else None
            for (index, path), measured in zip(right, times, strict=True):
                outcomes[index] = measured
                shutil.rmtree(path, ignore_errors=True)
        seconds: list[float | None] = []
        for schedule, outcome in zip(batch, outcomes, strict=True):
            assert not isinstance(outcome, Path)
            trial = self._write(schedule, outcome, us_default)
            seconds.append(None if trial.us is None else self._todays_seconds(trial))
            self._keep_if_best(trial)
        self._tell("timing")
        return seconds

    def _todays_seconds(self, trial: Trial) -> float:
        """Seconds on the clock of trial 0, so that batches of a drifting machine compare."""
        assert trial.us and trial.us_default and self.default and self.default.us
        return trial.us / trial.us_default * self.default.us * 1e-6

    def _keep_if_best(self, trial: Trial) -> None:
        if trial.us is None or trial.us_default is None:
            return
        assert self.best is not None and self.best.us and self.best.us_default
        if trial.us / trial.us_default < self.best.us / self.best.us_default:
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
        best_us = self._todays_seconds(best) * 1e6 if best else None
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
        assert self.default is not None and self.best is not None
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
        assert self.best is not None
        if self.best.trial == self.default_trial:
            return f"Stopped after {self.done} trials because {why}; the default schedule stays the best."
        ratio = self.best.us_default / self.best.us  # type: ignore[operator]
        return (
            f"Stopped after {self.done} trials because {why}; the best schedule is {ratio:.2f} times "
            "as fast as the default."
        )

    @property
    def default_trial(self) -> int:
        assert self.default is not None
        return self.default.trial
