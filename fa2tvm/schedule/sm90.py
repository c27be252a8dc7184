"""Decisions of the Hopper family, their choices, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule.base import SCHEDULES, Footprint, Schedule

# Head dims that the Hopper kernels have tiles for; others use the next one, zero-filled by TMA.
SM90_HEAD_DIMS = (64, 96, 128, 192, 256)


# What a consumer thread needs beside its fragments: 208 of 240 registers and 128 of 160 do not
# spill, 132 of 160 do (ptxas 13.0).
SM90_OTHER_REGISTERS = 32
# The least that the producer and the scheduler do with (ptxas 13.0).
SM90_PRODUCER_REGISTERS = 24


def sm90_head_dim(head_dim: int) -> int:
    """Columns of the tiles of a head dim: the next of `SM90_HEAD_DIMS`, or itself beyond them."""
    return next((d for d in SM90_HEAD_DIMS if d >= head_dim), head_dim)


def _widest(variant: Variant) -> int:
    """Columns of the wider of a variant's tiles, at most those of the widest tiles there are."""
    wide = sm90_head_dim(max(variant.head_dim_qk, variant.head_dim_v))
    return min(wide, SM90_HEAD_DIMS[-1])


def _shape(
    consumer_warpgroups: int,
    block_kv: int,
    stages: tuple[int, int, int],
    q_in_registers: bool = False,
) -> dict[str, Any]:
    q_stages, k_stages, v_stages = stages
    return {
        "consumer_warpgroups": consumer_warpgroups,
        "block_kv": block_kv,
        "q_stages": q_stages,
        "k_stages": k_stages,
        "v_stages": v_stages,
        "q_in_registers": q_in_registers,
    }


# By the widest tiles; narrow ones also fit those of (192, 128) and the like. The first that fits is
# the default: good at every length, where another may be better at some (sm90_fwd.md).
_HAND_PICKED: dict[int, tuple[dict[str, Any], ...]] = {
    64: (
        _shape(4, 64, (2, 3, 3)),
        _shape(3, 128, (2, 3, 3)),
        _shape(2, 128, (2, 4, 4)),
    ),
    96: (
        _shape(2, 128, (1, 3, 3), q_in_registers=True),
        _shape(3, 96, (1, 3, 3)),
        _shape(3, 64, (1, 4, 4)),
    ),
    128: (
        _shape(2, 128, (1, 3, 3), q_in_registers=True),
        _shape(2, 128, (1, 2, 2)),
        _shape(2, 160, (1, 2, 2)),
        _shape(2, 64, (1, 4, 4)),
    ),
    192: (
        _shape(2, 128, (1, 2, 2)),
        _shape(2, 112, (1, 2, 2)),
        _shape(2, 96, (1, 2, 2)),
        _shape(2, 64, (1, 3, 3)),
    ),
    256: (
        _shape(2, 64, (1, 3, 2)),
        _shape(2, 80, (1, 2, 2)),
        _shape(2, 64, (1, 2, 2)),
    ),
}
# Their order under a causal mask, where it is another.
_CAUSAL_ORDER = {64: (2, 1, 0), 192: (0, 3, 1, 2)}


@dataclass(frozen=True)
class Sm90Forward(Schedule):
    """Decisions of the Hopper forward kernel (kernels/sm90_fwd.py), one block a multiprocessor.

    Attributes
    ----------
    consumer_warpgroups
        Warpgroups of 64 query rows each: block_q = 64 * consumer_warpgroups.
    block_kv
        B_c, keys of one block.
    q_stages, k_stages, v_stages
        Query, key and value blocks that shared memory holds; with two of Q the next tile's is there
        when this one ends.
    q_in_registers
        Q_i as the register operand of S = Q K^T instead of the shared-memory one.
    lazy_rescale
        The running maximum moves only where the new one is 2**lazy_rescale times larger; 0 moves
        it always. Source: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute).
    trust_maximum
        Blocks that need no mask keep the running maximum without looking for a new one; a tile
        whose row sums then come near overflow is computed again with its maxima.
    pingpong
        Warpgroups take turns at issuing their GEMMs, so that one's softmax runs under another's
        GEMMs. Source: FlashAttention-3, arXiv:2407.08608, section 3.1.
    dynamic
        Thread blocks draw their tiles from a counter instead of striding over them.
    head_group_mib
        Heads whose K and V take this many MiB together are walked before the next ones (L2), the
        longest query blocks of all of them first; 0 walks head by head.
    max_chains
        Independent chains of the row maximum and the row sum.
    """

    family: ClassVar[str] = "sm90"
    pass_: ClassVar[PassName] = "forward"
    takes_counter: ClassVar[bool] = True

    consumer_warpgroups: int = 2
    block_kv: int = 128
    q_stages: int = 1
    k_stages: int = 2
    v_stages: int = 2
    q_in_registers: bool = False
    lazy_rescale: int = 8
    trust_maximum: bool = True
    pingpong: bool = True
    dynamic: bool = False
    head_group_mib: int = 0
    max_chains: int = 2

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Sm90Forward:
        """The first of the hand-picked schedules, which is good at any length."""
        return cls._hand_picked(variant, device)[0]

    @classmethod
    def hand_picked(cls, problem: Problem, device: Device) -> tuple[Sm90Forward, ...]:
        """Those of the variant (evidence in sm90_fwd.md), and other walks over the tiles."""
        picked = cls._hand_picked(problem.variant, device)
        first = picked[0]
        walks = [replace(first, dynamic=not first.dynamic)]
        if problem.variant.causal:
            walks += [replace(first, head_group_mib=mib) for mib in (0, 8, 16)]
        return (*picked, *walks)

    @classmethod
    def _hand_picked(cls, variant: Variant, device: Device) -> tuple[Sm90Forward, ...]:
        walk: dict[str, Any] = {
            "dynamic": variant.causal,
            "head_group_mib": 32 if variant.causal else 0,
        }
        wide = _widest(variant)
        shapes = _HAND_PICKED[wide]
        if variant.causal and wide in _CAUSAL_ORDER:
            shapes = tuple(shapes[n] for n in _CAUSAL_ORDER[wide])
        schedules = [cls(**shape, **walk) for shape in shapes]
        fitting = tuple(s for s in schedules if s.feasible(variant, device))
        return fitting or (schedules[-1],)

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space around the hand-picked schedules; `reasons` cuts away what does not fit."""
        wide = _widest(problem.variant)
        keys: tuple[int, ...] = (64, 80, 96, 112, 128)
        if wide <= 128:
            keys += (144, 160, 176, 192)
        elif wide > 192:
            keys = (48, 64, 80)
        return {
            "consumer_warpgroups": {64: (2, 3, 4), 96: (2, 3)}.get(wide, (2,)),
            "block_kv": keys,
            "q_stages": (1, 2) if wide <= 192 else (1,),
            "k_stages": (2, 3, 4) if wide <= 128 else (2, 3),
            "v_stages": (2, 3, 4) if wide <= 128 else (2, 3),
            "q_in_registers": (False, True) if wide <= 128 else (False,),
            "lazy_rescale": (8,),
            "trust_maximum": (False, True),
            "pingpong": (False, True),
            "dynamic": (False, True),
            "head_group_mib": (0, 8, 16, 32),
            "max_chains": (2, 4),
        }

    @property
    def counts_tiles(self) -> bool:
        """Static tiles need no counter."""
        return self.dynamic

    @property
    def block_q(self) -> int:
        """B_r, query rows of one tile."""
        return 64 * self.consumer_warpgroups

    @property
    def entry_registers(self) -> int:
        """What each thread starts with: an equal share of the multiprocessor's 65536."""
        return min(65536 // (128 * (self.consumer_warpgroups + 1)) // 8 * 8, 168)

    @property
    def consumer_registers(self) -> int:
        """What setmaxnreg gives each consumer thread: all that the producer can spare."""
        pool = (self.consumer_warpgroups + 1) * self.entry_registers
        return min((pool - SM90_PRODUCER_REGISTERS) // self.consumer_warpgroups // 8 * 8, 240)

    @property
    def producer_registers(self) -> int:
        """What is left for each thread of the producer's warpgroup."""
        pool = (self.consumer_warpgroups + 1) * self.entry_registers
        return pool - self.consumer_warpgroups * self.consumer_registers

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Shared memory of a thread block, registers of a consumer thread's fragments, threads."""
        d, dv = sm90_head_dim(variant.head_dim_qk), sm90_head_dim(variant.head_dim_v)
        blocks = self.q_stages * self.block_q * d
        blocks += self.block_kv * (self.k_stages * d + self.v_stages * dv)
        # Two 8-byte mbarriers a stage (beside Q, K, V: 2 tiles, 1 request, 2 reports), four
        # records of 6 words, two flags.
        control = 16 * (self.q_stages + self.k_stages + self.v_stages + 5) + 96 + 8
        fragments = self.block_kv // 2 + self.block_kv // 4 + dv // 2
        if self.q_in_registers:
            fragments += d // 4
        return Footprint(2 * blocks + control, fragments, 128 * (self.consumer_warpgroups + 1))

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Tile shapes that wgmma and TMA have, shared memory, registers without spills."""
        reasons = []
        if variant.dtype not in ("float16", "bfloat16"):
            reasons.append(f"dtype is {variant.dtype}, but wgmma takes float16 and bfloat16 here.")
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(variant, name)
            if value % 8 or value > SM90_HEAD_DIMS[-1]:
                reasons.append(
                    f"{name} is {value}, but it must be a multiple of 8 up to {SM90_HEAD_DIMS[-1]}."
                )
        if self.block_kv % 16 or not 16 <= self.block_kv <= 256:
            reasons.append(
                f"block_kv is {self.block_kv}, but it must be a multiple of 16 up to 256."
            )
        if not 1 <= self.consumer_warpgroups <= 4:
            reasons.append(
                f"consumer_warpgroups is {self.consumer_warpgroups}, but it must be 1 to 4."
            )
        for name in ("q_stages", "k_stages", "v_stages", "max_chains"):
            if getattr(self, name) < 1:
                reasons.append(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if reasons:
            return reasons
        if self.pingpong and self.consumer_warpgroups == 1:
            reasons.append("pingpong is True, but it needs at least two consumer warpgroups.")
        if not 0 <= self.lazy_rescale <= 15:
            # An exponential may reach 2**lazy_rescale, and float16 ends at 2**16.
            reasons.append(f"lazy_rescale is {self.lazy_rescale}, but it must be 0 to 15.")
        footprint = self.footprint(variant, device)
        if footprint.scratch_bytes > device.shared_bytes:
            reasons.append(
                f"shared memory is {footprint.scratch_bytes} bytes, but a thread block has "
                f"{device.shared_bytes}; take smaller blocks or fewer stages."
            )
        if footprint.accumulator_registers + SM90_OTHER_REGISTERS > self.consumer_registers:
            reasons.append(
                f"a consumer thread needs {footprint.accumulator_registers} fragment registers "
                f"and about {SM90_OTHER_REGISTERS} others, but it has {self.consumer_registers}; "
                "take a smaller block_kv or Q from shared memory."
            )
        return reasons


SCHEDULES["sm90", "forward"] = Sm90Forward
