"""What the TVMScript programs share: integer helpers of blocks.py, and finding blocks by name."""

from __future__ import annotations

import re
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

_LONGEST_SUM = 192


def ceil_div(a: Any, b: Any) -> Any:
    """blocks.ceil_div of int64 expressions, none negative, without floor division's fix-ups."""
    return T.truncdiv(a + (b - 1), b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """blocks.clamp of int64 expressions."""
    return T.max(T.min(x, high), T.int64(low))


def partial_sum(n: int) -> int:
    """How many of n products in a row are added up before their sum joins the others.

    The rounding error of a sum grows with its length. A matrix product of PyTorch splits sums of
    256 and more (measured: MKL, its error at 512 is 0.6 of one long sum's), so longer ones than
    this would break the rule of yardstick.py.
    """
    parts = -(-n // _LONGEST_SUM)
    return -(-n // parts)


def sblocks(sch: Any) -> dict[str, Any]:
    """Every block of a schedule by its name; T.inline's _1, _2, ... are taken off."""
    found: dict[str, Any] = {}
    todo = list(sch.get_child_blocks(sch.get_sblock("root")))
    while todo:
        block = todo.pop()
        name = re.sub(r"_\d+$", "", sch.get(block).name_hint)
        assert name not in found, f"two blocks are called {name}"
        found[name] = block
        todo += sch.get_child_blocks(block)
    return found


def transpose(rows: list[Any]) -> list[Any]:
    """The columns of a square tile of vectors, n log2 n two-operand shuffles; n is a power of two.

    Source: Eklundh, "A fast computer method for matrix transposing" (1972): at distance s the
    off-diagonal s x s blocks of every 2s x 2s block change places.
    """
    n = len(rows)
    distance = n // 2
    while distance:
        upper = [lane if not lane & distance else n + lane - distance for lane in range(n)]
        lower = [n + lane if lane & distance else lane + distance for lane in range(n)]
        for i in range(n):
            if not i & distance:
                pair = [rows[i], rows[i + distance]]
                rows[i] = tirx.Shuffle(pair, upper)
                rows[i + distance] = tirx.Shuffle(pair, lower)
        distance //= 2
    return rows


def lanes_of(start: Any, n: int) -> Any:
    """The index of n neighbours from `start`."""
    return T.Ramp(start, T.int64(1), n)
