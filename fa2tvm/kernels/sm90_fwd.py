"""Algorithm 1 (attention forward) for Hopper: TMA, wgmma and warp specialisation in TensorIR.

One persistent thread block a multiprocessor: a producer warp keeps rings of K_j and V_j full, a
scheduler warp hands out tiles, each consumer warpgroup carries 64 query rows. sm90_fwd.md draws the
schedule and keeps the profile.

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1; FlashAttention-3, arXiv:2407.08608
(producer and consumer warps, ping-pong, S of the next block issued before P V of this one).
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T
from tvm.tirx.layout import S as LayoutOf
from tvm.tirx.layout import TileLayout

from fa2tvm.device import Device
from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.ring import Ring
from fa2tvm.kernels.sm90_tiles import Scheduler, Tile, head_group_of, publish
from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import (
    SharedTile,
    encode_tensor_map,
    fence_floats,
    fence_words,
    gemm_accumulate,
    gemm_nt,
    load_a_fragment,
    pack_pairs,
    shared_address,
    store_row,
    transpose_fragment,
)
from fa2tvm.problem import Variant
from fa2tvm.schedule import Sm90Forward, sm90_head_dim

WARPGROUP = 128
# Hardware barrier 0 is __syncthreads; the consumers' turns take 1, 2, ..
FIRST_TURN = 1


def plan(variant, schedule, device):
    """Everything that is a constant of the program, by name."""
    head_dim, head_dim_v = sm90_head_dim(variant.head_dim_qk), sm90_head_dim(variant.head_dim_v)
    footprint = schedule.footprint(variant, device)
    return SimpleNamespace(
        **schedule.to_dict(),
        block_q=schedule.block_q,
        producer_registers=schedule.producer_registers,
        consumer_registers=schedule.consumer_registers,
        dtype=variant.dtype,
        causal=variant.causal,
        columns_qk=variant.head_dim_qk,
        columns_v=variant.head_dim_v,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        Q_tile=SharedTile(64, head_dim),
        K_tile=SharedTile(schedule.block_kv, head_dim),
        V_tile=SharedTile(schedule.block_kv, head_dim_v),
        consumer_warps=4 * schedule.consumer_warpgroups,
        # Sums of trusted exponentials end below 2**16 in float16; elsewhere they leave O_i room.
        trust_limit_log2=15 if variant.dtype == "float16" else 60,
        multiprocessors=device.cores,
        shared_bytes=footprint.scratch_bytes,
    )


@T.inline
def produce(p, z, shared, maps):
    """The producer: one thread loads Q_i and the K_j, V_j of each tile, last key block first."""
    Q_ring = shared.Q_ring.producer()
    K_ring = shared.K_ring.producer()
    V_ring = shared.V_ring.producer()
    tile_ring = shared.tile_ring.consumer()
    request = shared.request_ring.producer()
    tile = Tile()
    tile_ring.wait()
    tile.get(shared.tiles, 0)
    while tile.j_end > 0:
        tile_ring.release(0)
        tile_ring.advance()
        h_kv: T.let = T.truncdiv(tile.h, z.group)
        j: T.int32 = tile.j_end - 1
        while j >= 0:
            if p.dynamic:
                if j == 0:
                    request.commit()
            K_ring.acquire(p.K_tile.bytes)
            p.K_tile.load(
                shared.K,
                K_ring.stage * p.K_tile.elements,
                maps.K,
                j * p.block_kv,
                h_kv,
                tile.b,
                K_ring.barrier(),
            )
            K_ring.advance()
            if j == tile.j_end - 1:
                Q_ring.acquire(p.consumer_warpgroups * p.Q_tile.bytes)
                for w in T.unroll(p.consumer_warpgroups):
                    p.Q_tile.load(
                        shared.Q,
                        (Q_ring.stage * p.consumer_warpgroups + w) * p.Q_tile.elements,
                        maps.Q,
                        tile.i * p.block_q + w * 64,
                        tile.h,
                        tile.b,
                        Q_ring.barrier(),
                    )
                Q_ring.advance()
            V_ring.acquire(p.V_tile.bytes)
            p.V_tile.load(
                shared.V,
                V_ring.stage * p.V_tile.elements,
                maps.V,
                j * p.block_kv,
                h_kv,
                tile.b,
                V_ring.barrier(),
            )
            V_ring.advance()
            j = j - 1
        tile_ring.wait()
        tile.get(shared.tiles, tile_ring.stage)


@T.meta_class
class Consumer:
    """A consumer warpgroup: 64 rows of Q_i, the state that Algorithm 1 keeps of them, its rings."""

    def __init__(self, p, z, shared, warpgroup, warp, lane):
        self.p, self.z, self.shared = p, z, shared
        self.warpgroup, self.warp, self.lane = warpgroup, warp, lane
        self.Q_ring = shared.Q_ring.consumer()
        self.K_ring = shared.K_ring.consumer()
        self.V_ring = shared.V_ring.consumer()
        self.tile_ring = shared.tile_ring.consumer()
        self.report_ring = shared.report_ring.producer()
        self.tile = Tile()
        self.S_ij = T.alloc_local((p.block_kv // 2,), "float32")
        self.P_ij = T.alloc_local((max(p.block_kv // 4, p.head_dim_v // 4),), "uint32")
        self.O_i = T.alloc_local((p.head_dim_v // 2,), "float32")
        if p.q_in_registers:
            self.Q_i = T.alloc_local((p.head_dim // 4,), "uint32")
        self.m_i, self.m_old, self.scaled_m, self.alpha, self.l_i = (
            T.alloc_local((2,), "float32") for _ in range(5)
        )
        self.moved = T.alloc_local((2,), "int32") if p.lazy_rescale else None
        self.any_moved = T.alloc_local((1,), "int32")
        self.chains = [T.alloc_local((p.max_chains,), "float32") for _ in range(2)]
        self.spare = T.alloc_local((2,), "uint32")
        self.row = T.local_scalar("int32")
        self.j = T.local_scalar("int32")
        self.Q_address = T.local_scalar("uint32")
        self.Q_descriptor = T.local_scalar("uint64")
        self.K_descriptor = T.local_scalar("uint64")
        self.V_descriptor = T.local_scalar("uint64")

    @T.inline
    def begin(self):
        """Set the operand descriptors and this thread's first row within the tile."""
        p = T.meta_var(self.p)
        self.Q_address = shared_address(self.shared.Q) + T.Cast(
            "uint32", self.warpgroup * p.Q_tile.bytes
        )
        self.Q_descriptor = p.Q_tile.k_major(self.Q_address)
        self.K_descriptor = p.K_tile.k_major(shared_address(self.shared.K))
        self.V_descriptor = p.V_tile.mn_major(shared_address(self.shared.V))
        self.row = self.warpgroup * 64 + self.warp * 16 + T.truncdiv(self.lane, 4)
        if p.pingpong:
            # The last warpgroup opens the first one's turn.
            if self.warpgroup == p.consumer_warpgroups - 1:
                T.ptx.bar.arrive(T.uint32(FIRST_TURN), T.uint32(2 * WARPGROUP))

    @T.inline
    def await_turn(self):
        """Ping-pong: wait until the warpgroup before has issued its GEMMs."""
        if self.p.pingpong:
            T.ptx.bar.sync(T.Cast("uint32", FIRST_TURN + self.warpgroup), T.uint32(2 * WARPGROUP))

    @T.inline
    def pass_turn(self):
        """Ping-pong: let the next warpgroup issue."""
        if self.p.pingpong:
            if self.p.consumer_warpgroups == 2:
                T.ptx.bar.arrive(
                    T.Cast("uint32", FIRST_TURN + 1 - self.warpgroup), T.uint32(2 * WARPGROUP)
                )
            else:
                following: T.let = T.Select(
                    self.warpgroup == self.p.consumer_warpgroups - 1, 0, self.warpgroup + 1
                )
                T.ptx.bar.arrive(T.Cast("uint32", FIRST_TURN + following), T.uint32(2 * WARPGROUP))

    @T.inline
    def take_Q(self):
        """Q_i to registers, if it lives there: its shared copy is free at once."""
        if self.p.q_in_registers:
            stage: T.let = self.Q_ring.stage * (self.p.consumer_warpgroups * self.p.Q_tile.bytes)
            load_a_fragment(
                self.Q_i,
                self.p.Q_tile,
                self.Q_address + T.Cast("uint32", stage),
                self.lane,
                self.warp,
            )
            T.cuda.warp_sync()
            self.Q_ring.release(self.lane)

    @T.inline
    def issue_S(self):
        """S_ij = Q_i K_j^T, asynchronously."""
        p = T.meta_var(self.p)
        K_j = T.meta_var(self.K_descriptor + p.K_tile.stage_offset(self.K_ring.stage))
        fence_floats(self.S_ij)
        if p.q_in_registers:
            fence_words(self.Q_i)
            T.ptx.wgmma.fence.sync.aligned()
            gemm_nt(self.S_ij, self.Q_i, K_j, None, p.K_tile, p.dtype)
        else:
            Q_stage = T.meta_var(p.Q_tile.stage_offset(self.Q_ring.stage * p.consumer_warpgroups))
            T.ptx.wgmma.fence.sync.aligned()
            gemm_nt(self.S_ij, self.Q_descriptor + Q_stage, K_j, p.Q_tile, p.K_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_O(self):
        """O_i += P_ij V_j, asynchronously."""
        p = T.meta_var(self.p)
        V_j = T.meta_var(self.V_descriptor + p.V_tile.stage_offset(self.V_ring.stage))
        fence_floats(self.O_i)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_accumulate(self.O_i, self.P_ij, V_j, p.V_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def finish_S(self, last):
        """S_ij is there: give K_j back, and Q_i after the tile's last S."""
        fence_floats(self.S_ij)
        self.K_ring.release(self.lane)
        if not self.p.q_in_registers:
            if last:
                self.Q_ring.release(self.lane)
        self.K_ring.advance()

    @T.inline
    def mask(self, beyond_sequence):
        """-inf for keys after the diagonal and, where the sequence may end, after its end."""
        z = T.meta_var(self.z)
        p = T.meta_var(self.p)
        first_column: T.let = self.j * p.block_kv + T.truncmod(self.lane, 4) * 2
        if p.causal:
            diagonal: T.let = self.tile.i * p.block_q + self.row + z.causal_offset - first_column
            softmax.mask_beyond(self.S_ij, diagonal, 8)
            if beyond_sequence:
                if (self.j + 1) * p.block_kv > z.seq_kv:
                    softmax.mask_beyond(self.S_ij, z.seq_kv - 1 - first_column, 0)
        else:
            if (self.j + 1) * p.block_kv > z.seq_kv:
                softmax.mask_beyond(self.S_ij, z.seq_kv - 1 - first_column, 0)

    @T.inline
    def first_block(self):
        """Algorithm 1, lines 5 to 10, for the tile's first key block; its S_ij is there."""
        self.j = self.tile.j_end - 1
        self.mask(True)
        softmax.row_maxima(self.S_ij, self.m_i, self.chains)
        softmax.scaled_maxima(self.scaled_m, self.m_i, self.z.scale_log2)
        softmax.exponentials(self.S_ij, self.scaled_m, self.z.scale_log2)
        softmax.row_sums(self.S_ij, self.l_i, self.chains, first=True)
        pack_pairs(self.P_ij, self.S_ij, self.p.dtype)
        for d in range(self.p.head_dim_v // 2):
            self.O_i[d] = T.float32(0.0)
        self.V_ring.wait()
        self.j = self.j - 1

    @T.inline
    def next_block(self, masked, trusted):
        """Algorithm 1, lines 8 to 10, for key block j, while O_i takes in P V of block j + 1.

        Any m_i gives the right O_i and L_i unless exp(S - m_i) overflows. A trusted block keeps
        m_i as it is, so that its exponentials begin with S_ij; `report_tile` tells if that failed.
        """
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.K_ring.wait()
        self.await_turn()
        self.issue_S()
        self.issue_O()
        self.pass_turn()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        self.finish_S(self.j == 0)
        if masked:
            self.mask(False)
        if not trusted:
            self.move_maxima()
        softmax.exponentials(self.S_ij, self.scaled_m, z.scale_log2)
        softmax.row_sums(self.S_ij, self.l_i, self.chains, first=False)
        fence_floats(self.S_ij)
        # A branch, such as the wait for the next V_j, must stand here: without one ptxas hoists the
        # wait for O_i above the exponentials.
        stage: T.int32 = self.V_ring.stage
        self.V_ring.advance()
        self.V_ring.wait()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        fence_floats(self.O_i)
        self.V_ring.release_stage(stage, self.lane)
        pack_pairs(self.P_ij, self.S_ij, p.dtype)
        if not trusted:
            if p.lazy_rescale > 0:
                if self.any_moved[0] != 0:
                    softmax.scale_rows(self.O_i, self.alpha)
            else:
                softmax.scale_rows(self.O_i, self.alpha)
        self.j = self.j - 1

    @T.inline
    def move_maxima(self):
        """m_i = max(m_i, rowmax(S_ij)), l_i with it, and the factors that O_i will need."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        for r in T.unroll(2):
            self.m_old[r] = self.m_i[r]
        softmax.row_maxima(self.S_ij, self.m_i, self.chains, self.m_old)
        if p.lazy_rescale > 0:
            softmax.keep_lazy_maxima(
                self.m_i, self.m_old, self.moved, self.any_moved, z.scale_log2, p.lazy_rescale
            )
        softmax.scaled_maxima(self.scaled_m, self.m_i, z.scale_log2)
        softmax.correction_factors(self.alpha, self.m_old, self.scaled_m, z.scale_log2, self.moved)
        softmax.scale_sums(self.l_i, self.alpha)

    @T.inline
    def other_blocks(self):
        """Algorithm 1's inner loop but for its first block: masked blocks, then all others."""
        if self.p.causal:
            while self.j >= self.tile.j_full:
                self.next_block(True, False)
        if self.p.trust_maximum:
            if self.tile.exact == 0:
                while self.j >= 0:
                    self.next_block(False, True)
            else:
                while self.j >= 0:
                    self.next_block(False, False)
        else:
            while self.j >= 0:
                self.next_block(False, False)

    @T.inline
    def report_tile(self):
        """Tell whether the maxima could be trusted: no sum too large, no row without one."""
        if self.p.trust_maximum:
            self.any_moved[0] = softmax.any_distrusted(self.l_i, self.m_i, self.p.trust_limit_log2)
            self.report_ring.acquire_plain()
            if self.lane == 0:
                if self.any_moved[0] != 0 and self.tile.exact == 0 and self.tile.j_full > 0:
                    publish(self.shared.failures, 0, self.report_ring.stage, 1)
                self.report_ring.commit()
            self.report_ring.advance()

    @T.inline
    def take_tile(self):
        """Go to this thread block's next tile."""
        self.tile_ring.wait()
        self.tile.get_by_warp(self.shared.tiles, self.tile_ring.stage, self.lane)
        self.tile_ring.release(self.lane)
        self.tile_ring.advance()

    @T.inline
    def store_tile(self, O, LSE, b, h, i):
        """Algorithm 1, lines 12 to 15: O_i = diag(l_i)^-1 O_i and L_i = m_i + log l_i go out.

        O_i goes straight from registers: a transpose across each quad makes 16-byte stores.
        """
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        words = T.meta_var(self.P_ij)
        softmax.finish_sums(self.l_i, self.alpha)
        softmax.normalise(self.O_i, self.l_i, self.alpha, may_be_empty=p.causal)
        pack_pairs(words, self.O_i, p.dtype)
        transpose_fragment(words, p.head_dim_v, self.lane, self.spare)
        for r in T.unroll(2):
            row: T.let = i * p.block_q + self.row + 8 * r
            if row < z.seq_q:
                store_row(O, words, (b, row, h), r, self.lane, p.columns_v)
                if T.truncmod(self.lane, 4) == 0:
                    LSE[b, h, row] = T.Select(
                        self.l_i[r] == T.float32(0.0),
                        T.float32(softmax.NEGATIVE_INFINITY),
                        self.m_i[r] * z.softmax_scale + T.log(self.l_i[r]),
                    )


@T.inline
def consume(c, O, LSE):
    """The consumer: Algorithm 1 over this thread block's tiles.

    S of the first block of the next tile is issued behind the last P V of this one, so that the
    epilogue runs under a GEMM.
    """
    c.begin()
    c.take_tile()
    c.Q_ring.wait()
    c.take_Q()
    c.K_ring.wait()
    c.issue_S()
    T.ptx.wgmma.wait_group.sync.aligned(0)
    c.finish_S(c.tile.j_end == 1)
    while c.tile.j_end > 0:
        c.first_block()
        c.other_blocks()
        # Before the turn: its holder waits below for a record, which waits for all reports.
        c.report_tile()
        i: T.int32 = c.tile.i
        b: T.int32 = c.tile.b
        h: T.int32 = c.tile.h
        c.await_turn()
        c.issue_O()
        c.take_tile()
        c.Q_ring.advance()
        if c.tile.j_end > 0:
            c.Q_ring.wait()
            c.K_ring.wait()
            c.take_Q()
        # After the last tile this S reads stale shared memory and is dropped: no branch may
        # surround a GEMM in flight (ptxas C7515 would serialise all of them).
        c.issue_S()
        c.pass_turn()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        fence_floats(c.O_i)
        c.V_ring.release(c.lane)
        c.V_ring.advance()
        c.store_tile(O, LSE, b, h, i)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        fence_floats(c.S_ij)
        if c.tile.j_end > 0:
            c.finish_S(c.tile.j_end == 1)


def build(variant: Variant, schedule: Sm90Forward, device: Device) -> tvm.IRModule:
    """The forward program of a Variant on Hopper.

    `forward(Q, K, V, O, LSE, workspace, softmax_scale, causal_offset)`: Q [B, Sq, H, D],
    K [B, Sk, Hk, D], V [B, Sk, Hk, Dv], O [B, Sq, H, Dv] of the variant's dtype, 16-byte aligned,
    any strides that are multiples of 16 bytes with the innermost 1; LSE [B, H, Sq] float32,
    contiguous; workspace int32 [1], zero, and zero again afterwards; softmax_scale > 0; no size may
    be 0.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    schedule.require_feasible(variant, device)
    p = plan(variant, schedule, device)
    threads_groups = p.consumer_warpgroups + 1

    @T.prim_func
    def forward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        workspace: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
    ):
        B = T.int64()
        H = T.int64()
        Hk = T.int64()
        Sq = T.int64()
        Sk = T.int64()
        qb = T.int64()
        qn = T.int64()
        qh = T.int64()
        kb = T.int64()
        kn = T.int64()
        kh = T.int64()
        vb = T.int64()
        vn = T.int64()
        vh = T.int64()
        ob = T.int64()
        on = T.int64()
        oh = T.int64()
        Q = T.match_buffer(q, (B, Sq, H, p.columns_qk), p.dtype, strides=[qb, qn, qh, 1], align=16)
        K = T.match_buffer(k, (B, Sk, Hk, p.columns_qk), p.dtype, strides=[kb, kn, kh, 1], align=16)
        V = T.match_buffer(v, (B, Sk, Hk, p.columns_v), p.dtype, strides=[vb, vn, vh, 1], align=16)
        # Device code indexes by the layout; `strides` alone is only checked on the host (TVM 0.27).
        O = T.match_buffer(
            o,
            (B, Sq, H, p.columns_v),
            p.dtype,
            strides=[ob, on, oh, 1],
            layout=TileLayout(LayoutOf[(B, Sq, H, p.columns_v) : (ob, on, oh, 1)]),
            align=16,
        )
        LSE = T.match_buffer(lse, (B, H, Sq), "float32", align=4)
        counter = T.match_buffer(workspace, (1,), "int32", align=4)

        Q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        K_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        V_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode_tensor_map(Q_map, Q, p.dtype, (B, Sq, H, p.columns_qk), (qb, qn, qh), p.Q_tile, 64)
        encode_tensor_map(
            K_map, K, p.dtype, (B, Sk, Hk, p.columns_qk), (kb, kn, kh), p.K_tile, p.block_kv
        )
        encode_tensor_map(
            V_map, V, p.dtype, (B, Sk, Hk, p.columns_v), (vb, vn, vh), p.V_tile, p.block_kv
        )
        tiles: T.let = T.Cast("int32", T.truncdiv(Sq + (p.block_q - 1), T.int64(p.block_q)) * B * H)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        block = T.cta_id([T.min(p.multiprocessors, tiles)])
        warpgroup = T.warpgroup_id([threads_groups])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        T.thread_id_in_wg([128])

        pool = T.SMEMPool()
        Q_smem = pool.alloc(
            (p.q_stages * p.consumer_warpgroups * p.Q_tile.elements,), p.dtype, align=1024
        )
        K_smem = pool.alloc((p.k_stages * p.K_tile.elements,), p.dtype, align=1024)
        V_smem = pool.alloc((p.v_stages * p.V_tile.elements,), p.dtype, align=1024)
        Q_ring = Ring(pool, p.q_stages, p.consumer_warps)
        K_ring = Ring(pool, p.k_stages, p.consumer_warps)
        V_ring = Ring(pool, p.v_stages, p.consumer_warps)
        tile_ring = Ring(pool, 2, p.consumer_warps + 1)
        request_ring = Ring(pool, 1, 1)
        report_ring = Ring(pool, 2, 1, fills=p.consumer_warps)
        tiles_smem = pool.alloc((2, Tile.FIELDS), "int32", align=8)
        failures_smem = pool.alloc((1, 2), "int32", align=8)
        pool.commit()
        shared = T.meta_var(
            SimpleNamespace(
                Q=Q_smem,
                K=K_smem,
                V=V_smem,
                tiles=tiles_smem,
                Q_ring=Q_ring,
                K_ring=K_ring,
                V_ring=V_ring,
                tile_ring=tile_ring,
                request_ring=request_ring,
                report_ring=report_ring,
                failures=failures_smem,
            )
        )
        maps = T.meta_var(SimpleNamespace(Q=Q_map, K=K_map, V=V_map))

        seq_q: T.let = T.Cast("int32", Sq)
        seq_kv: T.let = T.Cast("int32", Sk)
        heads: T.let = T.Cast("int32", H)
        batch_heads: T.let = T.Cast("int32", B) * heads
        group: T.let = T.truncdiv(heads, T.Cast("int32", Hk))
        head_group: T.let = T.min(head_group_of(p, seq_kv, group), batch_heads)
        offset: T.let = T.Cast("int32", causal_offset)
        scale_log2: T.let = softmax_scale * T.float32(LOG2_E)
        sizes = T.meta_var(
            SimpleNamespace(
                tiles=tiles,
                blocks=T.min(p.multiprocessors, tiles),
                query_blocks=T.truncdiv(seq_q + (p.block_q - 1), p.block_q),
                key_blocks=T.truncdiv(seq_kv + (p.block_kv - 1), p.block_kv),
                batch_heads=batch_heads,
                heads=heads,
                group=group,
                head_group=head_group,
                seq_q=seq_q,
                seq_kv=seq_kv,
                causal_offset=offset,
                scale_log2=scale_log2,
                softmax_scale=softmax_scale,
            )
        )

        if warpgroup == 0 and warp == 0:
            if T.cuda.elect_sync():
                Q_ring.initialise()
                K_ring.initialise()
                V_ring.initialise()
                tile_ring.initialise()
                request_ring.initialise()
                report_ring.initialise()
                publish(failures_smem, 0, 0, 0)
                publish(failures_smem, 0, 1, 0)
                T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()

        if warpgroup == 0:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(p.producer_registers)
            if warp == 0:
                if T.cuda.elect_sync():
                    produce(p, sizes, shared, maps)
            if warp == 1:
                if T.cuda.elect_sync():
                    scheduler = Scheduler(p, sizes, shared, counter)
                    scheduler.run(block)
        else:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(p.consumer_registers)
            consumer = Consumer(p, sizes, shared, warpgroup - 1, warp, lane)
            consume(consumer, O, LSE)

    return tvm.IRModule({"forward": forward})
