"""Algorithm 1 (attention forward) for every NVIDIA GPU since Ampere, in TensorIR.

A thread block carries one query block: K_j and V_j stream through a ring of swizzled shared-memory
slots by cp.async while mma.sync multiplies. What FlashAttention-2 changed of version 1 are branches
of this one program (`Sm80Forward`). sm80_fwd.md draws it and keeps the profile.

Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1; FlashAttention, arXiv:2205.14135 (what
`split_keys`, `rescale_each_step`, not `parallel_queries` and `save_m_and_l` bring back).
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T

from fa2tvm.blocks import visible_keys
from fa2tvm.device import Device
from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.mma import (
    OPERAND_SETS,
    Copier,
    Rows,
    SharedTile,
    lane_of_columns,
    lane_of_rows,
    strided,
)
from fa2tvm.kernels.sm80_steps import (
    clear_fragment,
    clear_rows,
    copy_rows,
    distrusted,
    each_tile,
    emit_add_parts,
    emit_load_Q,
    emit_mask,
    emit_maxima,
    emit_move_weights,
    emit_put,
    emit_put_parts,
    emit_PV,
    emit_QK,
    emit_reduce,
    emit_store,
    emit_suspect,
    invert_sums,
    keep_lazy,
    of_row,
    total,
)
from fa2tvm.kernels.sm90_epilogue import add_key, here, quad_dot, store_strip, warp_max
from fa2tvm.kernels.softmax import LOG2_E
from fa2tvm.kernels.wgmma import pack_pairs, shared_address, transpose_fragment
from fa2tvm.problem import Variant
from fa2tvm.schedule import Sm80Forward, sm80_head_dim

# Query blocks with fewer unmasked keys look for all their maxima: there is little to save, and the
# one weight that makes up a row of few keys and loud logits is 1, not a rounded power of 2.
TRUST_FROM_KEYS = 384


def plan(variant, schedule, device):
    """Everything that is a constant of the program, by name."""
    head_dim, head_dim_v = sm80_head_dim(variant.head_dim_qk), sm80_head_dim(variant.head_dim_v)
    Q_tile = SharedTile(schedule.block_q, head_dim)
    K_tile = SharedTile(schedule.block_kv, head_dim)
    V_tile = SharedTile(schedule.block_kv, head_dim_v)
    threads = 32 * schedule.warps
    return SimpleNamespace(
        **schedule.to_dict(),
        dtype=variant.dtype,
        causal=variant.causal,
        columns_qk=variant.head_dim_qk,
        columns_v=variant.head_dim_v,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        depth=-(-variant.head_dim_qk // 16) * 16,
        row_tiles=schedule.row_tiles,
        warp_rows=0 if schedule.split_keys else 16 * schedule.row_tiles,
        warp_keys=schedule.warp_keys,
        warp_columns=head_dim_v // (schedule.warps if schedule.split_keys else 1),
        threads=threads,
        Q_tile=Q_tile,
        K_tile=K_tile,
        V_tile=V_tile,
        slot_bytes=max(K_tile.bytes, V_tile.bytes),
        Q_copier=Copier(Q_tile, variant.head_dim_qk, threads),
        K_copier=Copier(K_tile, variant.head_dim_qk, threads),
        V_copier=Copier(V_tile, variant.head_dim_v, threads),
        # A barrier for K_j and V_j together, where slots for the next ones are free meanwhile.
        whole_blocks=schedule.stages >= 4 and schedule.stages % 2 == 0,
        exchange_bytes=schedule.exchange_bytes(variant),
        # Room in float16 for weights above a trusted maximum's; bfloat16 has it.
        weight_log2=-4 if schedule.trust_maximum and variant.dtype == "float16" else 0,
        # Sums of trusted exponentials end below 2**16 in float16; elsewhere they leave O_i room.
        trust_limit_log2=15 if variant.dtype == "float16" else 60,
    )


def clamp(x, low, high):
    """TensorIR's clamp, for the block ranges."""
    return T.max(low, T.min(x, high))


def ahead(p, slot, slots):
    """The offset in bytes of the slot that many slots behind one in the ring."""
    end = T.uint32(p.stages * p.slot_bytes)
    following = slot + T.uint32(slots * p.slot_bytes)
    return T.Select(following >= end, following - end, following)


@T.meta_class
class Stream:
    """Q_i, and the key blocks j_end - 1 down to 0 through a ring of slots: K_j, V_j, K_j-1, ..

    Every thread copies its share of each block and commits one group for it, empty past the end, so
    that a fixed number of groups is under way at each wait. `slot` is where the block that is used
    next lies, in bytes; what is loaded, and where to, follows from it and from j.
    """

    def __init__(self, p, z, Q, K, V, Q_smem, ring_smem):
        self.p, self.z, self.Q, self.K, self.V = p, z, Q, K, V
        self.Q_smem, self.ring_smem = Q_smem, ring_smem
        self.Q_address = T.local_scalar("uint32")
        self.ring_address = T.local_scalar("uint32")
        self.b = T.local_scalar("int32")
        self.h = T.local_scalar("int32")
        self.h_kv = T.local_scalar("int32")
        self.slot = T.local_scalar("uint32")

    @T.inline
    def begin(self):
        """Find shared memory."""
        self.Q_address = shared_address(self.Q_smem)
        self.ring_address = shared_address(self.ring_smem)

    @T.inline
    def start(self, i, j_end):
        """Load Q_i and as many key blocks as the ring takes before the first is used."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        self.slot = T.uint32(0)
        Q_heads = T.meta_var(Rows(self.Q, z.Q_strides, self.b, self.h))
        p.Q_copier.copy(self.Q_address, Q_heads, i * p.block_q, z.seq_q)
        for n in T.unroll((p.stages - 1) // 2):
            self.load_K(j_end - 1 - n, T.Cast("uint32", 2 * n * p.slot_bytes))
            self.load_V(j_end - 1 - n, T.Cast("uint32", (2 * n + 1) * p.slot_bytes))
        if p.stages == 2:
            self.load_K(j_end - 1, T.uint32(0))

    @T.inline
    def load_K(self, j, slot):
        """Start the copy of K_j into a slot; nothing below block 0."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        if j >= 0:
            K_rows = T.meta_var(Rows(self.K, z.K_strides, self.b, self.h_kv))
            p.K_copier.copy(self.ring_address + slot, K_rows, j * p.block_kv, z.seq_kv)
        T.ptx["cp.async.commit_group"]()

    @T.inline
    def load_V(self, j, slot):
        """Start the copy of V_j into a slot; nothing below block 0."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        if j >= 0:
            V_rows = T.meta_var(Rows(self.V, z.V_strides, self.b, self.h_kv))
            p.V_copier.copy(self.ring_address + slot, V_rows, j * p.block_kv, z.seq_kv)
        T.ptx["cp.async.commit_group"]()

    @T.inline
    def await_K(self, j):
        """Wait for K_j of all threads; the slots of the block before are free then, and filled."""
        p = T.meta_var(self.p)
        T.ptx["cp.async.wait_group"](p.stages - (4 if p.whole_blocks else 2))
        T.cuda.cta_sync()
        if p.whole_blocks:
            self.load_K(j - (p.stages // 2 - 1), ahead(p, self.slot, p.stages - 2))
            self.load_V(j - (p.stages // 2 - 1), ahead(p, self.slot, p.stages - 1))
        elif p.stages % 2 == 0:
            self.load_V(j - (p.stages - 1) // 2, ahead(p, self.slot, p.stages - 1))
        else:
            self.load_K(j - (p.stages - 1) // 2, ahead(p, self.slot, p.stages - 1))

    @T.inline
    def await_V(self, j):
        """Wait for V_j of all threads, where it did not come with K_j; K_j's slot is filled."""
        p = T.meta_var(self.p)
        if not p.whole_blocks:
            T.ptx["cp.async.wait_group"](p.stages - 2)
            T.cuda.cta_sync()
            if p.stages % 2 == 0:
                self.load_K(j - p.stages // 2, ahead(p, self.slot, p.stages - 1))
            else:
                self.load_V(j - p.stages // 2, ahead(p, self.slot, p.stages - 1))

    @T.inline
    def advance(self):
        """Go on to the next slot."""
        self.slot = ahead(self.p, self.slot, 1)


@T.meta_class
class Fix:
    """What a quad that works on a row again has of it: a strip of columns."""

    def __init__(self, width):
        self.width = width
        self.O = T.alloc_local((width // 4,), "float32")
        self.words = T.alloc_local((width // 8,), "uint32")
        self.weight = T.alloc_local((1,), "float32")
        self.pair = T.alloc_local((2,), "uint32")
        self.column = T.local_scalar("int32")


@T.inline
def repair(w, O, b, h):
    """The warp's rows of O_i again, from the keys that each sees.

    The tensor cores multiply a hidden key's weight, 0, by its V, and 0 * NaN is NaN: rows beside a
    key whose V is not finite hold NaN though they do not see it. m_i and l_i are right. Each quad
    works on a row at a time, strip of columns by strip, key by key: few ever come here.
    """
    p = T.meta_var(w.p)
    z = T.meta_var(w.z)
    t = T.meta_var(w.stream)
    fix = T.meta_var(Fix(64 if p.head_dim_v % 64 == 0 else 32))
    strips = T.meta_var(p.head_dim_v // fix.width)
    # The rows were stored by other lanes of the quad, and by other warps where they share rows.
    T.cuda.warp_sync()
    fix.column = T.truncmod(w.late, 4) * 2
    part: T.int32 = 0
    while part < 2 * p.row_tiles * strips:
        number: T.int32 = T.truncdiv(part, strips)
        first: T.int32 = T.truncmod(part, strips) * fix.width
        m_r: T.float32 = of_row(w.m_i, number)
        inverse: T.float32 = of_row(w.alpha, number)
        query: T.int32 = w.i * p.block_q + w.row + number * 8
        inside: T.int32 = T.min(query, z.seq_q - 1)
        # A row that sees nothing has no inverse, and 0 of it.
        seen: T.int32 = T.Select(
            inverse == T.float32(0.0), 0, T.min(inside + z.causal_offset + 1, z.seq_kv)
        )
        of_warp: T.int32 = warp_max(seen)
        for n in T.unroll(fix.width // 4):
            fix.O[n] = T.float32(0.0)
        key: T.int32 = 0
        while key < of_warp:
            quad_dot(fix, t.Q, (b, inside, h), t.K, (b, key, t.h_kv), p)
            fix.weight[0] = inverse * T.exp2((fix.weight[0] * w.inner - m_r) * w.outer)
            add_key(fix, first, key < seen, t.V, (b, key, t.h_kv), p)
            key = key + 1
        store_strip(fix, first, query == inside, O, (b, inside, h), p)
        part = part + 1


@T.meta_class
class Warp:
    """A warp: its rows of Q_i, the state that Algorithm 1 keeps of them, where it reads.

    Fragments are lists over its `row_tiles` of 16 rows. With `split_keys` every warp has all rows
    and `warp_keys` of the keys; O_i is then the `warp_columns` columns whose sum it keeps.
    A weight is exp2((s * inner - m_i) * outer): inner is the scale and outer 1, one FMA, or, where
    products with the scale would be too coarse, the reverse.
    """

    def __init__(self, p, z, stream, exchange, warp, lane):
        self.p, self.z, self.stream, self.exchange = p, z, stream, exchange
        self.warp, self.lane = warp, lane
        self.tiles = range(p.row_tiles)

        def fragment(size, dtype="float32"):
            return [T.alloc_local((size,), dtype) for _ in self.tiles]

        self.S_ij = fragment(p.warp_keys // 2)
        self.P_ij = fragment(max(p.warp_keys, p.head_dim_v) // 4, "uint32")
        self.O_i = fragment(p.warp_columns // 2)
        self.O_part = fragment(p.head_dim_v // 2) if p.split_keys else self.O_i
        self.Q_i = fragment(p.depth // 4 if p.q_in_registers else 8, "uint32")
        self.operands = T.alloc_local((4 * OPERAND_SETS,), "uint32")
        self.m_i, self.m_old, self.l_i, self.l_full = (fragment(2) for _ in range(4))
        self.base, self.alpha = (fragment(2) for _ in range(2))
        self.moved = fragment(2, "int32") if p.lazy_rescale else [None for _ in self.tiles]
        self.any_moved = T.alloc_local((1,), "int32")
        self.suspect = T.alloc_local((1,), "int32")
        self.late = T.local_scalar("int32")
        self.spare = T.alloc_local((2,), "uint32")
        self.row = T.local_scalar("int32")
        self.key = T.local_scalar("int32")
        self.j = T.local_scalar("int32")
        self.i = T.local_scalar("int32")
        self.inner = T.local_scalar("float32")
        self.outer = T.local_scalar("float32")
        self.Q_lane = T.local_scalar("uint32")
        self.K_lane = T.local_scalar("uint32")
        self.V_lane = T.local_scalar("uint32")

    @T.inline
    def begin(self):
        """Set where this lane reads, its first row within the block, its first key."""
        p = T.meta_var(self.p)
        first_row: T.let = self.warp * p.warp_rows
        self.key = self.warp * p.warp_keys if p.split_keys else 0
        self.Q_lane = self.stream.Q_address + lane_of_rows(p.Q_tile, self.lane, first_row)
        self.K_lane = self.stream.ring_address + lane_of_columns(p.K_tile, self.lane, self.key)
        self.V_lane = self.stream.ring_address + lane_of_rows(p.V_tile, self.lane, self.key)
        self.row = first_row + T.truncdiv(self.lane, 4)

    @T.inline
    def clear(self):
        """Algorithm 1, line 5: O_i = 0, l_i = 0, m_i = -inf."""
        each_tile(clear_rows, self.m_i, self.l_i, self.l_full)
        each_tile(clear_fragment, self.O_i)

    @T.inline
    def multiply_QK(self):
        """S_ij = Q_i K_j^T."""
        each_tile(clear_fragment, self.S_ij)
        address: T.let = self.K_lane + self.stream.slot
        emit_QK(self, address)

    @T.inline
    def mask(self):
        """-inf for keys after the diagonal and after the end of the sequence."""
        p = T.meta_var(self.p)
        z = T.meta_var(self.z)
        first: T.let = self.j * p.block_kv + self.key + T.truncmod(self.lane, 4) * 2
        if p.causal:
            diagonal: T.let = self.i * p.block_q + self.row + z.causal_offset - first
            emit_mask(self.S_ij, diagonal, 8)
        if (self.j + 1) * p.block_kv > z.seq_kv:
            emit_mask(self.S_ij, z.seq_kv - 1 - first, 0)

    @T.inline
    def move_maxima(self):
        """m_i = max(m_i, rowmax(S_ij)), l_i with it, and the factors that O_i will need."""
        p = T.meta_var(self.p)
        emit_maxima(self)
        if p.split_keys:
            self.share(self.m_i, softmax.maximum)
        if p.lazy_rescale > 0:
            keep_lazy(self)
        emit_move_weights(self)

    @T.inline
    def scale_O(self, maxima):
        """O_i = diag(alpha) O_i, where a maximum moved; version 1 also takes 1/l_i back."""
        p = T.meta_var(self.p)
        if p.rescale_each_step:
            if maxima:
                each_tile(softmax.scale_sums, self.l_full, self.alpha)
            each_tile(softmax.scale_rows, self.O_i, self.l_full)
        elif maxima:
            if p.lazy_rescale > 0:
                if self.any_moved[0] != 0:
                    each_tile(softmax.scale_rows, self.O_i, self.alpha)
            else:
                each_tile(softmax.scale_rows, self.O_i, self.alpha)

    @T.inline
    def multiply_PV(self, careful):
        """P_ij = exp(S_ij - m_i), 16 keys at a time beside the GEMM, and O_i += P_ij V_j."""
        p = T.meta_var(self.p)
        if p.split_keys:
            each_tile(clear_fragment, self.O_part)
        address: T.let = self.V_lane + self.stream.slot
        emit_PV(self, address, careful)
        if p.split_keys:
            self.add_parts()

    @T.inline
    def next_block(self, careful):
        """Algorithm 1, lines 7 to 10, for key block j.

        Any m_i gives the right O_i and L_i unless exp(S - m_i) overflows. With `trust_maximum` a
        block that is not `careful` keeps m_i, so that its exponentials begin with S_ij;
        `distrusted` tells if that failed.
        """
        p = T.meta_var(self.p)
        maxima = T.meta_var(careful or not self.p.trust_maximum)
        self.stream.await_K(self.j)
        self.multiply_QK()
        self.stream.advance()
        if careful:
            self.mask()
        if maxima:
            self.move_maxima()
        self.scale_O(maxima)
        self.stream.await_V(self.j)
        self.multiply_PV(careful)
        self.stream.advance()
        if p.rescale_each_step:
            self.finish_sums(self.l_full)
            each_tile(softmax.scale_rows, self.O_i, self.alpha)
        self.j = self.j - 1

    @T.inline
    def finish_sums(self, sums):
        """Set sums to l_i of all keys so far, alpha to 1 / sums."""
        each_tile(copy_rows, sums, self.l_i)
        each_tile(softmax.finish_sums, sums, self.alpha)
        if self.p.split_keys:
            self.share(sums, total)
            each_tile(invert_sums, sums, self.alpha)

    @T.inline
    def share(self, values, op):
        """Reduce values of the rows over the warps that split the keys, through shared memory."""
        T.cuda.cta_sync()
        emit_put(self, values)
        T.cuda.cta_sync()
        emit_reduce(self, values, op)

    @T.inline
    def add_parts(self):
        """Add all warps' parts of O_i to the columns that this warp keeps."""
        T.cuda.cta_sync()
        emit_put_parts(self)
        T.cuda.cta_sync()
        emit_add_parts(self)

    @T.inline
    def store(self, O, LSE, b, h):
        """Algorithm 1, lines 12 to 15: O_i = diag(l_i)^-1 O_i and L_i = m_i + log l_i go out."""
        p = T.meta_var(self.p)
        self.finish_sums(self.l_full)
        if not p.rescale_each_step:
            each_tile(softmax.normalise, self.O_i, self.l_full, self.alpha, p.causal)
        self.late = here(self.lane)
        each_tile(pack_pairs, self.P_ij, self.O_i, p.dtype)
        if p.causal:
            emit_suspect(self)
        if not p.split_keys:
            each_tile(transpose_fragment, self.P_ij, p.head_dim_v, self.late, self.spare)
        emit_store(self, O, LSE, b, h)
        if p.causal:
            if self.suspect[0] != 0:
                repair(self, O, b, h)


@T.inline
def find_place(w, block):
    """Which query block of which head this thread block carries.

    It is derived anew where it is needed: held over the key blocks it would take registers.
    """
    z = T.meta_var(w.z)
    stream = T.meta_var(w.stream)
    number: T.int32 = here(block)
    head: T.int32 = number
    if w.p.parallel_queries:
        head = T.truncdiv(number, z.query_blocks)
        # Longest first, where a causal mask makes them differ.
        w.i = z.query_blocks - 1 - (number - head * z.query_blocks)
    stream.b = T.truncdiv(head, z.heads)
    stream.h = head - stream.b * z.heads
    stream.h_kv = T.truncdiv(stream.h, z.group)


@T.inline
def attend(w, O, LSE, block):
    """One query block: Algorithm 1, lines 3 to 15; once more, exactly, if trust was misplaced."""
    p = T.meta_var(w.p)
    z = T.meta_var(w.z)
    stream = T.meta_var(w.stream)
    again: T.int32 = 1
    exact: T.int32 = 0
    while again != 0:
        find_place(w, block)
        j_end: T.int32 = z.key_blocks
        j_full: T.int32 = z.key_blocks - 1
        if p.causal:
            first: T.let = w.i * p.block_q
            last: T.let = T.min(first + p.block_q, z.seq_q) - 1
            to_first: T.let = visible_keys(first, z.seq_kv, True, z.causal_offset, clamp)
            to_last: T.let = visible_keys(last, z.seq_kv, True, z.causal_offset, clamp)
            # A block that sees nothing still runs through one, all masked.
            j_end = T.truncdiv(T.max(to_last, 1) + (p.block_kv - 1), p.block_kv)
            # One key less: each row has a maximum from its masked blocks, which the others trust.
            j_full = T.min(T.truncdiv(T.max(to_first - 1, 0), p.block_kv), j_end - 1)
        if p.trust_maximum:
            if j_full * p.block_kv < TRUST_FROM_KEYS:
                j_full = 0
        if exact != 0:
            j_full = 0
        w.inner = T.Select(exact == 0, z.scale_log2, T.float32(1.0))
        w.outer = T.Select(exact == 0, T.float32(1.0), z.scale_log2)
        w.j = j_end - 1
        stream.start(w.i, j_end)
        w.clear()
        if p.q_in_registers:
            T.ptx["cp.async.wait_group"](p.stages - (3 if p.whole_blocks else 2))
            T.cuda.cta_sync()
            emit_load_Q(w)
        while w.j >= j_full:
            w.next_block(True)
        while w.j >= 0:
            w.next_block(False)
        again = 0
        if exact == 0:
            again = T.Cast("int32", T.cuda.syncthreads_or(distrusted(w, j_full)))
            exact = again
    find_place(w, block)
    w.store(O, LSE, stream.b, stream.h)


def build(variant: Variant, schedule: Sm80Forward, device: Device) -> tvm.IRModule:
    """The forward program of a Variant on an NVIDIA GPU since Ampere.

    `forward(Q, K, V, O, LSE, softmax_scale, causal_offset)`: Q [B, Sq, H, D], K [B, Sk, Hk, D],
    V [B, Sk, Hk, Dv], O [B, Sq, H, Dv] of the variant's dtype, 16-byte aligned, any strides that
    are multiples of 16 bytes with the innermost 1; LSE [B, H, Sq] float32, contiguous ([2 B, H, Sq]
    with `save_m_and_l`: m_i, then l_i); softmax_scale > 0; no size may be 0.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    schedule.require_feasible(variant, device)
    p = plan(variant, schedule, device)

    @T.prim_func
    def forward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
    ):
        B, H, Hk, Sq, Sk = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        qb, qn, qh = T.int64(), T.int64(), T.int64()
        kb, kn, kh = T.int64(), T.int64(), T.int64()
        vb, vn, vh = T.int64(), T.int64(), T.int64()
        ob, on, oh = T.int64(), T.int64(), T.int64()
        Q = strided(q, (B, Sq, H, p.columns_qk), (qb, qn, qh), p.dtype)
        K = strided(k, (B, Sk, Hk, p.columns_qk), (kb, kn, kh), p.dtype)
        V = strided(v, (B, Sk, Hk, p.columns_v), (vb, vn, vh), p.dtype)
        O = strided(o, (B, Sq, H, p.columns_v), (ob, on, oh), p.dtype)
        LSE = T.match_buffer(lse, (B * (2 if p.save_m_and_l else 1), H, Sq), "float32", align=4)
        query_blocks: T.let = T.Cast("int32", T.truncdiv(Sq + (p.block_q - 1), T.int64(p.block_q)))
        batch_heads: T.let = T.Cast("int32", B * H)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": p.blocks_per_multiprocessor})
        block = T.cta_id([batch_heads * query_blocks if p.parallel_queries else batch_heads])
        warp = T.warp_id([p.warps])
        lane = T.lane_id([32])
        T.thread_id([p.threads])

        pool = T.SMEMPool()
        Q_smem = pool.alloc((p.Q_tile.bytes,), "uint8", align=1024)
        ring_smem = pool.alloc((p.stages * p.slot_bytes,), "uint8", align=1024)
        exchange = pool.alloc((max(p.exchange_bytes // 4, 1),), "float32", align=16)
        pool.commit()

        seq_kv: T.let = T.Cast("int32", Sk)
        heads: T.let = T.Cast("int32", H)
        z = T.meta_var(
            SimpleNamespace(
                Q_strides=(qb, qn, qh),
                K_strides=(kb, kn, kh),
                V_strides=(vb, vn, vh),
                batch=T.Cast("int32", B),
                heads=heads,
                query_blocks=query_blocks,
                seq_q=T.Cast("int32", Sq),
                seq_kv=seq_kv,
                key_blocks=T.truncdiv(seq_kv + (p.block_kv - 1), p.block_kv),
                group=T.truncdiv(heads, T.Cast("int32", Hk)),
                causal_offset=T.Cast("int32", causal_offset),
                scale_log2=softmax_scale * T.float32(LOG2_E),
                softmax_scale=softmax_scale,
            )
        )
        stream = Stream(p, z, Q, K, V, Q_smem, ring_smem)
        w = Warp(p, z, stream, exchange, warp, lane)
        stream.begin()
        w.begin()
        if p.parallel_queries:
            attend(w, O, LSE, block)
        else:
            w.i = query_blocks - 1
            while w.i >= 0:
                attend(w, O, LSE, block)
                T.cuda.cta_sync()
                w.i = w.i - 1

    return tvm.IRModule({"forward": forward})
