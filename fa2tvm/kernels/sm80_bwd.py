"""Algorithm 2 (attention backward) for every NVIDIA GPU since Ampere: three kernels, one entry.

`preprocess` writes L and D of every row and clears dQ (sm90_bwd_passes.py). In the sweep a thread
block carries dK and dV of one key block over the query blocks that see it; dQ gathers in float32 by
reductions in global memory, which `write_dq` converts. sm80_bwd.md draws it.

Source: arXiv:2307.08691, Algorithm 2; S^T and dP^T for register operands: arXiv:2407.08608.
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T

from fa2tvm.blocks import first_row
from fa2tvm.device import Device
from fa2tvm.kernels.mma import (
    OPERAND_SETS,
    Copier,
    Rows,
    SharedTile,
    lane_of_columns,
    lane_of_rows,
    strided,
)
from fa2tvm.kernels.sm80_bwd_steps import (
    at_column,
    await_turn,
    dq_at,
    emit_add_dq,
    emit_dq,
    emit_gradient,
    emit_mask,
    emit_put,
    emit_score_gradients,
    emit_scores,
    emit_weights,
    emit_write_gradient,
    pass_turn,
    write_dq,
)
from fa2tvm.kernels.sm80_steps import clear_fragment, each_tile
from fa2tvm.kernels.sm90_bwd_passes import TURNS, preprocess
from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import shared_address
from fa2tvm.problem import Variant
from fa2tvm.schedule import Sm80Backward, sm80_bwd_head_dim
from fa2tvm.schedule.sm80 import SM80_COUNTER_FLOATS


def clamp(x, low, high):
    """TensorIR's clamp, for the block ranges."""
    return T.max(low, T.min(x, high))


def plan(variant, schedule, device):
    """Everything that is a constant of the program, by name."""
    d, dv = sm80_bwd_head_dim(variant.head_dim_qk), sm80_bwd_head_dim(variant.head_dim_v)
    Q_tile, dO_tile = SharedTile(schedule.block_q, d), SharedTile(schedule.block_q, dv)
    K_tile, V_tile = SharedTile(schedule.block_kv, d), SharedTile(schedule.block_kv, dv)
    threads = 32 * schedule.warps
    dq_tiles, dq_columns = schedule.dq_tiling(variant)
    return SimpleNamespace(
        **schedule.to_dict(),
        dtype=variant.dtype,
        causal=variant.causal,
        columns_qk=variant.head_dim_qk,
        columns_v=variant.head_dim_v,
        head_dim=d,
        head_dim_v=dv,
        depth_qk=-(-variant.head_dim_qk // 16) * 16,
        depth_v=-(-variant.head_dim_v // 16) * 16,
        threads=threads,
        exchange=schedule.exchange,
        key_tiles=schedule.key_tiles,
        warp_queries=schedule.block_q // schedule.query_groups,
        gradient_warps=schedule.gradient_warps,
        gradient_tiles=schedule.gradient_tiles,
        dq_tiles=dq_tiles,
        dq_columns=dq_columns,
        dq_floats=schedule.floats_per_block(variant)[1],
        # write_dq: 16 rows of 32 columns for a warp at a time.
        dq_pieces=schedule.block_q // 16 * (d // 32),
        dq_warps=min(schedule.block_q // 16 * (d // 32), 16),
        row_lanes=8 if dv == 64 else 16 if dv == 128 else 32,
        Q_tile=Q_tile,
        K_tile=K_tile,
        V_tile=V_tile,
        dO_tile=dO_tile,
        S_tile=SharedTile(schedule.block_kv, schedule.block_q),
        Q_copier=Copier(Q_tile, variant.head_dim_qk, threads),
        K_copier=Copier(K_tile, variant.head_dim_qk, threads),
        V_copier=Copier(V_tile, variant.head_dim_v, threads),
        dO_copier=Copier(dO_tile, variant.head_dim_v, threads),
        statistics_bytes=8 * schedule.block_q,
        # Reductions of four floats at a time exist since Hopper.
        vector_reductions=int(device.arch.removeprefix("sm_").rstrip("af")) >= 90,
    )


@T.meta_class
class Feed:
    """K_j and V_j, then Q_i, dO_i and their statistics for each query block and head in turn."""

    def __init__(self, p, z, tensors, shared, b, h_kv):
        self.p, self.z, self.tensors, self.shared = p, z, tensors, shared
        self.b, self.h_kv = b, h_kv

    @T.inline
    def begin(self, j):
        """Start the copies of K_j and V_j."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        t = T.meta_var(self.tensors)
        K_rows = T.meta_var(Rows(t.K, z.K_strides, self.b, self.h_kv))
        V_rows = T.meta_var(Rows(t.V, z.V_strides, self.b, self.h_kv))
        p.K_copier.copy(shared_address(self.shared.K), K_rows, j * p.block_kv, z.seq_kv)
        p.V_copier.copy(shared_address(self.shared.V), V_rows, j * p.block_kv, z.seq_kv)

    @T.inline
    def load(self, stage, h, i, there):
        """Start the copy of Q_i and dO_i of a head into a stage, where they are there."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        t = T.meta_var(self.tensors)
        shared = T.meta_var(self.shared)
        if there:
            Q_rows = T.meta_var(Rows(t.Q, z.Q_strides, self.b, h))
            dO_rows = T.meta_var(Rows(t.dO, z.dO_strides, self.b, h))
            first: T.let = i * p.block_q
            to: T.let = T.Cast("uint32", stage)
            p.Q_copier.copy(
                shared_address(shared.Q) + to * T.uint32(p.Q_tile.bytes), Q_rows, first, z.seq_q
            )
            p.dO_copier.copy(
                shared_address(shared.dO) + to * T.uint32(p.dO_tile.bytes), dO_rows, first, z.seq_q
            )
            block: T.let = (self.b * z.heads + h) * z.query_blocks + i
            thread: T.let = shared.thread
            if thread * 16 < p.statistics_bytes:
                T.ptx["cp.async.cg.shared.global"](
                    shared_address(shared.statistics)
                    + to * T.uint32(p.statistics_bytes)
                    + T.Cast("uint32", thread * 16),
                    t.workspace.ptr_to(
                        [
                            z.statistics_first
                            + T.Cast("int64", block) * T.int64(2 * p.block_q)
                            + T.Cast("int64", thread * 4)
                        ]
                    ),
                    16,
                )
        T.ptx["cp.async.commit_group"]()


@T.meta_class
class Warp:
    """A warp: its part of each GEMM, and where it reads and writes.

    Of S and dP it has `key_tiles` tiles of 16 keys and `warp_queries` queries; of dK and dV (of one
    of them with `split_gradients`) `gradient_tiles` tiles of 16 keys and a part of the columns.
    Fragments are lists over these tiles.
    """

    def __init__(self, p, z, shared, warp, lane):
        self.p, self.z, self.shared, self.warp, self.lane = p, z, shared, warp, lane
        self.tiles = range(p.key_tiles)

        def fragment(size, dtype="float32", count=p.key_tiles):
            return [T.alloc_local((size,), dtype) for _ in range(count)]

        def gradient(columns):
            return fragment(columns // (2 * p.column_groups), count=p.gradient_tiles)

        def packed(columns):
            return fragment(columns // (4 * p.column_groups), "uint32", p.gradient_tiles)

        self.S, self.dP = (fragment(p.warp_queries // 2) for _ in range(2))
        self.P, self.dS = (fragment(p.warp_queries // 4, "uint32") for _ in range(2))
        self.dK = gradient(p.head_dim)
        self.dV = self.dK if p.split_gradients else gradient(p.head_dim_v)
        self.dQ = fragment(p.dq_columns // 2, count=p.dq_tiles)
        self.dS_A = fragment(p.block_kv // 4, "uint32", p.dq_tiles)
        self.A = fragment(8, "uint32")
        # P and dS from shared memory, as the A operand of dV and dK.
        self.PdS_A = fragment(p.block_q // 4, "uint32", p.gradient_tiles * p.exchange)
        self.operands = T.alloc_local((4 * OPERAND_SETS,), "uint32")
        self.statistics = T.alloc_local((4,), "float32")
        self.dK_words, self.dV_words = packed(p.head_dim), packed(p.head_dim_v)
        self.spare = T.alloc_local((2,), "uint32")
        self.factor = T.local_scalar("float32")
        self.key = T.local_scalar("int32")
        self.query = T.local_scalar("int32")
        self.gradient_key = T.local_scalar("int32")
        self.column_part = T.local_scalar("int32")
        self.put = T.local_scalar("uint32")
        for name in ("K_rows", "V_rows", "Q_first", "dO_first", "Q_depth_first", "dO_depth_first"):
            setattr(self, name, T.local_scalar("uint32"))
        for name in ("Q_columns", "dO_columns", "Q_depth", "dO_depth", "K_depth"):
            setattr(self, name, T.local_scalar("uint32"))
        for name in ("P_rows", "dS_rows", "dS_columns", "statistics_first", "statistics_at"):
            setattr(self, name, T.local_scalar("uint32"))
        self.P_base = T.local_scalar("uint32")
        self.dS_base = T.local_scalar("uint32")

    @T.inline
    def begin(self, j):
        """Set the warp's keys, queries and columns, and where this lane reads and writes them."""
        p = T.meta_var(self.p)
        shared = T.meta_var(self.shared)
        lane = T.meta_var(self.lane)
        first_key: T.let = T.truncdiv(self.warp, p.query_groups) * (16 * p.key_tiles)
        first_query: T.let = T.truncmod(self.warp, p.query_groups) * p.warp_queries
        among: T.let = T.truncmod(self.warp, p.gradient_warps)
        gradient_key: T.let = T.truncdiv(among, p.column_groups) * (16 * p.gradient_tiles)
        self.column_part = T.truncmod(among, p.column_groups)
        dq_groups = T.meta_var(p.block_q // (16 * p.dq_tiles))
        dq_row: T.let = T.truncmod(self.warp, dq_groups) * (16 * p.dq_tiles)
        dq_column: T.let = T.truncdiv(self.warp, dq_groups) * p.dq_columns
        K_base: T.let = shared_address(shared.K)
        self.K_rows = K_base + lane_of_rows(p.K_tile, lane, first_key)
        self.V_rows = shared_address(shared.V) + lane_of_rows(p.V_tile, lane, first_key)
        self.K_depth = at_column(p.K_tile, K_base + lane_of_rows(p.K_tile, lane, 0), dq_column)
        self.Q_first = shared_address(shared.Q) + lane_of_columns(p.Q_tile, lane, first_query)
        self.dO_first = shared_address(shared.dO) + lane_of_columns(p.dO_tile, lane, first_query)
        self.Q_depth_first = at_column(
            p.Q_tile,
            shared_address(shared.Q) + lane_of_rows(p.Q_tile, lane, 0),
            self.column_part * (p.head_dim // p.column_groups),
        )
        self.dO_depth_first = at_column(
            p.dO_tile,
            shared_address(shared.dO) + lane_of_rows(p.dO_tile, lane, 0),
            self.column_part * (p.head_dim_v // p.column_groups),
        )
        self.dS_base = shared_address(shared.dS)
        self.P_base = shared_address(shared.P)
        self.P_rows = self.P_base + lane_of_rows(p.S_tile, lane, gradient_key)
        self.dS_rows = self.dS_base + lane_of_rows(p.S_tile, lane, gradient_key)
        if p.split_gradients:
            # The first half of the warps has dV, the second dK, by the same instructions.
            if self.warp >= p.gradient_warps:
                self.P_rows = self.dS_rows
                self.dO_depth_first = self.Q_depth_first
        self.dS_columns = at_column(
            p.S_tile, self.dS_base + lane_of_columns(p.S_tile, lane, 0), dq_row
        )
        self.put = at_column(
            p.S_tile,
            p.S_tile.chunk_address(first_key + T.truncdiv(lane, 4), 0),
            first_query,
        ) + T.Cast("uint32", T.truncmod(lane, 4) * 4)
        self.statistics_first = shared_address(shared.statistics) + T.Cast(
            "uint32", first_query * 4 + T.truncmod(lane, 4) * 16
        )
        self.key = j * p.block_kv + first_key + T.truncdiv(lane, 4)
        self.query = first_query + T.truncmod(lane, 4) * 2
        self.gradient_key = j * p.block_kv + gradient_key + T.truncdiv(lane, 4)

    @T.inline
    def read_scores(self, stage):
        """Compute S and dP from a stage of Q, dO and the statistics."""
        p = T.meta_var(self.p)
        at: T.let = T.Cast("uint32", stage)
        self.Q_columns = self.Q_first + at * T.uint32(p.Q_tile.bytes)
        self.dO_columns = self.dO_first + at * T.uint32(p.dO_tile.bytes)
        self.statistics_at = self.statistics_first + at * T.uint32(p.statistics_bytes)

    @T.inline
    def read_gradients(self, stage):
        """Compute dK and dV from a stage of Q and dO."""
        p = T.meta_var(self.p)
        at: T.let = T.Cast("uint32", stage)
        self.Q_depth = self.Q_depth_first + at * T.uint32(p.Q_tile.bytes)
        self.dO_depth = self.dO_depth_first + at * T.uint32(p.dO_tile.bytes)

    @T.inline
    def mask(self, i, j):
        """-inf for keys after the diagonal and after the end of the sequence.

        Masked scores are scaled before, so that -inf is right for a scale of any sign.
        """
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.factor = z.scale_log2
        beyond_end: T.let = (j + 1) * p.block_kv > z.seq_kv
        if p.causal:
            first: T.let = i * p.block_q + z.causal_offset
            if T.Or((j + 1) * p.block_kv - 1 > first, beyond_end):
                emit_mask(self, first + self.query, z.seq_kv - 1)
                self.factor = T.float32(1.0)
        else:
            if beyond_end:
                emit_mask(self, None, z.seq_kv - 1)
                self.factor = T.float32(1.0)

    @T.inline
    def scores(self, i, j, copy):
        """Algorithm 2, lines 10 to 14 of query block i; dS and P go to a copy of their tiles.

        P only where warps exchange it; elsewhere dV_j and dK_j are computed here too.
        """
        p = T.meta_var(self.p)
        emit_scores(self)
        self.mask(i, j)
        dS_at: T.let = self.dS_base + copy
        emit_weights(self, self.P_base + copy)
        if p.exchange:
            emit_score_gradients(self)
            emit_put(self, self.dS, dS_at)
        else:
            emit_gradient(self, self.dV, self.P, None, p.dO_tile, self.dO_depth, True)
            emit_put(self, self.dS, dS_at)
            emit_gradient(self, self.dK, self.dS, None, p.Q_tile, self.Q_depth)

    @T.inline
    def gradients(self, j, copy, workspace, dq_first, turn_at):
        """Lines 12, 15 and 16 from a copy of the tiles: dQ_i, and dV_j and dK_j where exchanged."""
        p = T.meta_var(self.p)
        self.add_dq(j, self.dS_columns + copy, workspace, dq_first, turn_at)
        if p.exchange:
            P_rows: T.let = self.P_rows + copy
            emit_gradient(self, self.dV, self.PdS_A, P_rows, p.dO_tile, self.dO_depth)
            if not p.split_gradients:
                dS_rows: T.let = self.dS_rows + copy
                emit_gradient(self, self.dK, self.PdS_A, dS_rows, p.Q_tile, self.Q_depth)

    @T.inline
    def add_dq(self, j, dS_columns, workspace, dq_first, turn_at):
        """dQ_i += dS_ij K_j, where the caller wants it."""
        p = T.meta_var(self.p)
        if self.z.need_dq != 0:
            emit_dq(self, dS_columns)
            if p.deterministic:
                turn = T.meta_var(workspace.ptr_to([turn_at]))
                await_turn(turn, j)
                emit_add_dq(self, workspace, dq_first)
                pass_turn(turn, j + 1)
            else:
                emit_add_dq(self, workspace, dq_first)


def turn_at(z, row_block):
    """Where the number of the key block lies whose turn it is at a query block."""
    return z.turns_first + T.Cast("int64", row_block * TURNS)


@T.inline
def steps(p, z, workspace, feed, w, j, i_start):
    """Lines 8 to 17: all query blocks of all heads of the group."""
    stage: T.int32 = 0
    i: T.int32 = i_start
    h: T.int32 = feed.h_kv * z.group
    left: T.int32 = (z.query_blocks - i_start) * z.group
    while left > 0:
        # All threads are through with the step before: its stage and dS are free.
        T.ptx["cp.async.wait_group"](0)
        T.cuda.cta_sync()
        after: T.let = i + 1 == z.query_blocks
        next_i: T.let = T.Select(after, i_start, i + 1)
        next_h: T.let = T.Select(after, h + 1, h)
        if p.stages == 2:
            feed.load(1 - stage, next_h, next_i, left > 1)
        w.read_scores(stage)
        w.read_gradients(stage)
        row_block: T.let = (feed.b * z.heads + h) * z.query_blocks + i
        w.scores(i, j, T.uint32(0))
        T.cuda.cta_sync()
        w.gradients(j, T.uint32(0), workspace, dq_at(p, z, row_block), turn_at(z, row_block))
        if p.stages == 2:
            stage = 1 - stage
        else:
            T.cuda.cta_sync()
            feed.load(0, next_h, next_i, left > 1)
        left = left - 1
        h = next_h
        i = next_i


@T.inline
def late_steps(p, z, workspace, feed, w, j, i_start):
    """The same with the gradients of the step before beside the scores of this one.

    Both only read what is there at the step's barrier, so a warp may begin with either.
    """
    stage: T.int32 = 0
    before: T.int32 = 0
    half: T.int32 = 0
    i: T.int32 = i_start
    h: T.int32 = feed.h_kv * z.group
    left: T.int32 = (z.query_blocks - i_start) * z.group
    late: T.int32 = -1
    # Warps 0 to 3 begin with scores, 4 to 7 with gradients: of the two in a quarter of the
    # multiprocessor one has exponentials to do while the other only multiplies.
    turn: T.let = T.truncmod(T.truncdiv(w.warp, 4), 2)
    while left >= 0:
        T.ptx["cp.async.wait_group"](0)
        T.cuda.cta_sync()
        after: T.let = i + 1 == z.query_blocks
        next_i: T.let = T.Select(after, i_start, i + 1)
        next_h: T.let = T.Select(after, h + 1, h)
        next_stage: T.let = T.Select(stage + 1 == p.stages, 0, stage + 1)
        feed.load(next_stage, next_h, next_i, left > 1)
        row_block: T.let = (feed.b * z.heads + h) * z.query_blocks + i
        part: T.int32 = 0
        while part < 2:
            if part == turn:
                if left > 0:
                    w.read_scores(stage)
                    if not p.exchange:
                        w.read_gradients(stage)
                    w.scores(i, j, T.Cast("uint32", half) * T.uint32(p.S_tile.bytes))
            else:
                if late >= 0:
                    if p.exchange:
                        w.read_gradients(before)
                    copy: T.let = T.Cast("uint32", 1 - half) * T.uint32(p.S_tile.bytes)
                    w.gradients(j, copy, workspace, dq_at(p, z, late), turn_at(z, late))
            part = part + 1
        before = stage
        stage = next_stage
        half = 1 - half
        late = row_block
        left = left - 1
        h = next_h
        i = next_i


@T.inline
def sweep(p, z, tensors):
    """Algorithm 2, lines 6 to 18: one key block of one key head."""
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": p.blocks_per_multiprocessor})
    block = T.cta_id([z.key_blocks * z.batch_heads_kv])
    warp = T.warp_id([p.warps])
    lane = T.lane_id([32])
    thread = T.thread_id([p.threads])
    pool = T.SMEMPool()
    K_smem = pool.alloc((p.K_tile.bytes,), "uint8", align=1024)
    V_smem = pool.alloc((p.V_tile.bytes,), "uint8", align=1024)
    Q_smem = pool.alloc((p.stages * p.Q_tile.bytes,), "uint8", align=1024)
    dO_smem = pool.alloc((p.stages * p.dO_tile.bytes,), "uint8", align=1024)
    copies = T.meta_var(1 + p.late)
    dS_smem = pool.alloc((copies * p.S_tile.bytes,), "uint8", align=1024)
    P_smem = pool.alloc((copies * p.S_tile.bytes if p.exchange else 16,), "uint8", align=1024)
    statistics_smem = pool.alloc((p.stages * p.statistics_bytes,), "uint8", align=16)
    pool.commit()
    shared = T.meta_var(
        SimpleNamespace(
            K=K_smem,
            V=V_smem,
            Q=Q_smem,
            dO=dO_smem,
            dS=dS_smem,
            P=P_smem,
            statistics=statistics_smem,
            thread=thread,
        )
    )
    # Ascending: the key blocks that most queries see come first.
    head: T.let = T.truncdiv(block, z.key_blocks)
    j: T.let = block - head * z.key_blocks
    b: T.let = T.truncdiv(head, z.heads_kv)
    h_kv: T.let = head - b * z.heads_kv
    i_start: T.int32 = 0
    if p.causal:
        # Where no query sees the block, this may still be the last one, all masked: comparing the
        # row with seq_q makes ptxas 13.0 find them equal always (VIMNMX.RELU, sm_90a).
        row: T.let = first_row(j * p.block_kv, z.seq_q, True, z.causal_offset, clamp)
        i_start = T.truncdiv(row, p.block_q)
    feed = Feed(p, z, tensors, shared, b, h_kv)
    w = Warp(p, z, shared, warp, lane)
    feed.begin(j)
    feed.load(0, h_kv * z.group, i_start, z.query_blocks > i_start)
    w.begin(j)
    each_tile(clear_fragment, w.dK)
    each_tile(clear_fragment, w.dV)
    if p.late:
        late_steps(p, z, tensors.workspace, feed, w, j, i_start)
    else:
        steps(p, z, tensors.workspace, feed, w, j, i_start)
    T.ptx["cp.async.wait_group"](0)
    dK_mine = T.meta_var(warp >= p.gradient_warps if p.split_gradients else True)
    dV_mine = T.meta_var(warp < p.gradient_warps if p.split_gradients else True)
    if T.And(z.need_dk != 0, dK_mine):
        scaled = T.meta_var((w.dK, z.softmax_scale))
        emit_write_gradient(w, *scaled, w.dK_words, tensors.dK, b, h_kv, p.columns_qk)
    if T.And(z.need_dv != 0, dV_mine):
        emit_write_gradient(w, w.dV, None, w.dV_words, tensors.dV, b, h_kv, p.columns_v)


def build(variant: Variant, schedule: Sm80Backward, device: Device) -> tvm.IRModule:
    """The backward program of a Variant on an NVIDIA GPU since Ampere.

    The arguments are those of the Hopper family (sm90_bwd.build), with a workspace of
    `schedule.workspace_floats(problem, splits)`.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    schedule.require_feasible(variant, device)
    p = plan(variant, schedule, device)

    @T.prim_func
    def backward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        do: T.handle,
        dlse: T.handle,
        dq: T.handle,
        dk: T.handle,
        dv: T.handle,
        work: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
        has_dlse: T.int32,
        need_dq: T.int32,
        need_dk: T.int32,
        need_dv: T.int32,
        splits: T.int32,
    ):
        B, H, Hk, Sq, Sk = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        qb, qn, qh = T.int64(), T.int64(), T.int64()
        kb, kn, kh = T.int64(), T.int64(), T.int64()
        vb, vn, vh = T.int64(), T.int64(), T.int64()
        ob, on, oh = T.int64(), T.int64(), T.int64()
        gb, gn, gh = T.int64(), T.int64(), T.int64()
        # What is not needed is a dummy of any size.
        l0, l1, l2 = T.int64(), T.int64(), T.int64()
        dq0, dq1, dq2 = T.int64(), T.int64(), T.int64()
        dqb, dqn, dqh = T.int64(), T.int64(), T.int64()
        dk0, dk1, dk2 = T.int64(), T.int64(), T.int64()
        dkb, dkn, dkh = T.int64(), T.int64(), T.int64()
        dv0, dv1, dv2 = T.int64(), T.int64(), T.int64()
        dvb, dvn, dvh = T.int64(), T.int64(), T.int64()
        floats = T.int64()
        Q = T.match_buffer(q, (B, Sq, H, p.columns_qk), p.dtype, strides=[qb, qn, qh, 1], align=16)
        K = T.match_buffer(k, (B, Sk, Hk, p.columns_qk), p.dtype, strides=[kb, kn, kh, 1], align=16)
        V = T.match_buffer(v, (B, Sk, Hk, p.columns_v), p.dtype, strides=[vb, vn, vh, 1], align=16)
        O = strided(o, (B, Sq, H, p.columns_v), (ob, on, oh), p.dtype)
        LSE = T.match_buffer(lse, (B, H, Sq), "float32", align=4)
        dO = strided(do, (B, Sq, H, p.columns_v), (gb, gn, gh), p.dtype)
        dLSE = T.match_buffer(dlse, (l0, l1, l2), "float32", align=4)
        dQ = strided(dq, (dq0, dq1, dq2, p.columns_qk), (dqb, dqn, dqh), p.dtype)
        dK = strided(dk, (dk0, dk1, dk2, p.columns_qk), (dkb, dkn, dkh), p.dtype)
        dV = strided(dv, (dv0, dv1, dv2, p.columns_v), (dvb, dvn, dvh), p.dtype)
        workspace = T.match_buffer(work, (floats,), "float32", align=16)

        seq_q: T.let = T.Cast("int32", Sq)
        seq_kv: T.let = T.Cast("int32", Sk)
        heads: T.let = T.Cast("int32", H)
        heads_kv: T.let = T.Cast("int32", Hk)
        batch: T.let = T.Cast("int32", B)
        query_blocks: T.let = T.truncdiv(seq_q + (p.block_q - 1), p.block_q)
        row_blocks: T.let = T.Cast("int64", query_blocks * batch * heads)
        offset: T.let = T.Cast("int32", causal_offset)
        z = T.meta_var(
            SimpleNamespace(
                query_blocks=query_blocks,
                key_blocks=T.truncdiv(seq_kv + (p.block_kv - 1), p.block_kv),
                batch_heads_q=batch * heads,
                batch_heads_kv=batch * heads_kv,
                heads=heads,
                heads_kv=heads_kv,
                group=T.truncdiv(heads, heads_kv),
                seq_q=seq_q,
                seq_kv=seq_kv,
                causal_offset=offset,
                scale_log2=softmax_scale * T.float32(LOG2_E),
                softmax_scale=softmax_scale,
                statistics_first=T.int64(SM80_COUNTER_FLOATS),
                dq_first=T.int64(SM80_COUNTER_FLOATS) + row_blocks * T.int64(2 * p.block_q),
                Q_strides=(qb, qn, qh),
                K_strides=(kb, kn, kh),
                V_strides=(vb, vn, vh),
                dO_strides=(gb, gn, gh),
                turns_first=T.int64(SM80_COUNTER_FLOATS)
                + row_blocks * T.int64(2 * p.block_q + p.dq_floats),
                need_dq=need_dq,
                need_dk=need_dk,
                need_dv=need_dv,
            )
        )
        tensors = T.meta_var(
            SimpleNamespace(Q=Q, K=K, V=V, dO=dO, dK=dK, dV=dV, workspace=workspace)
        )
        with T.attr({"tirx.device_entry": True}):
            preprocess(p, z, O, dO, LSE, dLSE, workspace, has_dlse)
        with T.attr({"tirx.device_entry": True}):
            sweep(p, z, tensors)
        if need_dq != 0:
            with T.attr({"tirx.device_entry": True}):
                write_dq(p, z, workspace, dQ)

    return tvm.IRModule({"backward": backward})
