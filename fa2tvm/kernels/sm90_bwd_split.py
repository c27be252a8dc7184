"""The consumers of the Hopper backward that halve every GEMM of a step of 64 queries by 80 keys.

Each warpgroup makes S and P, dP and dS of half of the keys, then half of the columns of dV, dK and
dQ from all of P and dS, which cross through shared memory. dV^T and dK^T have columns in rows and
keys in columns, so that a tile need not be a multiple of 64 keys. sm90_bwd.md draws the step.

Source: FlashAttention-3's hopper/flash_bwd_launch_template.h has these tile sizes and this way of
swapping for head dim 256.
"""

from tvm.script import tirx as T

from fa2tvm.kernels.sm90_bwd_consumer import WARPGROUP, Consumer
from fa2tvm.kernels.sm90_bwd_fragments import (
    gemm_tn,
    store_transposed,
    transposed_address,
    uniform,
)
from fa2tvm.kernels.sm90_bwd_passes import statistics_position
from fa2tvm.kernels.wgmma import (
    _PTX_TYPE,
    fence_floats,
    gemm_nt,
    pack_pairs,
    shared_address,
    shared_unit,
    store,
)

# Hardware barriers, all of both warpgroups: P is in shared memory; dS is; a tile is done with both.
P_BARRIER, DS_BARRIER, TILE_BARRIER = 2, 3, 4


def at_stage(tile, stage):
    """Units before a stage of a ring of such tiles."""
    return T.Cast("uint32", stage * (tile.bytes >> 4))


def box_unit(tile, box):
    """Units before a box of a tile."""
    return T.uint32(box * (tile.box_bytes >> 4))


def gemm_blocks(blocks, a_descriptor, b_descriptor, a_tile, b_tile, dtype):
    """Each block += A^T B^T of its 64 columns of A."""
    for n, block in enumerate(blocks):
        columns = a_descriptor + box_unit(a_tile, n)
        gemm_tn(block, columns, b_descriptor, a_tile, b_tile, dtype, accumulate=True)


def fence_blocks(blocks):
    """`fence_floats` of each."""
    for block in blocks:
        fence_floats(block)


def clear_blocks(blocks):
    """Zeros."""
    for block in blocks:
        for i in range(int(block.shape[0])):
            store(block, i, T.float32(0.0))


def load_two_rows(values, address):
    """Permuted statistics of a row and of the one eight further, from shared memory."""
    load = T.ptx["ld.shared.f32"]
    for r in range(2):
        T.evaluate(load(values[r], address + T.uint32(8 * r)))


def probabilities_by_rows(S_ij, L_i, scale_log2):
    """S_ij = exp(softmax_scale S_ij - L_i), queries in rows."""
    for i in range(int(S_ij.shape[0])):
        store(S_ij, i, T.exp2(S_ij[i] * scale_log2 - L_i[i // 2 % 2]))


def hide_columns(P_ij, limit):
    """P_ij = 0 from column `limit` of a thread's two rows on."""
    for i in range(int(P_ij.shape[0])):
        visible = T.int32(i // 4 * 8 + i % 2) < limit[i // 2 % 2]
        store(P_ij, i, T.Select(visible, P_ij[i], T.float32(0.0)))


def score_gradients_by_rows(dP_ij, P_ij, D_i):
    """dP_ij = P_ij o (dP_ij - D_i), queries in rows."""
    for i in range(int(P_ij.shape[0])):
        store(dP_ij, i, P_ij[i] * (dP_ij[i] - D_i[i // 2 % 2]))


def store_columns_transposed(words, address, tile):
    """A packed fragment to a tile of which its columns are the rows, 8 columns at least."""
    count = int(words.shape[0])
    store_transposed(words, address, tile, range(count // 4))
    if count % 4:
        write = T.ptx["stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"]
        rest = address + T.uint32(count // 4 * 16 * tile.row_bytes)
        T.evaluate(write(rest, words[count - 2], words[count - 1]))


def stage_transposed(fragment, words, address, scale, dtype):
    """A fragment times scale to shared memory: a row of 16 numbers, 32 bytes, for each column."""
    convert = T.ptx[f"cvt.rn.{_PTX_TYPE[dtype]}x2.f32"]
    write = T.ptx["stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"]
    for g in range(int(fragment.shape[0]) // 8):
        for i in range(4):
            low, high = (fragment[8 * g + 2 * i + n] * scale for n in range(2))
            T.evaluate(convert(words[i], high, low))
        T.evaluate(write(address + T.uint32(512 * g), *(words[i] for i in range(4))))


def load_words(words, address):
    """16 bytes of shared memory."""
    T.evaluate(T.ptx["ld.shared.v4.b32"](*(words[i] for i in range(4)), address))


def store_words(words, pointer):
    """16 bytes to global memory."""
    T.evaluate(T.ptx["st.global.v4.b32"](pointer, *(words[i] for i in range(4))))


@T.meta_class
class SplitConsumer(Consumer):
    """A warpgroup: half of the keys in S and dP, half of the columns in dV, dK and dQ."""

    def __init__(self, p, z, shared, workspace, warpgroup, warp, lane):
        super().__init__(p, z, shared, workspace, warpgroup, warp, lane)
        own_keys = p.block_kv // 2
        self.S_ij = T.alloc_local((own_keys // 2,), "float32")
        self.dP_ij = T.alloc_local((own_keys // 2,), "float32")
        self.words = T.alloc_local((own_keys // 4,), "uint32")
        self.dV_blocks = [
            T.alloc_local((p.block_kv // 2,), "float32") for _ in range(p.head_dim_v // 128)
        ]
        self.dK_blocks = [
            T.alloc_local((p.block_kv // 2,), "float32") for _ in range(p.head_dim // 128)
        ]
        self.dQ_i = T.alloc_local((p.block_q // 2,), "float32")
        self.L = T.alloc_local((2,), "float32")
        self.D = T.alloc_local((2,), "float32")
        self.limit = T.alloc_local((2,), "int32")
        self.spare_words = T.alloc_local((4,), "uint32")
        # Query block of the scores at hand: `i` is already the next head's when a head ends.
        self.i_scores = T.local_scalar("int32")
        self.P_stage = T.local_scalar("int32")
        # Where operands start, in descriptors' units; `own` are this warpgroup's keys or columns.
        self.Q_unit = T.local_scalar("uint32")
        self.Q_own = T.local_scalar("uint32")
        self.dO_unit = T.local_scalar("uint32")
        self.dO_own = T.local_scalar("uint32")
        self.K_keys = T.local_scalar("uint32")
        self.K_own = T.local_scalar("uint32")
        self.V_keys = T.local_scalar("uint32")
        self.P_unit = T.local_scalar("uint32")
        self.dS_unit = T.local_scalar("uint32")
        self.half = T.local_scalar("int32")
        self.P_address = T.local_scalar("uint32")
        self.staging = T.local_scalar("uint32")

    @T.inline
    def begin(self):
        """Find the operands, and where this thread's data stands."""
        p = T.meta_var(self.p)
        shared = T.meta_var(self.shared)
        # Uniform: what is made of it would else be kept, and spilled, in vector registers.
        self.half = uniform(self.warpgroup)
        self.Q_unit = shared_unit(shared.Q)
        self.dO_unit = shared_unit(shared.dO)
        self.P_unit = shared_unit(shared.P)
        self.dS_unit = shared_unit(shared.dS)
        self.Q_own = self.Q_unit + self.own_columns(p.Q_tile)
        self.dO_own = self.dO_unit + self.own_columns(p.dO_tile)
        self.K_own = shared_unit(shared.K) + self.own_columns(p.K_tile)
        own_keys: T.let = T.Cast("uint32", self.half * (p.block_kv // 2 * 128))
        self.K_keys = shared_unit(shared.K) + T.shift_right(own_keys, T.uint32(4))
        self.V_keys = shared_unit(shared.V) + T.shift_right(own_keys, T.uint32(4))
        P: T.let = shared_address(shared.P)
        dS: T.let = shared_address(shared.dS)
        self.P_address = transposed_address(P + own_keys, p.dS_tile, 0, self.warp, self.lane)
        self.dS_address = transposed_address(dS + own_keys, p.dS_tile, 0, self.warp, self.lane)
        self.P_stage = 0
        self.statistics_address = shared_address(shared.statistics) + T.Cast(
            "uint32", 4 * statistics_position(self.warp * 16 + T.truncdiv(self.lane, 4))
        )
        # A warp's own part of P, for its gradients on their way out.
        self.staging = P + T.Cast("uint32", (self.half * 4 + self.warp) * (32 * p.block_kv))

    def place(self, unit, tile, ring):
        """Units of a ring's stage, which vary from step to step as far as ptxas sees.

        Of operands that stay in their place it would keep the descriptors of all depths: 500 bytes
        of spill, and a load from there before each GEMM.
        """
        stage = ring.stage if ring.ring.stages > 1 else T.shift_right(self.Q_ring.stage, 1)
        return unit + at_stage(tile, stage)

    def own_columns(self, tile):
        """Units before this warpgroup's half of a tile's columns."""
        return T.Cast("uint32", self.half * (tile.boxes // 2 * tile.box_bytes >> 4))

    @T.inline
    def start_tile(self):
        """Stand at the first step of the tile that was taken, with dK_j = dV_j = 0 (line 6)."""
        self.set_tile()
        self.i_scores = self.i
        clear_blocks(self.dV_blocks)
        clear_blocks(self.dK_blocks)

    @T.inline
    def issue_S(self):
        """S_ij = Q_i K_j^T of the own keys, asynchronously (line 10)."""
        p = T.meta_var(self.p)
        Q_i = T.meta_var(p.Q_tile.k_major_at(self.place(self.Q_unit, p.Q_tile, self.Q_ring)))
        K_j = T.meta_var(p.K_tile.k_major_at(self.place(self.K_keys, p.K_tile, self.K_ring)))
        fence_floats(self.S_ij)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_nt(self.S_ij, Q_i, K_j, p.Q_tile, p.K_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dP(self):
        """dP_ij = dO_i V_j^T of the own keys, asynchronously (line 13)."""
        p = T.meta_var(self.p)
        dO_i = T.meta_var(p.dO_tile.k_major_at(self.place(self.dO_unit, p.dO_tile, self.dO_ring)))
        V_j = T.meta_var(p.V_tile.k_major_at(self.place(self.V_keys, p.V_tile, self.V_ring)))
        fence_floats(self.dP_ij)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_nt(self.dP_ij, dO_i, V_j, p.dO_tile, p.V_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dV(self):
        """dV_j^T += dO_i^T P_ij of the own columns, asynchronously (line 12)."""
        p = T.meta_var(self.p)
        dO_i = T.meta_var(p.dO_tile.mn_major_at(self.place(self.dO_own, p.dO_tile, self.dO_ring)))
        P_ij = T.meta_var(p.dS_tile.k_major_at(self.P_unit + at_stage(p.dS_tile, self.P_stage)))
        self.accumulate(self.dV_blocks, dO_i, P_ij, p.dO_tile)

    @T.inline
    def issue_dK(self):
        """dK_j^T += Q_i^T dS_ij of the own columns, asynchronously (line 16)."""
        p = T.meta_var(self.p)
        Q_i = T.meta_var(p.Q_tile.mn_major_at(self.place(self.Q_own, p.Q_tile, self.Q_ring)))
        dS_ij = T.meta_var(p.dS_tile.k_major_at(self.place(self.dS_unit, p.dS_tile, self.V_ring)))
        self.accumulate(self.dK_blocks, Q_i, dS_ij, p.Q_tile)

    @T.inline
    def accumulate(self, blocks, rows, scores, tile):
        """Blocks of 64 columns of a gradient += rows^T scores."""
        p = T.meta_var(self.p)
        fence_blocks(blocks)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_blocks(blocks, rows, scores, tile, p.dS_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_dQ(self, slice_):
        """64 of the own columns of the tile's share of dQ_i^T, K_j^T dS_ij^T (line 15)."""
        p = T.meta_var(self.p)
        columns = T.meta_var(self.K_own + box_unit(p.K_tile, slice_))
        K_j = T.meta_var(p.K_tile.mn_major_at(self.place(columns, p.K_tile, self.K_ring)))
        dS_ij = T.meta_var(p.dS_tile.mn_major_at(self.place(self.dS_unit, p.dS_tile, self.V_ring)))
        fence_floats(self.dQ_i)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_tn(self.dQ_i, K_j, dS_ij, p.K_tile, p.dS_tile, p.dtype, b_by_rows=True)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def load_statistics(self):
        """L_i and D_i of this thread's two queries."""
        p = T.meta_var(self.p)
        address = T.meta_var(
            self.statistics_address + T.Cast("uint32", self.Q_ring.stage * (8 * p.block_q))
        )
        load_two_rows(self.L, address)
        load_two_rows(self.D, address + T.uint32(4 * p.block_q))

    def masked(self):
        """Whether some query of the block does not see some key of the tile, or keys end in it."""
        hidden = self.z.seq_kv - (self.tile.j + 1) * self.p.block_kv
        if self.p.causal:
            hidden = T.min(hidden, self.i_scores - self.tile.i_full)
        return hidden < 0

    @T.inline
    def find_limits(self):
        """The first key that is not seen, counted from this lane's first, of its two queries."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        own_keys = T.meta_var(self.half * (p.block_kv // 2))
        first: T.let = self.tile.j * p.block_kv + own_keys + T.truncmod(self.lane, 4) * 2
        for r in T.unroll(2):
            self.limit[r] = z.seq_kv - first
            if p.causal:
                row: T.let = self.warp * 16 + T.truncdiv(self.lane, 4) + 8 * r
                query: T.let = self.i_scores * p.block_q + row
                self.limit[r] = T.min(self.limit[r], query + z.causal_offset + 1 - first)

    @T.inline
    def make_P(self):
        """P_ij = exp(S_ij - L_i) (line 11), 0 where a key is not seen, for both warpgroups."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        probabilities_by_rows(self.S_ij, self.L, z.scale_log2)
        if self.masked():
            self.find_limits()
            hide_columns(self.S_ij, self.limit)
        pack_pairs(self.words, self.S_ij, p.dtype)
        address = T.meta_var(self.P_address + T.Cast("uint32", self.P_stage * p.dS_tile.bytes))
        store_columns_transposed(self.words, address, p.dS_tile)
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.bar.sync(T.uint32(P_BARRIER), T.uint32(2 * WARPGROUP))

    @T.inline
    def make_dS(self):
        """dS_ij = P_ij o (dP_ij - D_i) (line 14), for both warpgroups."""
        p = T.meta_var(self.p)
        score_gradients_by_rows(self.dP_ij, self.S_ij, self.D)
        pack_pairs(self.words, self.dP_ij, p.dtype)
        store_columns_transposed(self.words, self.dS_address, p.dS_tile)
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.bar.sync(T.uint32(DS_BARRIER), T.uint32(2 * WARPGROUP))

    @T.inline
    def step(self, more):
        """Algorithm 2's inner loop for the S_ij at hand, and the next S_ij if there are `more`."""
        p = T.meta_var(self.p)
        second_slice = T.meta_var(bool(p.make_dq and p.dQ_slices == 2))
        self.dO_ring.wait()
        self.issue_dP()
        self.load_statistics()
        self.make_P()
        self.issue_dV()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        fence_floats(self.dP_ij)
        self.make_dS()
        if p.make_dq:
            self.issue_dQ(0)
        self.issue_dK()
        T.ptx.wgmma.wait_group.sync.aligned(1 + int(p.make_dq))
        fence_blocks(self.dV_blocks)
        self.dO_ring.release(self.lane)
        self.dO_ring.advance()
        self.P_stage = T.bitwise_xor(self.P_stage, 1)
        if p.make_dq:
            T.ptx.wgmma.wait_group.sync.aligned(1)
            self.begin_turn(self.row_block, self.tile.j)
            fence_floats(self.dQ_i)
            self.add_dQ(self.row_block, 0)
        if second_slice:
            self.issue_dQ(1)
        T.ptx.wgmma.wait_group.sync.aligned(int(second_slice))
        fence_blocks(self.dK_blocks)
        self.Q_ring.release(self.lane)
        self.Q_ring.advance()
        if more:
            self.Q_ring.wait()
            self.issue_S()
        if second_slice:
            T.ptx.wgmma.wait_group.sync.aligned(int(more))
            fence_floats(self.dQ_i)
            self.add_dQ(self.row_block, 1)
        if p.make_dq:
            self.end_turn(self.row_block)
        if more:
            # No GEMM is in flight over the loop's back edge.
            T.ptx.wgmma.wait_group.sync.aligned(0)
            fence_floats(self.S_ij)
            self.count_step()
            self.i_scores = self.i

    @T.inline
    def store_blocks(self, blocks, scale, out, position, columns):
        """A gradient's blocks of 64 columns."""
        several = T.meta_var(len(blocks) > 1)
        self.store_block(blocks, 0, scale, out, position, columns)
        if several:
            self.store_block(blocks, 1, scale, out, position, columns)

    @T.inline
    def store_block(self, blocks, n, scale, out, position, columns):
        """A block of a gradient, through this warp's part of shared memory."""
        p = T.meta_var(self.p)
        batch, first_key, head = position
        lane = T.meta_var(self.lane)
        own = T.meta_var(self.half * (64 * len(blocks)) + self.warp * 16)
        T.cuda.warp_sync()
        to: T.let = self.staging + T.Cast(
            "uint32",
            (T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)) * 32
            + T.truncmod(T.truncdiv(lane, 8), 2) * 16,
        )
        stage_transposed(blocks[n], self.spare_words, to, scale, p.dtype)
        T.cuda.warp_sync()
        column: T.let = own + 64 * n + T.truncmod(lane, 2) * 8
        for g in T.unroll(p.block_kv // 16):
            key: T.let = first_key + 16 * g + T.truncdiv(lane, 2)
            load_words(self.spare_words, self.staging + T.Cast("uint32", 512 * g + lane * 16))
            if key < self.z.seq_kv and column < columns:
                store_words(self.spare_words, out.ptr_to([batch, key, head, column]))

    @T.inline
    def run(self, dK, dV):
        """Algorithm 2 over this thread block's tiles."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.begin()
        self.take_tile()
        while self.index < z.tiles:
            self.start_tile()
            self.K_ring.wait()
            self.Q_ring.wait()
            self.issue_S()
            self.V_ring.wait()
            T.ptx.wgmma.wait_group.sync.aligned(0)
            fence_floats(self.S_ij)
            while self.heads_left > 0:
                while self.i + 1 < z.query_blocks:
                    self.step(True)
                self.next_head()
            self.step(False)
            self.K_ring.release(self.lane)
            self.K_ring.advance()
            self.V_ring.release(self.lane)
            self.V_ring.advance()
            # Gradients pass through P's place: both warpgroups are done with it, before and after.
            T.ptx.bar.sync(T.uint32(TILE_BARRIER), T.uint32(2 * WARPGROUP))
            position = T.meta_var((self.tile.b, self.tile.j * p.block_kv, self.tile.h_kv))
            if z.need_dv != 0:
                self.store_blocks(self.dV_blocks, T.float32(1.0), dV, position, p.columns_v)
            if z.need_dk != 0:
                self.store_blocks(self.dK_blocks, z.softmax_scale, dK, position, p.columns_qk)
            T.ptx.bar.sync(T.uint32(TILE_BARRIER), T.uint32(2 * WARPGROUP))
            self.take_tile()
