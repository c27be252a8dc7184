"""The end of a tile of the Hopper forward kernel: was it sound, O_i and L_i out, and the repair.

The functions are steps of `consume` (sm90_fwd.py); `c` is its Consumer.
"""

from tvm.script import tirx as T

from fa2tvm.kernels import online_softmax as softmax
from fa2tvm.kernels.sm90_tiles import publish
from fa2tvm.kernels.softmax import LN_2
from fa2tvm.kernels.wgmma import (
    pack_pairs,
    shuffle_xor,
    store,
    store_row,
    transpose_fragment,
)


@T.inline
def report_tile(c):
    """Tell whether the maxima could be trusted: no sum or maximum too large, no row without one."""
    p = T.meta_var(c.p)
    if p.trust_maximum:
        distrusted: T.let = softmax.any_distrusted(c.l_i, c.m_i, p.trust_limit_log2, c.scaled_m)
        c.failed = T.Select(T.And(c.tile.exact == 0, c.tile.j_full > 0), distrusted, 0)
        c.report_ring.acquire_plain()
        if c.lane == 0:
            if c.failed != 0:
                publish(c.shared.failures, 0, c.report_ring.stage(), 1)
            c.report_ring.commit()


_WARP_MAX = """
__device__ __forceinline__ int fa2tvm_warp_max(int value) {
  return __reduce_max_sync(0xffffffffu, value);
}
"""


def warp_max(value):
    """The largest number of the lanes.

    By one instruction, whose result ptxas knows to be uniform: a loop that it must take for
    divergent moves all ring arithmetic of the kernel from the uniform registers to the others
    (causal: 5 to 8 % slower, H200, 2026-11-30).
    """
    return T.cuda.func_call("fa2tvm_warp_max", value, source_code=_WARP_MAX, return_type="int32")


# Volatile: what only the end of a tile derives from the lane would else be computed before the loop
# over tiles and take registers in it (6 at d=128 causal, which spilled).
_HERE = """
__device__ __forceinline__ int fa2tvm_here(int value) {
  int same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}
"""
# Volatile, so that the row of Q is not held in registers over all keys.
_LOAD_PAIR = """
__device__ __forceinline__ unsigned int fa2tvm_load_pair(const void* address) {
  unsigned int pair;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(pair) : "l"(address));
  return pair;
}
"""
_WIDEN = {
    "bfloat16": """
__device__ __forceinline__ float fa2tvm_widen_bfloat16(unsigned int pair, int second) {
  return __uint_as_float(second ? pair & 0xffff0000u : pair << 16);
}
""",
    "float16": """
__device__ __forceinline__ float fa2tvm_widen_float16(unsigned int pair, int second) {
  return __half2float(__ushort_as_half(second ? pair >> 16 : pair & 0xffffu));
}
""",
}


def here(value):
    """The same number, for the compiler a new one."""
    return T.cuda.func_call("fa2tvm_here", value, source_code=_HERE, return_type="int32")


def load_pair(tensor, index):
    """Two elements of a tensor as one word."""
    address = tensor.ptr_to(list(index))
    return T.cuda.func_call(
        "fa2tvm_load_pair", address, source_code=_LOAD_PAIR, return_type="uint32"
    )


def widen(word, second, dtype):
    """One of a pair as float32."""
    return T.cuda.func_call(
        f"fa2tvm_widen_{dtype}", word, second, source_code=_WIDEN[dtype], return_type="float32"
    )


def quad_dot(fix, Q, q_index, K, k_index, p):
    """Put Q's row times K's row into fix.weight; each lane of a quad takes every fourth pair."""
    store(fix.weight, 0, T.float32(0.0))
    for a in range(p.columns_qk // 8):
        store(fix.pair, 0, load_pair(Q, (*q_index, 8 * a + fix.column)))
        store(fix.pair, 1, load_pair(K, (*k_index, 8 * a + fix.column)))
        for e in range(2):
            product = widen(fix.pair[0], e, p.dtype) * widen(fix.pair[1], e, p.dtype)
            store(fix.weight, 0, fix.weight[0] + product)
    for mask in (1, 2):
        store(fix.weight, 0, fix.weight[0] + shuffle_xor(fix.weight[0], mask))


def add_key(fix, first, visible, V, v_index, p):
    """Add fix.weight * V's row, from column `first` on, to fix.O, if the key is visible."""
    for a in range(fix.width // 8):
        # Columns that pad V are not stored: any other will do for them.
        column = T.Select(first + 8 * a < p.columns_v, first + 8 * a, 0) + fix.column
        store(fix.pair, 0, load_pair(V, (*v_index, column)))
        for e in range(2):
            added = fix.O[2 * a + e] + fix.weight[0] * widen(fix.pair[0], e, p.dtype)
            store(fix.O, 2 * a + e, T.Select(visible, added, fix.O[2 * a + e]))


def store_strip(fix, first, valid, O, o_index, p):
    """Store fix.O to columns `first` on of a row, pair by pair."""
    write = T.ptx["st.global.b32"]
    pack_pairs(fix.words, fix.O, p.dtype)
    for a in range(fix.width // 8):
        column = first + 8 * a + fix.column
        with T.If(T.And(valid, column < p.columns_v)), T.Then():
            T.evaluate(write(O.ptr_to([*o_index, column]), fix.words[a]))


@T.inline
def repair_tile(c, tensors):
    """Where `store_tile` left a suspect row: the warp's rows again, from the keys that each sees.

    The tensor cores multiply a hidden key's weight, 0, by its V, and 0 * NaN is NaN: rows beside a
    key whose V is not finite hold NaN though they do not see it. m_i and l_i are right. Each quad
    works on a row at a time, strip of columns by strip, key by key; only warps with data that is
    not finite come here, so speed does not matter, but registers do (S_ij of the next tile).
    """
    p = T.meta_var(c.p)
    z = T.meta_var(c.z)
    fix = T.meta_var(c.fix)
    b, h, i = T.meta_var((c.place.b, c.place.h, c.place.i))
    if fix.needed != 0:
        c.find_place()
        # The rows were stored by other lanes of the quad.
        T.cuda.warp_sync()
        fix.column = T.truncmod(here(c.lane), 4) * 2
        part: T.int32 = 0
        while part < 2 * (p.head_dim_v // fix.width):
            r: T.int32 = T.bitwise_and(part, 1)
            first: T.int32 = T.shift_right(part, 1) * fix.width
            m_r: T.float32 = T.Select(r == 0, c.m_i[0], c.m_i[1])
            inverse: T.float32 = T.Select(r == 0, c.alpha[0], c.alpha[1])
            query: T.int32 = c.query(i, r)
            inside: T.int32 = T.min(query, z.seq_q - 1)
            head: T.int32 = h * z.heads_of_unit + T.min(c.packed_head(r), z.heads_of_unit - 1)
            is_whole: T.let = query == inside and c.packed_head(r) < z.heads_of_unit
            h_kv: T.int32 = T.truncdiv(h, z.units_of_kv)
            # A row that sees nothing has no inverse, and 0 of it.
            seen: T.int32 = T.Select(
                inverse == T.float32(0.0), 0, T.min(inside + z.causal_offset + 1, z.seq_kv)
            )
            of_warp: T.int32 = warp_max(seen)
            for n in T.unroll(fix.width // 4):
                fix.O[n] = T.float32(0.0)
            key: T.int32 = 0
            while key < of_warp:
                quad_dot(fix, tensors.Q, (b, inside, head), tensors.K, (b, key, h_kv), p)
                fix.weight[0] = inverse * T.exp2(
                    (fix.weight[0] - m_r) * z.scale_log2 + T.float32(p.weight_log2)
                )
                add_key(fix, first, key < seen, tensors.V, (b, key, h_kv), p)
                key = key + 1
            store_strip(fix, first, is_whole, tensors.O, (b, inside, head), p)
            part = part + 1


@T.inline
def store_tile(c, tensors):
    """Algorithm 1, lines 12 to 15: O_i = diag(l_i)^-1 O_i and L_i = m_i + log l_i go out.

    O_i goes straight from registers: a transpose across each quad makes 16-byte stores.
    """
    p = T.meta_var(c.p)
    z = T.meta_var(c.z)
    words = T.meta_var(c.P_ij)
    b, h, i = T.meta_var((c.place.b, c.place.h, c.place.i))
    softmax.finish_sums(c.l_i, c.alpha)
    softmax.normalise(c.O_i, c.l_i, c.alpha, may_be_empty=p.causal)
    pack_pairs(words, c.O_i, p.dtype)
    if p.causal:
        softmax.nonfinite_rows(words, p.head_dim_v // 4, p.dtype, c.fix.pair)
        # A tile that is done again may have had weights beyond float16.
        c.fix.needed = T.Select(c.failed == 0, softmax.any_suspect(c.fix.pair, c.l_i), 0)
    lane: T.int32 = here(c.lane)
    transpose_fragment(words, p.head_dim_v, lane, c.spare)
    for r in T.unroll(2):
        query: T.let = c.query(i, r)
        head: T.let = h * z.heads_of_unit + c.packed_head(r)
        if query < z.seq_q and c.packed_head(r) < z.heads_of_unit:
            store_row(tensors.O, words, (b, query, head), r, lane, p.columns_v)
            if T.truncmod(lane, 4) == 0:
                tensors.LSE[b, head, query] = T.Select(
                    c.l_i[r] == T.float32(0.0),
                    T.float32(softmax.NEGATIVE_INFINITY),
                    c.m_i[r] * z.softmax_scale
                    + (T.log(c.l_i[r]) - T.float32(p.weight_log2 * LN_2)),
                )
