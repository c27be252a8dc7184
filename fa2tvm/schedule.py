"""How: the decisions of one kernel family, their choices, and whether they fit (nowhere else)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.problem import PassName, Problem, Variant


@dataclass(frozen=True)
class Footprint:
    """What one task (CPU thread or GPU block) of a schedule occupies."""

    scratch_bytes: int
    accumulator_registers: int
    threads: int = 1


@dataclass(frozen=True)
class Schedule:
    """Base of every family's decisions; each field of a subclass is one decision.

    A subclass sets `family` and `pass_`, gives every field a default that is good on an
    unknown device, lists in `choices` what the tuner may pick, and writes its limits in
    `footprint` and `reasons`.
    """

    family: ClassVar[str]
    pass_: ClassVar[PassName]

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Schedule:
        """The hand-picked schedule that is good by itself where nothing is tuned."""
        raise NotImplementedError

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space: the values that each decision may take, by field name."""
        raise NotImplementedError

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """What one task occupies."""
        raise NotImplementedError

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Every limit that this schedule breaks for the variant on the device; empty if it fits."""
        raise NotImplementedError

    def feasible(self, variant: Variant, device: Device) -> bool:
        """Whether the schedule fits."""
        return not self.reasons(variant, device)

    def require_feasible(self, variant: Variant, device: Device) -> None:
        """Raise InfeasibleSchedule, naming the first limit that is broken."""
        reasons = self.reasons(variant, device)
        if reasons:
            raise InfeasibleSchedule(
                f"schedule {self.to_dict()} does not fit {variant.name}: {reasons[0]}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The decisions as plain values; `schedule_from_dict` is the inverse."""
        return asdict(self)


def _round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return -(-a // b) * b


def _vector_registers(device: Device) -> int:
    """Architectural vector registers: AVX-512 has 32, narrower x86 vectors 16."""
    return 32 if device.vector_bytes == 64 else 16


SCHEDULES: dict[tuple[str, PassName], type[Schedule]] = {}


def schedule_class(family: str, pass_: PassName) -> type[Schedule]:
    """The Schedule class of a family's pass.

    Raises
    ------
    InfeasibleSchedule
        Where the family has no such pass.
    """
    try:
        return SCHEDULES[family, pass_]
    except KeyError:
        known = ", ".join(f"{f} {p}" for f, p in SCHEDULES)
        raise InfeasibleSchedule(
            f"family is {family!r} for the {pass_} pass, but only {known} exist; choose one."
        ) from None


def schedule_from_dict(family: str, pass_: PassName, decisions: dict[str, Any]) -> Schedule:
    """Rebuild a schedule from its decisions.

    Raises
    ------
    InfeasibleSchedule
        For an unknown, missing or wrongly typed decision.
    """
    cls = schedule_class(family, pass_)
    known = {f.name: f for f in fields(cls)}
    wrong = sorted(set(decisions) ^ set(known))
    if wrong:
        raise InfeasibleSchedule(
            f"decision {wrong[0]!r} is unknown or missing for {family} {pass_}, whose decisions "
            f"are {', '.join(known)}; tune again with this version."
        )
    for name, value in decisions.items():
        want = type(getattr(cls, name))
        if type(value) is not want:
            raise InfeasibleSchedule(
                f"decision {name} is {value!r}, but it must be of type {want.__name__}; "
                "correct the record."
            )
    return cls(**decisions)


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


# Head dims that the Hopper kernels have tiles for; others use the next one, zero-filled by TMA.
SM90_HEAD_DIMS = (64, 96, 128, 192, 256)


# What a consumer thread needs beside its fragments: 208 of 240 registers and 128 of 160 do not
# spill, 132 of 160 do (ptxas 13.0).
SM90_OTHER_REGISTERS = 32


def sm90_head_dim(head_dim: int) -> int:
    """Columns of the tiles of a head dim: the next of `SM90_HEAD_DIMS`, or itself beyond them."""
    return next((d for d in SM90_HEAD_DIMS if d >= head_dim), head_dim)


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
        """The hand-picked schedule of a head dim: the first that fits (evidence in sm90_fwd.md)."""
        # float16 holds too little above a trusted maximum for the logits of real models.
        walk: dict[str, Any] = {
            "dynamic": variant.causal,
            "head_group_mib": 32 if variant.causal else 0,
            "trust_maximum": variant.dtype != "float16",
        }
        # Narrow heads: three warpgroups where all keys are seen, two where much is masked.
        narrow = cls(3, 128, q_stages=2, k_stages=3, v_stages=3, **walk)
        if variant.causal:
            narrow = cls(2, 128, q_stages=2, k_stages=4, v_stages=4, **walk)
        candidates = [
            narrow,
            cls(2, 128, k_stages=3, v_stages=3, q_in_registers=True, **walk),
        ]
        candidates += [cls(2, block_kv, **walk) for block_kv in (128, 112, 96)]
        candidates.append(cls(2, 64, k_stages=3, **walk))
        return next((s for s in candidates if s.feasible(variant, device)), candidates[-1])

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space around the hand-picked schedules; `reasons` cuts away what does not fit."""
        wide = max(problem.variant.head_dim_qk, problem.variant.head_dim_v)
        keys: tuple[int, ...] = (64, 80, 96, 112, 128)
        if wide <= 128:
            keys += (144, 160, 176, 192)
        elif wide > 192:
            keys = (48, 64, 80)
        return {
            "consumer_warpgroups": (2, 3) if wide <= 96 else (2,),
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
    def block_q(self) -> int:
        """B_r, query rows of one tile."""
        return 64 * self.consumer_warpgroups

    @property
    def consumer_registers(self) -> int:
        """What setmaxnreg gives each consumer thread: all that the producer can spare."""
        return 240 if self.consumer_warpgroups <= 2 else 160

    @property
    def producer_registers(self) -> int:
        """What is left for each thread of the producer's warpgroup."""
        return {1: 40, 2: 24, 3: 32}[self.consumer_warpgroups]

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Shared memory of a thread block, registers of a consumer thread's fragments, threads."""
        d, dv = sm90_head_dim(variant.head_dim_qk), sm90_head_dim(variant.head_dim_v)
        blocks = self.q_stages * self.block_q * d
        blocks += self.block_kv * (self.k_stages * d + self.v_stages * dv)
        # Two 8-byte mbarriers a stage (beside Q, K, V: 2 tiles, 1 request, 2 reports), two records
        # of 6 words, two flags.
        control = 16 * (self.q_stages + self.k_stages + self.v_stages + 5) + 48 + 8
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
        if not 1 <= self.consumer_warpgroups <= 3:
            reasons.append(
                f"consumer_warpgroups is {self.consumer_warpgroups}, but it must be 1 to 3."
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
