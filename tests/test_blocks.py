"""Block ranges against the mask itself, element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fa2tvm.blocks import BlockRange, ceil_div, clamp, key_blocks, query_blocks

LENGTHS = (0, 1, 2, 7, 8, 9, 16, 23)
BLOCKS = ((4, 4), (8, 3), (3, 8), (16, 16), (1, 5))
OFFSETS = (-30, -9, -8, -1, 0, 1, 5, 15, 40)


def visible(seq_q: int, seq_kv: int, causal: bool, offset: int) -> np.ndarray:
    i, j = np.arange(seq_q)[:, None], np.arange(seq_kv)[None, :]
    return (j <= i + offset) if causal else np.ones((seq_q, seq_kv), dtype=bool)


def check(blocks: BlockRange, n_blocks: int, tiles: list[np.ndarray]) -> None:
    """A block out of range sees nothing; a full one is seen whole; the masked ones are few."""
    assert 0 <= blocks.start <= blocks.full_start <= blocks.full_end <= blocks.end <= n_blocks
    for index, tile in enumerate(tiles):
        if not blocks.start <= index < blocks.end:
            assert not tile.any(), f"block {index} is skipped, but has something to see"
            continue
        assert tile.any(), f"block {index} is visited, but sees nothing"
        full = blocks.full_start <= index < blocks.full_end
        assert full == tile.all(), f"block {index}: full is {full}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_q", "block_kv"), BLOCKS)
def test_key_blocks(causal: bool, block_q: int, block_kv: int) -> None:
    for seq_q, seq_kv, offset in itertools.product(LENGTHS, LENGTHS, OFFSETS):
        mask = visible(seq_q, seq_kv, causal, offset)
        n_blocks = ceil_div(seq_kv, block_kv)
        for i in range(ceil_div(seq_q, block_q)):
            rows = mask[i * block_q : (i + 1) * block_q]
            tiles = [rows[:, j * block_kv : (j + 1) * block_kv] for j in range(n_blocks)]
            got = key_blocks(i, block_q, block_kv, seq_q, seq_kv, causal, offset)
            check(got, n_blocks, tiles)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_q", "block_kv"), BLOCKS)
def test_query_blocks(causal: bool, block_q: int, block_kv: int) -> None:
    for seq_q, seq_kv, offset in itertools.product(LENGTHS, LENGTHS, OFFSETS):
        mask = visible(seq_q, seq_kv, causal, offset)
        n_blocks = ceil_div(seq_q, block_q)
        for j in range(ceil_div(seq_kv, block_kv)):
            keys = mask[:, j * block_kv : (j + 1) * block_kv]
            tiles = [keys[i * block_q : (i + 1) * block_q] for i in range(n_blocks)]
            got = query_blocks(j, block_q, block_kv, seq_q, seq_kv, causal, offset)
            check(got, n_blocks, tiles)


def test_causal_without_offset_is_the_papers_triangle() -> None:
    """Source: arXiv:2307.08691, section 3.1, causal masking: one masked block a row of blocks."""
    for i in range(8):
        assert key_blocks(i, 16, 16, 128, 128, True, 0) == BlockRange(0, 0, i, i + 1)
        assert query_blocks(i, 16, 16, 128, 128, True, 0) == BlockRange(i, i + 1, 8, 8)


def test_helpers() -> None:
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [clamp(x, 2, 5) for x in (1, 3, 9)] == [2, 3, 5]
