"""Decisions of the portable NVIDIA family (Ampere and later), their choices, whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule.base import SCHEDULES, Footprint, Schedule

SM80_MAX_HEAD_DIM = 256
# A multiprocessor's registers, in 4 bytes, and what one thread may have of them.
SM80_REGISTERS, SM80_THREAD_REGISTERS = 65536, 255
# What a thread needs beside its fragments: addresses, maxima, sums, operands on their way. Of 255
# registers 216 do not spill, 248 spill some 20 (ptxas 13.0).
SM80_OTHER_REGISTERS = 56
SM80_BWD_OTHER_REGISTERS = 40
# A multiprocessor has this much shared memory beyond what one thread block may use, and keeps as
# much of it for each thread block.
SM80_RESERVED_BYTES = 1024


def sm80_head_dim(head_dim: int) -> int:
    """Columns of the shared tiles of a head dim: the next multiple of 32."""
    return -(-head_dim // 32) * 32


def _variant_reasons(variant: Variant) -> list[str]:
    """Dtypes and head dims that the kernels do not have."""
    reasons = []
    if variant.dtype not in ("float16", "bfloat16"):
        reasons.append(f"dtype is {variant.dtype}, but mma takes float16 and bfloat16 here.")
    for name in ("head_dim_qk", "head_dim_v"):
        value = getattr(variant, name)
        if value % 8 or value > SM80_MAX_HEAD_DIM:
            reasons.append(
                f"{name} is {value}, but it must be a multiple of 8 up to {SM80_MAX_HEAD_DIM}."
            )
    return reasons


def _shared_reasons(footprint: Footprint, blocks: int, device: Device) -> list[str]:
    """Limits of shared memory that so many thread blocks of a multiprocessor break."""
    together = blocks * (footprint.scratch_bytes + SM80_RESERVED_BYTES)
    if footprint.scratch_bytes > device.shared_bytes:
        reason = (
            f"shared memory is {footprint.scratch_bytes} bytes, but a thread block has "
            f"{device.shared_bytes}; take smaller blocks or fewer stages."
        )
    elif together > device.shared_bytes + SM80_RESERVED_BYTES:
        reason = (
            f"{blocks} thread blocks take {together} bytes of shared memory, but a multiprocessor "
            f"has {device.shared_bytes + SM80_RESERVED_BYTES}; take fewer of them, smaller blocks "
            "or fewer stages."
        )
    else:
        return []
    return [reason]


@dataclass(frozen=True)
class Sm80Forward(Schedule):
    """Decisions of the portable forward kernel (kernels/sm80_fwd.py).

    The last four are what FlashAttention-2 changed of FlashAttention-1 (arXiv:2307.08691, sections
    3.1 to 3.3); with all of them turned, the program is version 1's.

    Attributes
    ----------
    block_q, block_kv
        B_r and B_c, query rows and keys of one block.
    warps
        Warps of a thread block.
    stages
        Blocks of K or V that shared memory holds, one ring for both: with 2, one of each; with 3,
        they take turns at each slot; with 4, the next ones load while these are used.
    blocks_per_multiprocessor
        Thread blocks that must fit a multiprocessor's registers together.
    q_in_registers
        Q_i stays in registers instead of being read from shared memory for every key block.
    lazy_rescale
        The running maximum moves only where the new one is 2**lazy_rescale times larger; 0 moves
        it always. Source: FlashAttention-4 (Dao-AILab/flash-attention, flash_attn/cute).
    trust_maximum
        Blocks that need no mask keep the running maximum without looking for a new one; a query
        block whose row sums then come near overflow is computed again with its maxima.
    split_keys
        Warps share the rows and split each key block, adding their parts of O up through shared
        memory (split-K), instead of having rows of their own (split-Q).
    rescale_each_step
        O_i is divided by l_i after every key block instead of once at the end.
    parallel_queries
        Thread blocks take single query blocks instead of all query blocks of a head.
    save_m_and_l
        m_i and l_i are stored instead of L_i = m_i + log l_i.
    """

    family: ClassVar[str] = "sm80"
    pass_: ClassVar[PassName] = "forward"

    block_q: int = 128
    block_kv: int = 64
    warps: int = 4
    stages: int = 2
    blocks_per_multiprocessor: int = 1
    q_in_registers: bool = False
    lazy_rescale: int = 8
    trust_maximum: bool = True
    split_keys: bool = False
    rescale_each_step: bool = False
    parallel_queries: bool = True
    save_m_and_l: bool = False

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Sm80Forward:
        """The hand-picked schedule of a head dim: the first that fits (evidence in sm80_fwd.md)."""
        wide = max(sm80_head_dim(variant.head_dim_qk), sm80_head_dim(variant.head_dim_v))
        # The most keys that spill on no architecture; 64 keys and 100 bytes of spills are 4 to 8 %
        # faster at 128 columns (H200, 2026-11-30), which is for the tuner to find.
        keys = 64 if wide <= 64 else 48 if wide <= 96 else 32
        # For sm_100 ptxas 13.0 spills 104 bytes of 128 columns that are not causal with four slots.
        stages = 3 if device.arch.startswith("sm_10") and wide > 96 else 4
        narrow = cls(128, keys, 4, stages, 2, q_in_registers=wide <= 64)
        # For sm_120 ptxas 13.0 spills 24 bytes of 128 columns, for sm_100 48 where only V has so
        # many, with three slots too.
        only_v = device.arch.startswith("sm_10") and variant.head_dim_qk <= 64
        most = 96 if only_v or device.arch.startswith("sm_12") else 128
        candidates = [narrow, replace(narrow, stages=2)] if wide <= most else []
        candidates += [
            cls(64, 64, 4, 2, 2),
            cls(128, 64, 8, 2, 1),
            cls(64, 64, 4, 2, 1),
            cls(64, 32, 4, 2, 1),
        ]
        return next((s for s in candidates if s.feasible(variant, device)), candidates[-1])

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space around the hand-picked schedules; `reasons` cuts away what does not fit."""
        return {
            "block_q": (64, 128, 256),
            "block_kv": (32, 48, 64, 80, 96, 128),
            "warps": (4, 8),
            "stages": (2, 3, 4),
            "blocks_per_multiprocessor": (1, 2, 3),
            "q_in_registers": (False, True),
            "lazy_rescale": (8,),
            "trust_maximum": (False, True),
            "split_keys": (False,),
            "rescale_each_step": (False,),
            "parallel_queries": (True,),
            "save_m_and_l": (False,),
        }

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 query rows that one warp carries."""
        return self.block_q // (16 if self.split_keys else 16 * self.warps)

    @property
    def warp_keys(self) -> int:
        """Keys of a block that one warp multiplies with its rows."""
        return self.block_kv // self.warps if self.split_keys else self.block_kv

    @property
    def thread_registers(self) -> int:
        """Registers that a thread may have."""
        share = SM80_REGISTERS // (32 * self.warps * self.blocks_per_multiprocessor)
        return min(SM80_THREAD_REGISTERS, share // 8 * 8)

    def exchange_bytes(self, variant: Variant) -> int:
        """Shared memory in which warps that split the keys add up: parts of O, maxima, sums."""
        if not self.split_keys:
            return 0
        return 4 * self.warps * self.block_q * (sm80_head_dim(variant.head_dim_v) + 1)

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Shared memory of a thread block, registers of a thread's fragments, threads."""
        d, dv = sm80_head_dim(variant.head_dim_qk), sm80_head_dim(variant.head_dim_v)
        shared = 2 * self.block_q * d + 2 * self.stages * self.block_kv * max(d, dv)
        fragments = self.row_tiles * (dv // 2 + self.warp_keys // 2)
        if self.split_keys:
            fragments += self.row_tiles * dv // (2 * self.warps)
        if self.q_in_registers:
            fragments += self.row_tiles * d // 4
        return Footprint(shared + self.exchange_bytes(variant), fragments, 32 * self.warps)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Tile shapes that mma.sync has, shared memory, registers without spills."""
        reasons = _variant_reasons(variant)
        if self.warps not in (1, 2, 4, 8, 16):
            reasons.append(f"warps is {self.warps}, but it must be 1, 2, 4, 8 or 16.")
        for name in ("block_q", "block_kv", "blocks_per_multiprocessor"):
            if getattr(self, name) < 1:
                reasons.append(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if not 2 <= self.stages <= 8:
            reasons.append(f"stages is {self.stages}, but it must be 2 to 8.")
        if not 0 <= self.lazy_rescale <= 15:
            # An exponential may reach 2**lazy_rescale, and float16 ends at 2**16.
            reasons.append(f"lazy_rescale is {self.lazy_rescale}, but it must be 0 to 15.")
        if reasons:
            return reasons
        rows, keys = (1, self.warps) if self.split_keys else (self.warps, 1)
        if self.block_q % (16 * rows):
            reasons.append(
                f"block_q is {self.block_q}, but it must be a multiple of {16 * rows} here."
            )
        if self.block_kv % (16 * keys):
            reasons.append(
                f"block_kv is {self.block_kv}, but it must be a multiple of {16 * keys} here."
            )
        if self.split_keys and sm80_head_dim(variant.head_dim_v) % (8 * self.warps):
            reasons.append(
                f"split_keys is True, but {self.warps} warps do not share "
                f"{sm80_head_dim(variant.head_dim_v)} columns of O in eights."
            )
        footprint = self.footprint(variant, device)
        reasons += _shared_reasons(footprint, self.blocks_per_multiprocessor, device)
        if footprint.accumulator_registers + SM80_OTHER_REGISTERS > self.thread_registers:
            reasons.append(
                f"a thread needs {footprint.accumulator_registers} fragment registers and about "
                f"{SM80_OTHER_REGISTERS} others, but it has {self.thread_registers}; take smaller "
                "blocks, more warps or Q from shared memory."
            )
        return reasons


SCHEDULES["sm80", "forward"] = Sm80Forward


def sm80_bwd_head_dim(head_dim: int) -> int:
    """Columns of the backward's tiles of a head dim: 64, 128 or 256."""
    return next((d for d in (64, 128, 256) if d >= head_dim), head_dim)


# Workspace before the statistics: a counter that this family does not use, padded to 128 bytes.
SM80_COUNTER_FLOATS = 32
# Behind the accumulators, where the order of additions is kept: words of each query block.
SM80_TURNS = 8


@dataclass(frozen=True)
class Sm80Backward(Schedule):
    """Decisions of the portable backward kernels (kernels/sm80_bwd.py).

    Attributes
    ----------
    block_q, block_kv
        B_r and B_c, query rows of one step and keys of one thread block.
    warps
        Warps of a thread block.
    stages
        Blocks of Q and dO that shared memory holds; with 2 the next ones load while these are used,
        with 3 those of the step before are kept for its gradients (`late`).
    query_groups
        Warps that share their keys in S and dP: each computes that part of the queries.
    column_groups
        Warps that share their keys in dK and dV: each keeps that part of the columns.
    split_gradients
        Half of the warps keep dV and half keep dK, in tiles twice as tall.
    late
        What reads other warps' dS (dQ) and P (dK and dV too, where they are exchanged) does so in
        the next step, from a second pair of tiles: one barrier a step, and of the two warps of a
        multiprocessor's quarter one has scores first, the other gradients.
    blocks_per_multiprocessor
        Thread blocks that must fit a multiprocessor's registers together.
    deterministic
        Key blocks add their parts of dQ in their order, so that repeated runs are bitwise equal.

    Where a warp has the same keys in S as in dK and dV, and all queries of them, P and dS stay in
    its registers; else they reach other warps through shared memory (`exchange`).
    """

    family: ClassVar[str] = "sm80"
    pass_: ClassVar[PassName] = "backward"

    block_q: int = 64
    block_kv: int = 128
    warps: int = 8
    stages: int = 2
    query_groups: int = 1
    column_groups: int = 1
    split_gradients: bool = False
    late: bool = False
    blocks_per_multiprocessor: int = 1
    deterministic: bool = False

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Sm80Backward:
        """The hand-picked schedule of a head dim: the first that fits (evidence in sm80_bwd.md)."""
        # For sm_100 ptxas 13.0 spills 8 bytes of 256 causal columns, and of 128 with `late`.
        split = not device.arch.startswith("sm_10")
        # 348 against 318 TFLOP/s at 4x4096 (H200). Causal gains 1 % and spills 36 bytes; so do
        # head dims below 128, up to 20.
        dims = (variant.head_dim_qk, variant.head_dim_v)
        whole = dims == (128, 128) and not variant.causal
        late = [cls(64, 128, 8, 3, 2, 2, True, True)] if whole and split else []
        candidates = [
            cls(32, 128, 4, 2, blocks_per_multiprocessor=2),
            *late,
            cls(64, 128, 8, 2, 2, 2, True),
            cls(64, 128, 8, 2),
            cls(64, 64, 8, 2, 2, 4, split),
            cls(64, 64, 8, 2, 2, 2),
            cls(64, 64, 8, 1, 2, 4, True),
            cls(64, 64, 8, 1, 2, 2, True),
            cls(64, 64, 8, 1, 2, 2),
            cls(32, 64, 4, 1),
            cls(32, 32, 4, 1, 2, 2),
        ]
        return next((s for s in candidates if s.feasible(variant, device)), candidates[-1])

    @classmethod
    def hand_picked(cls, problem: Problem, device: Device) -> tuple[Sm80Backward, ...]:
        """The default, then other divisions of the work (predictions in sm80_bwd.md)."""
        default = cls.default(problem.variant, device)
        others = (
            cls(32, 128, 4, 2, late=True, blocks_per_multiprocessor=2),
            cls(64, 128, 8, 3, 2, 2, True, True),
            cls(64, 128, 8, 2, 2, 2, True),
            cls(64, 64, 4, 2, 2, 2, True, blocks_per_multiprocessor=2),
            cls(64, 64, 4, 1, 2, 2, True, blocks_per_multiprocessor=2),
            cls(64, 128, 8, 2, 2, 2),
            cls(64, 128, 8, 2),
            cls(64, 128, 8, 2, late=True),
            cls(64, 64, 8, 2, 2, 4),
            cls(64, 64, 8, 2, 2, 2),
        )
        fitting = (s for s in others if s != default and s.feasible(problem.variant, device))
        return (default, *fitting)

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space around the hand-picked schedules; `reasons` cuts away what does not fit."""
        return {
            "block_q": (32, 64, 128),
            "block_kv": (32, 64, 128),
            "warps": (4, 8),
            "stages": (1, 2, 3),
            "query_groups": (1, 2),
            "column_groups": (1, 2, 4),
            "split_gradients": (False, True),
            "late": (False, True),
            "blocks_per_multiprocessor": (1, 2),
            "deterministic": (False,),
        }

    @property
    def key_tiles(self) -> int:
        """Tiles of 16 keys of S and dP that one warp computes."""
        return self.block_kv * self.query_groups // (16 * self.warps)

    @property
    def gradient_warps(self) -> int:
        """Warps that share dV, and as many share dK."""
        return self.warps // 2 if self.split_gradients else self.warps

    @property
    def gradient_tiles(self) -> int:
        """Tiles of 16 keys of dK, dV or both that one warp keeps."""
        return self.block_kv * self.column_groups // (16 * self.gradient_warps)

    @property
    def exchange(self) -> bool:
        """Whether P and dS reach other warps' dV and dK through shared memory."""
        return self.split_gradients or self.query_groups > 1 or self.column_groups > 1

    @property
    def thread_registers(self) -> int:
        """Registers that a thread may have."""
        share = SM80_REGISTERS // (32 * self.warps * self.blocks_per_multiprocessor)
        return min(SM80_THREAD_REGISTERS, share // 8 * 8)

    def dq_tiling(self, variant: Variant) -> tuple[int, int]:
        """Tiles of 16 rows, and columns, of dQ_i that one warp computes; (0, 0) if there are none.

        Two tiles of rows, where that leaves columns of a size that a swizzled tile can start at.
        """
        d = sm80_bwd_head_dim(variant.head_dim_qk)
        for tiles in (2, 1):
            groups, left = divmod(self.block_q, 16 * tiles)
            if left or not groups or self.warps % groups:
                continue
            columns, left = divmod(d, self.warps // groups)
            if not left and (columns in (16, 32) or columns % 64 == 0) and columns:
                return tiles, columns
        return 0, 0

    def floats_per_block(self, variant: Variant) -> tuple[int, int]:
        """float32 elements of workspace of a query block: its statistics, its dQ accumulator."""
        return 2 * self.block_q, self.block_q * sm80_bwd_head_dim(variant.head_dim_qk)

    def workspace_floats(self, problem: Problem, splits: int = 1) -> int:
        """float32 elements of scratch: L and D of every row, dQ in float32."""
        del splits  # The keys of a head are split over thread blocks as it is.
        s = problem.shape
        blocks = s.batch * s.heads_q * -(-s.seq_q // self.block_q)
        floats = sum(self.floats_per_block(problem.variant))
        return SM80_COUNTER_FLOATS + blocks * (floats + SM80_TURNS * self.deterministic)

    def splits(self, problem: Problem, threads: int = 1) -> int:
        """Pieces of a head's keys that a caller must provide workspace for: always one."""
        del problem, threads
        return 1

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Shared memory of a thread block, registers of a thread's fragments, threads."""
        d, dv = sm80_bwd_head_dim(variant.head_dim_qk), sm80_bwd_head_dim(variant.head_dim_v)
        elements = (self.block_kv + self.stages * self.block_q) * (d + dv)
        elements += self.block_q * self.block_kv * (1 + self.exchange) * (1 + self.late)
        floats = 2 * self.stages * self.block_q
        columns = max(d, dv) if self.split_gradients else d + dv
        fragments = self.gradient_tiles * columns // (2 * self.column_groups)
        fragments += self.key_tiles * 5 * (self.block_q // self.query_groups) // 4
        return Footprint(2 * elements + 4 * floats, fragments, 32 * self.warps)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Tile shapes that mma.sync has, shared memory, registers without spills."""
        reasons = _variant_reasons(variant)
        for name, choices in (
            ("block_q", (32, 64, 128)),
            ("block_kv", (32, 64, 128, 256)),
            ("warps", (4, 8)),
            ("stages", (1, 2, 3)),
            ("query_groups", (1, 2, 4)),
            ("column_groups", (1, 2, 4)),
            ("blocks_per_multiprocessor", (1, 2, 3)),
        ):
            value = getattr(self, name)
            if value not in choices:
                reasons.append(f"{name} is {value}, but it must be one of {choices}.")
        if reasons:
            return reasons
        if min(self.key_tiles, self.gradient_tiles, self.block_q // self.query_groups // 16) < 1:
            reasons.append(
                f"{self.warps} warps in {self.query_groups} query groups and {self.column_groups} "
                f"column groups are too many for blocks of {self.block_q} queries and "
                f"{self.block_kv} keys; take fewer or larger blocks."
            )
            return reasons
        if self.dq_tiling(variant) == (0, 0):
            reasons.append(
                f"{self.warps} warps do not share a dQ of {self.block_q} rows; take fewer warps."
            )
        for name in ("head_dim_qk", "head_dim_v"):
            columns = sm80_bwd_head_dim(getattr(variant, name)) // self.column_groups
            if columns % 64:
                reasons.append(
                    f"column_groups is {self.column_groups}, but {columns} columns of {name} are "
                    "no multiple of 64; take 1."
                )
        reasons += self._layout_reasons(variant)
        footprint = self.footprint(variant, device)
        reasons += _shared_reasons(footprint, self.blocks_per_multiprocessor, device)
        if footprint.accumulator_registers + SM80_BWD_OTHER_REGISTERS > self.thread_registers:
            reasons.append(
                f"a thread needs {footprint.accumulator_registers} fragment registers and about "
                f"{SM80_BWD_OTHER_REGISTERS} others, but it has {self.thread_registers}; take "
                "smaller blocks or more warps."
            )
        return reasons

    def _layout_reasons(self, variant: Variant) -> list[str]:
        """Divisions of the GEMMs among the warps that the program does not have."""
        reasons = []
        d, dv = sm80_bwd_head_dim(variant.head_dim_qk), sm80_bwd_head_dim(variant.head_dim_v)
        if self.split_gradients and d != dv:
            reasons.append(
                f"split_gradients is True, but dK has {d} columns and dV {dv}; take False."
            )
        needed = (3 if self.exchange else 2) if self.late else min(self.stages, 2)
        if self.stages != needed:
            reasons.append(
                f"stages is {self.stages}, but late is {self.late} and P and dS are "
                f"{'' if self.exchange else 'not '}exchanged, which takes {needed}."
            )
        return reasons


SCHEDULES["sm80", "backward"] = Sm80Backward
