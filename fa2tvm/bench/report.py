"""Markdown tables, made from the rows only."""

from __future__ import annotations

from collections.abc import Sequence

from fa2tvm.bench import gpu_report
from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import OURS, Cell, absences, cells, geometric_mean, grouped, table

_SDPA_PREFIX = "sdpa"


def markdown(rows: Sequence[Row]) -> str:
    """All tables that the rows hold, each under the machine that they were measured on."""
    parts = []
    for run_rows in grouped(rows, lambda row: str(sorted(row["run"].items()))):
        parts.append(machine_line(run_rows[0]))
        for what_rows in grouped(run_rows, lambda row: str(row["what"])):
            what = what_rows[0]["what"]
            speed = gpu_report.tables if gpu_report.is_gpu(what_rows[0]["run"]) else _speed_tables
            make = {"scaling": _scaling_tables, "calls": _calls_tables}.get(what, speed)
            parts += make(what_rows)
    return "\n\n".join(parts) + "\n"


def machine_line(row: Row) -> str:
    """The provenance of a row as one sentence."""
    run = row["run"]
    if gpu_report.is_gpu(run):
        return gpu_report.machine_line(run)
    commit = (run["commit"] or "no checkout")[:12] + (" with changes" if run["dirty"] else "")
    peak = f"measured FMA peak {run['peak_gflops']} GFLOP/s" if run["peak_gflops"] else "no peak"
    return (
        f"{run['device_name']} ({run['device']}), {run['threads']} threads, {peak}; "
        f"torch {run['torch']}, TVM {run['tvm']}, fa2tvm {run['fa2tvm']} ({commit}), "
        f"{run['date']}."
    )


def ratio(cell: Cell) -> float | None:
    """Time of the fastest F.scaled_dot_product_attention backend over ours."""
    ours = cell.get(OURS)
    sdpa = [
        row["us_p50"]
        for peer, row in cell.items()
        if peer.startswith(_SDPA_PREFIX) and row["us_p50"] is not None
    ]
    if ours is None or ours["us_p50"] is None or not sdpa:
        return None
    return float(min(sdpa) / ours["us_p50"])


def _summary(rows: Sequence[Row]) -> list[str]:
    """One line for each dtype, pass and mode, and one for each dtype with several passes."""
    lines = []
    for of_dtype in grouped(rows, lambda row: f"{row['dtype']}, {row['mode']}"):
        by_pass = grouped(of_dtype, lambda row: str(row["pass"]))
        for group in by_pass if len(by_pass) == 1 else [*by_pass, of_dtype]:
            ratios = [r for r in map(ratio, cells(group)) if r is not None]
            if not ratios:
                continue
            shares = [
                100_000 * row["tflops"] / row["run"]["peak_gflops"]
                for row in group
                if row["peer"] == OURS and row["tflops"] and row["run"]["peak_gflops"]
            ]
            passes = " and ".join(dict.fromkeys(row["pass"] for row in group))
            share = f"{min(shares):.0f}–{max(shares):.0f}" if shares else "–"
            lines.append(
                [
                    f"{group[0]['dtype']}, {passes}",
                    str(len(ratios)),
                    f"{geometric_mean(ratios):.2f}",
                    f"{min(ratios):.2f}",
                    f"{max(ratios):.2f}",
                    share,
                ]
            )
    header = ["F.sdpa / fa2tvm", "problems", "geometric mean", "least", "most", "% of peak"]
    return [table(header, lines)] if lines else []


def _speed_tables(rows: Sequence[Row]) -> list[str]:
    """The summary, a table for each dtype, pass and mode, and why a peer is absent."""
    parts = _summary(rows)
    for group in grouped(rows, lambda row: f"{row['dtype']}, {row['pass']}, {row['mode']}"):
        first = group[0]
        parts.append(f"#### {first['dtype']}, {first['pass']} ({first['mode']})")
        group_cells = cells(group)
        peers = [p for p in dict.fromkeys(row["peer"] for row in group) if p != OURS]
        timed = [p for p in peers if any(c.get(p, {}).get("us_p50") for c in group_cells)]
        header = ["problem", "fa2tvm ms", "GFLOP/s", "% of peak", "F.sdpa / fa2tvm"]
        header += [f"{peer} ms" for peer in timed]
        parts.append(table(header, [_speed_line(cell, timed) for cell in group_cells]))
        parts += absences(group)
    return parts


def _speed_line(cell: Cell, peers: Sequence[str]) -> list[str]:
    any_row = next(iter(cell.values()))
    ours = cell.get(OURS)
    line = [any_row["workload"]]
    if ours is None or ours["us_p50"] is None:
        line += ["–"] * 4
    else:
        gflops = 1000 * ours["tflops"]
        peak = ours["run"]["peak_gflops"]
        share = f"{100 * gflops / peak:.0f}" if peak else "–"
        against_sdpa = ratio(cell)
        line += [_ms(ours), f"{gflops:.0f}", share]
        line.append("–" if against_sdpa is None else f"{against_sdpa:.2f}")
    return line + [_ms(cell[peer]) if peer in cell else "–" for peer in peers]


def _ms(row: Row) -> str:
    """Median and, where there are several samples, the 20th and 80th percentile."""
    if row["us_p50"] is None:
        return "–"
    p20, p50, p80 = (row[key] / 1000 for key in ("us_p20", "us_p50", "us_p80"))
    digits = 1 if p50 >= 100 else 2 if p50 >= 1 else 3
    return f"{p50:.{digits}f} ({p20:.{digits}f}–{p80:.{digits}f})"


def _scaling_tables(rows: Sequence[Row]) -> list[str]:
    """Time over N^2 against its mean, and extra memory over N, for each peer and pass."""
    parts = []
    for group in grouped(rows, lambda row: f"{row['peer']} {row['pass']}"):
        timed = [row for row in group if row["us_p50"] is not None]
        if not timed:
            parts += absences(group)
            continue
        costs = [1e3 * row["us_p50"] / row["seq_q"] ** 2 for row in timed]
        middle = geometric_mean([min(costs), max(costs)])
        lines = []
        for row, cost in zip(timed, costs, strict=True):
            extra = row["extra_bytes"]
            lines.append(
                [
                    str(row["seq_q"]),
                    _ms(row),
                    f"{cost:.3f}",
                    f"{100 * (cost / middle - 1):+.0f} %",
                    "–" if extra is None else f"{extra / 2**20:.1f}",
                    "–" if extra is None else f"{row['output_bytes'] / 2**20:.1f}",
                    "–" if extra is None else f"{extra / row['seq_q']:.0f}",
                ]
            )
        parts.append(f"#### {group[0]['peer']}, {group[0]['dtype']}, {group[0]['pass']}")
        header = [
            "N",
            "ms",
            "ns / N²",
            "from the middle",
            "extra MiB",
            "of it results MiB",
            "B / N",
        ]
        parts.append(table(header, lines))
        parts += absences(group)
    return parts


def _calls_tables(rows: Sequence[Row]) -> list[str]:
    """CPU and wall microseconds of one call."""
    lines = []
    for cell in cells(row for row in rows if row["us_p50"] is not None):
        for row in cell.values():
            what = "forward" if row["pass"] == "forward" else "forward + backward"
            wall = f"{row['us_p50']:.1f} ({row['us_p20']:.1f}–{row['us_p80']:.1f})"
            lines.append([row["workload"], what, row["peer"], f"{row['cpu_us_p50']:.1f}", wall])
    header = ["problem", "pass", "peer", "CPU µs", "wall µs"]
    return ["#### One call", table(header, lines), *absences(rows)]
