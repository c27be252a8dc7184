"""Markdown tables of GPU rows: TFLOP/s of every peer, ours over the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import (
    OURS,
    OURS_DEFAULT,
    Cell,
    absences,
    cells,
    geometric_mean,
    grouped,
    table,
)


def is_gpu(run: dict[str, Any]) -> bool:
    """Whether rows of this run were measured on a GPU."""
    return bool(run.get("cuda"))


def machine_line(run: dict[str, Any]) -> str:
    """Device, driver, versions and ceilings of a run as one sentence."""
    commit = (run["commit"] or "no checkout")[:12] + (" with changes" if run["dirty"] else "")
    parts = [f"{run['device_name']} ({run['device']}), driver {run['driver']}, CUDA {run['cuda']}"]
    if run.get("peak_gflops"):
        ceilings = f"bfloat16 matmul {run['peak_gflops'] / 1000:.0f} TFLOP/s"
        if run.get("sustained_gflops"):
            ceilings += f" (sustained {run['sustained_gflops'] / 1000:.0f})"
        if run.get("memory_gbs"):
            ceilings += f", copy {run['memory_gbs'] / 1000:.2f} TB/s"
        parts.append(ceilings)
    parts.append(
        f"torch {run['torch']}, TVM {run['tvm']}, fa2tvm {run.get('fa2tvm', '')} ({commit}), "
        f"{run['date']}"
    )
    return "; ".join(parts) + "."


def best_peer(cell: Cell) -> Row | None:
    """The fastest row that is not ours."""
    others = [row for peer, row in cell.items() if peer not in (OURS, OURS_DEFAULT)]
    return min((r for r in others if r["us_p50"]), key=lambda r: float(r["us_p50"]), default=None)


def advantage(cell: Cell, over: str | None = None) -> float | None:
    """A peer's time (of the best peer by default) over ours."""
    ours, other = cell.get(OURS), cell.get(over) if over else best_peer(cell)
    if ours is None or other is None or not ours["us_p50"] or not other["us_p50"]:
        return None
    return float(other["us_p50"] / ours["us_p50"])


def tables(rows: Sequence[Row]) -> list[str]:
    """The summary, then a table for each dtype, pass and mode, and why a peer is absent."""
    parts = [summary(rows)]
    for group in grouped(rows, lambda row: f"{row['dtype']}, {row['pass']}, {row['mode']}"):
        first = group[0]
        parts.append(f"#### {first['dtype']}, {first['pass']} ({first['mode']}), TFLOP/s")
        group_cells = cells(group)
        names = [p for p in dict.fromkeys(row["peer"] for row in group) if p != OURS]
        timed = [p for p in names if any((c.get(p) or {}).get("us_p50") for c in group_cells)]
        header = ["problem", "fa2tvm", "of the best peer", "% of matmul", "% of data sheet", *timed]
        if first["mode"] == "sustained":
            header += ["W", "MHz"]
        parts.append(table(header, [_line(cell, timed, header) for cell in group_cells]))
        parts += absences(group)
    return parts + memory(rows) + differences(rows)


def memory(rows: Sequence[Row]) -> list[str]:
    """What a step of training takes at its peak beyond its inputs, results included, in MB."""
    steps = [row for row in rows if row["pass"] == "both" and row.get("extra_bytes")]
    if not steps:
        return []
    names = list(dict.fromkeys(row["peer"] for row in steps))
    lines = []
    for cell in cells(steps):
        first = next(iter(cell.values()))
        sizes = [cell[n]["extra_bytes"] / 1e6 if n in cell else None for n in names]
        lines.append([first["workload"], *("–" if s is None else f"{s:.0f}" for s in sizes)])
    return ["#### Peak memory of forward and backward, MB", table(["problem", *names], lines)]


def differences(rows: Sequence[Row]) -> list[str]:
    """The decisions in which a tuned schedule differs from the default, and what they gave."""
    lines = []
    for cell in cells(rows):
        ours, default = cell.get(OURS), cell.get(OURS_DEFAULT)
        faster = advantage(cell, OURS_DEFAULT)
        if faster is None or ours is None or default is None:
            continue
        tuned, untuned = ours.get("schedule") or {}, default.get("schedule") or {}
        changed = [
            f"{name} {untuned.get(name)} → {value}"
            for name, value in tuned.items()
            if value != untuned.get(name)
        ]
        if changed:
            what = f"{ours['workload']}, {ours['pass']}, {ours['mode']}"
            lines.append([what, f"{faster:.3f}", ", ".join(changed)])
    if not lines:
        return []
    header = ["problem", "over default", "decisions that differ"]
    return ["#### Tuned against the default schedule", table(header, lines)]


def summary(rows: Sequence[Row]) -> str:
    """Ours over the best peer and over our default, by pass, mode and head dim."""
    lines = []
    for group in grouped(rows, lambda row: f"{row['dtype']}, {row['pass']}, {row['mode']}"):
        by_dim = grouped(group, lambda row: str(row["head_dim"]))
        for part in by_dim if len(by_dim) == 1 else [*by_dim, group]:
            ratios = [r for r in map(advantage, cells(part)) if r is not None]
            if not ratios:
                continue
            defaults = [advantage(cell, OURS_DEFAULT) for cell in cells(part)]
            tuned = [r for r in defaults if r is not None]
            dims = f"d {part[0]['head_dim']}" if part is not group else "all"
            first = part[0]
            lines.append(
                [
                    f"{first['dtype']}, {first['pass']}, {first['mode']}, {dims}",
                    str(len(ratios)),
                    f"{geometric_mean(ratios):.3f}",
                    f"{min(ratios):.3f}",
                    f"{max(ratios):.3f}",
                    f"{geometric_mean(tuned):.3f}" if tuned else "–",
                ]
            )
    header = ["fa2tvm / best peer", "problems", "geometric mean", "least", "most", "over default"]
    return table(header, lines)


def _line(cell: Cell, peers: Sequence[str], header: Sequence[str]) -> list[str]:
    any_row = next(iter(cell.values()))
    ours, over_best = cell.get(OURS), advantage(cell)
    run = any_row["run"]
    sustained = any_row["mode"] == "sustained"
    line = [any_row["workload"], _tflops(ours), "–" if over_best is None else f"{over_best:.3f}"]
    ceiling = run.get("sustained_gflops" if sustained else "peak_gflops")
    for limit in (ceiling and ceiling / 1000, run.get("data_sheet_tflops")):
        known = ours is not None and ours["tflops"] and limit
        line.append(f"{100 * ours['tflops'] / limit:.0f}" if known and ours else "–")
    line += [_tflops(cell.get(peer)) for peer in peers]
    if "MHz" in header:
        for key in ("power_w", "clock_mhz"):
            value = ours.get(key) if ours else None
            line.append("–" if value is None else f"{value:.0f}")
    return line


def _tflops(row: Row | None) -> str:
    return "–" if row is None or not row["tflops"] else f"{row['tflops']:.0f}"
