"""One tuning job: propose, build, check, time, write down; until trials or time run out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from fa2tvm.device import Device
from fa2tvm.lookup import family_for, home
from fa2tvm.problem import Problem
from fa2tvm.tune.builder import Builder
from fa2tvm.tune.database import TrialLog, job_lock
from fa2tvm.tune.loop import Budget, Job
from fa2tvm.tune.nouns import BuilderLike, JobResult, Options, Progress, RunnerLike
from fa2tvm.tune.provenance import write_job
from fa2tvm.tune.runner import Runner
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import Space
from fa2tvm.tune.worker import WorkerSpec


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
        job = Job(
            space=space,
            log=TrialLog(folder),
            builder=builder,
            runner=runner,
            options=options,
            budget=Budget(trials, seconds),
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

    def spec(role: str, threads: int | None) -> WorkerSpec:
        limit = options.memory_bytes if device.kind == "llvm" else None
        return WorkerSpec(f"fa2tvm.tune.{role}", scratch, options.plugins, limit, threads)

    builder = Builder(
        problem.variant,
        device,
        spec("builder", 1),
        n_workers=options.builders or max(1, device.cores),
        timeout_s=options.build_timeout_s,
    )
    return builder, Runner(problem, spec("harness", None), seed, options.run_timeout_s)
