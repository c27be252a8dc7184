"""Block geometry of Algorithms 1 and 2: which blocks a block meets, and which of those need a mask.

The only author of these ranges. Arguments are ints or symbolic TensorIR integers alike where a
function says so; `causal_offset` is `Problem.causal_offset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BlockRange:
    """Half-open ranges of block indices: `[start, full_start)` and `[full_end, end)` need a mask.

    Blocks of `[full_start, full_end)` are seen whole by every row of the other side.
    """

    start: int
    full_start: int
    full_end: int
    end: int


def ceil_div(a: int, b: int) -> int:
    """The smallest integer at least a / b, for b > 0."""
    return -(-a // b)


def clamp(x: int, low: int, high: int) -> int:
    """x, moved into [low, high]."""
    return max(low, min(x, high))


def visible_keys(
    row: Any,
    seq_kv: Any,
    causal: bool,
    causal_offset: Any = 0,
    clamp: Callable[..., Any] = clamp,
) -> Any:
    """How many keys query `row` sees: those of [0, visible_keys).

    Integers, or TensorIR integers with a `clamp` of theirs.
    """
    return clamp(row + causal_offset + 1, 0, seq_kv) if causal else seq_kv


def first_row(
    key: Any,
    seq_q: Any,
    causal: bool,
    causal_offset: Any = 0,
    clamp: Callable[..., Any] = clamp,
) -> Any:
    """The first query row that sees `key`, seq_q if none does.

    Integers, or TensorIR integers with a `clamp` of theirs.
    """
    return clamp(key - causal_offset, 0, seq_q) if causal else 0


def key_blocks(
    i: int,
    block_q: int,
    block_kv: int,
    seq_q: int,
    seq_kv: int,
    causal: bool,
    causal_offset: int = 0,
) -> BlockRange:
    """Key blocks that query block i visits in Algorithm 1.

    The tail block (seq_kv is no multiple of block_kv) counts as full: it is shorter, not masked.
    """
    n_blocks = ceil_div(seq_kv, block_kv)
    if not causal:
        return BlockRange(0, 0, n_blocks, n_blocks)
    first_row = i * block_q
    last_row = min(first_row + block_q, seq_q) - 1
    visible_to_last = visible_keys(last_row, seq_kv, causal, causal_offset)
    visible_to_first = visible_keys(first_row, seq_kv, causal, causal_offset)
    end = ceil_div(visible_to_last, block_kv)
    full_end = n_blocks if visible_to_first == seq_kv else visible_to_first // block_kv
    return BlockRange(0, 0, min(full_end, end), end)


def query_blocks(
    j: int,
    block_q: int,
    block_kv: int,
    seq_q: int,
    seq_kv: int,
    causal: bool,
    causal_offset: int = 0,
) -> BlockRange:
    """Query blocks that key block j visits in Algorithm 2; those before `start` see none of it."""
    n_blocks = ceil_div(seq_q, block_q)
    if not causal:
        return BlockRange(0, 0, n_blocks, n_blocks)
    first_key = j * block_kv
    last_key = min(first_key + block_kv, seq_kv) - 1
    first_row_seeing_any = first_row(first_key, seq_q, causal, causal_offset)
    first_row_seeing_all = first_row(last_key, seq_q, causal, causal_offset)
    start = min(first_row_seeing_any // block_q, n_blocks)
    if first_row_seeing_any >= seq_q:
        start = n_blocks
    full_start = clamp(ceil_div(first_row_seeing_all, block_q), start, n_blocks)
    return BlockRange(start, full_start, n_blocks, n_blocks)
