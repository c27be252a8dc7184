"""What the backward pass needs of every query row beforehand: L_i, D_i and a factor R_i of P_i.

S and L are in base 2 as in the forward. LSE is float32, and an LSE of 1e6 is known to 1/32 only:
exp(S - LSE) would be off by 3 %. For such loud rows the maximum and the sum are computed again, by
one product more, and P = exp(S - max) R.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from fa2tvm import blocks
from fa2tvm.kernels import softmax
from fa2tvm.kernels.cpu_bwd_blocks import (
    INF,
    LOG2_E,
    ONE,
    ZERO,
    count_seen,
    is_wide,
    load_keys,
    load_queries,
    product,
)
from fa2tvm.kernels.script import ceil_div, clamp, partial_sum

NAN = T.float32(float("nan"))
# Beyond it float32 keeps LSE to 2**-17 or worse, which is an error of P of that size.
LOG2_PRECISE = T.float32(256 * softmax.LOG2_E)


@T.inline
def multiply_rows(D_i, O, dO, b, h, i0, seq_q, d0, n):
    """Sums of n products of dO_i o O_i from column d0."""
    for i, d in T.grid(D_i.shape[0], n):
        with T.sblock("D"):
            vi, vd = T.axis.remap("SR", [i, d])
            with T.init():
                D_i[vi] = ZERO
            D_i[vi] = D_i[vi] + T.cast(
                dO[b, T.min(i0 + vi, seq_q - 1), h, d0 + vd], "float32"
            ) * T.cast(O[b, T.min(i0 + vi, seq_q - 1), h, d0 + vd], "float32")


@T.inline
def add_row_parts(D_i, O, dO, b, h, i0, seq_q, n, step):
    """The same for n columns from 0 in partial sums of `step` products, as dP's."""
    for part in range(ceil_div(n, step)):
        with T.sblock("D_part"):
            d0 = T.axis.opaque(n, part * step)
            T.reads()
            T.writes()
            sums = T.sblock_alloc_buffer(D_i.shape)
            multiply_rows(sums, O, dO, b, h, i0, seq_q, d0, T.min(step, n - d0))
            for i in range(D_i.shape[0]):
                D_i[i] = T.Select(d0 == 0, ZERO, D_i[i]) + sums[i]


@T.inline
def row_statistics(c, O, dO, LSE, dLSE, W, b, h, i0, row0, stats, seq_q, has_dlse):
    """Line 4: D_i = rowsum(dO_i o O_i) - dLSE_i, and L_i; W also gets R_i, a factor of P_i.

    A row past the end, or that sees nothing, has L = inf, so that 2**(S - L) is 0. The sum is taken
    in the order of dP's, so that dP - D is exactly 0 where P is one-hot.
    """
    D_i = T.sblock_alloc_buffer((c.Br,))
    if is_wide(c.Dv):
        add_row_parts(D_i, O, dO, b, h, i0, seq_q, c.Dv, T.int64(partial_sum(int(c.Dv))))
    else:
        multiply_rows(D_i, O, dO, b, h, i0, seq_q, 0, c.Dv)
    for i in range(c.Br):
        W[row0 + i] = INF
        W[stats + row0 + i] = D_i[i]
        W[2 * stats + row0 + i] = ONE
        if i0 + i < seq_q:
            W[row0 + i] = LSE[b, h, i0 + i] * LOG2_E
            if LSE[b, h, i0 + i] == -INF:
                W[row0 + i] = INF
            # A logit of inf makes all of its row NaN, as inf - inf is.
            if LSE[b, h, i0 + i] == INF:
                W[row0 + i] = NAN
            if has_dlse != 0:
                W[stats + row0 + i] = D_i[i] - dLSE[b, h, i0 + i]


def is_loud(L: Any) -> Any:
    """Whether float32 keeps this LSE too coarsely; false for NaN and where nothing is seen."""
    return T.And(L != INF, T.max(L, -L) > LOG2_PRECISE)


@T.inline
def find_loud(c, W, row0, loud):
    """Set loud to 1 iff some row's LSE is loud, else to 0."""
    loud[0] = T.int32(0)
    for i in range(c.Br):
        if is_loud(W[row0 + i]):
            loud[0] = T.int32(1)


@T.inline
def online_statistics(c, S, m, l, n_seen):
    """Algorithm 1's line 9 on each lane by itself: maximum and sum of S_ij over a lane's keys."""
    for i, v, lane in T.grid(c.Br, T.truncdiv(c.Bc, c.lanes), c.lanes):
        with T.sblock("online"):
            vi, vv, vl = T.axis.remap("SSS", [i, v, lane])
            T.reads(n_seen[vi])
            T.writes(m[vi, vl], l[vi, vl])
            s = T.meta_var(
                T.Select(
                    T.cast(vv * c.lanes + vl, "int32") < n_seen[vi], S[vi, vv * c.lanes + vl], -INF
                )
            )
            m_new = T.meta_var(T.max(m[vi, vl], s))
            safe = T.meta_var(T.Select(m_new == -INF, ZERO, m_new))
            l[vi, vl] = l[vi, vl] * softmax.exp2(m[vi, vl] - safe) + softmax.exp2(s - safe)
            m[vi, vl] = m_new


@T.inline
def renormalise(c, W, m, l, row0, stats):
    """For loud rows: L_i becomes the row's maximum and R_i one over its sum."""
    for i in range(c.Br):
        if is_loud(W[row0 + i]):
            W[row0 + i] = -INF
            for lane in range(c.lanes):
                W[row0 + i] = T.max(W[row0 + i], m[i, lane])
            W[2 * stats + row0 + i] = ZERO
            for lane in range(c.lanes):
                W[2 * stats + row0 + i] = W[2 * stats + row0 + i] + l[i, lane] * softmax.exp2(
                    m[i, lane] - W[row0 + i]
                )
            W[2 * stats + row0 + i] = ONE / W[2 * stats + row0 + i]


@T.inline
def exact_statistics(
    c, Q, K, W, b, h, hk, i0, row0, stats, seq_q, seq_kv, causal_offset, softmax_scale
):
    """L_i and R_i of loud rows from S itself; one product more than Algorithm 2 has."""
    Q_i = T.sblock_alloc_buffer((c.Br, c.Dp))
    K_j = T.sblock_alloc_buffer((c.Bc, c.Dp))
    KT_j = T.sblock_alloc_buffer((c.D, c.Bc))
    S = T.sblock_alloc_buffer((c.Br, c.Bc))
    m = T.sblock_alloc_buffer((c.Br, c.lanes))
    l = T.sblock_alloc_buffer((c.Br, c.lanes))
    n_seen = T.sblock_alloc_buffer((c.Br,), "int32")
    n_visible: T.let = blocks.visible_keys(
        T.min(i0 + c.Br, seq_q) - 1, seq_kv, c.causal, causal_offset, clamp
    )
    load_queries(c, Q, Q_i, W, b, h, i0, row0, softmax_scale)
    for i, lane in T.grid(c.Br, c.lanes):
        m[i, lane] = -INF
        l[i, lane] = ZERO
    for block in range(ceil_div(n_visible, c.Bc)):
        with T.sblock("row_keys"):
            j0 = T.axis.opaque(seq_kv, block * c.Bc)
            T.reads()
            T.writes()
            n_keys: T.let = T.min(c.Bc, seq_kv - j0)
            load_keys(c, K, K_j, KT_j, b, hk, j0, n_keys)
            product("S_rows", S, Q_i, KT_j, c.D, c.Bc)
            count_seen(c, W, n_seen, i0, j0, row0, n_keys, causal_offset)
            online_statistics(c, S, m, l, n_seen)
    renormalise(c, W, m, l, row0, stats)
