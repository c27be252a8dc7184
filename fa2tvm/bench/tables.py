"""What the tables of all devices share: cells, geometric means, Markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from fa2tvm.bench.rows import Row

OURS, OURS_DEFAULT = "fa2tvm", "fa2tvm-default"

Cell = dict[str, Row]


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The rows of each (workload, dtype, pass, mode), by peer, in the order measured."""
    found: dict[tuple[str, ...], Cell] = defaultdict(dict)
    for row in rows:
        found[row["workload"], row["dtype"], row["pass"], row["mode"]][row["peer"]] = row
    return list(found.values())


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; NaN of none."""
    if not values:
        return math.nan
    return math.exp(sum(math.log(value) for value in values) / len(values))


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> list[list[Row]]:
    """Rows of equal keys together, in the order in which the keys first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ruler, *lines])


def absences(rows: Sequence[Row]) -> list[str]:
    """Who is absent, for which problems, and why: a sentence each."""
    reasons: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row["error"] is not None:
            reasons[row["peer"], row["error"]][row["workload"]] = None
    everywhere = len({row["workload"] for row in rows})
    return [
        f"{peer} is absent{'' if len(where) == everywhere else ' for ' + ', '.join(where)}: {why}"
        for (peer, why), where in reasons.items()
    ]
