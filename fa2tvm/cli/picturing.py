"""Commands that make pages to look at: viz, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(viz)
    report = typer.Typer(help="Pages with pictures, from logs and rows.", no_args_is_help=True)
    report.command("tune")(report_tune)
    report.command("bench")(report_bench)
    app.add_typer(report, name="report")


def viz(
    seq_q: Annotated[int, typer.Option(help="Queries.")] = 4,
    seq_kv: Annotated[int | None, typer.Option(help="Keys (default: as queries).")] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 3,
    block_q: Annotated[int, typer.Option(help="Rows of a query block.")] = 2,
    block_kv: Annotated[int, typer.Option(help="Rows of a key block.")] = 2,
    mask: Annotated[
        Literal["full", "bottom_right", "top_left"],
        typer.Option(help="None, or causal with one of the two alignments."),
    ] = "full",
    scale: Annotated[
        float | None, typer.Option(help="Softmax scale (default: 1/sqrt(head dim)).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the numbers.")] = 3,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("fa2tvm_viz.html"),
) -> None:
    """Write a page that plays FlashAttention-2 (and 1) block by block; open it in a browser.

    It is one file without network. Everything can be changed in the page as well.
    """
    from fa2tvm.viz.render import write_page
    from fa2tvm.viz.setting import Setting

    keys = seq_q if seq_kv is None else seq_kv
    setting = Setting(seq_q, keys, head_dim, block_q, block_kv, mask, scale, seed)
    typer.echo(f"wrote {write_page(out, setting)}")


def report_tune(
    logs: Annotated[
        Path | None,
        typer.Argument(help="A job's folder, or one above several (default: in FA2TVM_HOME)."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("fa2tvm_tune.html"),
) -> None:
    """What a search saw, learned and found, from its log: one page and its pictures as PNG."""
    from fa2tvm.lookup import home
    from fa2tvm.viz import tune_report

    folders = tune_report.find_logs(logs or home() / "tuning_logs")
    for path in tune_report.write(folders, out):
        typer.echo(f"wrote {path}")


def report_bench(
    rows: Annotated[Path, typer.Argument(help="Rows: a .jsonl file, or a folder of them.")] = Path(
        "benchmarks"
    ),
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("fa2tvm_bench.html"),
) -> None:
    """Rates, roofline, share of peak and ratios, from rows: one page and its pictures as PNG."""
    from fa2tvm.bench.rows import read_rows
    from fa2tvm.viz import bench_report

    for path in bench_report.write(read_rows(rows), out):
        typer.echo(f"wrote {path}")
