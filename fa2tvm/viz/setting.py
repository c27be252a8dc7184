"""A setting of the visualizer: sizes, blocks, mask, scale, and the numbers that a seed gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fa2tvm.errors import UnsupportedProblem
from fa2tvm.reference import Array, causal_offset, resolve_scale

Mask = Literal["full", "bottom_right", "top_left"]
MASKS: tuple[Mask, ...] = ("full", "bottom_right", "top_left")
# What one page still shows legibly and plays without delay.
MAX_LENGTH, MAX_HEAD_DIM = 32, 8


@dataclass(frozen=True)
class Setting:
    """What the page plays; the default is the smallest example with two blocks on each side.

    Attributes
    ----------
    seq_q, seq_kv, head_dim
        N_q, N_kv and d of one head.
    block_q, block_kv
        B_r and B_c.
    mask
        No mask, or causal with one of the two alignments.
    softmax_scale
        None is 1/sqrt(head_dim).
    seed
        Of `inputs`.

    Raises
    ------
    UnsupportedProblem
        For a size that the page does not show.
    """

    seq_q: int = 4
    seq_kv: int = 4
    head_dim: int = 3
    block_q: int = 2
    block_kv: int = 2
    mask: Mask = "full"
    softmax_scale: float | None = None
    seed: int = 3

    def __post_init__(self) -> None:
        limits = {
            "seq_q": MAX_LENGTH,
            "seq_kv": MAX_LENGTH,
            "head_dim": MAX_HEAD_DIM,
            "block_q": MAX_LENGTH,
            "block_kv": MAX_LENGTH,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise UnsupportedProblem(
                    f"{name} is {value}, but the page shows 1 to {limit}; choose one of those."
                )
        if self.mask not in MASKS:
            raise UnsupportedProblem(
                f"mask is {self.mask!r}, but only {', '.join(MASKS)} exist; choose one."
            )

    @property
    def causal(self) -> bool:
        """Whether there is a mask."""
        return self.mask != "full"

    @property
    def causal_offset(self) -> int:
        """Query row i sees keys j <= i + this, where there is a mask."""
        return causal_offset(self.seq_q, self.seq_kv, self.mask) if self.mask != "full" else 0

    @property
    def scale(self) -> float:
        """The softmax scale as a number."""
        return resolve_scale(self.softmax_scale, self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def inputs(setting: Setting) -> dict[str, Array]:
    """Q, K, V and dO of a setting: multiples of 0.5 in [-2, 2], so that they read well.

    Drawn row by row from mulberry32, which the page's JavaScript repeats exactly.
    """
    rows = {"Q": setting.seq_q, "K": setting.seq_kv, "V": setting.seq_kv, "dO": setting.seq_q}
    draw = _Mulberry32(setting.seed)
    return {
        name: np.array([[draw.half_step() for _ in range(setting.head_dim)] for _ in range(n)])
        for name, n in rows.items()
    }


class _Mulberry32:
    """A 32-bit generator that is a few lines in any language. Source: Tommy Ettinger, 2017."""

    def __init__(self, seed: int) -> None:
        self.state = seed & 0xFFFFFFFF

    def half_step(self) -> float:
        """The next multiple of 0.5 in [-2, 2]."""
        self.state = (self.state + 0x6D2B79F5) & 0xFFFFFFFF
        t = self.state
        t = ((t ^ (t >> 15)) * (t | 1)) & 0xFFFFFFFF
        t ^= (t + (((t ^ (t >> 7)) * (t | 61)) & 0xFFFFFFFF)) & 0xFFFFFFFF
        return ((t ^ (t >> 14)) % 9 - 4) / 2
