"""The command bench: measure, report, plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa2tvm.cli.options import takes_problems
from fa2tvm.device import detect
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa2tvm.bench.rows import Row


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(takes_problems(bench))


def bench(
    problems: list[Problem],
    peer: Annotated[
        list[str] | None, typer.Option(help="Only these peers; may repeat (default: all).")
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Time and memory from N = 512 to 16384.")
    ] = False,
    calls: Annotated[bool, typer.Option("--calls", help="CPU time of one tiny call.")] = False,
    seconds: Annotated[float, typer.Option(help="Time of one peer on one problem.")] = 2.0,
    sustained: Annotated[
        float, typer.Option(help="Also measure back to back for this many seconds.")
    ] = 0.0,
    threads: Annotated[
        int | None, typer.Option(help="Threads of both sides (default: PyTorch's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Rows go here (default: benchmarks/<device>/<what>.jsonl).")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Only print the tables of these rows (file or folder).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --report: also write this picture of the rows.")
    ] = None,
) -> None:
    """Compare with F.scaled_dot_product_attention and others: right before timed, interleaved.

    Without a problem it measures the speed table of the CPU in all three dtypes.
    Writes the rows as JSON lines and CSV, their tables as Markdown, and a picture of them.
    """
    from fa2tvm.bench.rows import read_rows

    if report is not None:
        _show(read_rows(report), plot)
        return
    import torch

    from fa2tvm.bench import suite
    from fa2tvm.bench.machine import provenance
    from fa2tvm.bench.measure import Policy
    from fa2tvm.bench.report import markdown
    from fa2tvm.bench.rows import write_rows

    if scaling + calls + bool(problems) > 1:
        raise UnsupportedProblem(
            "more than one of --scaling, --calls and problems is given; choose one."
        )
    if threads is not None:
        torch.set_num_threads(threads)
    policy = Policy(seconds, sustained)
    what = "scaling" if scaling else "calls" if calls else "problems" if problems else "cpu"
    run = provenance()
    rows: Iterable[Row]
    if scaling:
        rows = suite.scaling(policy, run, seed)
    elif calls:
        rows = suite.calls(run, seed)
    else:
        cells = suite.cells_of(problems) if problems else suite.speed_table()
        rows = suite.speed(cells, suite.known_peers(peer or ()), policy, what, run, seed)
    measured = []
    for row in rows:
        measured.append(row)
        typer.echo(_progress(row), err=True)
    # Whatever else ran at the start may be over: the better of two measurements is the peak.
    after = provenance()
    for peak in ("peak_gflops", "memory_gbs"):
        run[peak] = max(run[peak] or 0, after[peak] or 0) or None
    path = out or Path("benchmarks") / detect().slug / f"{what}.jsonl"
    for written in write_rows(measured, path):
        typer.echo(f"wrote {written}", err=True)
    tables = path.with_suffix(".md")
    tables.write_text(f"# {what}\n\n{markdown(measured)}", encoding="utf-8")
    typer.echo(f"wrote {tables}", err=True)
    _show(measured, plot or path.with_suffix(".png"))


def _progress(row: Row) -> str:
    name = f"{row['workload']} {row['dtype']} {row['pass']} {row['peer']}"
    if row["error"] is not None:
        return f"{name}: {row['error']}"
    figures = f"{row['us_p50'] / 1000:.3f} ms"
    if row["tflops"] is not None:
        figures += f", {1000 * row['tflops']:.0f} GFLOP/s"
    return f"{name}: {figures}"


def _show(rows: list[Row], picture: Path | None) -> None:
    from fa2tvm.bench.plot import plot
    from fa2tvm.bench.report import markdown

    typer.echo(markdown(rows))
    if picture is not None:
        typer.echo(f"wrote {plot(rows, picture)}", err=True)
