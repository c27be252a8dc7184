"""The consumers of the Hopper backward for wide heads: one holds dV of a tile, the other dK.

A tile is 64 keys. The first warpgroup (`values`) makes S and P and carries dV, the second (`keys`)
makes dP and dS and carries dK; each adds half of dQ. P goes from the first to the second in float32
through shared memory, each thread's registers to the thread of the same number. sm90_bwd.md draws
the step.
"""

from tvm.script import tirx as T

from fa2tvm.kernels.sm90_bwd_consumer import WARPGROUP, Consumer
from fa2tvm.kernels.sm90_bwd_fragments import (
    fence_groups,
    hide,
    pack_groups,
    probabilities,
    stage,
    unstage,
)
from fa2tvm.kernels.wgmma import fence_floats, shared_address

# Hardware barriers: P is in shared memory; dS is, for the other warpgroup; for its own.
# None needs a twin: each waits for what the other has made from the one before.
P_BARRIER, DS_BARRIER, OWN_DS_BARRIER = 2, 3, 4


@T.meta_class
class WideConsumer(Consumer):
    """What both warpgroups of a wide tile have."""

    def __init__(self, p, z, shared, workspace, warpgroup, warp, lane):
        super().__init__(p, z, shared, workspace, warpgroup, warp, lane)
        self.keys = 0
        self.P_address = T.local_scalar("uint32")

    @T.inline
    def set_P_address(self):
        """Where this thread's registers of P stand."""
        p = T.meta_var(self.p)
        self.P_address = shared_address(self.shared.P) + T.Cast(
            "uint32", self.warp * (64 * p.block_q) + self.lane * 16
        )

    def position(self):
        """Batch, first row and head of this thread's gradients."""
        return self.tile.b, self.tile.j * self.p.block_kv + self.row, self.tile.h_kv

    @T.inline
    def other_dQ_slices(self):
        """All slices of this step's dQ but the first one, which is there, to global memory."""
        p = T.meta_var(self.p)
        self.begin_turn(self.row_block, self.tile.j)
        for n in T.unroll(p.dQ_slices):
            if n > 0:
                self.issue_dQ(n)
                T.ptx.wgmma.wait_group.sync.aligned(0)
            fence_floats(self.dQ_i)
            self.add_dQ(self.row_block, n)
        self.end_turn(self.row_block)


@T.meta_class
class ValuesConsumer(WideConsumer):
    """The warpgroup that makes S and P and carries dV."""

    @T.inline
    def finish_S(self):
        """P_ij = exp(S_ij - L_i) (line 11), for both warpgroups; Q_i is given back."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.load_L(self.groups)
        fence_floats(self.S_ij)
        self.Q_ring.release(self.lane)
        self.Q_ring.advance()
        probabilities(self.S_ij, self.statistics, z.scale_log2, self.groups)
        if p.causal:
            if self.i < self.tile.i_full:
                self.find_visible()
                hide(self.S_ij, self.first_visible, self.groups)
        stage(self.S_ij, self.P_address)
        T.ptx.bar.arrive(T.uint32(P_BARRIER), T.uint32(2 * WARPGROUP))
        pack_groups(self.P_words, self.S_ij, p.dtype, self.groups)
        fence_groups(self.P_words, self.groups)

    @T.inline
    def gradients(self, more):
        """Lines 12 and 15 for the scores at hand, and S of the next step if there are `more`."""
        p = T.meta_var(self.p)
        self.dO_ring.wait()
        self.issue_dV(self.groups)
        if more:
            self.Q_ring.wait()
            self.issue_S()
        # Without dQ too: P has been read, its place may be written.
        T.ptx.bar.sync(T.uint32(DS_BARRIER), T.uint32(2 * WARPGROUP))
        if p.make_dq:
            self.issue_dQ(0)
        T.ptx.wgmma.wait_group.sync.aligned(int(more) + int(p.make_dq))
        fence_floats(self.dV_j)
        self.dO_ring.release(self.lane)
        self.dO_ring.advance()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        if p.make_dq:
            self.other_dQ_slices()

    @T.inline
    def run(self, dV):
        """Algorithm 2's lines for dV over this thread block's tiles."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.begin()
        self.set_P_address()
        self.take_tile()
        while self.index < z.tiles:
            self.set_tile()
            self.clear()
            self.K_ring.wait()
            self.Q_ring.wait()
            self.issue_S()
            T.ptx.wgmma.wait_group.sync.aligned(0)
            self.finish_S()
            while self.heads_left > 0:
                while self.i + 1 < z.query_blocks:
                    self.gradients(True)
                    self.count_step()
                    self.finish_S()
                self.next_head()
            self.gradients(False)
            self.K_ring.release(self.lane)
            self.K_ring.advance()
            if z.need_dv != 0:
                self.store_gradient(self.dV_j, T.float32(1.0), dV, self.position(), p.columns_v)
            self.take_tile()


@T.meta_class
class KeysConsumer(WideConsumer):
    """The warpgroup that makes dP and dS and carries dK."""

    @T.inline
    def finish_dP(self):
        """dS_ij (line 14) from the other's P_ij, for both warpgroups; dO_i is given back."""
        p = T.meta_var(self.p)
        self.Q_ring.wait()
        self.load_D(self.groups)
        T.ptx.bar.sync(T.uint32(P_BARRIER), T.uint32(2 * WARPGROUP))
        unstage(self.S_ij, self.P_address)
        fence_floats(self.dP_ij)
        self.dO_ring.release(self.lane)
        self.dO_ring.advance()
        self.make_dS(self.groups)
        if p.make_dq:
            T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.bar.arrive(T.uint32(DS_BARRIER), T.uint32(2 * WARPGROUP))
        if p.make_dq:
            T.ptx.bar.sync(T.uint32(OWN_DS_BARRIER), T.uint32(WARPGROUP))

    @T.inline
    def gradients(self, more):
        """Lines 15 and 16 for the dS_ij at hand, and dP of the next step if there are `more`."""
        p = T.meta_var(self.p)
        self.issue_dK(self.groups)
        if p.make_dq:
            self.issue_dQ(0)
        if more:
            self.dO_ring.wait()
            self.issue_dP()
            T.ptx.wgmma.wait_group.sync.aligned(1)
        else:
            T.ptx.wgmma.wait_group.sync.aligned(0)
        fence_floats(self.dK_j)
        self.Q_ring.release(self.lane)
        self.Q_ring.advance()
        if p.make_dq:
            self.other_dQ_slices()
        T.ptx.wgmma.wait_group.sync.aligned(0)

    @T.inline
    def run(self, dK):
        """Algorithm 2's lines for dK over this thread block's tiles."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.begin()
        self.set_P_address()
        self.take_tile()
        while self.index < z.tiles:
            self.set_tile()
            self.clear()
            self.K_ring.wait()
            self.V_ring.wait()
            self.dO_ring.wait()
            self.issue_dP()
            T.ptx.wgmma.wait_group.sync.aligned(0)
            self.finish_dP()
            while self.heads_left > 0:
                while self.i + 1 < z.query_blocks:
                    self.gradients(True)
                    self.count_step()
                    self.finish_dP()
                self.next_head()
            self.V_ring.release(self.lane)
            self.V_ring.advance()
            self.gradients(False)
            self.K_ring.release(self.lane)
            self.K_ring.advance()
            if z.need_dk != 0:
                self.store_gradient(self.dK_j, z.softmax_scale, dK, self.position(), p.columns_qk)
            self.take_tile()
