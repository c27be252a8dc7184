"""The consumers of the Hopper backward where a warpgroup can hold dK and dV of 64 keys.

A tile is 128 keys; each of the two warpgroups carries 64 of them through all five GEMMs of a step
and, through the dS of both, its part of dQ. sm90_bwd.md draws the step.
"""

from tvm.script import tirx as T

from fa2tvm.kernels.sm90_bwd_fragments import (
    await_turn,
    fence_groups,
    gemm_groups,
    gemm_tn,
    hide,
    load_statistics,
    pack_columns,
    pack_groups,
    pass_turn,
    probabilities,
    reduce_from_registers,
    score_gradients,
    stage,
    store_columns,
    store_transposed,
    transposed_address,
    uniform,
)
from fa2tvm.kernels.sm90_bwd_tiles import KeyTile
from fa2tvm.kernels.sm90_tiles import observe
from fa2tvm.kernels.wgmma import (
    fence_floats,
    gemm_nt,
    shared_address,
    transpose_fragment,
)
from fa2tvm.schedule.sm90_bwd import TURNS

WARPGROUP = 128
# Hardware barrier 0 is __syncthreads. dS of a step is complete at 2 (first warpgroup waits) and 3,
# of the next one at 4 and 5: with one barrier each the faster warpgroup could arrive twice.
DS_BARRIER, DS_BARRIER_OTHER, DS_BARRIER_NEXT = 2, 1, 6


@T.meta_class
class Consumer:
    """A consumer warpgroup: 64 keys of the tile, their dK and dV, and its part of each dQ."""

    def __init__(self, p, z, shared, workspace, warpgroup, warp, lane):
        self.p, self.z, self.shared, self.workspace = p, z, shared, workspace
        self.warpgroup, self.warp, self.lane = warpgroup, warp, lane
        # Which 64 keys of the tile are this warpgroup's.
        self.keys = warpgroup
        # Groups of 16 queries; those whose dV is issued under the others' exponentials, and those.
        count = p.block_q // 16
        self.groups = range(count)
        self.first_groups = range((count + 1) // 2 if p.halves else 0)
        self.last_groups = range(len(self.first_groups), count)
        # Those whose dK waits for the last dS.
        self.late_groups = self.last_groups if p.early_dk else self.groups
        self.Q_ring = shared.Q_ring.consumer()
        self.dO_ring = shared.dO_ring.consumer()
        self.K_ring = shared.K_ring.consumer()
        self.V_ring = shared.V_ring.consumer()
        self.tile_ring = shared.tile_ring.consumer()
        self.tile = KeyTile(p, z)
        self.index = T.local_scalar("int32")
        scores = p.block_q // 2
        # P_ij takes the place of S_ij.
        self.S_ij = T.alloc_local((scores,), "float32")
        self.dP_ij = T.alloc_local((scores,), "float32")
        self.dQ_i = T.alloc_local((p.dQ_queries // 2,), "float32")
        self.P_words = T.alloc_local((scores // 2,), "uint32")
        self.words = T.alloc_local((8,), "uint32")
        self.dS_words = T.alloc_local((scores // 2,), "uint32")
        self.dV_j = T.alloc_local((p.head_dim_v // 2,), "float32")
        self.dK_j = T.alloc_local((p.head_dim // 2,), "float32")
        self.statistics = T.alloc_local((p.block_q // 4,), "float32")
        self.first_visible = T.alloc_local((2,), "int32")
        self.row_bits = T.alloc_local((2,), "uint32")
        self.spare = T.alloc_local((2,), "uint32")
        # Query block of the scores at hand; the same, the one before and the next among all rows'.
        self.i = T.local_scalar("int32")
        self.row_block = T.local_scalar("int32")
        self.staged_block = T.local_scalar("int32")
        self.next_block = T.local_scalar("int32")
        self.heads_left = T.local_scalar("int32")
        self.dS_offset = T.local_scalar("int32")
        # A variable of its own: made from dS_offset, the barrier's number would drag it into a
        # vector register, and what depends on it.
        self.dS_barrier = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.Q_descriptor = T.local_scalar("uint64")
        self.Q_rows_descriptor = T.local_scalar("uint64")
        self.dO_descriptor = T.local_scalar("uint64")
        self.dO_rows_descriptor = T.local_scalar("uint64")
        self.K_descriptor = T.local_scalar("uint64")
        self.K_columns_descriptor = T.local_scalar("uint64")
        self.V_descriptor = T.local_scalar("uint64")
        self.dS_descriptor = T.local_scalar("uint64")
        self.dS_address = T.local_scalar("uint32")
        self.statistics_address = T.local_scalar("uint32")
        self.dQ_address = T.local_scalar("uint32")

    @T.inline
    def begin(self):
        """Set the operand descriptors, and where this thread's data stands."""
        p = T.meta_var(self.p)
        shared = T.meta_var(self.shared)
        wg = T.meta_var(self.warpgroup)
        K: T.let = shared_address(shared.K)
        dS: T.let = shared_address(shared.dS)
        own_rows: T.let = T.Cast("uint32", self.keys * (64 * p.K_tile.row_bytes))
        self.Q_descriptor = p.Q_tile.k_major(shared_address(shared.Q))
        self.Q_rows_descriptor = p.Q_tile.mn_major(shared_address(shared.Q))
        self.dO_descriptor = p.dO_tile.k_major(shared_address(shared.dO))
        self.dO_rows_descriptor = p.dO_tile.mn_major(shared_address(shared.dO))
        self.K_descriptor = p.K_tile.k_major(K + own_rows)
        self.V_descriptor = p.V_tile.k_major(shared_address(shared.V) + own_rows)
        if p.dQ_by_columns:
            own_columns: T.let = T.Cast("uint32", wg * (p.dQ_slices * p.K_tile.box_bytes))
            self.K_columns_descriptor = p.K_tile.mn_major(K + own_columns)
            self.dS_descriptor = p.dS_tile.k_major(dS)
        else:
            own_queries: T.let = T.Cast("uint32", wg * (p.dQ_queries * p.dS_tile.row_bytes))
            self.K_columns_descriptor = p.K_tile.mn_major(K)
            self.dS_descriptor = p.dS_tile.k_major(dS + own_queries)
        self.dS_address = transposed_address(dS, p.dS_tile, self.keys, self.warp, self.lane)
        self.dS_offset = 0
        self.dS_barrier = DS_BARRIER + wg
        self.statistics_address = shared_address(shared.statistics) + T.Cast(
            "uint32", T.truncmod(self.lane, 4) * 16
        )
        if p.bulk_dq:
            self.dQ_address = shared_address(shared.dQ) + T.Cast(
                "uint32", 4 * self.dQ_position(0) + self.lane * 16
            )
        self.row = self.keys * 64 + self.warp * 16 + T.truncdiv(self.lane, 4)

    def dQ_position(self, slice_):
        """Where this warp's part of a slice of 64 columns starts in a block's accumulator."""
        p = self.p
        eights = p.block_q // 8
        if p.dQ_by_columns:
            chunk = (self.warpgroup * p.dQ_slices + slice_) * 4 + self.warp
            return chunk * (eights * 128)
        return (slice_ * 4 + self.warp) * (eights * 128) + self.warpgroup * (p.dQ_queries * 16)

    @T.inline
    def take_tile(self):
        """Go to this thread block's next tile."""
        self.tile_ring.wait()
        self.index = uniform(observe(self.shared.tiles, 0, self.tile_ring.stage))
        self.tile_ring.release(self.lane)
        self.tile_ring.advance()

    @T.inline
    def set_tile(self):
        """Stand at the first step of the tile that was taken."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.tile.decode(self.index)
        self.i = self.tile.i_start
        self.row_block = (self.tile.b * z.heads + self.tile.first_head()) * z.query_blocks + self.i
        self.next_block = self.row_block + 1
        for r in T.unroll(2):
            key: T.let = self.tile.j * p.block_kv + self.row + 8 * r
            self.row_bits[r] = T.Select(key < z.seq_kv, T.uint32(0xFFFFFFFF), T.uint32(0))
        self.heads_left = z.group

    @T.inline
    def clear(self):
        """dK_j = dV_j = 0 (line 6)."""
        for d in T.unroll(self.p.head_dim_v // 2):
            self.dV_j[d] = T.float32(0.0)
        for d in T.unroll(self.p.head_dim // 2):
            self.dK_j[d] = T.float32(0.0)

    @T.inline
    def issue_S(self):
        """S_ij^T = K_j Q_i^T, asynchronously (line 10)."""
        p = T.meta_var(self.p)
        K_j = T.meta_var(self.K_descriptor + p.K_tile.stage_offset(self.K_ring.stage))
        Q_i = T.meta_var(self.Q_descriptor + p.Q_tile.stage_offset(self.Q_ring.stage))
        fence_floats(self.S_ij)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_nt(self.S_ij, K_j, Q_i, p.K_tile, p.Q_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dP(self):
        """dP_ij^T = V_j dO_i^T, asynchronously (line 13)."""
        p = T.meta_var(self.p)
        dO_i = T.meta_var(self.dO_descriptor + p.dO_tile.stage_offset(self.dO_ring.stage))
        fence_floats(self.dP_ij)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_nt(self.dP_ij, self.V_descriptor, dO_i, p.V_tile, p.dO_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dV(self, groups):
        """dV_j += P_ij^T dO_i over some of the queries, asynchronously (line 12)."""
        p = T.meta_var(self.p)
        dO_i = T.meta_var(self.dO_rows_descriptor + p.dO_tile.stage_offset(self.dO_ring.stage))
        fence_floats(self.dV_j)
        fence_groups(self.P_words, groups)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_groups(self.dV_j, self.P_words, dO_i, p.dO_tile, p.dtype, groups)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dK(self, groups):
        """dK_j += dS_ij^T Q_i over some of the queries, asynchronously (line 16)."""
        p = T.meta_var(self.p)
        Q_i = T.meta_var(self.Q_rows_descriptor + p.Q_tile.stage_offset(self.Q_ring.stage))
        fence_floats(self.dK_j)
        fence_groups(self.dS_words, groups)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_groups(self.dK_j, self.dS_words, Q_i, p.Q_tile, p.dtype, groups)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dQ(self, slice_):
        """A slice of the tile's share of dQ_i^T, K_j^T dS_ij^T, asynchronously (line 15)."""
        p = T.meta_var(self.p)
        K_j = T.meta_var(
            self.K_columns_descriptor
            + p.K_tile.stage_offset(self.K_ring.stage)
            + T.Cast("uint64", slice_ * (p.K_tile.box_bytes >> 4))
        )
        dS_i = T.meta_var(self.dS_descriptor + T.Cast("uint64", self.dS_offset >> 4))
        fence_floats(self.dQ_i)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_tn(self.dQ_i, K_j, dS_i, p.K_tile, p.dS_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def load_L(self, groups):
        """L_i from shared memory."""
        p = T.meta_var(self.p)
        address = T.meta_var(
            self.statistics_address + T.Cast("uint32", self.Q_ring.stage * (8 * p.block_q))
        )
        load_statistics(self.statistics, address, groups)

    @T.inline
    def load_D(self, groups):
        """D_i from shared memory."""
        p = T.meta_var(self.p)
        address = T.meta_var(
            self.statistics_address
            + T.Cast("uint32", self.Q_ring.stage * (8 * p.block_q) + 4 * p.block_q)
        )
        load_statistics(self.statistics, address, groups)

    @T.inline
    def finish_scores(self):
        """P_ij = exp(S_ij - L_i) (line 11) while dP_ij comes in; both are there afterwards.

        In halves: dV_j (with `early_dk` dK_j too) of the first half of the queries is issued before
        the exponentials of the second, which it covers; it is there afterwards.
        """
        p = T.meta_var(self.p)
        self.load_L(self.groups)
        T.ptx.wgmma.wait_group.sync.aligned(1)
        fence_floats(self.S_ij)
        if p.halves:
            self.make_P(self.first_groups)
            pack_groups(self.P_words, self.S_ij, p.dtype, self.first_groups)
            self.issue_dV(self.first_groups)
            self.load_D(self.first_groups)
            T.ptx.wgmma.wait_group.sync.aligned(1)
            fence_floats(self.dP_ij)
            self.make_dS(self.first_groups)
            if p.early_dk:
                self.issue_dK(self.first_groups)
        self.make_P(self.last_groups)
        if p.early_dv:
            pack_groups(self.P_words, self.S_ij, p.dtype, self.last_groups)
        self.load_D(self.last_groups)
        if p.early_dv:
            fence_groups(self.P_words, self.last_groups)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        if p.halves:
            fence_floats(self.dV_j)
            if p.early_dk:
                fence_floats(self.dK_j)
        else:
            fence_floats(self.dP_ij)

    @T.inline
    def make_P(self, groups):
        """P_ij in the place of S_ij (line 11), masked."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        probabilities(self.S_ij, self.statistics, z.scale_log2, groups)
        if p.causal:
            # One loop with a branch: with a second copy of it for masked blocks ptxas kept the
            # descriptors of both in vector registers and spilled 340 bytes.
            if self.i < self.tile.i_full:
                self.find_visible()
                hide(self.S_ij, self.first_visible, groups)

    @T.inline
    def make_dS(self, groups):
        """dS_ij (line 14), in registers and in shared memory."""
        p = T.meta_var(self.p)
        score_gradients(
            self.dS_words, self.S_ij, self.dP_ij, self.statistics, self.row_bits, p.dtype, groups
        )
        if p.make_dq:
            address = T.meta_var(self.dS_address + T.Cast("uint32", self.dS_offset))
            store_transposed(self.dS_words, address, p.dS_tile, groups)

    @T.inline
    def find_visible(self):
        """The first column, counted from this lane's first, that sees each of its two keys."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        for r in T.unroll(2):
            key: T.let = self.tile.j * p.block_kv + self.row + 8 * r
            first_column: T.let = self.i * p.block_q + T.truncmod(self.lane, 4) * 2
            self.first_visible[r] = key - z.causal_offset - first_column

    @T.inline
    def issue_gradients(self):
        """Lines 12 to 16 from P_ij and dP_ij: dV_j, dK_j and dQ_i are in flight afterwards."""
        p = T.meta_var(self.p)
        if p.early_dv:
            self.issue_dV(self.last_groups)
        self.make_dS(self.last_groups)
        if not p.early_dv:
            pack_groups(self.P_words, self.S_ij, p.dtype, self.groups)
            self.issue_dV(self.groups)
        # Before the fence: it takes its operand from registers.
        self.issue_dK(self.late_groups)
        if p.make_dq:
            # For dS here, and for dQ of the step before.
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx.bar.arrive(
                T.Cast("uint32", T.bitwise_xor(self.dS_barrier, DS_BARRIER_OTHER)),
                T.uint32(2 * WARPGROUP),
            )
        if p.bulk_dq and not p.deterministic:
            if self.staged_block >= 0:
                self.reduce_dQ(self.tile.j)
        if p.make_dq:
            T.ptx.bar.sync(T.Cast("uint32", self.dS_barrier), T.uint32(2 * WARPGROUP))
            self.issue_dQ(0)
        if p.bulk_dq and p.deterministic:
            # It waits for others: with the GEMMs in flight.
            if self.staged_block >= 0:
                self.reduce_dQ(self.tile.j)

    @T.inline
    def finish_gradients(self):
        """dV_j and dK_j are there: give Q_i and dO_i back, and go to the next stages."""
        p = T.meta_var(self.p)
        T.ptx.wgmma.wait_group.sync.aligned(int(p.make_dq))
        fence_floats(self.dV_j)
        fence_floats(self.dK_j)
        self.Q_ring.release(self.lane)
        self.dO_ring.release(self.lane)
        self.Q_ring.advance()
        self.dO_ring.advance()
        if p.make_dq:
            if p.ds_stages == 2:
                self.dS_offset = T.bitwise_xor(self.dS_offset, p.dS_tile.bytes)
            self.dS_barrier = T.bitwise_xor(self.dS_barrier, DS_BARRIER_NEXT)
            self.staged_block = self.row_block
        self.count_step()

    @T.inline
    def count_step(self):
        """Go to the next query block."""
        self.row_block = self.next_block
        self.next_block = self.next_block + 1
        self.i = self.i + 1

    @T.inline
    def export_dQ(self, j):
        """Key block j's share of dQ_i leaves its registers, which the next dP_ij takes."""
        fence_floats(self.dQ_i)
        if self.p.bulk_dq:
            # The reduction before has read this warp's part.
            if self.lane == 0:
                T.ptx.cp.async_.bulk.wait_group.read(0)
            T.cuda.warp_sync()
            stage(self.dQ_i, self.dQ_address)
        else:
            self.begin_turn(self.staged_block, j)
            self.add_dQ(self.staged_block, 0)
            self.end_turn(self.staged_block)

    @T.inline
    def add_dQ(self, block, slice_):
        """Add a slice of dQ to global memory, straight from registers."""
        if self.z.need_dq != 0:
            position: T.let = self.dQ_target(block, slice_) + T.Cast("int64", self.lane * 4)
            reduce_from_registers(self.dQ_i, self.workspace, position)

    def dQ_target(self, block, slice_):
        """Where this warp's part of a slice of a block's dQ stands in the workspace."""
        return (
            self.z.dq_first
            + T.Cast("int64", block) * T.int64(self.p.dq_floats)
            + T.Cast("int64", self.dQ_position(slice_))
        )

    def turn(self, block):
        """Whose turn it is to add this warp's part to a block's dQ: the number of a key block."""
        number = T.Cast("int64", block * TURNS + self.warpgroup * 4 + self.warp)
        return self.workspace.ptr_to([self.z.turns_first + number])

    @T.inline
    def begin_turn(self, block, j):
        """Deterministic mode: a warp waits for the key blocks before the j-th."""
        if self.p.deterministic:
            if self.lane == 0:
                await_turn(self.turn(block), j)
            T.cuda.warp_sync()

    @T.inline
    def end_turn(self, block):
        """Deterministic mode: let the next key block add, after what this warp has added."""
        if self.p.deterministic:
            T.cuda.thread_fence()
            T.cuda.warp_sync()
            if self.lane == 0:
                pass_turn(self.turn(block))

    @T.inline
    def reduce_dQ(self, j):
        """One lane adds what its warp has staged to global memory, after a proxy fence of all.

        j is the key block that it comes from.
        """
        add = T.meta_var(T.ptx["cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"])
        T.cuda.warp_sync()
        if self.lane == 0 and self.z.need_dq != 0:
            if self.p.deterministic:
                await_turn(self.turn(self.staged_block), j)
            add(
                self.workspace.ptr_to([self.dQ_target(self.staged_block, 0)]),
                self.dQ_address,
                T.uint32(64 * self.p.dQ_queries),
            )
            T.ptx.cp.async_.bulk.commit_group()
            if self.p.deterministic:
                T.ptx.cp.async_.bulk.wait_group(0)
                pass_turn(self.turn(self.staged_block))

    @T.inline
    def step(self):
        """The rest of Algorithm 2's inner loop for the scores at hand, and the next scores.

        No GEMM is in flight over the loop's back edge: ptxas would serialise all of them (C7515).
        """
        self.issue_gradients()
        self.finish_gradients()
        self.Q_ring.wait()
        self.issue_S()
        if self.p.make_dq:
            T.ptx.wgmma.wait_group.sync.aligned(1)
            self.export_dQ(self.tile.j)
        self.dO_ring.wait()
        self.issue_dP()
        self.finish_scores()

    @T.inline
    def other_steps(self):
        """Algorithm 2's inner loop but for its first step, head by head."""
        z = T.meta_var(self.z)
        while self.heads_left > 0:
            while self.i + 1 < z.query_blocks:
                self.step()
            self.next_head()

    @T.inline
    def next_head(self):
        """Let the next step be the first one of the next query head."""
        self.heads_left = self.heads_left - 1
        self.i = self.tile.i_start - 1
        self.next_block = self.next_block + self.tile.i_start

    @T.inline
    def turn_to_next_tile(self, dK, dV):
        """The last step's gradients, line 18, and the first scores of the next tile.

        dK_j and dV_j go out under the next tile's first GEMM and while its V_j comes in. After the
        last tile the scores are of stale shared memory and are dropped: no branch may surround a
        GEMM in flight.
        """
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.issue_gradients()
        # Behind the GEMMs: before them, the branch cost 148 bytes of spill at d=64.
        self.V_ring.release(self.lane)
        self.V_ring.advance()
        j: T.int32 = self.tile.j
        row: T.int32 = j * p.block_kv + self.row
        b: T.int32 = self.tile.b
        h: T.int32 = self.tile.h_kv
        K_stage: T.int32 = self.K_ring.stage
        self.finish_gradients()
        self.K_ring.advance()
        self.take_tile()
        if p.k_stages == 1:
            if p.make_dq:
                T.ptx.wgmma.wait_group.sync.aligned(0)
                self.export_dQ(j)
            self.K_ring.release_stage(K_stage, self.lane)
        if self.index < z.tiles:
            self.Q_ring.wait()
            self.K_ring.wait()
        self.issue_S()
        # Its divisions take longer than a GEMM.
        self.set_tile()
        if p.k_stages > 1:
            if p.make_dq:
                T.ptx.wgmma.wait_group.sync.aligned(1)
                self.export_dQ(j)
            self.K_ring.release_stage(K_stage, self.lane)
        if p.bulk_dq:
            T.ptx.fence.proxy.async_.shared__cta()
            self.reduce_dQ(j)
        self.staged_block = -1
        if z.need_dv != 0:
            self.store_gradient(self.dV_j, T.float32(1.0), dV, (b, row, h), p.columns_v)
        if z.need_dk != 0:
            self.store_gradient(self.dK_j, z.softmax_scale, dK, (b, row, h), p.columns_qk)
        self.clear()
        if self.index < z.tiles:
            self.V_ring.wait()
            self.dO_ring.wait()
        self.issue_dP()
        self.finish_scores()

    @T.inline
    def store_gradient(self, gradient, scale, out, position, columns):
        """A thread's two rows, straight from registers after a transpose across each quad."""
        batch, first_row, head = position
        for c in T.unroll(gradient.shape[0] // 16):
            pack_columns(self.words, gradient, c, scale, self.p.dtype)
            transpose_fragment(self.words, 32, self.lane, self.spare)
            column: T.let = 32 * c + T.truncmod(self.lane, 4) * 8
            for r in T.unroll(2):
                if first_row + 8 * r < self.z.seq_kv and column < columns:
                    store_columns(
                        out.ptr_to([batch, first_row + 8 * r, head, column]), self.words, r
                    )


@T.inline
def consume(c, dK, dV):
    """The consumer: Algorithm 2 over this thread block's tiles."""
    c.begin()
    c.take_tile()
    c.set_tile()
    c.staged_block = -1
    c.K_ring.wait()
    c.Q_ring.wait()
    c.issue_S()
    c.V_ring.wait()
    c.dO_ring.wait()
    c.issue_dP()
    c.clear()
    c.finish_scores()
    while c.index < c.z.tiles:
        c.other_steps()
        c.turn_to_next_tile(dK, dV)
    if c.p.bulk_dq:
        if c.lane == 0:
            T.ptx.cp.async_.bulk.wait_group(0)
