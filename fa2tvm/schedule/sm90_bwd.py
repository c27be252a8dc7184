"""Decisions of the Hopper backward kernels, their choices, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule.base import SCHEDULES, Footprint, Schedule
from fa2tvm.schedule.sm90 import SM90_HEAD_DIMS

CONSUMER_WARPGROUPS = 2
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
# What a consumer thread needs beside its fragments: 200 of 240 do not spill (ptxas 13.0).
OTHER_REGISTERS = 24
# Workspace before the statistics: the tile counter, padded to 128 bytes.
COUNTER_FLOATS = 32
# Turns of a query block's dQ, int32: one for each consumer warp.
TURNS = 4 * CONSUMER_WARPGROUPS


def sm90_bwd_head_dim(head_dim: int) -> int:
    """Columns of the backward's tiles of a head dim: whole boxes of 64, zero-filled by TMA."""
    return -(-head_dim // 64) * 64


@dataclass(frozen=True)
class Sm90Backward(Schedule):
    """Decisions of the Hopper backward (kernels/sm90_bwd.py): one block a multiprocessor.

    Attributes
    ----------
    block_q
        B_r, query rows of one step.
    block_kv
        B_c, keys of one tile: 128 (each consumer warpgroup carries dK and dV of 64 keys) or, for
        wide heads, 64 (one warpgroup carries dV, the other dK) or 80 (each carries half of the
        columns of both).
    q_stages, do_stages
        Query and dO blocks that shared memory holds.
    k_stages
        Key blocks that shared memory holds; with two the next tile's is there when this one ends.
    ds_stages
        Copies of dS in shared memory.
    early_dv
        dV of a step is issued before its dS is computed, not together with dK.
    halves
        The first half of a step's queries goes ahead: its dV is issued, and its dS computed, before
        and under the exponentials of the second half.
    early_dk
        With `halves`: its dK is issued then, too. Not if `deterministic`: it spills there.
    bulk_dq
        dQ reaches global memory through shared memory and the bulk copy engine, not by reductions
        from registers.
    persistent
        A thread block walks over many tiles instead of one launch a tile.
    head_group_mib
        Heads whose Q, dO and dQ take this many MiB together are walked before the next ones (L2),
        the longest key blocks of all of them first; 0 walks head by head.
    deterministic
        Thread blocks add to a dQ in the order of their keys: it is bitwise equal over runs.
    """

    family: ClassVar[str] = "sm90"
    pass_: ClassVar[PassName] = "backward"

    block_q: int = 64
    block_kv: int = 128
    q_stages: int = 2
    do_stages: int = 2
    k_stages: int = 2
    ds_stages: int = 2
    early_dv: bool = True
    halves: bool = False
    early_dk: bool = False
    bulk_dq: bool = True
    persistent: bool = True
    head_group_mib: int = 0
    deterministic: bool = False

    @property
    def split(self) -> bool:
        """Whether both consumer warpgroups take half of every GEMM."""
        return self.block_kv == 80

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Sm90Backward:
        """The first of the hand-picked schedules, which is good at any length."""
        return cls._hand_picked(variant, device)[0]

    @classmethod
    def hand_picked(cls, problem: Problem, device: Device) -> tuple[Sm90Backward, ...]:
        """Those of the variant (evidence in sm90_bwd.md), and other walks over the tiles."""
        picked = cls._hand_picked(problem.variant, device)
        walks = [replace(picked[0], head_group_mib=mib) for mib in (0, 8, 16, 32)]
        return (*picked, *(walk for walk in walks if walk != picked[0]))

    @classmethod
    def _hand_picked(cls, variant: Variant, device: Device) -> tuple[Sm90Backward, ...]:
        wide = max(variant.head_dim_qk, variant.head_dim_v)
        if wide <= 64:
            # Causal it spills 36 bytes in the step, and gains nothing.
            halves = cls(128, halves=True, early_dk=not variant.causal)
            picked = [halves, cls(128, early_dv=False), cls(96, halves=True)]
        elif wide <= 128:
            halves = cls(64, halves=True, early_dk=True)
            picked = [halves, replace(halves, early_dk=False), replace(halves, bulk_dq=False)]
        else:
            roles = cls(64, 64, ds_stages=1, early_dv=False, bulk_dq=False)
            picked = [
                replace(roles, block_kv=80, do_stages=1, k_stages=1),
                roles,
                replace(roles, k_stages=1),
            ]
        picked = [replace(s, head_group_mib=32 if variant.causal else 0) for s in picked]
        fitting = tuple(s for s in picked if s.feasible(variant, device))
        return fitting or (picked[-1],)

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space around the hand-picked schedules; `reasons` cuts away what does not fit."""
        wide = max(problem.variant.head_dim_qk, problem.variant.head_dim_v)
        walks: dict[str, tuple[Any, ...]] = {
            "persistent": (False, True),
            "head_group_mib": (0, 8, 16, 32),
            "deterministic": (False,),
        }
        if wide > 128:
            return {
                "block_q": (48, 64, 80),
                "block_kv": (64, 80),
                "q_stages": (1, 2),
                "do_stages": (1, 2),
                "k_stages": (1, 2),
                "ds_stages": (1,),
                "early_dv": (False,),
                "halves": (False,),
                "early_dk": (False,),
                "bulk_dq": (False,),
                **walks,
            }
        return {
            "block_q": (64, 80, 96, 112, 128) if wide <= 64 else (64, 80),
            "block_kv": (128,),
            "q_stages": (1, 2, 3),
            "do_stages": (1, 2, 3),
            "k_stages": (1, 2),
            "ds_stages": (2,),
            "early_dv": (False, True),
            "halves": (False, True),
            "early_dk": (False, True),
            "bulk_dq": (False, True),
            **walks,
        }

    def floats_per_block(self, variant: Variant) -> tuple[int, int]:
        """float32 elements of workspace of a query block: its statistics, its dQ accumulator."""
        return 2 * self.block_q, self.block_q * sm90_bwd_head_dim(variant.head_dim_qk)

    def workspace_floats(self, problem: Problem, splits: int = 1) -> int:
        """float32 elements of scratch: a counter, L and D of every row, dQ in float32."""
        del splits  # The keys of a head are split over thread blocks as it is.
        s = problem.shape
        blocks = s.batch * s.heads_q * -(-s.seq_q // self.block_q)
        floats = sum(self.floats_per_block(problem.variant))
        return COUNTER_FLOATS + blocks * (floats + (TURNS if self.deterministic else 0))

    def splits(self, problem: Problem, threads: int = 1) -> int:
        """Pieces of a head's keys that a caller must provide workspace for: always one."""
        del problem, threads
        return 1

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Shared memory of a thread block, registers of a consumer thread's fragments, threads."""
        d, dv = sm90_bwd_head_dim(variant.head_dim_qk), sm90_bwd_head_dim(variant.head_dim_v)
        elements = self.block_kv * (self.k_stages * d + dv)
        elements += self.block_q * (self.q_stages * d + self.do_stages * dv)
        elements += self.ds_stages * self.block_q * self.block_kv
        floats = 2 * self.q_stages * self.block_q + (self.block_q * d if self.bulk_dq else 0)
        # Two 8-byte mbarriers a stage (beside Q, dO, K: 1 V, 2 tiles), two tile numbers.
        control = 16 * (self.q_stages + self.do_stages + self.k_stages + 3) + 16
        scores = self.block_q // 2
        fragments = (d + dv) // 2 + 2 * scores + (scores // 2 if self.early_dv else 0)
        if self.halves:
            fragments -= scores // 4
        if self.split:
            floats += self.block_q * self.block_kv
            fragments = (d + dv) // 128 * (self.block_kv // 2) + self.block_kv // 4 + scores
        elif self.block_kv == 64:
            floats += self.block_q * self.block_kv
            fragments = max(d, dv) // 2 + 2 * scores + scores // 2
        return Footprint(
            2 * elements + 4 * floats + control, fragments, 128 * (CONSUMER_WARPGROUPS + 1)
        )

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
        if self.block_q % 16 or not 16 <= self.block_q <= 128:
            reasons.append(f"block_q is {self.block_q}, but it must be a multiple of 16 up to 128.")
        if self.block_kv not in (64, 80, 128):
            reasons.append(f"block_kv is {self.block_kv}, but it must be 64, 80 or 128.")
        if self.split:
            if self.block_q != 64:
                reasons.append(f"block_q is {self.block_q}, but block_kv 80 takes 64.")
            for name in ("head_dim_qk", "head_dim_v"):
                columns = sm90_bwd_head_dim(getattr(variant, name))
                if columns % 128:
                    reasons.append(
                        f"{name} takes {columns} columns, but block_kv 80 takes whole 128."
                    )
        for name in ("q_stages", "do_stages", "k_stages", "ds_stages"):
            if getattr(self, name) < 1:
                reasons.append(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if self.halves and not self.early_dv:
            reasons.append("halves is True, but then early_dv must be True.")
        if self.early_dk and not self.halves:
            reasons.append("early_dk is True, but then halves must be True.")
        if self.block_kv != 128 and (self.bulk_dq or self.ds_stages > 1 or self.early_dv):
            reasons.append(
                f"block_kv is {self.block_kv}, where bulk_dq and early_dv must be False and "
                "ds_stages 1."
            )
        if self.block_kv == 128 and self.ds_stages != 2:
            # The other warpgroup may still read dS of the step before.
            reasons.append(f"ds_stages is {self.ds_stages}, but block_kv 128 takes 2.")
        if self.block_kv == 64 and self.q_stages < 2:
            # S of the next step is issued while dK of this one reads its Q: both would wait.
            reasons.append(f"q_stages is {self.q_stages}, but block_kv 64 takes at least 2.")
        if reasons:
            return reasons
        footprint = self.footprint(variant, device)
        if footprint.scratch_bytes > device.shared_bytes:
            reasons.append(
                f"shared memory is {footprint.scratch_bytes} bytes, but a thread block has "
                f"{device.shared_bytes}; take smaller blocks or fewer stages."
            )
        if footprint.accumulator_registers + OTHER_REGISTERS > CONSUMER_REGISTERS:
            reasons.append(
                f"a consumer thread needs {footprint.accumulator_registers} fragment registers "
                f"and about {OTHER_REGISTERS} others, but it has {CONSUMER_REGISTERS}; "
                "take a smaller block_q."
            )
        return reasons


SCHEDULES["sm90", "backward"] = Sm90Backward
