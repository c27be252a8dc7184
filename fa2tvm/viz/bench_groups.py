"""Rows of the comparison report in groups that may be compared, and the ceilings of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import OURS, Cell, geometric_mean

# A file whose name ends so chooses a schedule of ours; it compares nothing.
SWEEP = "sweep"
_TABLES = {
    "cpu": "speed table",
    "gpu": "speed table",
    "gpu_backward": "speed table",
    "scaling": "scaling with length",
    "calls": "cost of a call",
    "ablation_v1_v2": "version 1 against version 2",
    "forward": "kernels alone",
    "backward": "kernels alone",
    "backward_deterministic": "kernels alone",
    "ampere_forward": "kernels alone",
    "ampere_backward": "kernels alone",
    "problems": "chosen problems",
}


@dataclass(frozen=True)
class Ceilings:
    """What the machine reaches at best, in GFLOP/s and GB/s, and how that is known.

    Attributes
    ----------
    peak_gflops, memory_gbs
        Measured: multiply-adds on registers (CPU) or a matrix product (GPU), and a copy.
    sheet_gflops
        What the vendor promises, where shares are given of that, as the papers do.
    source
        How the measured ones were.
    """

    peak_gflops: float | None = None
    memory_gbs: float | None = None
    sheet_gflops: float | None = None
    source: str = ""

    @property
    def whole(self) -> float | None:
        """What a share is a share of."""
        return self.sheet_gflops or self.peak_gflops


@dataclass(frozen=True)
class Group:
    """Rows that may be compared: one table of one device, mode, commit and number of threads.

    Attributes
    ----------
    facts
        What all rows have in common, the shorter words first; also the title.
    rows
        Every row.
    ceilings
        Measured with the rows, or in another run on the same device.
    """

    facts: tuple[str, ...]
    rows: tuple[Row, ...]
    ceilings: dict[str, Ceilings]

    @property
    def title(self) -> str:
        """What the rows have in common."""
        return ", ".join(self.facts)

    @property
    def device(self) -> str:
        """The device's name."""
        return self.facts[0]

    @property
    def timed(self) -> list[Row]:
        """Rows with a rate, the fastest where a peer was measured several times on one problem."""
        fastest: dict[tuple[str, ...], Row] = {}
        for row in self.rows:
            if row["us_p50"] is None or not row["tflops"]:
                continue
            key = (row["peer"], *cell_key(row))
            if key not in fastest or row["us_p50"] < fastest[key]["us_p50"]:
                fastest[key] = row
        return list(fastest.values())

    @property
    def base(self) -> str:
        """What the others are compared with: ours, or the first peer where nothing is ours."""
        names = [row["peer"] for row in self.rows]
        return OURS if OURS in names else str(names[0])

    @property
    def repeats(self) -> int:
        """The most often that one peer was measured on one problem."""
        counts = Counter(
            (row["peer"], *cell_key(row)) for row in self.rows if row["us_p50"] is not None
        )
        return max(counts.values(), default=0)

    @property
    def runs(self) -> list[str]:
        """The provenance of the runs, one sentence each; runs that differ in time alone are one."""
        dates: dict[str, list[str]] = defaultdict(list)
        for row in self.rows:
            dates[provenance(row)].append(row["run"]["date"])
        return [
            f"{what}; {min(when)}" + (f" to {max(when)}." if max(when) > min(when) else ".")
            for what, when in dates.items()
        ]

    def share(self, row: Row) -> float | None:
        """Rate of a row in percent of the peak: the data sheet's for a GPU, else the measured."""
        whole = self.ceilings[row["dtype"]].whole
        return 100_000 * float(row["tflops"]) / whole if whole else None


def cell_key(row: Row) -> tuple[str, str, str]:
    """What a comparison holds fixed inside a group."""
    return row["workload"], row["dtype"], row["pass"]


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The rows of each problem, by peer, in the order measured."""
    found: dict[tuple[str, str, str], Cell] = defaultdict(dict)
    for row in rows:
        found[cell_key(row)][row["peer"]] = row
    return list(found.values())


def best_peer(cell: Cell) -> Row | None:
    """The fastest row that is not of this package."""
    others = [row for peer, row in cell.items() if not peer.startswith(OURS)]
    return min(others, key=lambda row: row["us_p50"]) if others else None


def ratios(rows: Sequence[Row]) -> list[float]:
    """Time of the fastest peer over ours, for each problem that has both."""
    found = []
    for cell in cells(rows):
        peer = best_peer(cell)
        if OURS in cell and peer is not None:
            found.append(peer["us_p50"] / cell[OURS]["us_p50"])
    return found


def summary(values: Sequence[float]) -> list[str]:
    """Number, geometric mean, least and most of some ratios."""
    if not values:
        return ["0", "–", "–", "–"]
    figures = (geometric_mean(values), min(values), max(values))
    return [str(len(values)), *(f"{x:.2f}" for x in figures)]


def provenance(row: Row) -> str:
    """Where a row was measured and with what."""
    run = row["run"]
    parts = [
        ("threads", run["threads"]),
        ("driver", run.get("driver")),
        ("power limit in W", run.get("power_limit_w")),
        ("CUDA", run.get("cuda")),
        ("torch", run["torch"]),
        ("TVM", run["tvm"]),
        ("fa2tvm", run.get("fa2tvm")),
        ("commit", commit(row)),
    ]
    known = ", ".join(f"{name} {value}" for name, value in parts if value is not None)
    return f"{device(row)}: {known}"


def device(row: Row) -> str:
    """Name of a row's device, with its slug where that says more."""
    run = row["run"]
    name = str(run["device_name"])
    slug = str(run["device"])
    return (
        name
        if slug == name or slug.replace("_", " ").upper() == name.upper()
        else f"{name} ({slug})"
    )


def commit(row: Row) -> str:
    """The commit that a row measured."""
    run = row["run"]
    return str(run["commit"] or "unknown")[:12] + (" with changes" if run["dirty"] else "")


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows apart by what must not be mixed; families of ours are apart, each beside all peers.

    Rows of a sweep are left out.
    """
    rows = list(rows)
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if not row["what"].endswith(SWEEP):
            found[_facts(row)].append(row)
    made = []
    for facts, members in found.items():
        families = list(
            dict.fromkeys(row["family"] for row in members if row["peer"] == OURS and row["family"])
        )
        for family in families or [None]:
            mine = [r for r in members if family in (None, r["family"]) or r["peer"] != OURS]
            extra = () if family in (None, "cpu") else (f"family {family}",)
            roofs = {dtype: _ceilings(mine, dtype, rows) for dtype in {r["dtype"] for r in mine}}
            made.append(Group(facts + extra, tuple(mine), roofs))
    return made


def _facts(row: Row) -> tuple[str, ...]:
    run = row["run"]
    what = _TABLES.get(row["what"], row["what"])
    facts = [device(row), what] + ([row["mode"]] if row["mode"] != row["what"] else [])
    if run["threads"] is not None:
        facts.append(f"{run['threads']} threads")
    if row.get("amplitude") not in (None, 1.0):
        facts.append(f"logits of amplitude {row['amplitude']:g}")
    return (*facts, f"commit {commit(row)}")


def _ceilings(mine: Sequence[Row], dtype: str, every: Sequence[Row]) -> Ceilings:
    """Those of the rows' own runs, else those of other runs on a device of the same name."""
    first, mode = mine[0]["run"], mine[0]["mode"]
    sheet = _data_sheet_gflops(first) if dtype in ("bfloat16", "float16") else None
    name = first["device_name"]
    others = [row for row in every if row["run"]["device_name"] == name]
    for rows, source in ((mine, "measured in the same runs"), (others, "measured in other runs")):
        runs = [row["run"] for row in rows]
        # A CPU has one peak, a GPU another where power sets the clock.
        is_slower = mode == "sustained" and any("sustained_gflops" in run for run in runs)
        key = "sustained_gflops" if is_slower else "peak_gflops"
        peaks = [run[key] for run in runs if run.get(key)]
        memory = [run["memory_gbs"] for run in runs if run.get("memory_gbs")]
        if peaks:
            return Ceilings(max(peaks), max(memory, default=None), sheet, source)
    return Ceilings(sheet_gflops=sheet)


def _data_sheet_gflops(run: dict[str, Any]) -> float | None:
    """The vendor's dense 16-bit peak of a run's GPU; None for a CPU or another GPU."""
    tflops = run.get("data_sheet_tflops")
    if tflops is None and run.get("cuda"):
        from fa2tvm.bench.gpu import DATA_SHEET_TFLOPS

        tflops = DATA_SHEET_TFLOPS.get(run["device"].lower().replace(" ", "_"))
    return 1000 * tflops if tflops else None
