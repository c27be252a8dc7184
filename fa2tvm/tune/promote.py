"""From evidence to verdict: measure the best trials again beside the default, keep the winner."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa2tvm.device import Device
from fa2tvm.errors import CorruptRecord, InfeasibleSchedule, require_at_least
from fa2tvm.lookup import family_for, home
from fa2tvm.problem import Problem
from fa2tvm.records import (
    Record,
    device_summary,
    merge_records,
    program_version,
    tuning_key,
    versions,
)
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.database import TRIALS, Trial, TrialLog, job_lock
from fa2tvm.tune.job import keep, log_folder, open_workers
from fa2tvm.tune.nouns import (
    PROMOTION_SEED,
    Failure,
    Measured,
    Options,
    RunnerLike,
    Workers,
    require_served,
)
from fa2tvm.tune.provenance import add_verdict, utc_now
from fa2tvm.tune.space import Space

# A winner must be this much faster in the median round, by kind of device, and faster in this
# share of the rounds. Repeats of a burst differ by 0.3 to 0.5 % on an H200 (2026-11-30).
CLEARLY = {"llvm": 1.02, "cuda": 1.005}
SHARE_OF_ROUNDS = 0.75
# A round on a GPU is a burst of three samples.
ROUNDS = {"llvm": 15, "cuda": 21}
# On a GPU the best of the long problems must hold their lead at the clocks that power leaves, too.
SUSTAINED_CONTENDERS, SUSTAINED_ROUNDS = 2, 1
SUSTAINED_LEAST = 0.995


@dataclass(frozen=True)
class Contender:
    """One schedule that was measured again.

    Attributes
    ----------
    ratio
        Median over the rounds of default's time / its own; None where it failed.
    wins
        Share of the rounds in which it beat the default.
    sustained_us, sustained_ratio
        The same back to back; None where that was not measured.
    """

    trial: Trial
    schedule: Schedule
    us: float | None = None
    ratio: float | None = None
    wins: float | None = None
    failure: Failure | None = None
    sustained_us: float | None = None
    sustained_ratio: float | None = None

    @property
    def merit(self) -> float:
        """What the winner has most of: its ratio, both ways of measuring taken together."""
        return math.sqrt((self.ratio or 0.0) * (self.sustained_ratio or self.ratio or 0.0))

    def to_dict(self) -> dict[str, Any]:
        """The evidence for the job's file."""
        return {
            "trial": self.trial.trial,
            "us": self.us,
            "ratio": self.ratio,
            "wins": self.wins,
            "sustained_us": self.sustained_us,
            "sustained_ratio": self.sustained_ratio,
            "failure": f"{self.failure.kind}: {self.failure.reason}" if self.failure else None,
        }


@dataclass(frozen=True)
class Promoted:
    """The verdict.

    Attributes
    ----------
    record, path
        What was written, and where.
    contenders
        Everything that was measured, the default first.
    message
        The outcome in one sentence.
    """

    record: Record
    path: Path
    contenders: tuple[Contender, ...]
    message: str


def promote(problem: Problem, device: Device, **options: Any) -> Promoted:
    """Measure the best trials of one problem again; see `promote_together`."""
    (promoted,) = promote_together([problem], device, **options)
    return promoted


def promote_together(
    problems: Sequence[Problem],
    device: Device,
    *,
    logs: Path | None = None,
    schedules: Path | None = None,
    top: int = 5,
    rounds: int | None = None,
    seed: int = PROMOTION_SEED,
    family: str | None = None,
    options: Options | None = None,
    workers: Workers | None = None,
) -> list[Promoted]:
    """Measure the best trials of problems of one variant again; the winners go into `schedules`.

    The contenders are checked against the oracle with fresh data and timed in interleaved rounds in
    one process. Where none beats the default clearly, the default is the recorded winner.

    Parameters
    ----------
    logs, schedules
        Roots of the logs and of the records; those of the user's home by default.
    top
        Trials of each problem that are measured again.
    rounds
        Interleaved rounds; by default those of `ROUNDS` for the kind of device.
    workers
        Builder and runner to use, which stay open; worker processes of its own by default.

    Raises
    ------
    CorruptRecord
        Where a log holds no measured trial of this problem, kernel and versions.
    InfeasibleSchedule
        Where the default schedule cannot be built or is wrong.
    JobBusy
        Where a tuning job is running in a log's folder.
    ServerUnavailable
        Where a device elsewhere is meant, and its server is lost: no verdict is written.
    UnsupportedProblem
        For a `top`, `rounds` or `seed` that is too small.
    """
    require_at_least(1, top=top, rounds=rounds)
    require_at_least(0, seed=seed)
    family = family or family_for(device, problems[0].variant)
    options = options or Options.of(device)
    logs = logs if logs is not None else home() / "tuning_logs"
    schedules = schedules if schedules is not None else home() / "schedules"
    spaces = [Space.of(problem, device, family) for problem in problems]
    folders = [log_folder(logs, problem, device, family) for problem in problems]
    chosen = [_best_trials(s, folder, top) for s, folder in zip(spaces, folders, strict=True)]
    verdicts = []
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(job_lock(folder))
        builder, runner = workers or stack.enter_context(open_workers(device, options))
        runner.start()
        variant = problems[0].variant
        every = list(dict.fromkeys(s for trials in chosen for _, s in trials))
        runner.expect(variant, seed)
        builds = {schedule: builder.submit(variant, schedule) for schedule in every}
        built = {schedule: build.result() for schedule, build in builds.items()}
        for schedule, path in built.items():
            if isinstance(path, Path):
                built[schedule] = runner.check(path, seed) or path
        require_served(built.values())
        for space, trials, folder in zip(spaces, chosen, folders, strict=True):
            contenders = _measure(space, trials, built, runner, rounds or ROUNDS[device.kind])
            if device.kind == "cuda" and space.problem.length_class == "long":
                contenders = _sustain(space, contenders, built, runner)
            verdicts.append(_verdict(space, contenders, built, folder, logs, schedules))
    return verdicts


def _verdict(
    space: Space,
    contenders: list[Contender],
    built: dict[Schedule, Path | Failure],
    folder: Path,
    logs: Path,
    schedules: Path,
) -> Promoted:
    """Choose the winner and write it down with its evidence."""
    problem, device, default = space.problem, space.device, contenders[0]
    if default.us is None:
        raise InfeasibleSchedule(
            f"default schedule {default.schedule.to_dict()} of {problem.name} failed "
            f"({default.failure}); correct the kernel before promoting."
        )
    winner = _winner(contenders, device.kind)
    record = _record(space, winner, default, folder.relative_to(logs))
    path = schedules / device.slug / f"{problem.variant.pass_}.jsonl"
    merge_records(path, [record])
    add_verdict(folder, winner.trial.trial, [c.to_dict() for c in contenders])
    for contender in (default, winner):
        with contextlib.suppress(OSError):  # the verdict stands where there is no room for that
            keep(built[contender.schedule])
    return Promoted(record, path, tuple(contenders), _message(problem, winner, default))


def _best_trials(space: Space, folder: Path, top: int) -> list[tuple[Trial, Schedule]]:
    """The default's newest trial and the fastest others of this problem, kernel and versions."""
    variant = space.problem.variant
    program = program_version(space.family, variant.pass_)
    key = tuning_key(space.problem, space.family, space.device.slug, program, versions())
    found: dict[Schedule, Trial] = {}
    for trial in TrialLog(folder).load() if folder.is_dir() else []:
        if trial.key != key or trial.problem != space.problem.name or trial.us is None:
            continue
        try:
            schedule = schedule_from_dict(space.family, variant.pass_, trial.decisions)
        except InfeasibleSchedule:
            continue
        known = found.get(schedule)
        if schedule == space.default or known is None or trial.relative < known.relative:
            found[schedule] = trial
    default = found.pop(space.default, None)
    if default is None:
        raise CorruptRecord(
            f"{folder / TRIALS} holds no measured trial of the default schedule of "
            f"{space.problem.name} for this kernel and these versions; tune it first."
        )
    best = sorted(found.items(), key=lambda item: item[1].relative)[:top]
    return [(default, space.default), *((trial, schedule) for schedule, trial in best)]


def _measure(
    space: Space,
    chosen: Sequence[tuple[Trial, Schedule]],
    built: dict[Schedule, Path | Failure],
    runner: RunnerLike,
    rounds: int,
) -> list[Contender]:
    """Time everything that was built and is right; the first is the default."""
    outcomes: list[Path | Measured | Failure] = [built[schedule] for _, schedule in chosen]
    right = [(index, path) for index, path in enumerate(outcomes) if isinstance(path, Path)]
    times = runner.time(space.problem, [path for _, path in right], rounds)
    require_served(times)
    for (index, _), measured in zip(right, times, strict=True):
        outcomes[index] = measured
    default = outcomes[0]
    contenders = []
    for (trial, schedule), outcome in zip(chosen, outcomes, strict=True):
        contender = Contender(trial, schedule)
        if isinstance(outcome, Failure):
            contender = replace(contender, failure=outcome)
        elif isinstance(outcome, Measured) and isinstance(default, Measured):
            # A hopeless one has been timed once only.
            ratios = [a / b for a, b in zip(default.runs_us, outcome.runs_us, strict=False)]
            contender = replace(
                contender,
                us=outcome.us,
                ratio=statistics.median(ratios),
                wins=sum(ratio > 1 for ratio in ratios) / len(ratios),
            )
        contenders.append(contender)
    return contenders


def _sustain(
    space: Space,
    contenders: list[Contender],
    built: dict[Schedule, Path | Failure],
    runner: RunnerLike,
) -> list[Contender]:
    """Time the best of those that are clearly ahead back to back, beside the default."""
    default = contenders[0]
    best = sorted(_clear(contenders, space.device.kind), key=lambda c: -c.merit)
    chosen = [default, *best[:SUSTAINED_CONTENDERS]]
    paths = [path for c in chosen if isinstance(path := built[c.schedule], Path)]
    if len(chosen) < 2 or len(paths) < len(chosen):
        return contenders
    outcomes = runner.sustain(space.problem, paths, SUSTAINED_ROUNDS)
    require_served(outcomes)
    measured: dict[Schedule, Contender] = {}
    for contender, outcome in zip(chosen, outcomes, strict=True):
        if isinstance(outcome, Failure):
            measured[contender.schedule] = replace(contender, failure=outcome, ratio=None)
        elif isinstance(outcomes[0], Measured):
            pairs = zip(outcomes[0].runs_us, outcome.runs_us, strict=True)
            measured[contender.schedule] = replace(
                contender,
                sustained_us=outcome.us,
                sustained_ratio=statistics.median(a / b for a, b in pairs),
            )
    return [measured.get(contender.schedule, contender) for contender in contenders]


def _clear(contenders: Sequence[Contender], kind: str) -> list[Contender]:
    """Those that beat the default, the first, clearly."""
    return [
        c
        for c in contenders[1:]
        if c.ratio is not None
        and c.wins is not None
        and c.ratio >= CLEARLY[kind]
        and c.wins >= SHARE_OF_ROUNDS
    ]


def _winner(contenders: Sequence[Contender], kind: str) -> Contender:
    """The one of most merit that beats the default clearly, else the default."""
    clear = _clear(contenders, kind)
    if any(c.sustained_ratio is not None for c in clear):
        clear = [c for c in clear if (c.sustained_ratio or 0.0) >= SUSTAINED_LEAST]
    return max(clear, key=lambda c: c.merit, default=contenders[0])


def _record(space: Space, winner: Contender, default: Contender, folder: Path) -> Record:
    """The verdict with its evidence; times are those of this measurement."""
    assert winner.ratio is not None
    assert default.us is not None
    return Record(
        problem=space.problem,
        family=space.family,
        decisions=winner.schedule.to_dict(),
        us=default.us / winner.ratio,
        us_default=default.us,
        device=device_summary(space.device),
        program=program_version(space.family, space.problem.variant.pass_),
        versions=versions(),
        date=utc_now(),
        log=f"{(folder / TRIALS).as_posix()}#{winner.trial.trial}",
    )


def _message(problem: Problem, winner: Contender, default: Contender) -> str:
    if winner is default:
        return f"{problem.name}: nothing beats the default schedule clearly, so it is the winner."
    assert winner.ratio is not None
    return (
        f"{problem.name}: {winner.schedule.to_dict()} is {winner.ratio:.2f} times as fast as the "
        "default schedule."
    )
