"""A setting with its numbers and blocks: the geometry is that of blocks.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa2tvm.blocks import BlockRange, ceil_div, key_blocks, query_blocks
from fa2tvm.reference import Array
from fa2tvm.viz.setting import Setting, inputs


@dataclass(frozen=True)
class Case:
    """A setting with its numbers and block geometry."""

    setting: Setting
    arrays: dict[str, Array]

    @classmethod
    def of(cls, setting: Setting) -> Case:
        """The case of a setting."""
        return cls(setting, inputs(setting))

    @property
    def n_query_blocks(self) -> int:
        """T_r."""
        return ceil_div(self.setting.seq_q, self.setting.block_q)

    @property
    def n_key_blocks(self) -> int:
        """T_c."""
        return ceil_div(self.setting.seq_kv, self.setting.block_kv)

    def rows(self, i: int) -> slice:
        """Rows of query block i."""
        s = self.setting
        return slice(i * s.block_q, min((i + 1) * s.block_q, s.seq_q))

    def keys(self, j: int) -> slice:
        """Rows of key block j."""
        s = self.setting
        return slice(j * s.block_kv, min((j + 1) * s.block_kv, s.seq_kv))

    def _geometry(self) -> tuple[int, int, int, int, bool, int]:
        s = self.setting
        return s.block_q, s.block_kv, s.seq_q, s.seq_kv, s.causal, s.causal_offset

    def key_blocks(self, i: int) -> BlockRange:
        """Key blocks that query block i meets."""
        return key_blocks(i, *self._geometry())

    def query_blocks(self, j: int) -> BlockRange:
        """Query blocks that key block j meets."""
        return query_blocks(j, *self._geometry())

    def hide(self, S_ij: Array, i: int, j: int) -> Array:
        """S_ij with -inf where a row may not see a key."""
        row = self.rows(i).start + np.arange(S_ij.shape[0])[:, None]
        key = self.keys(j).start + np.arange(S_ij.shape[1])[None, :]
        return np.where(key <= row + self.setting.causal_offset, S_ij, -np.inf)


def safe(x: Array) -> Array:
    """Put 0 for -inf: exp(-inf - -inf) is NaN (erratum 3 of reference.py)."""
    return np.where(x == -np.inf, 0.0, x)


def visits(seen: BlockRange) -> list[tuple[int, bool]]:
    """(block, whether it needs a mask) of a range."""
    return [(b, not seen.full_start <= b < seen.full_end) for b in range(seen.start, seen.end)]


def left_out(seen: BlockRange, n: int) -> list[int]:
    """Blocks that a causal mask lets an algorithm skip."""
    return [b for b in range(n) if not seen.start <= b < seen.end]
