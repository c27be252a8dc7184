"""Tuning jobs: propose, build, check, time, write down; until trials or time run out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fa2tvm import cache, files
from fa2tvm.blocks import ceil_div
from fa2tvm.device import Device, usable_cores
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem, require_at_least
from fa2tvm.lookup import FAMILIES, family_for, home
from fa2tvm.problem import Problem, Variant
from fa2tvm.schedule import Schedule
from fa2tvm.tune.builder import Builder
from fa2tvm.tune.database import TrialLog, job_lock
from fa2tvm.tune.interleave import Finished, run_beside
from fa2tvm.tune.loop import Budget, Loop
from fa2tvm.tune.nouns import Failure, JobResult, Options, Progress, Workers
from fa2tvm.tune.problem_job import Job
from fa2tvm.tune.provenance import write_job
from fa2tvm.tune.remote import RemoteRunner
from fa2tvm.tune.runner import Runner
from fa2tvm.tune.search import Search, first_picks
from fa2tvm.tune.space import Space
from fa2tvm.tune.worker import WorkerSpec

# Threads of a GPU's runner for the oracle on the CPU.
_ORACLE_THREADS = 2
Program: TypeAlias = "tuple[Variant, Schedule]"


def tune(problem: Problem, device: Device, **options: Any) -> JobResult:
    """Search for the fastest schedule of one problem; see `tune_together`."""
    (result,) = tune_together([problem], device, **options)
    return result


def tune_together(
    problems: Sequence[Problem],
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
    workers: Workers | None = None,
) -> list[JobResult]:
    """Search for the fastest schedule of each problem; all are of one variant.

    Each problem has a search of its own, but every candidate is built once and timed on all
    problems. Every finished trial is on disk at once, in `<out>/<device>/<pass>/<problem>/`. An
    interrupt (Ctrl-C) ends the job with what it has found.

    Parameters
    ----------
    trials, seconds
        The job stops at whichever comes first (trials of each problem); None is no limit.
    seed
        Of the search and of the random inputs.
    resume
        Whether earlier trials of the same problem, kernel and versions teach this search.
    out
        Root of the logs; `<home>/tuning_logs` by default.
    workers
        Builder and runner to use, which stay open; worker processes of its own by default.

    Raises
    ------
    InfeasibleSchedule
        Where the default schedule does not fit, or cannot be built, or is wrong.
    JobBusy
        Where another process tunes into the same folder.
    ServerUnavailable
        Where a device elsewhere is meant, and no server is to be had (any more); what was tried is
        written down.
    UnsupportedProblem
        Where no family runs on the device, the problems are of several variants, or a limit is
        none.
    """
    found: list[list[JobResult] | InfeasibleSchedule] = []
    tell = progress or (lambda _: None)
    tune_beside(
        [problems],
        device,
        lambda _, results: found.append(results),
        trials=trials,
        seconds=seconds,
        seed=seed,
        resume=resume,
        out=out,
        progress=lambda _, state: tell(state),
        family=family,
        options=options,
        workers=workers,
    )
    (results,) = found
    if isinstance(results, InfeasibleSchedule):
        raise results
    return results


def tune_beside(
    groups: Sequence[Sequence[Problem]],
    device: Device,
    finished: Finished,
    *,
    trials: int | None = 64,
    seconds: float | None = None,
    seed: int = 0,
    resume: bool = True,
    out: Path | None = None,
    progress: Callable[[int, Progress], None] | None = None,
    family: str | None = None,
    options: Options | None = None,
    workers: Workers | None = None,
) -> None:
    """Search for the fastest schedules of several variants; see `tune_together`.

    On a GPU all go on beside each other, the first ones first (interleave.py); on a CPU, where
    builds would disturb the times, one after the other. `seconds` is for each group.

    Parameters
    ----------
    groups
        Problems of one variant each.
    finished
        Gets the number of a group as it ends, its locks released, and what it found or why it could
        not begin.
    progress
        Gets the number of a group and where it stands.

    Raises
    ------
    JobBusy, KeyboardInterrupt, ServerUnavailable, UnsupportedProblem
        As `tune_together` does.
    """
    require_at_least(1, trials=trials)
    require_at_least(0, seconds=seconds, seed=seed)
    for problems in groups:
        _require_one_variant(problems)
    options = options or Options.of(device)
    root = out if out is not None else home() / "tuning_logs"
    with contextlib.ExitStack() as stack:
        builder, runner = workers or stack.enter_context(open_workers(device, options))
        locks = [stack.enter_context(contextlib.ExitStack()) for _ in groups]

        def end(number: int, results: list[JobResult] | InfeasibleSchedule) -> None:
            locks[number].close()
            finished(number, results)

        def begin(number: int) -> Loop | None:
            problems = groups[number]
            its_family = family or family_for(device, problems[0].variant)
            try:
                spaces = [Space.of(problem, device, its_family) for problem in problems]
            except InfeasibleSchedule as error:
                end(number, error)
                return None
            folders = [log_folder(root, problem, device, its_family) for problem in problems]
            for folder in folders:
                locks[number].enter_context(job_lock(folder))
            for folder, space in zip(folders, spaces, strict=True):
                write_job(folder, space, seed, trials, seconds, options.server)
            runner.start()
            builder.start()
            share = ceil_div(options.batch, len(problems))
            jobs = [
                Job(space, TrialLog(folder), Search(space, seed, share, options.first_batch))
                for folder, space in zip(folders, spaces, strict=True)
            ]
            tell = (lambda state: progress(number, state)) if progress else (lambda _: None)
            budget = Budget(trials, seconds)
            return Loop(jobs, builder, runner, options, budget, seed, tell, order=number)

        if options.overlap:
            run_beside([begin(number) for number in range(len(groups))], resume, end)
            return
        for number in range(len(groups)):
            alone: list[Loop | None] = [None] * len(groups)
            alone[number] = begin(number)
            if run_beside(alone, resume, end):
                return


def _require_one_variant(problems: Sequence[Problem]) -> None:
    if len({problem.variant for problem in problems}) != 1:
        names = ", ".join(dict.fromkeys(problem.variant.name for problem in problems))
        raise UnsupportedProblem(
            f"problems are of the variants {names or 'none'}, but one job tunes one; split them."
        )


def build_first(
    groups: Sequence[Sequence[Problem]],
    device: Device,
    seed: int,
    options: Options,
    family: str | None = None,
) -> dict[Program, Path | Failure]:
    """Build what jobs of these problems begin with into the user's cache, where they find it.

    Needs no GPU: the machine that tunes has its cores for what the searches propose.
    """
    programs = [
        program
        for problems in groups
        for program in first_programs(problems, device, seed, options, family)
    ]
    return build_all(programs, device, options)


def build_all(
    programs: Sequence[Program], device: Device, options: Options
) -> dict[Program, Path | Failure]:
    """Build programs on all cores and put them into the user's cache; or why they were refused."""
    with open_workers(device, options) as (builder, _):
        builder.start()
        builds = {program: builder.submit(*program) for program in programs}
        made = {program: build.result() for program, build in builds.items()}
        for module in made.values():
            keep(module)
    return made


def keep(module: Path | Failure) -> None:
    """Put a module into the user's cache, so that the first call finds it made."""
    if isinstance(module, Failure) or not module.is_dir():
        return
    kept = cache.root() / module.name
    if not kept.exists():
        with cache.staging(kept.parent) as staged:
            shutil.copytree(module, staged, dirs_exist_ok=True)
            cache.put(staged, kept)


def first_programs(
    problems: Sequence[Problem],
    device: Device,
    seed: int,
    options: Options,
    family: str | None = None,
) -> list[Program]:
    """What a job of these problems builds first: the default and its first batch."""
    family = family or family_for(device, problems[0].variant)
    space = Space.of(problems[0], device, family)
    picks = first_picks(space, seed, options.first_batch)[: options.first_batch]
    return [(problems[0].variant, schedule) for schedule in (space.default, *picks)]


def log_folder(root: Path, problem: Problem, device: Device, family: str) -> Path:
    """Where the log of a problem lies below a root of logs.

    A family that the device has a faster one for is named.
    """
    known = family in FAMILIES[device.kind]
    slower = known and family != family_for(device, problem.variant)
    name = f"{problem.name}_{family}" if slower else problem.name
    return root / device.slug / problem.variant.pass_ / name


@contextlib.contextmanager
def open_workers(device: Device, options: Options) -> Iterator[Workers]:
    """Worker processes that build and run candidates; they and all modules end with the block."""
    with files.scratch("fa2tvm-tune-") as scratch:
        workers = make_workers(device, scratch, options)
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()


def _spec(
    role: str, threads: int | None, device: Device, scratch: Path, options: Options
) -> WorkerSpec:
    limit = options.memory_bytes if device.kind == "llvm" else None
    return WorkerSpec(f"fa2tvm.tune.{role}", scratch, options.plugins, limit, threads)


def make_workers(device: Device, scratch: Path, options: Options) -> tuple[Builder, Runner]:
    """Worker processes that build and run candidates; modules go into `scratch`."""
    builder = Builder(
        device,
        _spec("builder", 1, device, scratch, options),
        n_workers=options.builders or usable_cores(),
        timeout_s=options.build_timeout_s,
    )
    # Beside a GPU the cores are the builders'.
    threads = None if device.kind == "llvm" else _ORACLE_THREADS
    spec = _spec("harness", threads, device, scratch, options)
    timeout_s = options.run_timeout_s
    if options.server is not None:
        return builder, RemoteRunner(spec, options.server, device, timeout_s)
    return builder, Runner(spec, device.kind, timeout_s)
