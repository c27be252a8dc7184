"""The command evidence: everything that is claimed of a GPU, measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fa2tvm.cli.options import device_named
from fa2tvm.errors import UnsupportedProblem, require_at_least
from fa2tvm.problem import PASSES


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(evidence)


def evidence(
    device: Annotated[
        str, typer.Option(help="cuda (the current GPU); with --build also a GPU by its name.")
    ] = "cuda",
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="Only build what the run needs into the cache of FA2TVM_HOME; needs no GPU.",
        ),
    ] = False,
    pass_: Annotated[
        str, typer.Option("--pass", help="forward; backward is also with its forward in one call.")
    ] = "forward",
    seconds: Annotated[float, typer.Option(help="After so long no cell is begun.")] = 130.0,
    fa3: Annotated[
        Path | None,
        typer.Option(
            help="Folder of FlashAttention-3's library, as for bench.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Rows go here (default: benchmarks/<device>).")
    ] = None,
) -> None:
    """Measure the GPU's whole table in one run that compiles nothing.

    Burst and sustained speed of all peers and of our default beside the tuned schedules, the cost
    of a call, and our modules' checks: every cell once, then again while time is left. Run it with
    --build first.
    """
    from fa2tvm.bench import evidence as evidences

    require_at_least(0, seconds=seconds)
    target = device_named(device)
    if target.kind != "cuda":
        raise UnsupportedProblem(
            f"device is {device!r}, but evidence is of a GPU; say cuda or a GPU's name."
        )
    if pass_ not in PASSES:
        raise UnsupportedProblem(f"pass is {pass_!r}, but it must be one of {', '.join(PASSES)}.")
    plan = evidences.phases(pass_)
    if build:
        from fa2tvm.tune.job import build_all
        from fa2tvm.tune.nouns import Options

        made = build_all(evidences.programs(plan, target, calls=True), target, Options.of(target))
        refused = [(p, m) for p, m in made.items() if not isinstance(m, Path)]
        for (variant, schedule), failure in refused:
            typer.echo(f"{variant.name} {schedule.to_dict()}: {failure.reason}", err=True)
        typer.echo(f"{len(made) - len(refused)} of {len(made)} modules are in the cache")
        raise typer.Exit(1 if refused else 0)
    if device != "cuda":
        raise UnsupportedProblem(f"device is {device!r}, but only the GPU here can be measured.")
    from fa2tvm.bench.machine import provenance
    from fa2tvm.bench.packages import give_flash_attention_3
    from fa2tvm.bench.report import markdown
    from fa2tvm.cli.measuring import progress_line

    if fa3 is not None:
        give_flash_attention_3(fa3)
    found = evidences.Evidence(
        plan,
        provenance("cuda"),
        seconds,
        out or Path("benchmarks") / target.slug,
        say=lambda row: typer.echo(progress_line(row), err=True),
    )
    found.measure()
    for what in found.left_out:
        typer.echo(f"no time was left for {what}", err=True)
    for rows in found.rows.values():
        typer.echo(markdown(list(rows.values())))
