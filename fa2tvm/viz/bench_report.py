"""The comparison report: throughput, roofline, share of peak and ratios, from bench rows only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import OURS, Cell, geometric_mean
from fa2tvm.errors import CorruptRecord
from fa2tvm.viz import bench_figures as figures
from fa2tvm.viz.bench_groups import (
    SWEEP,
    Ceilings,
    Group,
    best_peer,
    cells,
    groups,
    ratios,
    summary,
)
from fa2tvm.viz.figures import Picture
from fa2tvm.viz.report_page import (
    Link,
    Section,
    TableRow,
    folded,
    paragraph,
    ratio_style,
    table,
    write_report,
)


def write(rows: Sequence[Row], path: Path) -> list[Path]:
    """The report of some rows as a page, and its pictures as PNG in a folder named after it.

    Parameters
    ----------
    rows
        As `read_rows` gives them; those of a sweep are counted and left out.
    path
        The page.

    Raises
    ------
    CorruptRecord
        Where no row holds a time.
    """
    parts = [g for g in groups(rows) if any(r["us_p50"] is not None for r in g.rows)]
    if not parts:
        raise CorruptRecord("no row holds a time, so there is nothing to report; measure again.")
    parts.sort(key=lambda group: (group.device, not group.timed))
    peers = figures.looks(row for group in parts if group.base == OURS for row in group.rows)
    left_out = sum(row["what"].endswith(SWEEP) for row in rows)
    lead = (
        f"{len(rows) - left_out} rows in {len(parts)} "
        + ("group" if len(parts) == 1 else "groups that are never mixed")
        + ": one for each table, device, mode, commit and number of threads. "
        "Times are medians; every peer was checked against float64 before it was timed."
    )
    if left_out:
        lead += f" {left_out} rows of sweeps, which choose a schedule, are left out."
    sections = [Section("Overview", tuple(_overview(parts)))]
    for number, group in enumerate(parts, 1):
        own = peers if group.base == OURS else figures.looks(group.rows, group.base)
        sections += _sections(group, number, own)
    return write_report(path, "fa2tvm beside other implementations", lead, sections)


def _overview(parts: Sequence[Group]) -> list[str | Picture]:
    found: list[str | Picture] = []
    picture = figures.overview(parts)
    if picture is not None:
        found.append(picture)
    lines: list[TableRow] = []
    for number, group in enumerate(parts, 1):
        link = Link(group.title, f"group-{number}")
        kinds = figures.by(group.timed, "dtype", "pass")
        for (dtype, pass_), rows in kinds.items():
            shares = [s for r in rows if r["peer"] == OURS and (s := group.share(r)) is not None]
            share = f"{min(shares):.0f}–{max(shares):.0f}" if shares else "–"
            if group.base == OURS:
                what = f"{dtype}, {pass_}"
                gone = _absent(group, dtype, pass_)
                lines.append([link, what, *summary(ratios(rows)), share, gone])
        if not kinds or group.base != OURS:
            what = "variants of one program" if kinds else "times of calls"
            lines.append([link, what, "–", "–", "–", "–", "–", "–"])
    header = ["group", "what", "problems", "geometric mean", "least", "most", "% of peak", "absent"]
    note = "Ratios are the time of the fastest peer over ours: above 1 ours is faster."
    return [*found, table(header, lines, "Every group"), paragraph(note)]


def _absent(group: Group, dtype: str, pass_: str) -> str:
    """Peers that some problems lack, and how many problems."""
    missing: dict[str, set[str]] = {}
    for row in group.rows:
        if row["error"] and (row["dtype"], row["pass"]) == (dtype, pass_):
            missing.setdefault(row["peer"], set()).add(row["workload"])
    return ", ".join(f"{peer} in {len(where)}" for peer, where in missing.items()) or "–"


def _sections(group: Group, number: int, peers: figures.Looks) -> list[Section]:
    prefix = f"{number}_"
    head = Section(group.title, tuple(_facts(group)), anchor=f"group-{number}")
    if not group.timed:
        return [head, Section("Time of a call", (_calls(group),), 3)]
    rates = tuple(figures.throughput(group, prefix, peers))
    parts: list[tuple[str, Sequence[str | Picture]]] = [
        ("Rate over sequence length", rates),
        ("Time of the fastest peer over ours", _heat_maps(group)),
        (f"Time over that of {group.base}", _over_base(group)),
        ("Schedules of ours beside each other", _schedules(group)),
        ("Share of peak", _utilisation(group, prefix)),
        ("Roofline", _roofline(group, prefix, peers)),
        ("Absent", _absences(group)),
    ]
    return [head, *(Section(title, tuple(what), 3) for title, what in parts if what)]


def _facts(group: Group) -> list[str | Picture]:
    facts: list[str | Picture] = [paragraph(run) for run in group.runs]
    if group.repeats > 1:
        facts.append(
            paragraph(
                f"A peer was measured up to {group.repeats} times on one problem (ours with as "
                "many schedules); its fastest stands here."
            )
        )
    return facts


def _ceilings(group: Group) -> list[tuple[str, Ceilings]]:
    """Ceilings with the dtypes that share them."""
    dtypes: dict[Ceilings, list[str]] = {}
    for dtype, ceilings in group.ceilings.items():
        dtypes.setdefault(ceilings, []).append(dtype)
    return [(", ".join(names), ceilings) for ceilings, names in dtypes.items()]


def _utilisation(group: Group, prefix: str) -> list[str | Picture]:
    if group.base != OURS:
        return []
    picture = figures.utilisation(group, prefix)
    if picture is None:
        return [paragraph("No peak is known for these rows.")]
    return [picture, *(paragraph(_peak(names, c)) for names, c in _ceilings(group))]


def _peak(names: str, ceilings: Ceilings) -> str:
    """What shares are shares of, and what was measured."""
    measured = ""
    if ceilings.peak_gflops is not None:
        measured = f"{_rate(ceilings.peak_gflops)}, {ceilings.source}"
    if ceilings.sheet_gflops is None:
        return f"The peak of {names}: {measured}."
    sheet = f"The peak of {names}: {_rate(ceilings.sheet_gflops)} by the data sheet."
    if not measured:
        return sheet
    return (
        f"{sheet} A matrix product of 8192³ reaches {measured}; attention may pass it where it "
        "draws less power."
    )


def _rate(gflops: float) -> str:
    return f"{gflops / 1000:.1f} TFLOP/s" if gflops >= 10_000 else f"{gflops:g} GFLOP/s"


def _roofline(group: Group, prefix: str, peers: figures.Looks) -> list[str | Picture]:
    picture = figures.roofline(group, prefix, peers) if group.base == OURS else None
    if picture is None:
        return []
    if all(c.peak_gflops and c.memory_gbs for _, c in _ceilings(group)):
        return [picture]
    missing = "Only the ceilings that were measured are drawn; some are not known for these rows."
    return [picture, paragraph(missing)]


def _place(row: Row) -> tuple[str, str]:
    """Line and column of a problem in the heat map."""
    width = f"d {row['head_dim']}"
    if row["head_dim_v"] != row["head_dim"]:
        width += f"/{row['head_dim_v']}"
    heads = f"{row['heads_q']} heads"
    if row["heads_kv"] != row["heads_q"]:
        heads = f"{row['heads_q']}/{row['heads_kv']} heads"
    mask = "causal" if row["causal"] else "no mask"
    lengths = str(row["seq_q"])
    if row["seq_kv"] != row["seq_q"]:
        lengths += f"/{row['seq_kv']}"
    return f"{width}, {mask}, {heads}", f"{row['batch']}×{lengths}"


def _heat_maps(group: Group) -> list[str | Picture]:
    """Per dtype and pass: lines of head dim and mask, columns of batch and length."""
    parts: list[str | Picture] = []
    for (dtype, pass_), rows in figures.by(group.timed, "dtype", "pass").items():
        found: dict[tuple[str, str], float] = {}
        for cell in sorted(cells(rows), key=_order):
            peer = best_peer(cell)
            if OURS in cell and peer is not None:
                found[_place(cell[OURS])] = peer["us_p50"] / cell[OURS]["us_p50"]
        if not found:
            continue
        columns = list(dict.fromkeys(column for _, column in found))
        lines: list[TableRow] = [
            [line, *(_heat(found.get((line, column))) for column in columns)]
            for line in dict.fromkeys(line for line, _ in found)
        ]
        title = f"{dtype}, {pass_}"
        header = ["batch × tokens", *columns]
        parts += [f"<h4>{title}</h4>", table(header, lines, f"Ratios, {title}")]
        parts.append(folded("Every peer", _every_peer(rows, title)))
    if parts:
        parts.insert(0, paragraph("Above 1 ours is faster (blue); below 1 the peer is (orange)."))
    return parts


def _heat(ratio: float | None) -> str | tuple[str, str]:
    return "–" if ratio is None else (f"{ratio:.2f}", ratio_style(ratio))


def _order(cell: Cell) -> list[Any]:
    row = next(iter(cell.values()))
    kind = [row[key] for key in ("head_dim", "head_dim_v", "causal", "heads_q")]
    return [*kind, row["heads_kv"] != row["heads_q"], row["seq_q"], row["seq_kv"]]


def _over_base(group: Group) -> list[str | Picture]:
    """Variants of one program beside one of them, where nothing is named ours."""
    if group.base == OURS:
        return []
    parts: list[str | Picture] = []
    for (dtype, pass_), rows in figures.by(group.timed, "dtype", "pass").items():
        title = f"{dtype}, {pass_}"
        parts += [f"<h4>{title}</h4>", _every_peer(rows, title, group.base)]
    return parts


def _every_peer(rows: Sequence[Row], title: str, base: str = OURS) -> str:
    """A line for each problem, a column for each peer: its time over that of `base`."""
    problems = [cell for cell in sorted(cells(rows), key=_order) if base in cell]
    peers = [p for p in dict.fromkeys(name for cell in problems for name in cell) if p != base]
    lines: list[TableRow] = [
        [
            cell[base]["workload"],
            _ms(cell[base]),
            *(
                _heat(cell[peer]["us_p50"] / cell[base]["us_p50"]) if peer in cell else "–"
                for peer in peers
            ),
        ]
        for cell in problems
    ]
    header = ["problem", f"{base}, ms", *peers]
    return table(header, lines, f"Time of each peer over that of {base}, {title}")


def _ms(row: Row) -> str:
    return f"{row['us_p50'] / 1000:.3g}"


def _calls(group: Group) -> str:
    """Wall and CPU time where no rate makes sense."""
    lines: list[TableRow] = [
        [
            row["workload"],
            row["pass"],
            row["peer"],
            f"{row['us_p50']:.1f}",
            "–" if row["cpu_us_p50"] is None else f"{row['cpu_us_p50']:.1f}",
        ]
        for row in group.rows
        if row["us_p50"] is not None
    ]
    return table(["problem", "pass", "peer", "wall µs", "CPU µs"], lines, "Times of a call")


def _schedules(group: Group) -> list[str | Picture]:
    """Where ours was measured with several schedules: time of each over the best of its variant.

    A line is what differs from that best one, a column a problem.
    """
    ours = [r for r in group.rows if r["peer"] == OURS and r["us_p50"] and r["schedule"]]
    parts: list[str | Picture] = []
    for rows in figures.by(ours, "dtype", "pass", "head_dim", "head_dim_v", "causal").values():
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            times.setdefault(json.dumps(row["schedule"]), {})[row["workload"]] = row["us_p50"]
        if len(times) > 1:
            parts += _schedules_of_variant(rows, times)
    if parts:
        note = "Time over that of the first schedule, which is best; a line names what differs."
        parts.insert(0, paragraph(note))
    return parts


def _schedules_of_variant(
    rows: Sequence[Row], times: dict[str, dict[str, float]]
) -> list[str | Picture]:
    """A heading and a table; `times` are microseconds by schedule and problem."""
    most = max(map(len, times.values()))
    best = min(
        (text for text, us in times.items() if len(us) == most),
        key=lambda text: geometric_mean(list(times[text].values())),
    )
    decisions = json.loads(best)
    columns = {r["workload"]: _place(r)[1] for r in rows if r["workload"] in times[best]}
    lines: list[tuple[float, TableRow]] = []
    for text, us in times.items():
        ratios_of = {w: us[w] / times[best][w] for w in columns if w in us}
        differs = [f"{k}={v}" for k, v in json.loads(text).items() if decisions.get(k) != v]
        name = " ".join(differs) or " ".join(f"{k}={v}" for k, v in decisions.items())
        line: TableRow = [name, *(_slower(ratios_of.get(w)) for w in columns)]
        lines.append((geometric_mean(list(ratios_of.values())), line))
    first = rows[0]
    kind = ", ".join([first["dtype"], first["pass"], *_place(first)[0].split(", ")[:2]])
    header = ["schedule", *columns.values()]
    ordered = [line for _, line in sorted(lines, key=lambda pair: pair[0])]
    return [f"<h4>{kind}</h4>", table(header, ordered, f"Schedules of ours, {kind}")]


def _slower(ratio: float | None) -> str | tuple[str, str]:
    return "–" if ratio is None else (f"{ratio:.2f}", ratio_style(1 / ratio))


def _absences(group: Group) -> list[str | Picture]:
    reasons = Counter((row["peer"], row["error"]) for row in group.rows if row["error"])
    if not reasons:
        return []
    words = "text-align:left;white-space:normal"
    lines: list[TableRow] = [
        [peer, str(n), (reason, words)] for (peer, reason), n in reasons.items()
    ]
    return [table(["peer", "rows", "reason"], lines, "What was not measured")]
