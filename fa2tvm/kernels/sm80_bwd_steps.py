"""Emitters of a warp's steps in the portable backward kernel, and the pass that writes dQ.

`w` is the kernel's `Warp` (sm80_bwd.py). S, P, dP and dS are held transposed, keys by queries, so
that P^T and dS^T leave the accumulators as A operands; a thread's columns are queries 8 a + 2 l + c
(l its number in the quad), whose L and D lie as `statistics_position` orders them: four at a time.
"""

from tvm.script import tirx as T

from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.mma import gemm_accumulate, gemm_nt, load_matrices
from fa2tvm.kernels.sm80_steps import clear_fragment, pack_step
from fa2tvm.kernels.wgmma import pack_pairs, store, transpose_fragment


def at_column(tile, address, column):
    """From the address of a lane's first chunk to that of the same rows at a run-time column.

    The columns that are read from there on must not carry across the tile's boxes.
    """
    box = 8 * tile.lanes
    near = T.Cast("uint32", T.truncdiv(T.truncmod(column, box), 8) * 16)
    far = T.Cast("uint32", T.truncdiv(column, box) * (16 * tile.lanes))
    return T.bitwise_xor(address, near) + far


def emit_scores(w):
    """S_ij^T = K_j Q_i^T."""
    p = w.p
    for fragment in w.S:
        clear_fragment(fragment)
    gemm_nt(w.S, _loaded(w), w.operands, p.Q_tile, w.Q_columns, p.depth_qk, p.dtype, _load(w, "K"))


def _loaded(w):
    """Where the A operand of step k lies: two sets of registers in turn."""
    return lambda m, k: (w.A[m], 4 * (k % 2))


def _load(w, name):
    """What brings the warp's rows of K_j or V_j there."""
    tile = getattr(w.p, f"{name}_tile")
    rows = getattr(w, f"{name}_rows")

    def load(k):
        for m in w.tiles:
            load_matrices(w.A[m], 4 * (k % 2), tile.step(rows, 2 * k) + tile.rows_later(16 * m))

    return load


def emit_mask(w, first_query, last_key):
    """S^T in units of the exponent, -inf where a column's query does not see the key.

    last_key: the last that exists. first_query: causal_offset + the query of this lane's first
    column; None without a mask.
    """
    for m, fragment in enumerate(w.S):
        for n in range(int(fragment.shape[0])):
            key = w.key + 16 * m + 8 * (n // 2 % 2)
            hidden = key > last_key
            if first_query is not None:
                hidden = T.Or(hidden, key > first_query + (n // 4 * 8 + n % 2))
            scaled = fragment[n] * w.z.scale_log2
            store(fragment, n, T.Select(hidden, T.float32(softmax.NEGATIVE_INFINITY), scaled))


def _load_statistics(w, which, k):
    """L or D of the 16 queries of chunk k to w.statistics."""
    load = T.ptx["ld.shared.v4.f32"]
    address = w.statistics_at + T.uint32(4 * w.p.block_q * which + 64 * k)
    T.evaluate(load(*(w.statistics[i] for i in range(4)), address))


def emit_weights(w, P_at):
    """dP^T = V_j dO_i^T, beside it P^T = exp(S^T - L), packed and, for other warps, put there."""
    p = w.p
    chunks = p.warp_queries // 16
    steps = p.depth_v // 16
    for fragment in w.dP:
        clear_fragment(fragment)

    def weights(k):
        _load_statistics(w, 0, k)
        for m in w.tiles:
            for n in range(8 * k, 8 * k + 8):
                L = w.statistics[n // 4 % 2 * 2 + n % 2]
                store(w.S[m], n, T.exp2(w.S[m][n] * w.factor - L))
            pack_step(w.P[m], w.S[m], k, p.dtype)
        if p.exchange:
            _put_step(w, w.P, P_at, k)

    def beside(k):
        for chunk in range(chunks * k // steps, chunks * (k + 1) // steps):
            weights(chunk)

    gemm_nt(
        w.dP, _loaded(w), w.operands, p.dO_tile, w.dO_columns, p.depth_v, p.dtype,
        _load(w, "V"), beside,
    )  # fmt: skip


def _score_gradients_step(w, k):
    """dS^T = P^T o (dP^T - D) of the 16 queries of chunk k, packed."""
    _load_statistics(w, 1, k)
    for m in w.tiles:
        for n in range(8 * k, 8 * k + 8):
            D = w.statistics[n // 4 % 2 * 2 + n % 2]
            store(w.dP[m], n, w.S[m][n] * (w.dP[m][n] - D))
        pack_step(w.dS[m], w.dP[m], k, w.p.dtype)


def emit_score_gradients(w):
    """dS^T of all queries of the warp."""
    for k in range(w.p.warp_queries // 16):
        _score_gradients_step(w, k)


def _put_step(w, words, base, k):
    """The 16 queries of chunk k of a packed fragment to a shared tile of keys by queries."""
    write, tile = T.ptx["st.shared.b32"], w.p.S_tile
    for m in w.tiles:
        for i in range(4):
            address = tile.step(base + w.put, 2 * k + i // 2)
            address += tile.rows_later(16 * m + 8 * (i % 2))
            T.evaluate(write(address, words[m][4 * k + i]))


def emit_put(w, words, base):
    """A packed fragment to a shared tile of keys by queries."""
    for k in range(w.p.warp_queries // 16):
        _put_step(w, words, base, k)


def emit_gradient(w, gradient, words, rows, tile, address, with_dS=False):
    """dV_j += P^T dO_i, or dK_j += dS^T Q_i, in the columns that this warp keeps.

    rows: where this lane reads the A operand in shared memory; None where `words` hold it.
    with_dS: dS^T is computed beside.
    """
    p = w.p

    def load(k):
        for m in range(p.gradient_tiles):
            at = p.S_tile.step(rows, 2 * k) + p.S_tile.rows_later(16 * m)
            load_matrices(words[m], 4 * k, at)

    def dS(k):
        _score_gradients_step(w, k)

    before = dS if with_dS else load if rows is not None else None
    gemm_accumulate(gradient, words, w.operands, tile, address, p.block_q, p.dtype, before)


def emit_dq(w, dS_columns):
    """dS_ij K_j: the warp's part of what this key block adds to dQ_i."""
    p = w.p
    for fragment in w.dQ:
        clear_fragment(fragment)

    def load(k):
        for m in range(p.dq_tiles):
            at = p.S_tile.step(dS_columns, 2 * m) + p.S_tile.rows_later(16 * k)
            load_matrices(w.dS_A[m], 4 * k, at, transposed=True)

    gemm_accumulate(w.dQ, w.dS_A, w.operands, p.K_tile, w.K_depth, p.block_kv, p.dtype, load)


def emit_add_dq(w, workspace, first):
    """Add the warp's part of dQ_i to its accumulator."""
    p = w.p
    for m in range(p.dq_tiles):
        for n in range(p.dq_columns // 8):
            number = (w.warp * p.dq_tiles + m) * (p.dq_columns // 8) + n
            _add(p, w.dQ[m], 4 * n, workspace, first + dq_unit(w, number))


_AWAIT_TURN = """
__device__ __forceinline__ void fa2tvm_await_turn(const float* turn, int mine) {
  if (threadIdx.x == 0) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != mine);
  }
  __syncthreads();
}
"""
_PASS_TURN = """
__device__ __forceinline__ void fa2tvm_pass_turn(float* turn, int next) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(turn), "r"(next) : "memory");
  }
}
"""


def await_turn(pointer, mine):
    """The thread block waits until the key block before has added its part of dQ_i."""
    T.evaluate(
        T.cuda.func_call(
            "fa2tvm_await_turn", pointer, mine, source_code=_AWAIT_TURN, return_type="void"
        )
    )


def pass_turn(pointer, following):
    """The next key block may add its part once all of this thread block's is there."""
    T.evaluate(
        T.cuda.func_call(
            "fa2tvm_pass_turn", pointer, following, source_code=_PASS_TURN, return_type="void"
        )
    )


def dq_at(p, z, row_block):
    """Where the accumulator of a query block of all heads begins in the workspace."""
    return z.dq_first + T.Cast("int64", row_block) * T.int64(p.dq_floats)


def dq_unit(w, number):
    """Where a lane's four elements of a unit of 16 rows of 8 columns lie in the accumulator.

    Units are numbered by warp of the sweep, tile of rows, columns.
    """
    return T.Cast("int64", number * 128 + w.lane * (4 if w.p.vector_reductions else 1))


def _add(p, fragment, i, workspace, element):
    """Four registers to the accumulator: one vector reduction, or four of neighbouring lanes."""
    if p.vector_reductions:
        add = T.ptx["red.relaxed.gpu.global.add.v4.f32"]
        T.evaluate(add(workspace.ptr_to([element]), *(fragment[i + e] for e in range(4))))
        return
    add = T.ptx["red.relaxed.gpu.global.add.f32"]
    for e in range(4):
        T.evaluate(add(workspace.ptr_to([element + 32 * e]), fragment[i + e]))


class DqWarp:
    """A warp of `write_dq`: registers of a piece, 16 rows of 32 columns."""

    def __init__(self, p, z, lane):
        self.p, self.z, self.lane = p, z, lane
        self.dQ = T.alloc_local((16,), "float32")
        self.words = T.alloc_local((8,), "uint32")
        self.spare = T.alloc_local((2,), "uint32")


def emit_write_dq(w, workspace, first, dQ, index, piece):
    """A piece of dQ_i: softmax_scale times its accumulator, which the sweep's warps laid out."""
    p = w.p
    b, row, h = index
    row_tile = T.truncmod(piece, p.block_q // 16)
    chunk = T.truncdiv(piece, p.block_q // 16)
    groups = p.block_q // (16 * p.dq_tiles)
    eights = p.dq_columns // 8
    for a in range(4):
        eighth = chunk * 4 + a
        warp = T.truncdiv(eighth, eights) * groups + T.truncdiv(row_tile, p.dq_tiles)
        tile = warp * p.dq_tiles + T.truncmod(row_tile, p.dq_tiles)
        at = first + dq_unit(w, tile * eights + T.truncmod(eighth, eights))
        if p.vector_reductions:
            load = T.ptx["ld.global.v4.f32"]
            T.evaluate(load(*(w.dQ[4 * a + e] for e in range(4)), workspace.ptr_to([at])))
        else:
            for e in range(4):
                store(w.dQ, 4 * a + e, workspace[at + 32 * e])
    for n in range(16):
        store(w.dQ, n, w.dQ[n] * w.z.softmax_scale)
    pack_pairs(w.words, w.dQ, p.dtype)
    at = (b, row + row_tile * 16 + T.truncdiv(w.lane, 4), h)
    write_rows(w, dQ, w.words, at, w.z.seq_q, chunk * 32, p.columns_qk)


@T.inline
def write_dq(p, z, workspace, dQ):
    """Write dQ: softmax_scale times its accumulator, in the gradient's dtype and order."""
    block = T.cta_id([z.query_blocks * z.batch_heads_q])
    warp = T.warp_id([p.dq_warps])
    lane = T.lane_id([32])
    T.thread_id([32 * p.dq_warps])
    head: T.let = T.truncdiv(block, z.query_blocks)
    b: T.let = T.truncdiv(head, z.heads)
    h: T.let = head - b * z.heads
    w = T.meta_var(DqWarp(p, z, lane))
    row: T.let = (block - head * z.query_blocks) * p.block_q
    first: T.let = dq_at(p, z, block)
    for n in T.unroll(p.dq_pieces // p.dq_warps):
        emit_write_dq(w, workspace, first, dQ, (b, row, h), warp + n * p.dq_warps)


def write_rows(w, out, words, index, end, first_column, columns):
    """The two rows of a packed accumulator, 16 bytes at a time."""
    write = T.ptx["st.global.v4.b32"]
    b, row, h = index
    count = int(words.shape[0])
    transpose_fragment(words, 4 * count, w.lane, w.spare)
    for r in softmax.ROWS:
        with T.If(row + 8 * r < end), T.Then():
            for c in range(count // 8):
                column = first_column + 32 * c + T.truncmod(w.lane, 4) * 8
                with T.If(column < columns), T.Then():
                    pointer = out.ptr_to([b, row + 8 * r, h, column])
                    T.evaluate(write(pointer, *(words[8 * c + r + 2 * i] for i in range(4))))


def emit_write_gradient(w, gradient, scale, words, out, b, h, columns):
    """dK_j or dV_j, times a scale, in the columns that this warp keeps."""
    for m in range(w.p.gradient_tiles):
        size = int(gradient[m].shape[0])
        if scale is not None:
            for n in range(size):
                store(gradient[m], n, gradient[m][n] * scale)
        pack_pairs(words[m], gradient[m], w.p.dtype)
        at = (b, w.gradient_key + 16 * m, h)
        write_rows(w, out, words[m], at, w.z.seq_kv, w.column_part * (size * 2), columns)
