"""A consumer warpgroup of the Hopper forward kernel: its state, and Algorithm 1 block by block.

p and z hold the constants of the program and its run-time sizes, `shared` the buffers and rings
(`plan` and `build` in sm90_fwd.py). `consume` there puts the steps together.
"""

from tvm.script import tirx as T

from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.sm90_tiles import Place, Tile
from fa2tvm.kernels.wgmma import (
    fence_floats,
    fence_words,
    gemm_accumulate,
    gemm_nt,
    load_a_fragment,
    pack_pairs,
    shared_unit,
)

WARPGROUP = 128
# Hardware barrier 0 is __syncthreads; the consumers' turns take 1, 2, ..
FIRST_TURN = 1


@T.meta_class
class Fix:
    """What `repair_tile` (sm90_epilogue.py) works with: `width` columns of one row of O_i."""

    def __init__(self, width):
        self.width = width
        self.needed = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        self.weight = T.alloc_local((1,), "float32")
        self.pair = T.alloc_local((2,), "uint32")
        self.O = T.alloc_local((width // 4,), "float32")
        self.words = T.alloc_local((width // 8,), "uint32")


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
        self.report_ring = shared.report_ring.producer_behind(self.tile_ring)
        self.tile = Tile()
        self.skipped = T.local_scalar("int32")
        self.place = Place()
        self.S_ij = T.alloc_local((p.block_kv // 2,), "float32")
        self.P_ij = T.alloc_local((max(p.block_kv // 4, p.head_dim_v // 4),), "uint32")
        self.O_i = T.alloc_local((p.head_dim_v // 2,), "float32")
        if p.q_in_registers:
            self.Q_i = T.alloc_local((p.head_dim // 4,), "uint32")
        self.m_i, self.m_old, self.scaled_m, self.alpha, self.l_i = (
            T.alloc_local((2,), "float32") for _ in range(5)
        )
        self.moved = T.alloc_local((2,), "int32")
        self.any_moved = T.alloc_local((1,), "int32")
        self.chains = [T.alloc_local((p.max_chains,), "float32") for _ in range(2)]
        self.spare = T.alloc_local((2,), "uint32")
        self.fix = Fix(64 if p.head_dim_v % 64 == 0 else 32) if p.causal else None
        self.failed = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.j = T.local_scalar("int32")
        self.base = T.local_scalar("uint32")

    @T.inline
    def begin(self):
        """Find shared memory and this thread's first row within the tile."""
        p = T.meta_var(self.p)
        self.base = shared_unit(self.shared.Q)
        self.row = self.warpgroup * 64 + self.warp * 16 + T.truncdiv(self.lane, 4)
        self.failed = 0
        if p.pingpong:
            # The last warpgroup opens the first one's turn.
            if self.warpgroup == p.consumer_warpgroups - 1:
                T.ptx.bar.arrive(T.uint32(FIRST_TURN), T.uint32(2 * WARPGROUP))

    def query(self, i, r):
        """The query of this thread's row r (0 or 1) in query block i."""
        return i * self.z.block_queries + T.shift_right(self.row + 8 * r, self.z.pack_log2)

    def packed_head(self, r):
        """The head within the tile's of row r; from z.heads_of_unit on the row is void."""
        return T.bitwise_and(self.row + 8 * r, self.z.pack - 1)

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

    def unit(self, first, tiles, tile):
        """Where the tiles-th tile of a ring that starts `first` bytes after Q begins."""
        return self.base + T.Cast("uint32", tiles * (tile.bytes >> 4) + (first >> 4))

    def Q_unit(self):
        """Where this warpgroup's 64 rows of Q_i begin."""
        p = self.p
        tiles = self.Q_ring.stage * p.consumer_warpgroups + self.warpgroup
        return self.unit(0, tiles, p.Q_tile)

    @T.inline
    def take_Q(self):
        """Q_i to registers, if it lives there: its shared copy is free at once."""
        if self.p.q_in_registers:
            address: T.let = T.shift_left(self.Q_unit(), T.uint32(4))
            load_a_fragment(self.Q_i, self.p.Q_tile, address, self.lane, self.warp)
            T.cuda.warp_sync()
            self.Q_ring.release(self.lane)

    @T.inline
    def issue_S(self):
        """S_ij = Q_i K_j^T, asynchronously."""
        p = T.meta_var(self.p)
        K_unit: T.let = self.unit(p.K_start_bytes, self.K_ring.stage, p.K_tile)
        K_j = T.meta_var(p.K_tile.k_major_at(K_unit))
        fence_floats(self.S_ij)
        if p.q_in_registers:
            fence_words(self.Q_i)
            T.ptx.wgmma.fence.sync.aligned()
            gemm_nt(self.S_ij, self.Q_i, K_j, None, p.K_tile, p.dtype)
        else:
            Q_unit: T.let = self.Q_unit()
            T.ptx.wgmma.fence.sync.aligned()
            gemm_nt(self.S_ij, p.Q_tile.k_major_at(Q_unit), K_j, p.Q_tile, p.K_tile, p.dtype)
        T.ptx.wgmma.commit_group.sync.aligned()

    @T.inline
    def issue_O(self):
        """O_i += P_ij V_j, asynchronously."""
        p = T.meta_var(self.p)
        V_unit: T.let = self.unit(p.V_start_bytes, self.V_ring.stage, p.V_tile)
        fence_floats(self.O_i)
        T.ptx.wgmma.fence.sync.aligned()
        gemm_accumulate(self.O_i, self.P_ij, p.V_tile.mn_major_at(V_unit), p.V_tile, p.dtype)
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

    def has_one_block(self):
        """Whether the tile's first S is its last."""
        return self.tile.j_end - self.skipped == 1

    @T.inline
    def mask(self, beyond_sequence):
        """-inf for keys after the diagonal and, where the sequence may end, after its end."""
        z = T.meta_var(self.z)
        p = T.meta_var(self.p)
        first_column: T.let = self.j * p.block_kv + T.truncmod(self.lane, 4) * 2
        if p.causal:
            query: T.let = self.query(self.tile.i, 0)
            step: T.let = self.query(self.tile.i, 1) - query
            softmax.mask_beyond(self.S_ij, query + z.causal_offset - first_column, step)
            if beyond_sequence:
                if (self.j + 1) * p.block_kv > z.seq_kv:
                    softmax.mask_beyond(self.S_ij, z.seq_kv - 1 - first_column, 0)
        else:
            if (self.j + 1) * p.block_kv > z.seq_kv:
                softmax.mask_beyond(self.S_ij, z.seq_kv - 1 - first_column, 0)

    @T.inline
    def first_block(self):
        """Algorithm 1, lines 5 to 10, for the tile's first key block; its S_ij is there."""
        self.j = self.tile.j_end - 1 - self.skipped
        self.mask(True)
        softmax.row_maxima(self.S_ij, self.m_i, self.chains)
        self.weigh(False)
        softmax.row_sums(self.S_ij, self.l_i, self.chains, first=True)
        pack_pairs(self.P_ij, self.S_ij, self.p.dtype)
        for d in range(self.p.head_dim_v // 2):
            self.O_i[d] = T.float32(0.0)
        self.skip_turns()
        self.skip(self.V_ring)
        self.V_ring.wait()
        self.j = self.j - 1

    @T.inline
    def next_block(self, masked, trusted):
        """Algorithm 1, lines 8 to 10, for key block j, while O_i takes in P V of block j + 1.

        Any m_i gives the right O_i and L_i unless exp(S - m_i) overflows. A trusted block keeps
        m_i as it is, so that its exponentials begin with S_ij; `report_tile` tells if that failed.
        """
        p = T.meta_var(self.p)
        self.K_ring.wait()
        self.await_turn()
        self.issue_S()
        self.issue_O()
        self.pass_turn()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        self.finish_S(self.j == 0)
        if masked:
            self.mask(False)
        if trusted:
            softmax.exponentials(self.S_ij, self.scaled_m, self.z.scale_log2, p.weight_log2, False)
        else:
            self.move_maxima()
            self.weigh(True)
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
        """m_i = max(m_i, rowmax(S_ij)), unless that gains too little."""
        p = T.meta_var(self.p)
        for r in T.unroll(2):
            self.m_old[r] = self.m_i[r]
        softmax.row_maxima(self.S_ij, self.m_i, self.chains, self.m_old)
        if p.lazy_rescale > 0:
            softmax.keep_lazy_maxima(
                self.m_i, self.m_old, self.moved, self.any_moved, self.z.scale_log2, p.lazy_rescale
            )

    @T.inline
    def weigh(self, again):
        """S_ij becomes P_ij, not yet normalised; `again` also rescales l_i and tells O_i's factors.

        In the form that does not round m_i; `trust` prepares the other.
        """
        p = T.meta_var(self.p)
        scale_log2 = T.meta_var(self.z.scale_log2)
        softmax.scaled_maxima(self.scaled_m, self.m_i, scale_log2, exact=True)
        if again:
            softmax.correction_factors(
                self.alpha, self.m_old, self.scaled_m, scale_log2, exact=True
            )
            softmax.scale_sums(self.l_i, self.alpha)
        softmax.exponentials(self.S_ij, self.scaled_m, scale_log2, p.weight_log2, exact=True)

    @T.inline
    def trust(self):
        """From here on m_i stays: its scaled form, for exponentials of one FMA."""
        softmax.scaled_maxima(self.scaled_m, self.m_i, self.z.scale_log2, self.p.weight_log2)

    @T.inline
    def other_blocks(self):
        """Algorithm 1's inner loop but for its first block: masked blocks, then all others."""
        if self.p.causal:
            while self.j >= self.tile.j_full:
                self.next_block(True, False)
        if self.p.trust_maximum:
            if self.tile.exact == 0:
                self.trust()
                while self.j >= 0:
                    self.next_block(False, True)
            else:
                while self.j >= 0:
                    self.next_block(False, False)
        else:
            while self.j >= 0:
                self.next_block(False, False)

    @T.inline
    def take_tile(self):
        """Go to this thread block's next tile."""
        self.tile_ring.wait()
        self.tile.get_blocks(self.shared.tiles, self.tile_ring.fill(), self.lane)
        self.tile_ring.release(self.lane)
        self.tile_ring.advance()
        self.count_skipped()

    @T.inline
    def count_skipped(self):
        """How many of the tile's first key blocks none of this warpgroup's rows sees."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.skipped = 0
        if p.skips:
            last_row: T.let = T.shift_right(self.warpgroup * 64 + 63, z.pack_log2)
            last: T.let = self.tile.i * z.block_queries + last_row
            keys: T.let = T.max(T.min(last + z.causal_offset + 1, z.seq_kv), 1)
            blocks: T.let = T.truncdiv(keys + (p.block_kv - 1), p.block_kv)
            self.skipped = T.max(self.tile.j_end - blocks, 0)

    @T.inline
    def skip(self, ring):
        """Give back the stages of a ring that hold skipped blocks."""
        if self.p.skips:
            n: T.int32 = self.skipped
            while n > 0:
                ring.wait()
                ring.release(self.lane)
                ring.advance()
                n = n - 1

    @T.inline
    def skip_turns(self):
        """Ping-pong: the other warpgroups issue GEMMs of the blocks that are skipped here."""
        if self.p.skips and self.p.pingpong:
            n: T.int32 = self.skipped
            while n > 0:
                self.await_turn()
                self.pass_turn()
                n = n - 1

    @T.inline
    def find_place(self):
        """Read again where the tile before the one that was taken last goes."""
        n: T.let = T.bitwise_and(self.tile_ring.fill() - 2, Tile.RECORDS - 1)
        self.place.get(self.shared.tiles, n, self.lane)
