"""Pictures, made from the rows only."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa2tvm.bench.report import machine_line
from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import Cell, cells
from fa2tvm.errors import CorruptRecord

_COLORS = ("#1b6ca8", "#7fb3d5", "#e07a3f", "#b8b8b8", "#6a994e", "#9c6ade")


def plot(rows: Sequence[Row], path: Path) -> Path:
    """Write a picture of the rows; its kind follows from what they measured.

    Raises
    ------
    CorruptRecord
        Where no row holds a time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["us_p50"] is not None]
    if not timed:
        raise CorruptRecord("no row holds a time, so there is nothing to plot; measure again.")
    kinds = {"scaling": _scaling, "calls": _calls, "ablation_v1_v2": _ablation}
    draw = kinds.get(timed[0]["what"], _speed)
    figure = draw(pyplot, timed)
    line = textwrap.fill(machine_line(timed[0]), int(15 * figure.get_figwidth()))
    figure.suptitle(line, fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    peers = dict.fromkeys(row["peer"] for row in rows)
    return {peer: _COLORS[i % len(_COLORS)] for i, peer in enumerate(peers)}


def _ablation(pyplot: Any, rows: Sequence[Row]) -> Any:
    """TFLOP/s of every point, a panel for each problem; the first point is full version 2."""
    panels = cells(rows)
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(10, 2.2 * lines + 0.6), squeeze=False, sharey=True
    )
    colors = _colors(rows)
    for axis, cell in zip(axes.flat, panels, strict=False):
        points = [peer for peer in colors if peer in cell]
        speeds = [cell[peer]["tflops"] for peer in points]
        bars = axis.barh(range(len(points)), speeds, color=[colors[peer] for peer in points])
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
        axis.set_yticks(range(len(points)), points, fontsize=7)
        axis.set_xlim(right=1.2 * max(speeds))
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(_short_label(next(iter(cell.values()))).replace("\n", " "), fontsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    axes[0, 0].invert_yaxis()
    for axis in axes[-1]:
        axis.set_xlabel("TFLOP/s", fontsize=8)
    return figure


def _speed(pyplot: Any, rows: Sequence[Row]) -> Any:
    """GFLOP/s of every peer on every problem; whiskers from the 20th to the 80th percentile."""
    panels: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells(rows):
        row = next(iter(cell.values()))
        panels.setdefault((row["dtype"], row["pass"], row["mode"]), []).append(cell)
    longest = max(len(panel) for panel in panels.values())
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6, 1.2 * longest), 3 * len(panels) + 0.6), squeeze=False
    )
    colors = _colors(rows)
    for axis, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _speed_panel(axis, panel, colors)
        axis.set_title(", ".join(title), fontsize=9)
    axes[0, 0].legend(fontsize=7, ncols=len(colors), loc="upper left")
    return figure


def _speed_panel(axis: Any, panel: Sequence[Cell], colors: dict[str, str]) -> None:
    width = 0.8 / len(colors)
    for slot, (peer, color) in enumerate(colors.items()):
        for place, cell in enumerate(panel):
            if peer not in cell:
                continue
            row = cell[peer]
            gflops = 1000 * row["tflops"]
            low = gflops - gflops * row["us_p50"] / row["us_p80"]
            high = gflops * row["us_p50"] / row["us_p20"] - gflops
            axis.bar(
                place + (slot - (len(colors) - 1) / 2) * width,
                gflops,
                width,
                yerr=[[low], [high]],
                error_kw={"linewidth": 0.7},
                color=color,
                label=peer if place == 0 else None,
            )
    row = next(iter(panel[0].values()))
    peak = row["run"]["peak_gflops"] or 0
    if peak:
        axis.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    highest = max(1000 * row["tflops"] for cell in panel for row in cell.values())
    axis.set_ylim(top=1.3 * max(peak, highest))
    axis.set_xlim(-0.5, len(panel) - 0.5)
    labels = [_short_label(next(iter(cell.values()))) for cell in panel]
    axis.set_xticks(range(len(panel)), labels, fontsize=7)
    axis.set_ylabel("GFLOP/s (dashed: FMA peak)", fontsize=8)


def _short_label(row: Row) -> str:
    mask = "\ncausal" if row["causal"] else ""
    return f"d{row['head_dim']} {row['batch']}×{row['seq_q']}{mask}"


def _scaling(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Time over N^2 on the left, extra memory on the right."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    colors = _colors(rows)
    for peer, color in colors.items():
        for pass_, style in (("forward", "-"), ("backward", "--")):
            line = [row for row in rows if row["peer"] == peer and row["pass"] == pass_]
            lengths = [row["seq_q"] for row in line]
            costs = [1e3 * row["us_p50"] / row["seq_q"] ** 2 for row in line]
            left.plot(lengths, costs, style, color=color, marker=".", label=f"{peer}, {pass_}")
            known = [(r["seq_q"], r["extra_bytes"] / 2**20) for r in line if r["extra_bytes"]]
            if known:
                right.plot(*zip(*known, strict=True), style, color=color, marker=".")
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_xlabel("N")
    left.set_ylabel("time / N² (ns)")
    left.legend(fontsize=7)
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xlabel("N")
    right.set_ylabel("peak extra memory of a call (MiB)")
    return figure


def _calls(pyplot: Any, rows: Sequence[Row]) -> Any:
    """CPU time of one call."""
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    colors = _colors(rows)
    table = cells(rows)
    width = 0.8 / len(colors)
    for slot, (peer, color) in enumerate(colors.items()):
        places = [place + (slot - (len(colors) - 1) / 2) * width for place in range(len(table))]
        heights = [cell[peer]["cpu_us_p50"] if peer in cell else 0 for cell in table]
        axis.bar(places, heights, width, color=color, label=peer)
    names = [next(iter(cell.values())) for cell in table]
    labels = [f"{row['workload']}\n{row['pass']}" for row in names]
    axis.set_xticks(range(len(table)), labels, fontsize=7)
    axis.set_ylabel("CPU µs of one call")
    axis.legend(fontsize=8)
    return figure
