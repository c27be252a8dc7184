"""Pictures of the comparison report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from fa2tvm.bench.rows import Row
from fa2tvm.bench.tables import OURS, geometric_mean
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.viz.bench_groups import Group, ratios
from fa2tvm.viz.figures import COLORS, INK, MARKERS, Picture, draw

# Shares of peak that the papers give for an A100 in 16 bits, in percent. Source: arXiv:2307.08691,
# introduction and section 4.1.
PUBLISHED = {
    ("forward", "v1"): (30, 50),
    ("forward", "v2"): (50, 73),
    ("backward", "v1"): (25, 35),
    ("backward", "v2"): (63, 63),
}
_PASSES = ("forward", "backward")
_PANELS_IN_A_ROW = 4

Looks = dict[str, tuple[str, str]]


def looks(rows: Iterable[Row], base: str = OURS) -> Looks:
    """Colour and marker of each peer, `base` first."""
    names = sorted({row["peer"] for row in rows}, key=lambda name: (name != base, name))
    return {
        name: (COLORS[k % len(COLORS)], MARKERS[k % len(MARKERS)]) for k, name in enumerate(names)
    }


def by(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some columns, in order."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[column] for column in columns)].append(row)
    return found


def overview(parts: Sequence[Group]) -> Picture | None:
    """One line for each group, dtype and pass: a dot is one problem."""
    lines = []
    for group in parts:
        for (dtype, pass_), rows in by(group.timed, "dtype", "pass").items():
            if found := ratios(rows):
                family = [fact for fact in group.facts if fact.startswith("family ")]
                what = ", ".join([*group.facts[:3], *family])
                lines.append((f"{what}\n{dtype}, {pass_}", found))
    if not lines:
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for place, (_, values) in enumerate(lines):
            axis.plot(values, _spread(place, len(values)), "o", color=COLORS[0], markersize=3.5)
            mean = geometric_mean(values)
            axis.plot([mean, mean], [place - 0.36, place + 0.36], color=COLORS[1], linewidth=2)
            axis.text(1.01, place, f"{mean:.2f}", transform=axis.get_yaxis_transform(), va="center")
        axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=7)
        axis.invert_yaxis()
        every = [x for _, values in lines for x in values]
        _ratio_axis(axis, min([*every, 1]), max([*every, 1]))
        axis.set_xlabel("time of the fastest peer / ours (right of 1: ours is faster)")
        axis.grid(axis="x")

    alt = (
        "Time of the fastest peer that was there over ours. A dot is one problem, an orange line "
        "and the figure at the right are the geometric mean of its row."
    )
    return draw("overview", alt, (7.5, 0.42 * len(lines) + 0.8), paint)


def _ratio_axis(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis from `low` to `high` with ticks that read as ratios."""
    ticks = (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
    axis.set_xscale("log")
    axis.set_xlim(low / 1.05, high * 1.05)
    few = high / low > 3
    shown = [t for t in ticks if low / 1.05 <= t <= high * 1.05 and not (few and t in (0.9, 1.1))]
    axis.set_xticks(shown, [f"{t:g}" for t in shown])
    axis.minorticks_off()


def _spread(place: int, n: int) -> list[float]:
    """Heights around `place`, so that dots of one row do not hide each other."""
    return [place + 0.44 * ((k + 0.5) / n - 0.5) for k in range(n)]


def throughput(group: Group, prefix: str, peers: Looks) -> list[Picture]:
    """A picture for each dtype and pass, a panel for each head dim and mask."""
    pictures = []
    factor, unit = _unit(group.timed)
    for (dtype, pass_), rows in by(group.timed, "dtype", "pass").items():
        panels = dict(sorted(by(rows, "head_dim", "head_dim_v", "causal").items()))
        columns = min(_PANELS_IN_A_ROW, len(panels))
        lines = -(-len(panels) // columns)
        fastest = factor * max(row["tflops"] for row in rows)

        def paint(
            figure: Any,
            panels: Any = panels,
            grid: tuple[int, int] = (lines, columns),
            fastest: float = fastest,
        ) -> None:
            axes = figure.subplots(*grid, squeeze=False, sharey=True)
            for axis in axes.flat[len(panels) :]:
                axis.set_axis_off()
            for axis, (key, members) in zip(axes.flat, panels.items(), strict=False):
                _throughput_panel(axis, key, members, peers, factor)
            axes[0, 0].set_ylim(0, 1.08 * fastest)
            for axis in axes[:, 0]:
                axis.set_ylabel(unit)
            _legend(figure, axes, peers)

        alt = f"{unit} over sequence length, {dtype}, {pass_}, for each head dim and mask."
        size = (max(5.0, 2.6 * columns), 2.5 * lines + 0.5)
        pictures.append(draw(f"{prefix}rate_{dtype}_{pass_}", alt, size, paint))
    return pictures


def _legend(figure: Any, axes: Any, peers: Looks) -> None:
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        found, labels = axis.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    order = [name for name in peers if name in handles]
    columns = min(len(order), 5, int(figure.get_figwidth() / 1.8))
    figure.legend([handles[name] for name in order], order, loc="outside upper left", ncols=columns)


def _throughput_panel(
    axis: Any, key: Any, rows: Sequence[Row], peers: Looks, factor: float
) -> None:
    head_dim, head_dim_v, causal = key
    width = f"d {head_dim}" + (f"/{head_dim_v}" if head_dim_v != head_dim else "")
    axis.set_title(f"{width}, {'causal' if causal else 'no mask'}")
    for peer, (color, marker) in peers.items():
        label = peer
        mine = [row for row in rows if row["peer"] == peer]
        for series in by(mine, "heads_q", "heads_kv").values():
            points = sorted((r["seq_q"], factor * r["tflops"]) for r in series)
            # Problems of one length that differ in batch stay apart: points, no average.
            single = len({length for length, _ in points}) == len(points)
            axis.plot(
                *zip(*points, strict=True),
                marker=marker,
                markersize=5 if peer == OURS else 3.5,
                linestyle="-" if single else "none",
                linewidth=1.8 if peer == OURS else 1,
                zorder=3 if peer == OURS else 2,
                color=color,
                label=label,
            )
            label = "_again"
    lengths = sorted({row["seq_q"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths], rotation=45 if len(lengths) > 4 else 0)
    axis.minorticks_off()
    axis.grid(axis="y")


def utilisation(group: Group, prefix: str) -> Picture | None:
    """Shares of peak beside those that the papers give; None without a peak."""
    ours = [r for r in group.timed if r["peer"] == OURS and r["pass"] in _PASSES]
    by_kind = by([r for r in ours if group.share(r) is not None], "pass", "dtype")
    if not by_kind:
        return None

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for place, ((pass_, _), rows) in enumerate(by_kind.items()):
            for version, color in (("v1", COLORS[4]), ("v2", COLORS[1])):
                low, high = PUBLISHED[pass_, version]
                axis.barh(place, max(high - low, 0.7), 0.66, low, color=color, alpha=0.28)
                axis.text((low + high) / 2, place - 0.37, version, ha="center", fontsize=7)
            shares = [group.share(row) for row in rows]
            heights = _spread(place, len(shares))
            axis.plot(shares, heights, "o", color=COLORS[0], markersize=4, alpha=0.8)
        axis.set_yticks(range(len(by_kind)), [", ".join(kind) for kind in by_kind])
        axis.invert_yaxis()
        axis.set_xlim(0, max(100, *(1.02 * (group.share(r) or 0) for r in ours)))
        axis.set_xlabel("% of peak")

    alt = (
        "Dots: ours, one a problem, in percent of the peak below. Bands: what the papers report "
        "of an A100 in 16 bits, in percent of its data sheet: FlashAttention-1 (v1, forward 30-50, "
        "backward 25-35) and FlashAttention-2 (v2, forward 50-73, backward up to 63)."
    )
    return draw(f"{prefix}share", alt, (7.5, 0.75 * len(by_kind) + 0.9), paint)


def intensity(row: Row) -> float | None:
    """Useful FLOP of a row per byte that must cross main memory."""
    head_dims = (row["head_dim"], row["head_dim_v"])
    variant = Variant(row["pass"], row["dtype"], *head_dims, bool(row["causal"]))
    shape = Shape(row["batch"], row["heads_q"], row["heads_kv"], row["seq_q"], row["seq_kv"])
    problem = Problem(variant, shape)
    return problem.flops() / problem.bytes() if problem.bytes() else None


def roofline(group: Group, prefix: str, peers: Looks) -> Picture | None:
    """Rate against arithmetic intensity, ours before the others, under the measured ceilings."""
    rows = [r for r in group.timed if r["pass"] in _PASSES and intensity(r)]
    if not rows:
        return None
    factor, unit = _unit(rows)
    ceilings = {c.peak_gflops: name for name, c in group.ceilings.items() if c.peak_gflops}
    peaks = {factor * peak / 1000: name for peak, name in ceilings.items()}
    # Bytes/s times FLOP/byte: GB/s give GFLOP/s.
    bandwidths = {c.memory_gbs for c in group.ceilings.values() if c.memory_gbs}

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for peer, (color, marker) in reversed(peers.items()):
            points = [(intensity(r), factor * r["tflops"]) for r in rows if r["peer"] == peer]
            if points:
                size = 4.5 if peer == OURS else 3
                axis.plot(
                    *zip(*points, strict=True), marker, color=color, label=peer, markersize=size
                )
        every = [x for row in rows if (x := intensity(row))]
        ridges = [1000 * p / factor / b for p in peaks for b in bandwidths]
        span = (min([*every, *ridges]) / 3, 2 * max(every))
        rates = [factor * row["tflops"] for row in rows]
        _log_axes(axis, span, (min(rates) / 2, 1.7 * max([*peaks, *rates])))
        for place, (peak, name) in enumerate(sorted(peaks.items(), reverse=True)):
            axis.axhline(peak, color=INK, linewidth=1)
            label = f"{peak:.3g} {unit}" + (f" ({name})" if len(peaks) > 1 else "")
            below = "top" if place else "bottom"
            axis.text(span[0] * 1.05, peak, label, va=below, fontsize=8)
        for bandwidth in bandwidths:
            axis.plot(span, [factor * bandwidth * x / 1000 for x in span], "--", color=INK, lw=1)
            low, x = factor * bandwidth / 1000, 1.6 * span[0]
            name = f"{bandwidth / 1000:.2f} TB/s" if bandwidth >= 1000 else f"{bandwidth:g} GB/s"
            axis.text(x, low * x, f"  {name}", va="top", fontsize=8)
        axis.set_xlabel("useful FLOP per byte that must cross main memory")
        axis.set_ylabel(unit)
        axis.grid(which="major")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)

    alt = "Rate of every problem against its arithmetic intensity, under the measured ceilings."
    return draw(f"{prefix}roofline", alt, (8, 3.8), paint)


def _log_axes(axis: Any, across: tuple[float, float], up: tuple[float, float]) -> None:
    """Logarithmic axes with plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter("")
    axis.set_xlim(*across)
    axis.set_ylim(*up)


def _unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Factor from TFLOP/s and the unit that reads best."""
    return (1, "TFLOP/s") if max(row["tflops"] for row in rows) >= 10 else (1000, "GFLOP/s")
