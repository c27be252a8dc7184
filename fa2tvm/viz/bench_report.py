"""The comparison report: throughput, roofline, share of peak and ratios, from bench rows only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2tvm.bench.report import OURS, cells, machine_line
from fa2tvm.bench.rows import Row
from fa2tvm.errors import CorruptRecord
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.viz.figures import COLORS, INK, MARKERS, Picture, draw
from fa2tvm.viz.report_page import Section, paragraph, ratio_style, table, write_report

# Shares of peak that the papers give for an A100 in 16 bits, in percent. Source: arXiv:2307.08691,
# introduction and section 4.1.
PUBLISHED = {
    ("forward", "v1"): (30, 50),
    ("forward", "v2"): (50, 73),
    ("backward", "v1"): (25, 35),
    ("backward", "v2"): (63, 63),
}
_PANELS_IN_A_ROW = 4


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one device, mode, commit and number of threads."""

    device: str
    mode: str
    commit: str
    threads: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """What the rows have in common."""
        return f"{self.device}, {self.mode}, {self.threads} threads, commit {self.commit}"

    @property
    def timed(self) -> list[Row]:
        """Rows with a rate."""
        return [r for r in self.rows if r["us_p50"] is not None and r["tflops"]]

    @property
    def runs(self) -> list[str]:
        """The provenance of each run, one sentence each."""
        return list(dict.fromkeys(machine_line(row) for row in self.rows))


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows apart by what must not be mixed: device, mode, commit, threads."""
    found: dict[tuple[str, str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        run = row["run"]
        commit = (run["commit"] or "unknown")[:12] + (" with changes" if run["dirty"] else "")
        device = f"{run['device_name']} ({run['device']})"
        found[device, row["mode"], commit, run["threads"]].append(row)
    return [Group(*key, tuple(members)) for key, members in found.items()]


def write(rows: Sequence[Row], path: Path) -> list[Path]:
    """The report of some rows as a page with its pictures beside it; returns what was written.

    Raises
    ------
    CorruptRecord
        Where no row holds a rate.
    """
    parts = [group for group in groups(rows) if group.timed]
    if not parts:
        raise CorruptRecord("no row holds a rate, so there is nothing to report; measure again.")
    sections: list[Section] = []
    for number, group in enumerate(parts, 1):
        sections += _sections(group, f"{number}_" if len(parts) > 1 else "")
    apart = f" in {len(parts)} groups that are never mixed" if len(parts) > 1 else ""
    lead = (
        f"{len(rows)} rows{apart}: one group for each device, mode, commit and number of threads. "
        "Times are medians; every peer was checked against float64 before it was timed."
    )
    return write_report(path, "fa2tvm beside other implementations", lead, sections)


def _sections(group: Group, prefix: str) -> list[Section]:
    facts: list[str | Picture] = [paragraph(run) for run in group.runs]
    panels = _throughput(group, prefix)
    return [
        Section(group.title, tuple(facts)),
        Section("Rate over sequence length", tuple(panels), 3),
        Section("Share of the measured peak", tuple(_utilisation(group, prefix)), 3),
        Section("Roofline", tuple(_roofline(group, prefix)), 3),
        Section("Time of a peer over ours", tuple(_ratios(group)), 3),
        *_absences(group),
    ]


def _peers(rows: Iterable[Row]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each peer, ours first."""
    names = sorted({row["peer"] for row in rows}, key=lambda name: (name != OURS, name))
    return {
        name: (COLORS[k % len(COLORS)], MARKERS[k % len(MARKERS)]) for k, name in enumerate(names)
    }


def _unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Factor from TFLOP/s and the unit that reads best."""
    return (1, "TFLOP/s") if max(row["tflops"] for row in rows) >= 10 else (1000, "GFLOP/s")


def _by(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[column] for column in columns)].append(row)
    return found


def _throughput(group: Group, prefix: str) -> list[Picture]:
    """A picture for each dtype and pass, a panel for each head dim and mask."""
    pictures = []
    peers = _peers(group.timed)
    factor, unit = _unit(group.timed)
    for (dtype, pass_), rows in _by(group.timed, "dtype", "pass").items():
        panels = _by(rows, "head_dim", "head_dim_v", "causal")
        columns = min(_PANELS_IN_A_ROW, len(panels))
        lines = -(-len(panels) // columns)
        fastest = max(row["tflops"] for row in rows)

        def paint(
            figure: Any,
            panels: Any = panels,
            columns: int = columns,
            lines: int = lines,
            fastest: float = fastest,
        ) -> None:
            axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
            for axis in axes.flat[len(panels) :]:
                axis.set_axis_off()
            for axis, (key, members) in zip(axes.flat, panels.items(), strict=False):
                _throughput_panel(axis, key, members, peers, factor)
            axes[0, 0].set_ylim(0, 1.08 * factor * fastest)
            for axis in axes[:, 0]:
                axis.set_ylabel(unit)
            handles: dict[str, Any] = {}
            for axis in axes.flat:
                found, labels = axis.get_legend_handles_labels()
                handles.update(zip(labels, found, strict=True))
            order = [name for name in peers if name in handles]
            figure.legend(
                [handles[name] for name in order],
                order,
                loc="outside upper left",
                ncols=min(5, len(order)),
            )

        alt = f"{unit} over sequence length, {dtype}, {pass_}, for each head dim and mask."
        size = (max(5.0, 2.6 * columns), 2.5 * lines + 0.5)
        pictures.append(draw(f"{prefix}rate_{dtype}_{pass_}", alt, size, paint))
    return pictures


def _throughput_panel(
    axis: Any, key: Any, rows: Sequence[Row], peers: dict[str, tuple[str, str]], factor: float
) -> None:
    head_dim, head_dim_v, causal = key
    width = f"d {head_dim}" + (f"/{head_dim_v}" if head_dim_v != head_dim else "")
    axis.set_title(f"{width}, {'causal' if causal else 'no mask'}")
    for peer, (color, marker) in peers.items():
        # Workloads of one length that differ in batch or heads stay apart: points, no average.
        points = sorted((r["seq_q"], factor * r["tflops"]) for r in rows if r["peer"] == peer)
        if not points:
            continue
        single = len({length for length, _ in points}) == len(points)
        axis.plot(
            *zip(*points, strict=True),
            marker=marker,
            markersize=5 if peer == OURS else 3.5,
            linestyle="-" if single else "none",
            linewidth=1.8 if peer == OURS else 1,
            color=color,
            label=peer,
        )
    lengths = sorted({row["seq_q"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths], rotation=45 if len(lengths) > 4 else 0)
    axis.minorticks_off()
    axis.grid(axis="y")


def _share(row: Row) -> float | None:
    peak = row["run"]["peak_gflops"]
    return 100_000 * row["tflops"] / peak if peak else None


def _utilisation(group: Group, prefix: str) -> list[str | Picture]:
    ours = [r for r in group.timed if r["peer"] == OURS and _share(r) is not None]
    if not ours:
        return [paragraph("No row of ours holds a measured peak.")]
    by_kind = _by([r for r in ours if r["pass"] in ("forward", "backward")], "pass", "dtype")

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        labels, place = [], 0
        for (pass_, dtype), rows in by_kind.items():
            shares = [_share(row) for row in rows]
            labels.append(f"{pass_}, {dtype}")
            axis.plot(shares, [place] * len(shares), "o", color=COLORS[0], alpha=0.75)
            for version, color in (("v1", COLORS[4]), ("v2", COLORS[1])):
                low, high = PUBLISHED[pass_, version]
                axis.barh(place, max(high - low, 0.7), 0.62, low, color=color, alpha=0.28)
                axis.text((low + high) / 2, place - 0.4, version, ha="center", fontsize=7)
            place += 1
        axis.set_yticks(range(place), labels)
        axis.invert_yaxis()
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of the float32 multiply-add peak measured in the same run")

    published = (
        "Bands: what the papers report of an A100 in 16 bits, FlashAttention-1 (v1: forward 30-50, "
        "backward 25-35 %) and FlashAttention-2 (v2: forward 50-73, backward up to 63 %). "
        "Points: ours, one a problem."
    )
    return [draw(f"{prefix}share", published, (7.5, 0.75 * len(by_kind) + 1.0), paint)]


def _problem(row: Row) -> Problem:
    variant = Variant(
        row["pass"], row["dtype"], row["head_dim"], row["head_dim_v"], bool(row["causal"])
    )
    shape = Shape(row["batch"], row["heads_q"], row["heads_kv"], row["seq_q"], row["seq_kv"])
    return Problem(variant, shape)


def _roofline(group: Group, prefix: str) -> list[str | Picture]:
    rows = [r for r in group.timed if r["pass"] in ("forward", "backward")]
    peaks = sorted({row["run"]["peak_gflops"] for row in rows if row["run"]["peak_gflops"]})
    bandwidths = sorted({r["run"]["memory_gbs"] for r in rows if r["run"].get("memory_gbs")})
    peers = _peers(rows)

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        intensities = []
        for peer, (color, marker) in reversed(peers.items()):
            points = []
            for row in rows:
                problem = _problem(row)
                if row["peer"] == peer and problem.bytes():
                    points.append((problem.flops() / problem.bytes(), 1000 * row["tflops"]))
            if not points:
                continue
            intensities += [x for x, _ in points]
            axis.plot(
                *zip(*points, strict=True), marker, color=color, label=peer, markersize=4, alpha=0.8
            )
        span = (min(intensities) / 4, max(intensities) * 2)
        for peak in peaks:
            axis.axhline(peak, color=INK, linewidth=1, label=f"peak {peak:g} GFLOP/s")
        for bandwidth in bandwidths:
            axis.plot(
                span,
                [bandwidth * x for x in span],
                "--",
                color=INK,
                linewidth=1,
                label=f"memory {bandwidth:g} GB/s",
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=10)
        axis.set_xlim(*span)
        axis.set_ylim(min(1000 * r["tflops"] for r in rows) / 2, 2 * max([*peaks, 1]))
        axis.set_xlabel("useful FLOP per byte that must cross main memory")
        axis.set_ylabel("GFLOP/s")
        axis.grid(which="major")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)

    alt = "Rate of every problem against its arithmetic intensity, under the measured ceilings."
    picture = draw(f"{prefix}roofline", alt, (8, 3.8), paint)
    if bandwidths:
        return [picture]
    missing = (
        "These rows hold no measured memory bandwidth, so only the ceiling of arithmetic is drawn."
    )
    return [picture, paragraph(missing)]


def _ratios(group: Group) -> list[str | Picture]:
    """The heat map: a line for each problem, a column for each peer."""
    peers = [name for name in _peers(group.timed) if name != OURS]
    parts: list[str | Picture] = [
        paragraph("Above 1 ours is faster (blue); below 1 the peer is (orange).")
    ]
    for (dtype, pass_), rows in _by(group.timed, "dtype", "pass").items():
        lines = []
        for cell in cells(rows):
            if OURS not in cell:
                continue
            line: list[str | tuple[str, str]] = [cell[OURS]["workload"]]
            for peer in peers:
                if peer in cell:
                    ratio = cell[peer]["us_p50"] / cell[OURS]["us_p50"]
                    line.append((f"{ratio:.2f}", ratio_style(ratio)))
                else:
                    line.append("–")
            lines.append(line)
        if lines:
            parts.append(f"<h4>{dtype}, {pass_}</h4>" + table(["problem", *peers], lines))
    return parts


def _absences(group: Group) -> list[Section]:
    reasons = dict.fromkeys((row["peer"], row["error"]) for row in group.rows if row["error"])
    if not reasons:
        return []
    return [Section("Absent peers", (table(["peer", "reason"], list(reasons)),), 3)]
