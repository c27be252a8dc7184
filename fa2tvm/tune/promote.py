"""From evidence to verdict: measure the best trials again beside the default, keep the winner."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fa2tvm.device import Device
from fa2tvm.errors import CorruptRecord, InfeasibleSchedule
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
from fa2tvm.tune.job import make_workers
from fa2tvm.tune.nouns import BuilderLike, Failure, Measured, Options, RunnerLike
from fa2tvm.tune.provenance import utc_now
from fa2tvm.tune.space import Space

# A winner must be this much faster in the median round, and faster in this share of the rounds.
CLEARLY = 1.02
SHARE_OF_ROUNDS = 0.75
ROUNDS = 15


@dataclass(frozen=True)
class Contender:
    """One schedule that was measured again.

    Attributes
    ----------
    ratio
        Median over the rounds of default's time / its own; None where it failed.
    wins
        Share of the rounds in which it beat the default.
    """

    trial: Trial
    schedule: Schedule
    us: float | None
    ratio: float | None
    wins: float | None
    failure: Failure | None


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


def promote(
    problem: Problem,
    device: Device,
    *,
    logs: Path | None = None,
    schedules: Path | None = None,
    top: int = 5,
    rounds: int = ROUNDS,
    seed: int = 1,
    family: str | None = None,
    options: Options | None = None,
    workers: tuple[BuilderLike, RunnerLike] | None = None,
) -> Promoted:
    """Measure the best trials of a problem again and write the winner into `schedules`.

    The contenders are checked against the oracle with fresh data and timed in interleaved rounds in
    one process. Where none beats the default clearly, the default is the recorded winner.

    Parameters
    ----------
    logs, schedules
        Roots of the logs and of the records; those of the user's home by default.
    top
        Trials that are measured again.

    Raises
    ------
    CorruptRecord
        Where the log holds no measured trial of this problem, kernel and versions.
    InfeasibleSchedule
        Where the default schedule cannot be built or is wrong.
    JobBusy
        Where a tuning job is running in the log's folder.
    """
    family = family or family_for(device)
    options = options or Options()
    space = Space.of(problem, device, family)
    logs = logs if logs is not None else home() / "tuning_logs"
    schedules = schedules if schedules is not None else home() / "schedules"
    folder = logs / device.slug / problem.variant.pass_ / problem.name
    chosen = _best_trials(space, folder, top)
    with job_lock(folder), tempfile.TemporaryDirectory(prefix="fa2tvm-promote-") as scratch:
        builder, runner = workers or make_workers(problem, device, seed, Path(scratch), options)
        try:
            contenders = _measure(chosen, builder, runner, rounds)
        finally:
            builder.close()
            runner.close()
    default = contenders[0]
    if default.us is None:
        raise InfeasibleSchedule(
            f"default schedule {default.schedule.to_dict()} of {problem.name} failed "
            f"({default.failure}); correct the kernel before promoting."
        )
    winner = _winner(contenders)
    record = _record(space, winner, default, folder.relative_to(logs))
    path = schedules / device.slug / f"{problem.variant.pass_}.jsonl"
    merge_records(path, [record])
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
    chosen: Sequence[tuple[Trial, Schedule]],
    builder: BuilderLike,
    runner: RunnerLike,
    rounds: int,
) -> list[Contender]:
    """Build, check and time everything; the first is the default."""
    runner.start()
    outcomes: list[Path | Measured | Failure] = list(builder.build([s for _, s in chosen]))
    builder.close()
    for index, built in enumerate(outcomes):
        if isinstance(built, Path):
            outcomes[index] = runner.check(built) or built
    right = [(index, path) for index, path in enumerate(outcomes) if isinstance(path, Path)]
    for (index, _), times in zip(right, runner.time([p for _, p in right], rounds), strict=True):
        outcomes[index] = times
    default = outcomes[0]
    contenders = []
    for (trial, schedule), outcome in zip(chosen, outcomes, strict=True):
        contender = Contender(trial, schedule, None, None, None, None)
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


def _winner(contenders: Sequence[Contender]) -> Contender:
    """The one with the best median ratio that beats the default clearly, else the default."""
    default, *others = contenders
    clear = [
        c
        for c in others
        if c.ratio is not None
        and c.wins is not None
        and c.ratio >= CLEARLY
        and c.wins >= SHARE_OF_ROUNDS
    ]
    return max(clear, key=lambda c: c.ratio or 0.0, default=default)


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
