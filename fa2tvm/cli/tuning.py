"""Commands that make something: tune, promote, export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa2tvm.cli.options import (
    DeviceOption,
    KeyOption,
    ServerTimeoutOption,
    TrackerOption,
    choose,
    device_named,
    place_of,
    require_some,
    takes_problems,
)
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem, Variant

if TYPE_CHECKING:
    from fa2tvm.device import Device
    from fa2tvm.tune.nouns import Options

FamilyOption = Annotated[
    str | None,
    typer.Option(
        help="Kernel family (default: the fastest of the device); sm80 runs on Hopper too.",
        show_default=False,
    ),
]
# Trials of each problem that `tune --promote` measures again.
_TOP_OF_A_JOB = 3


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(takes_problems(tune))
    app.command()(takes_problems(promote))
    app.command()(takes_problems(export))
    app.command()(serve)


def export(
    problems: list[Problem],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the pack.")],
    device: DeviceOption = "native",
) -> None:
    """Compile problems into a pack that runs without the compiler.

    Each module serves every batch size, head count, length and stride of its variant; give
    several lengths of one variant to ship a schedule for each length class.
    """
    from fa2tvm.pack import PackEntry, export_pack

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
    family: FamilyOption = None,
    trials: Annotated[int, typer.Option(help="At most so many candidates a problem.")] = 64,
    seconds: Annotated[
        float | None,
        typer.Option(help="At most so long a variant's problems together.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search and of the inputs.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Learn from earlier trials of the problem.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Root of the logs (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
    then_promote: Annotated[
        bool, typer.Option("--promote", help="Promote each job's best at once, as `promote` does.")
    ] = False,
    schedules: Annotated[
        Path | None,
        typer.Option(help="With --promote: root of the records.", show_default=False),
    ] = None,
    only_build: Annotated[
        bool,
        typer.Option(
            "--only-build",
            help="Only build what the jobs begin with into the cache of FA2TVM_HOME; needs no GPU.",
        ),
    ] = False,
    tracker: TrackerOption = None,
    key: KeyOption = None,
    server_timeout: ServerTimeoutOption = 60.0,
) -> None:
    """Search for the fastest schedule of each problem with MetaSchedule.

    Problems that differ in their sizes only are tuned together: a candidate is built once and timed
    on each. On a GPU several variants go on beside each other. Every finished trial is on disk at
    once; Ctrl-C keeps what was found. `fa2tvm promote` then makes the best schedule the one that
    calls use.
    """
    from fa2tvm.tune import job
    from fa2tvm.tune.nouns import JobResult, Options
    from fa2tvm.tune.progress import LiveProgress
    from fa2tvm.tune.promote import promote_together

    groups = _by_variant(require_some(problems))
    target, server = place_of(device, tracker, key, server_timeout)
    options = replace(Options.of(target), server=server)
    if only_build:
        _build(groups, target, seed, options, family)
        return
    titles = [g[0].name if len(g) == 1 else f"{g[0].variant.name} ({len(g)})" for g in groups]
    failed: list[int] = []
    interrupted: list[int] = []
    with job.open_workers(target, options) as workers, LiveProgress() as live:
        shared: dict[str, Any] = {"options": options, "workers": workers, "family": family}

        def finished(number: int, results: list[JobResult] | InfeasibleSchedule) -> None:
            live.drop(titles[number])
            if isinstance(results, InfeasibleSchedule):
                failed.append(number)
                typer.echo(f"fa2tvm: {results}", err=True)
                return
            for result in results:
                typer.echo(f"{result.problem.name}: {result.message}")
                typer.echo(f"log: {result.folder}")
            if results[0].stopped == "interrupted":
                interrupted.append(number)
            elif then_promote:
                roots: dict[str, Any] = {"logs": out, "schedules": schedules}
                for verdict in promote_together(
                    groups[number], target, top=_TOP_OF_A_JOB, **roots, **shared
                ):
                    typer.echo(verdict.message)

        job.tune_beside(
            groups,
            target,
            finished,
            trials=trials,
            seconds=seconds,
            seed=seed,
            resume=resume,
            out=out,
            progress=lambda number, state: live.show(state, titles[number]),
            **shared,
        )
    if interrupted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(2)


def _build(
    groups: list[list[Problem]], target: Device, seed: int, options: Options, family: str | None
) -> None:
    """Build what the jobs would begin with, and say what was refused."""
    from fa2tvm.tune.job import build_first

    made = build_first(groups, target, seed, options, family)
    refused = [(p, m) for p, m in made.items() if not isinstance(m, Path)]
    for (variant, schedule), failure in refused:
        typer.echo(f"{variant.name} {schedule.to_dict()}: {failure.reason}", err=True)
    typer.echo(f"{len(made) - len(refused)} of {len(made)} modules are in the cache")


def _by_variant(problems: list[Problem]) -> list[list[Problem]]:
    groups: dict[Variant, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.variant, []).append(problem)
    return list(groups.values())


def promote(
    problems: list[Problem],
    device: DeviceOption = "native",
    family: FamilyOption = None,
    top: Annotated[int, typer.Option(help="Trials that are measured again.")] = 5,
    rounds: Annotated[
        int | None, typer.Option(help="Interleaved rounds (default: 15, on a GPU 21).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 1,
    logs: Annotated[
        Path | None,
        typer.Option(help="Root of the logs (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
    schedules: Annotated[
        Path | None,
        typer.Option(help="Root of the records (default: in FA2TVM_HOME).", show_default=False),
    ] = None,
    tracker: TrackerOption = None,
    key: KeyOption = None,
    server_timeout: ServerTimeoutOption = 60.0,
) -> None:
    """Measure the best trials of each problem again beside the default and record the winner.

    From then on calls use it. To ship records with the package, give its folders: --logs
    tuning_logs --schedules schedules.
    """
    from fa2tvm.tune.job import open_workers
    from fa2tvm.tune.nouns import Options
    from fa2tvm.tune.promote import promote_together

    groups = _by_variant(require_some(problems))
    target, server = place_of(device, tracker, key, server_timeout)
    options = replace(Options.of(target), server=server)
    with open_workers(target, options) as workers:
        for group in groups:
            for verdict in promote_together(
                group,
                target,
                logs=logs,
                schedules=schedules,
                family=family,
                top=top,
                rounds=rounds,
                seed=seed,
                options=options,
                workers=workers,
            ):
                typer.echo(verdict.message)
                typer.echo(f"wrote {verdict.path}")


def serve(
    tracker: Annotated[str, typer.Option(help="HOST:PORT of a tracker of TVM's RPC.")],
    key: Annotated[str, typer.Option(help="What to be called there.")],
    device: Annotated[
        str, typer.Option(help="native (this CPU) or cuda (this machine's first visible GPU).")
    ] = "native",
    host: Annotated[
        str, typer.Option(help="Address to listen on; whoever reaches it can run code here.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
) -> None:
    """Offer this machine's CPU or GPU to `fa2tvm tune --tracker` on other machines.

    One server serves one job at a time; start one for each GPU (CUDA_VISIBLE_DEVICES). The tracker
    is TVM's own: python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 9190.
    """
    from fa2tvm.tune import serving
    from fa2tvm.tune.tracker import Server

    choose("device", [device], ("native", "cuda"))
    serving.serve(device_named(device), Server(tracker, key), host, port)
