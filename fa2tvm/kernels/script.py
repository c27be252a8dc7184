"""What the TVMScript programs share: integer helpers of blocks.py, and finding blocks by name."""

from __future__ import annotations

import re
from typing import Any

from tvm.script import tirx as T


def ceil_div(a: Any, b: Any) -> Any:
    """blocks.ceil_div of int64 expressions, none negative, without floor division's fix-ups."""
    return T.truncdiv(a + (b - 1), b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """blocks.clamp of int64 expressions."""
    return T.max(T.min(x, high), T.int64(low))


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
