"""Emitters of a warp's steps in the portable forward kernel: loops over registers at build time.

`w` is the kernel's `Warp` (sm80_fwd.py); its fragments are lists over tiles of 16 rows.
"""

from tvm.script import tirx as T

from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.mma import gemm_accumulate, gemm_nt, load_matrices
from fa2tvm.kernels.softmax import LN_2
from fa2tvm.kernels.wgmma import pack_pairs, store, store_row

# Beyond it a row is done again with exact differences: a maximum times log2 e is rounded by up to
# 2**-14 there, and so are all weights of its row, but their roundings to 2 bytes are not alike.
SHIFT_LIMIT = 2.0**10


def each_tile(emit, *arguments):
    """Emit a step for each tile of 16 rows; arguments that are lists give it their element."""
    for m in range(len(arguments[0])):
        emit(*(a[m] if isinstance(a, list) else a for a in arguments))


def total(a, b):
    """The sum, as a reduction's operator."""
    return a + b


def clear_fragment(fragment):
    """All registers 0."""
    for n in range(int(fragment.shape[0])):
        store(fragment, n, T.float32(0.0))


def clear_rows(m_i, l_i, l_full):
    """The state of rows that have seen nothing."""
    for r in softmax.ROWS:
        store(m_i, r, T.float32(softmax.NEGATIVE_INFINITY))
        store(l_i, r, T.float32(0.0))
        store(l_full, r, T.float32(0.0))


def copy_rows(to, values):
    """Copy the values of a thread's two rows."""
    for r in softmax.ROWS:
        store(to, r, values[r])


_PRODUCT = """
__device__ __forceinline__ float fa2tvm_product(float a, float b) { return __fmul_rn(a, b); }
"""


def product(a, b):
    """The rounded product of two floats, which does not become part of an FMA."""
    return T.cuda.func_call("fa2tvm_product", a, b, source_code=_PRODUCT, return_type="float32")


def emit_maxima(w):
    """m_i = max(m_old, rowmax(S_ij) * inner), each row rounded as all its weights will see it.

    The largest logit of a row has the weight 2**weight_log2.
    """
    chains = [T.alloc_local((2,), "float32") for _ in softmax.ROWS]
    for m in w.tiles:
        copy_rows(w.m_old[m], w.m_i[m])
        softmax.row_maxima(w.S_ij[m], w.m_i[m], chains)
        for r in softmax.ROWS:
            scaled = product(w.m_i[m][r], w.inner)
            if w.p.weight_log2:
                scaled = scaled - T.float32(w.p.weight_log2) / w.outer
            store(w.m_i[m], r, softmax.maximum(w.m_old[m][r], scaled))


def base(m_i):
    """What exponents subtract; 0 for a row that saw nothing: exp(-inf - -inf) must be 0."""
    return T.Select(m_i == T.float32(softmax.NEGATIVE_INFINITY), T.float32(0.0), m_i)


def emit_move_weights(w):
    """alpha, the factor that the weights so far owe to the new maxima, and l_i times it."""
    for m in w.tiles:
        for r in softmax.ROWS:
            factor = T.exp2((w.m_old[m][r] - base(w.m_i[m][r])) * w.outer)
            if w.moved[m] is not None:
                factor = T.Select(w.moved[m][r] == 0, T.float32(1.0), factor)
            store(w.alpha[m], r, factor)
            store(w.l_i[m], r, w.l_i[m][r] * w.alpha[m][r])


def emit_mask(S_ij, last_key, row_step):
    """-inf beyond the last key that each row sees; rows of a tile are `row_step` keys apart."""
    for m, fragment in enumerate(S_ij):
        softmax.mask_beyond(fragment, last_key + 2 * row_step * m, row_step)


def invert_sums(l_i, inverse):
    """The inverse of l_i, 0 for a row that saw nothing."""
    for r in softmax.ROWS:
        nothing = l_i[r] == T.float32(0.0)
        store(inverse, r, T.Select(nothing, T.float32(0.0), T.float32(1.0) / l_i[r]))


def keep_lazy(w):
    """`keep_lazy_maxima` of all row tiles; any_moved says whether one row of the warp moved."""
    moves = []
    for m in w.tiles:
        softmax.keep_lazy_maxima(
            w.m_i[m], w.m_old[m], w.moved[m], w.any_moved, w.outer, w.p.lazy_rescale
        )
        moves += [w.moved[m][r] for r in softmax.ROWS]
    if len(w.tiles) > 1:
        any_move = moves[0]
        for move in moves[1:]:
            any_move = T.bitwise_or(any_move, move)
        store(w.any_moved, 0, T.cuda.any_sync(T.uint32(softmax.FULL_WARP), any_move))


def emit_QK(w, K_address):
    """S_ij[m] += Q_i[m] K_j^T; Q_i from registers, or from shared memory two steps at a time."""
    p = w.p

    def fragments(m, k):
        return w.Q_i[m], 4 * k if p.q_in_registers else 4 * (k % 2)

    def load_Q(k):
        for m in w.tiles:
            if not p.q_in_registers:
                address = p.Q_tile.step(w.Q_lane, 2 * k) + p.Q_tile.rows_later(16 * m)
                load_matrices(w.Q_i[m], 4 * (k % 2), address)

    gemm_nt(w.S_ij, fragments, w.operands, p.K_tile, K_address, p.depth, p.dtype, load_Q)


def emit_load_Q(w):
    """All of the warp's rows of Q_i to registers."""
    for m in w.tiles:
        for k in range(w.p.depth // 16):
            address = w.p.Q_tile.step(w.Q_lane, 2 * k) + w.p.Q_tile.rows_later(16 * m)
            load_matrices(w.Q_i[m], 4 * k, address)


def emit_PV(w, V_address, careful):
    """O_part[m] += exp(S_ij[m] - m_i) V_j; the exponentials of 16 keys run beside the GEMM."""
    p = w.p
    if careful:
        for m in w.tiles:
            for r in softmax.ROWS:
                store(w.base[m], r, base(w.m_i[m][r]))

    def exponent(m, n):
        r = n // 2 % 2
        if careful:
            return (w.S_ij[m][n] * w.inner - w.base[m][r]) * w.outer
        return w.S_ij[m][n] * w.z.scale_log2 - w.m_i[m][r]

    def weights(k):
        for m in w.tiles:
            S_ij, l_i = w.S_ij[m], w.l_i[m]
            for n in range(8 * k, 8 * k + 8):
                store(S_ij, n, T.exp2(exponent(m, n)))
            for r in softmax.ROWS:
                a, b, c, d = (S_ij[8 * k + 4 * half + 2 * r + e] for half in (0, 1) for e in (0, 1))
                store(l_i, r, l_i[r] + ((a + b) + (c + d)))
            pack_step(w.P_ij[m], S_ij, k, p.dtype)

    gemm_accumulate(
        w.O_part, w.P_ij, w.operands, p.V_tile, V_address, p.warp_keys, p.dtype, weights
    )


def pack_step(words, fragment, k, dtype):
    """The 2-byte pairs of the k-th 16 columns of an accumulator: an A operand."""
    pack_pairs(_Part(words, 4 * k, 4), _Part(fragment, 8 * k, 8), dtype)


class _Part:
    """A run of a fragment's registers, for emitters that take whole fragments."""

    def __init__(self, fragment, first, size):
        self.fragment, self.first, self.shape = fragment, first, (size,)

    def __getitem__(self, n):
        return self.fragment[self.first + n]


def emit_put(w, values):
    """Each warp's values of the rows to shared memory."""
    with T.If(T.truncmod(w.lane, 4) == 0), T.Then():
        for m in w.tiles:
            for r in softmax.ROWS:
                row = w.row + 16 * m + 8 * r
                T.buffer_store(w.exchange, values[m][r], [w.warp * w.p.block_q + row])


def emit_reduce(w, values, op):
    """Reduce the values over all warps."""
    for m in w.tiles:
        for r in softmax.ROWS:
            row = w.row + 16 * m + 8 * r
            store(values[m], r, w.exchange[row])
            for other in range(1, w.p.warps):
                store(values[m], r, op(values[m][r], w.exchange[other * w.p.block_q + row]))


def _part_index(w, m, n, source):
    """Where a lane's four registers of column group n of row tile m lie: no bank twice."""
    groups = w.p.head_dim_v // 8
    base = w.p.warps * w.p.block_q
    return base + (((source * w.p.row_tiles + m) * groups + n) * 32 + w.lane) * 4


def emit_put_parts(w):
    """The warp's part of O_i to shared memory."""
    for m in w.tiles:
        for n in range(w.p.head_dim_v // 8):
            for e in range(4):
                value = w.O_part[m][4 * n + e]
                T.buffer_store(w.exchange, value, [_part_index(w, m, n, w.warp) + e])


def emit_add_parts(w):
    """O_i += the parts of all warps, in the columns that this warp keeps."""
    own = w.p.warp_columns // 8
    for m in w.tiles:
        for n in range(own):
            for source in range(w.p.warps):
                index = _part_index(w, m, w.warp * own + n, source)
                for e in range(4):
                    store(w.O_i[m], 4 * n + e, w.O_i[m][4 * n + e] + w.exchange[index + e])


def emit_suspect(w):
    """Whether a row of the warp holds what its logits do not explain: NaN beside a hidden key."""
    found = T.alloc_local((2,), "uint32")
    store(w.suspect, 0, 0)
    for m in w.tiles:
        pairs = int(w.O_i[m].shape[0]) // 2
        softmax.nonfinite_rows(w.P_ij[m], pairs, w.p.dtype, found)
        suspect = softmax.any_suspect(found, w.l_full[m])
        store(w.suspect, 0, T.bitwise_or(w.suspect[0], suspect))


def of_row(fragments, number):
    """The value of a thread's row by its run-time number, 2 m + r."""
    value = fragments[0][0]
    for n in range(1, 2 * len(fragments)):
        value = T.Select(number == n, fragments[n // 2][n % 2], value)
    return value


def emit_store_pairs(w, O, row_index, m, r):
    """Row r of the columns that this warp keeps, in pairs of 2-byte elements."""
    write = T.ptx["st.global.b32"]
    for n in range(w.p.warp_columns // 8):
        column = w.warp * w.p.warp_columns + 8 * n + T.truncmod(w.lane, 4) * 2
        with T.If(column < w.p.columns_v), T.Then():
            T.evaluate(write(O.ptr_to([*row_index, column]), w.P_ij[m][2 * n + r]))


def emit_store(w, O, LSE, b, h):
    """O_i, already packed, and the statistics of all rows of the warp that exist."""
    for m in w.tiles:
        for r in softmax.ROWS:
            row = w.i * w.p.block_q + w.row + 16 * m + 8 * r
            with T.If(row < w.z.seq_q), T.Then():
                if w.p.split_keys:
                    emit_store_pairs(w, O, (b, row, h), m, r)
                else:
                    store_row(O, w.P_ij[m], (b, row, h), r, w.late, w.p.columns_v)
                first = T.truncmod(w.late, 4) == 0
                first = T.And(first, w.warp == 0) if w.p.split_keys else first
                with T.If(first), T.Then():
                    emit_statistics(w, LSE, b, h, row, m, r)


def emit_statistics(w, LSE, b, h, row, m, r):
    """L_i, or version 1's m_i and l_i, of one row."""
    l = w.l_full[m][r]
    maximum = w.m_i[m][r] * w.outer * T.float32(LN_2)
    nothing = T.float32(softmax.NEGATIVE_INFINITY)
    if w.p.save_m_and_l:
        T.buffer_store(LSE, maximum, [b, h, row])
        T.buffer_store(LSE, l, [w.z.batch + b, h, row])
    else:
        value = T.Select(l == T.float32(0.0), nothing, maximum + T.log(l))
        T.buffer_store(LSE, value, [b, h, row])


def distrusted(w, j_full):
    """Whether a row of this thread has too large a sum, too large a shift or no maximum.

    The thread's part of a row's sum stands for the sum: four times the limit still is no overflow.
    A NaN passes: it is in O_i already.
    """
    failed = []
    for m in w.tiles:
        for r in softmax.ROWS:
            unseen = w.m_i[m][r] == T.float32(softmax.NEGATIVE_INFINITY)
            failed.append(T.And(T.abs(w.m_i[m][r]) > T.float32(SHIFT_LIMIT), T.Not(unseen)))
            if w.p.trust_maximum:
                failed.append(w.l_i[m][r] > T.float32(2.0 ** (w.p.trust_limit_log2 - 2)))
                failed.append(T.And(j_full > 0, unseen))
    result = failed[0]
    for other in failed[1:]:
        result = T.Or(result, other)
    return T.Cast("int32", result)
