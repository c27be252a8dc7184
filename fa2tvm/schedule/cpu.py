"""Decisions of the CPU family, their choices, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule.base import SCHEDULES, Footprint, Schedule


def _round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return -(-a // b) * b


def _vector_registers(device: Device) -> int:
    """Architectural vector registers: AVX-512 has 32, narrower x86 vectors 16."""
    return 32 if device.vector_bytes == 64 else 16


@dataclass(frozen=True)
class CpuForward(Schedule):
    """Decisions of Algorithm 1 on a CPU.

    Attributes
    ----------
    block_q, block_kv
        Rows of Q_i (one task) and of K_j, V_j.
    panel
        Queries of one register tile: they lie on the vector lanes.
    s_rows, o_rows
        Keys of an S tile, value columns of an O tile: times `panel`, they stay in registers.
    """

    family: ClassVar[str] = "cpu"
    pass_: ClassVar[PassName] = "forward"

    block_q: int = 256
    block_kv: int = 64
    panel: int = 32
    s_rows: int = 8
    o_rows: int = 8

    @classmethod
    def default(cls, variant: Variant, device: Device) -> CpuForward:
        """Panels of two native vectors; the largest blocks that half the level-2 cache holds."""
        rows = 8 if _vector_registers(device) >= 32 else 4
        panel = 2 * device.lanes
        sizes = [(256, 64), (128, 64), (64, 64), (64, 32), (panel, 32), (panel, 16)]
        candidates = [cls(max(b_r, panel), b_c, panel, rows, rows) for b_r, b_c in sizes]
        fits = (
            s
            for s in candidates
            if s.footprint(variant, device).scratch_bytes <= device.l2_bytes // 2
        )
        return next(fits, candidates[-1])

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """Blocks that a second-level cache holds, register tiles that hide the latency of FMA."""
        shortest = min(problem.shape.seq_q, problem.shape.seq_kv)
        rows = (4, 6, 8, 12) if _vector_registers(device) >= 32 else (2, 3, 4, 6)
        return {
            "block_q": tuple(b for b in (64, 128, 192, 256, 384) if b < 2 * max(shortest, 64)),
            "block_kv": (32, 48, 64, 96, 128),
            "panel": (device.lanes, 2 * device.lanes),
            "s_rows": rows,
            "o_rows": rows,
        }

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Packed Q_i, K_j and V_j, the O_i accumulator, one panel of S_ij; a register tile."""
        keys = _round_up(self.block_kv, self.s_rows)
        columns = _round_up(variant.head_dim_v, self.o_rows)
        floats = self.block_q * (variant.head_dim_qk + columns) + keys * (
            variant.head_dim_qk + columns + self.panel
        )
        vectors = -(-self.panel // device.lanes)
        return Footprint(4 * floats, max(self.s_rows, self.o_rows) * vectors)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Whole vectors, whole panels, accumulators beside their operands, scratch in the cache."""
        reasons = []
        for name, value in self.to_dict().items():
            if value < 1:
                reasons.append(f"{name} is {value}, but it must be at least 1.")
        if reasons:
            return reasons
        if self.panel % device.lanes:
            reasons.append(
                f"panel is {self.panel}, but it must be a multiple of the {device.lanes} lanes."
            )
        if self.block_q % self.panel:
            reasons.append(
                f"block_q is {self.block_q}, but it must be a multiple of panel {self.panel}."
            )
        footprint = self.footprint(variant, device)
        used = footprint.accumulator_registers + -(-self.panel // device.lanes) + 1
        if used > _vector_registers(device):
            reasons.append(
                f"a register tile needs {used} vector registers, but there are "
                f"{_vector_registers(device)}; take fewer rows or a narrower panel."
            )
        if footprint.scratch_bytes > max(device.l2_bytes, 256 << 10):
            reasons.append(
                f"one task needs {footprint.scratch_bytes} bytes of scratch, but the second-level "
                f"cache has {device.l2_bytes}; take smaller blocks."
            )
        return reasons


SCHEDULES["cpu", "forward"] = CpuForward


@dataclass(frozen=True)
class CpuBackward(Schedule):
    """Decisions of Algorithm 2 on a CPU.

    Attributes
    ----------
    block_q, block_kv
        Rows of Q_i and of K_j.
    lanes
        float32 elements of the vectors that the code uses.
    vectors
        Vectors of a register tile, at most.
    score_rows, kv_rows, q_rows
        Rows of a register tile of S and dP, of dK and dV, and of dQ.
    """

    family: ClassVar[str] = "cpu"
    pass_: ClassVar[PassName] = "backward"

    block_q: int = 64
    block_kv: int = 64
    lanes: int = 8
    vectors: int = 2
    score_rows: int = 4
    kv_rows: int = 4
    q_rows: int = 4

    @classmethod
    def default(cls, variant: Variant, device: Device) -> CpuBackward:
        """Long key blocks while the second-level cache holds them; tiles of 4 x 4 or 4 x 2 vectors.

        A long key block halves how often Q, dO and dQ stream through the caches.
        """
        fits = (4, 5, 6) if _vector_registers(device) >= 32 else (2,)
        widths = variant.head_dim_qk, variant.head_dim_v

        def columns(vectors: int) -> int:
            return sum(cls(lanes=device.lanes, vectors=vectors).padded(w) for w in widths)

        vectors = min(fits, key=columns)
        long = cls(block_kv=128, lanes=device.lanes, vectors=vectors)
        if long.footprint(variant, device).scratch_bytes <= device.l2_bytes:
            return long
        return cls(block_kv=64, lanes=device.lanes, vectors=vectors)

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """Blocks that the first two caches hold, and register tiles around the optimum."""
        rows = (4, 8) if _vector_registers(device) < 32 else (4, 8, 16)
        return {
            "block_q": (32, 64, 128),
            "block_kv": (32, 64, 128, 256),
            "lanes": (device.lanes,),
            "vectors": (1, 2, 3) if _vector_registers(device) < 32 else (1, 2, 3, 4, 5, 6),
            "score_rows": rows,
            "kv_rows": rows,
            "q_rows": rows,
        }

    def tile_vectors(self, width: int) -> int:
        """Vectors of a register tile over `width` columns: as even as `vectors` allows."""
        n = -(-width // self.lanes)
        return -(-n // -(-n // self.vectors))

    def padded(self, width: int) -> int:
        """`width` columns rounded up to whole register tiles."""
        tile = self.tile_vectors(width) * self.lanes
        return -(-width // tile) * tile

    def tiles(self, variant: Variant) -> dict[str, tuple[int, int]]:
        """(rows, vectors) of the register tile of each of the five products."""
        score = (self.score_rows, self.tile_vectors(self.block_kv))
        d, dv = self.tile_vectors(variant.head_dim_qk), self.tile_vectors(variant.head_dim_v)
        return {
            "S": score,
            "dP": score,
            "dV": (self.kv_rows, dv),
            "dK": (self.kv_rows, d),
            "dQ": (self.q_rows, d),
        }

    def workspace_floats(self, problem: Problem, splits: int) -> int:
        """float32 elements of scratch: L, D and R of every row, and one dQ for each split."""
        s = problem.shape
        rows = -(-s.seq_q // self.block_q) * self.block_q
        return s.batch * s.heads_q * rows * (3 + splits * self.padded(problem.variant.head_dim_qk))

    def splits(self, problem: Problem, threads: int) -> int:
        """Pieces of a head's keys so that equal contiguous chunks of tasks feed all threads."""
        s = problem.shape
        heads = s.batch * s.heads_kv
        n_blocks = -(-s.seq_kv // self.block_kv)
        best, best_load = 1, float("inf")
        for splits in range(1, max(1, min(threads, n_blocks)) + 1):
            tasks = heads * splits
            load = -(-tasks // threads) / max(1, tasks)
            # A split costs a dQ of its own: take one more only for a tenth of the time.
            if load < 0.9 * best_load:
                best, best_load = splits, load
        return best

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """The packed blocks of both sides, their gradients, and S, P, dP, dS."""
        d, dv = self.padded(variant.head_dim_qk), self.padded(variant.head_dim_v)
        floats = (
            self.block_q * (d + dv)
            + self.block_kv * (3 * d + 2 * dv)
            + 4 * self.block_q * self.block_kv
        )
        registers = max(rows * vectors for rows, vectors in self.tiles(variant).values())
        return Footprint(4 * floats, registers)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Whole register tiles, and accumulators that leave registers for the operands."""
        reasons = []
        for name, value in self.to_dict().items():
            if value < 1:
                reasons.append(f"{name} is {value}, but it must be at least 1.")
        if reasons:
            return reasons
        if self.lanes > device.lanes:
            reasons.append(f"lanes is {self.lanes}, but the device has {device.lanes}.")
        if self.padded(self.block_kv) != self.block_kv:
            reasons.append(
                f"block_kv is {self.block_kv}, but it must be a multiple of "
                f"{self.tile_vectors(self.block_kv)} vectors of {self.lanes} lanes."
            )
        for block, rows in (
            ("block_q", "score_rows"),
            ("block_q", "q_rows"),
            ("block_kv", "kv_rows"),
        ):
            if getattr(self, block) % getattr(self, rows):
                reasons.append(
                    f"{block} is {getattr(self, block)}, but it must be a multiple of "
                    f"{rows} {getattr(self, rows)}."
                )
        used = max(rows * vectors + vectors + 1 for rows, vectors in self.tiles(variant).values())
        if used > _vector_registers(device):
            reasons.append(
                f"a register tile needs {used} vector registers, but there are "
                f"{_vector_registers(device)}; take fewer rows or vectors."
            )
        return reasons


SCHEDULES["cpu", "backward"] = CpuBackward
