"""The command bench: measure, report, plot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa2tvm.cli.options import device_named, takes_problems
from fa2tvm.errors import UnsupportedProblem, require_at_least
from fa2tvm.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fa2tvm.bench.rows import Row


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(takes_problems(bench))


def bench(
    problems: list[Problem],
    device: Annotated[
        str, typer.Option(help="native (the CPU) or cuda (the current GPU).")
    ] = "native",
    peer: Annotated[
        list[str] | None, typer.Option(help="Only these peers; may repeat (default: all).")
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Time and memory from N = 512 to 16384.")
    ] = False,
    calls: Annotated[bool, typer.Option("--calls", help="CPU time of one tiny call.")] = False,
    both: Annotated[
        bool, typer.Option("--both", help="Also a forward and its backward in one timed call.")
    ] = False,
    ablation: Annotated[
        str | None,
        typer.Option(
            help="v1-v2, on a GPU: what FlashAttention-2 changed, each change alone and all.",
            show_default=False,
        ),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="Take our modules from this pack.", show_default=False)
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option(
            help="Folder of FlashAttention-3's library: fa3/_C.so and libcudart.so.12, bfloat16, "
            "head dims 64, 128 and 256.",
            show_default=False,
        ),
    ] = None,
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

    Without a problem it measures the speed table of the CPU in all three dtypes, or with
    --device cuda that of the GPU in bfloat16, forward.
    Writes the rows as JSON lines and CSV, their tables as Markdown, and a picture of them.
    """
    from fa2tvm.bench.rows import read_rows

    if report is not None:
        _show(read_rows(report), plot)
        return
    import torch

    import fa2tvm
    from fa2tvm.bench import ablation as ablations
    from fa2tvm.bench import suite
    from fa2tvm.bench.machine import provenance
    from fa2tvm.bench.measure import Policy
    from fa2tvm.bench.packages import give_flash_attention_3
    from fa2tvm.bench.report import markdown
    from fa2tvm.bench.rows import write_rows

    if scaling + calls + bool(ablation) + bool(problems) > 1:
        raise UnsupportedProblem(
            "more than one of --scaling, --calls, --ablation and problems is given; choose one."
        )
    if device not in ("native", "cuda"):
        raise UnsupportedProblem(
            f"device is {device!r}, but only what is here can be measured; say native or cuda."
        )
    target = device_named(device)
    kind = "cpu" if device == "native" else "cuda"
    if scaling and kind == "cuda":
        raise UnsupportedProblem("--scaling is for the CPU; the GPU's table has all lengths.")
    peers = suite.known_peers(peer or (), kind)
    if fa3 is not None:
        give_flash_attention_3(fa3)
    if pack is not None:
        fa2tvm.use_pack(pack)
    require_at_least(0, seconds=seconds, sustained=sustained, seed=seed)
    require_at_least(1, threads=threads)
    if threads is not None:
        torch.set_num_threads(threads)
    policy = Policy(seconds, sustained)
    table = "cpu" if kind == "cpu" else "gpu"
    if ablation is not None:
        ablations.require_known(ablation, kind)
        table = f"ablation_{ablation.replace('-', '_')}"
    what = "scaling" if scaling else "calls" if calls else "problems" if problems else table
    run = provenance(kind)
    rows: Iterable[Row]
    if scaling:
        rows = suite.scaling(policy, run, seed)
    elif calls:
        rows = suite.calls(run, seed, kind)
    elif ablation is not None:
        from fa2tvm.tune.job import build_all
        from fa2tvm.tune.nouns import Options

        # On all cores; one after the other they would take minutes.
        build_all(ablations.programs(target), target, Options.of(target))
        rows = suite.speed(ablations.cells(), ablations.COMPARED, policy, what, run, seed, kind)
    else:
        cells = suite.cells_of(problems)
        if not problems:
            cells = suite.speed_table() if kind == "cpu" else suite.gpu_table(["forward"])
        if both:
            cells = [(w, dtype, (*passes, "both")) for w, dtype, passes in cells]
        rows = suite.speed(cells, peers, policy, what, run, seed, kind)
    path = out or Path("benchmarks") / target.slug / f"{what}.jsonl"
    measured = []
    for row in rows:
        measured.append(row)
        write_rows(measured, path)
        typer.echo(progress_line(row), err=True)
    # Whatever else ran at the start may be over: the better of two measurements is the peak.
    after = provenance(kind)
    for peak in ("peak_gflops", "sustained_gflops", "memory_gbs"):
        if peak in run:
            run[peak] = max(run[peak] or 0, after[peak] or 0) or None
    for written in write_rows(measured, path):
        typer.echo(f"wrote {written}", err=True)
    tables = path.with_suffix(".md")
    tables.write_text(f"# {what}\n\n{markdown(measured)}", encoding="utf-8")
    typer.echo(f"wrote {tables}", err=True)
    _show(measured, plot or path.with_suffix(".png"))


def progress_line(row: Row) -> str:
    """What a row says, on one line."""
    name = f"{row['workload']} {row['dtype']} {row['pass']} {row['peer']}"
    if row["error"] is not None:
        return f"{name}: {row['error']}"
    figures = f"{row['us_p50'] / 1000:.3f} ms"
    if row["tflops"] is not None:
        figures += f", {1000 * row['tflops']:.0f} GFLOP/s {row['mode']}"
    return f"{name}: {figures}"


def _show(rows: list[Row], picture: Path | None) -> None:
    from fa2tvm.bench.plot import plot
    from fa2tvm.bench.report import markdown

    typer.echo(markdown(rows))
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("no picture: matplotlib is not installed", err=True)
    elif picture is not None:
        typer.echo(f"wrote {plot(rows, picture)}", err=True)
