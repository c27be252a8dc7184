"""Commands that make something: tune, promote, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fa2tvm.cli.options import DeviceOption, device_named, require_some, takes_problems
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(takes_problems(tune))
    app.command()(takes_problems(promote))
    app.command()(takes_problems(export))


def export(
    problems: list[Problem],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pack.")],
    device: DeviceOption = "native",
) -> None:
    """Compile problems into a pack that runs without the compiler.

    Each module serves every batch size, head count, length and stride of its variant; give
    several lengths of one variant to ship a schedule for each length class.
    """
    from fa2tvm.compile import PackEntry, export_pack

    target = device_named(device)
    entries = {}
    for problem in require_some(problems):
        found = lookup(problem, target)
        entry = PackEntry(problem.variant, found.schedule, target, problem.length_class)
        entries[problem.variant, problem.length_class] = entry
        typer.echo(f"{problem.name}: schedule from {found.origin}", err=True)
    typer.echo(f"wrote {export_pack(entries.values(), out)}")


def tune(
    problems: list[Problem],
    device: DeviceOption = "native",
    trials: Annotated[int, typer.Option(help="At most so many candidates a problem.")] = 64,
    seconds: Annotated[
        float | None, typer.Option(help="At most so long a problem.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search and of the inputs.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Learn from earlier trials of the problem.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Root of the logs (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
) -> None:
    """Search for the fastest schedule of each problem with MetaSchedule.

    Every finished trial is on disk at once; Ctrl-C keeps what was found. `fa2tvm promote` then
    makes the best schedule the one that calls use.
    """
    from fa2tvm.tune import job
    from fa2tvm.tune.progress import LiveProgress

    target = device_named(device)
    for problem in require_some(problems):
        with LiveProgress(problem.name) as live:
            result = job.tune(
                problem,
                target,
                trials=trials,
                seconds=seconds,
                seed=seed,
                resume=resume,
                out=out,
                progress=live.show,
            )
        typer.echo(f"{problem.name}: {result.message}")
        typer.echo(f"log: {result.folder}")


def promote(
    problems: list[Problem],
    device: DeviceOption = "native",
    top: Annotated[int, typer.Option(help="Trials that are measured again.")] = 5,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 1,
    logs: Annotated[
        Path | None,
        typer.Option(help="Root of the logs (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
    schedules: Annotated[
        Path | None,
        typer.Option(help="Root of the records (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
) -> None:
    """Measure the best trials of each problem again beside the default and record the winner.

    From then on calls use it. To ship records with the package, give its folders: --logs
    tuning_logs --schedules schedules.
    """
    from fa2tvm.tune.promote import promote as measure_again

    target = device_named(device)
    for problem in require_some(problems):
        verdict = measure_again(
            problem,
            target,
            logs=logs,
            schedules=schedules,
            top=top,
            rounds=rounds,
            seed=seed,
        )
        typer.echo(verdict.message)
        typer.echo(f"wrote {verdict.path}")
