"""Algorithm 2 for CPUs: five products a block pair, each in register tiles.

One task is one key head of one batch entry, or one of `splits` parts of its keys. It goes over its
key blocks and, for each, over the query blocks that see it, with dK_j and dV_j at hand and a dQ of
its own in the workspace, so nothing is shared. The plan, its floor and the measurements behind it
are in cpu_bwd.md.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.script import tirx as T

from fa2tvm.device import Device
from fa2tvm.kernels import softmax
from fa2tvm.kernels.cpu_bwd_blocks import (
    INF,
    ONE,
    ZERO,
    Sizes,
    add_dq,
    add_transposed_product,
    clear,
    count_seen,
    first_query_block,
    load_keys,
    load_queries,
    load_rows,
    load_values,
    product,
    visible,
)
from fa2tvm.kernels.cpu_bwd_rows import exact_statistics, find_loud, row_statistics
from fa2tvm.kernels.script import ceil_div, sblocks
from fa2tvm.problem import DTYPE_BYTES, Variant
from fa2tvm.schedule import CpuBackward

LN_2 = T.float32(softmax.LN_2)


def build(variant: Variant, schedule: CpuBackward, device: Device) -> tvm.IRModule:
    """The module of the backward pass; its one function is `backward`.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    del device  # `lanes` is a decision of the schedule.
    sch = s_tir.Schedule(program(Sizes.of(variant, schedule)))
    apply_tiles(sch, variant, schedule)
    return tvm.IRModule({"backward": sch.mod["main"]})


@T.inline
def probabilities(c, S, dP, P, dS, W, row0, stats, columns):
    """Lines 11 and 14: P_ij = 2**(S_ij - L_i) R_i and dS_ij = P_ij o (dP_ij - D_i)."""
    for i, j in T.grid(c.Br, columns):
        with T.sblock("P"):
            vi, vj = T.axis.remap("SS", [i, j])
            L = T.meta_var(W[row0 + vi])
            D = T.meta_var(W[stats + row0 + vi])
            R = T.meta_var(W[2 * stats + row0 + vi])
            P_ij = T.meta_var(softmax.exp2(S[vi, vj] - L) * R)
            P[vi, vj] = P_ij
            dS[vi, vj] = P_ij * (dP[vi, vj] - D)


@T.inline
def masked_probabilities(c, S, dP, P, dS, W, row0, stats, columns, n_seen):
    """The same, and exactly 0 for what a row does not see, even where that is NaN."""
    for i, j in T.grid(c.Br, columns):
        with T.sblock("P_masked"):
            vi, vj = T.axis.remap("SS", [i, j])
            L = T.meta_var(W[row0 + vi])
            D = T.meta_var(W[stats + row0 + vi])
            R = T.meta_var(W[2 * stats + row0 + vi])
            seen = T.meta_var(T.cast(vj, "int32") < n_seen[vi])
            P_ij = T.meta_var(softmax.exp2(S[vi, vj] - L) * R)
            P[vi, vj] = T.Select(seen, P_ij, ZERO)
            dS[vi, vj] = T.Select(seen, P_ij * (dP[vi, vj] - D), ZERO)


def is_odd(x: Any) -> Any:
    """1 for NaN and infinity, else 0. TVM folds x != x and x - x, so neither would do."""
    return T.Select(T.max(x, -x) < INF, T.int32(0), T.int32(1))


@T.inline
def find_odd_keys(c, K_j, odd_keys):
    """Some lane of odd_keys is 1 iff some K_j is NaN or infinite; the others are 0."""
    for lane in range(c.lanes):
        odd_keys[lane] = T.int32(0)
    for j, d, lane in T.grid(c.Bc, T.truncdiv(c.Dp, c.lanes), c.lanes):
        odd_keys[lane] = T.max(odd_keys[lane], is_odd(K_j[j, d * c.lanes + lane]))


@T.inline
def find_odd(c, W, row0, stats, odd_keys, odd):
    """Set odd to 1 iff a row or key of the block pair may be NaN or infinite."""
    for lane in range(c.lanes):
        odd[0] = T.max(odd[0], odd_keys[lane])
    for i in range(c.Br):
        # Q that is not finite makes L NaN, dO that is not finite makes D so.
        if W[row0 + i] != INF:
            odd[0] = T.max(odd[0], T.max(is_odd(W[row0 + i]), is_odd(W[stats + row0 + i])))


@T.inline
def add_seen_only(c, P, dS, Q_i, dO_i, K_j, dK_j, dV_j, W, dq0, n_seen):
    """Lines 12, 15 and 16 pair by pair: 0 NaN is NaN, so what is not seen must not take part."""
    for i in range(c.Br):
        for j in range(n_seen[i]):
            for d in range(c.Dv):
                dV_j[j, d] = dV_j[j, d] + P[i, j] * dO_i[i, d]
            for d in range(c.D):
                dK_j[j, d] = dK_j[j, d] + dS[i, j] * Q_i[i, d]
            for d in range(c.D):
                W[dq0 + i * c.Dp + d] = W[dq0 + i * c.Dp + d] + dS[i, j] * K_j[j, d]


@T.inline
def needed_products(
    c, P, dS, Q_i, dO_i, K_j, dK_j, dV_j, W, dq0, columns, need_dq, need_dk, need_dv
):
    """Lines 12, 15 and 16, the needed ones."""
    if need_dv != 0:
        add_transposed_product("dV", dV_j, P, dO_i, columns)
    if need_dk != 0:
        add_transposed_product("dK", dK_j, dS, Q_i, columns)
    if need_dq != 0:
        add_dq(c, W, dq0, dS, K_j, columns)


@T.inline
def store_rows(X, X_j, b, j0, hk, n_keys, D, scale):
    """Line 18: the key block's finished gradient."""
    for j, d in T.grid(n_keys, D):
        X[b, j0 + j, hk, d] = T.cast(X_j[j, d] * scale, X.dtype)


@T.inline
def store_dq(c, dQ, W, b, h, i0, dq0, split_stride, n_rows, n_splits, softmax_scale):
    """dQ_i, summed over the splits of the keys."""
    dQ_i = T.sblock_alloc_buffer((c.D,))
    for i in range(n_rows):
        for d in range(c.D):
            dQ_i[d] = ZERO
        for s in range(n_splits):
            for d in range(c.D):
                dQ_i[d] = dQ_i[d] + W[dq0 + s * split_stride + i * c.Dp + d]
        for d in range(c.D):
            dQ[b, i0 + i, h, d] = T.cast(dQ_i[d] * softmax_scale, c.dtype)


def program(c: Sizes) -> Any:
    """Algorithm 2 as block-level TensorIR, before any loop is tiled, vectorised or parallel."""
    one = T.int64(1)
    align = DTYPE_BYTES[c.dtype]

    @T.prim_func(s_tir=True)
    def backward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        do: T.handle,
        dlse: T.handle,
        dq: T.handle,
        dk: T.handle,
        dv: T.handle,
        workspace: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
        has_dlse: T.int32,
        need_dq: T.int32,
        need_dk: T.int32,
        need_dv: T.int32,
        splits: T.int32,
    ):
        T.func_attr({"global_symbol": "backward", "tirx.noalias": True})
        batch, seq_q, seq_kv = T.int64(), T.int64(), T.int64()
        heads, heads_kv = T.int64(), T.int64()
        qb, qs, qh = T.int64(), T.int64(), T.int64()
        kb, ks, kh = T.int64(), T.int64(), T.int64()
        vb, vs, vh = T.int64(), T.int64(), T.int64()
        ob, os, oh = T.int64(), T.int64(), T.int64()
        gb, gs, gh = T.int64(), T.int64(), T.int64()
        # What is not needed is a dummy of any size.
        l0, l1, l2 = T.int64(), T.int64(), T.int64()
        dq0, dq1, dq2 = T.int64(), T.int64(), T.int64()
        dqb, dqs, dqh = T.int64(), T.int64(), T.int64()
        dk0, dk1, dk2 = T.int64(), T.int64(), T.int64()
        dkb, dks, dkh = T.int64(), T.int64(), T.int64()
        dv0, dv1, dv2 = T.int64(), T.int64(), T.int64()
        dvb, dvs, dvh = T.int64(), T.int64(), T.int64()
        floats = T.int64()
        Q = T.match_buffer(
            q, (batch, seq_q, heads, c.D), c.dtype, strides=(qb, qs, qh, one), align=align
        )
        K = T.match_buffer(
            k, (batch, seq_kv, heads_kv, c.D), c.dtype, strides=(kb, ks, kh, one), align=align
        )
        V = T.match_buffer(
            v, (batch, seq_kv, heads_kv, c.Dv), c.dtype, strides=(vb, vs, vh, one), align=align
        )
        O = T.match_buffer(
            o, (batch, seq_q, heads, c.Dv), c.dtype, strides=(ob, os, oh, one), align=align
        )
        LSE = T.match_buffer(lse, (batch, heads, seq_q), "float32", align=4)
        dO = T.match_buffer(
            do, (batch, seq_q, heads, c.Dv), c.dtype, strides=(gb, gs, gh, one), align=align
        )
        dLSE = T.match_buffer(dlse, (l0, l1, l2), "float32", align=4)
        dQ = T.match_buffer(
            dq, (dq0, dq1, dq2, c.D), c.dtype, strides=(dqb, dqs, dqh, one), align=align
        )
        dK = T.match_buffer(
            dk, (dk0, dk1, dk2, c.D), c.dtype, strides=(dkb, dks, dkh, one), align=align
        )
        dV = T.match_buffer(
            dv, (dv0, dv1, dv2, c.Dv), c.dtype, strides=(dvb, dvs, dvh, one), align=align
        )
        # L, D and R of every row, then dQ of every split: W[L | D | R | dQ ...].
        W = T.match_buffer(workspace, (floats,), "float32", align=4)
        n_i: T.let = ceil_div(seq_q, c.Br)
        n_j: T.let = ceil_div(seq_kv, c.Bc)
        rows: T.let = n_i * c.Br
        stats: T.let = batch * heads * rows
        group: T.let = T.truncdiv(heads, T.max(heads_kv, one))
        n_splits: T.let = T.cast(splits, "int64")
        for task in range(batch * heads * n_i):
            with T.sblock("rows"):
                t = T.axis.spatial(batch * heads * n_i, task)
                T.reads()
                T.writes()
                loud = T.sblock_alloc_buffer((1,), "int32")
                b: T.let = T.truncdiv(t, heads * n_i)
                h: T.let = T.truncmod(T.truncdiv(t, n_i), heads)
                i0: T.let = T.truncmod(t, n_i) * c.Br
                row0: T.let = t * c.Br
                row_statistics(c, O, dO, LSE, dLSE, W, b, h, i0, row0, stats, seq_q, has_dlse)
                find_loud(c, W, row0, loud)
                if loud[0] != 0:
                    for _ in range(one):
                        with T.sblock("loud_rows"):
                            hk = T.axis.opaque(heads_kv, T.truncdiv(h, group))
                            T.reads()
                            T.writes()
                            exact_statistics(
                                c,
                                Q,
                                K,
                                W,
                                b,
                                h,
                                hk,
                                i0,
                                row0,
                                stats,
                                seq_q,
                                seq_kv,
                                causal_offset,
                                softmax_scale,
                            )
        for task in range(batch * heads_kv * n_splits):
            with T.sblock("keys"):
                t = T.axis.spatial(batch * heads_kv * n_splits, task)
                T.reads()
                T.writes()
                K_j = T.sblock_alloc_buffer((c.Bc, c.Dp))
                KT_j = T.sblock_alloc_buffer((c.D, c.Bc))
                VT_j = T.sblock_alloc_buffer((c.Dv, c.Bc))
                dK_j = T.sblock_alloc_buffer((c.Bc, c.Dp))
                dV_j = T.sblock_alloc_buffer((c.Bc, c.Dvp))
                Q_i = T.sblock_alloc_buffer((c.Br, c.Dp))
                dO_i = T.sblock_alloc_buffer((c.Br, c.Dvp))
                S = T.sblock_alloc_buffer((c.Br, c.Bc))
                dP = T.sblock_alloc_buffer((c.Br, c.Bc))
                P = T.sblock_alloc_buffer((c.Br, c.Bc))
                dS = T.sblock_alloc_buffer((c.Br, c.Bc))
                n_seen = T.sblock_alloc_buffer((c.Br,), "int32")
                odd_keys = T.sblock_alloc_buffer((c.lanes,), "int32")
                odd = T.sblock_alloc_buffer((1,), "int32")
                split: T.let = T.truncmod(t, n_splits)
                b: T.let = T.truncdiv(t, heads_kv * n_splits)
                hk: T.let = T.truncmod(T.truncdiv(t, n_splits), heads_kv)
                # This task's dQ in W: [group, rows, Dp].
                own: T.let = 3 * stats + ((split * batch + b) * heads + hk * group) * rows * c.Dp
                # Columns past the head dims: their products are never read, but must not be slow.
                clear("K_zero", K_j)
                clear("Q_zero", Q_i)
                clear("dO_zero", dO_i)
                if need_dq != 0:
                    for x in range(group * rows * c.Dp):
                        W[own + x] = ZERO
                for block in range(T.truncdiv(n_j - split + n_splits - 1, n_splits)):
                    with T.sblock("K_j"):
                        # Every n_splits-th: under a causal mask the early ones have more rows.
                        j0 = T.axis.opaque(seq_kv, (split + block * n_splits) * c.Bc)
                        T.reads()
                        T.writes()
                        n_keys: T.let = T.min(c.Bc, seq_kv - j0)
                        first: T.let = first_query_block(c, j0, seq_q, causal_offset)
                        load_keys(c, K, K_j, KT_j, b, hk, j0, n_keys)
                        load_values(c, V, VT_j, b, hk, j0, n_keys)
                        if c.causal:
                            find_odd_keys(c, K_j, odd_keys)
                        clear("dK_zero", dK_j)
                        clear("dV_zero", dV_j)
                        for g, block_i in T.grid(group, n_i - first):
                            with T.sblock("Q_i"):
                                vg = T.axis.opaque(group, g)
                                i0 = T.axis.opaque(rows, (first + block_i) * c.Br)
                                T.reads()
                                T.writes()
                                h: T.let = hk * group + vg
                                row0: T.let = (b * heads + h) * rows + i0
                                dq_i: T.let = own + (vg * rows + i0) * c.Dp
                                load_queries(c, Q, Q_i, W, b, h, i0, row0, softmax_scale)
                                load_rows(dO, dO_i, W, b, h, i0, row0, c.Dv)
                                # Keys of the block that some row sees, in whole tiles of S.
                                tiles: T.let = ceil_div(
                                    visible(c, i0 + c.Br - 1, j0, n_keys, causal_offset), c.unit
                                )
                                columns = T.meta_var(tiles * c.unit)
                                product("S", S, Q_i, KT_j, c.D, columns)
                                if need_dq + need_dk != 0:
                                    product("dP", dP, dO_i, VT_j, c.Dv, columns)
                                odd[0] = T.int32(0)
                                if visible(c, i0, j0, n_keys, causal_offset) < c.Bc:
                                    count_seen(c, W, n_seen, i0, j0, row0, n_keys, causal_offset)
                                    masked_probabilities(
                                        c, S, dP, P, dS, W, row0, stats, columns, n_seen
                                    )
                                    if c.causal:
                                        find_odd(c, W, row0, stats, odd_keys, odd)
                                else:
                                    probabilities(c, S, dP, P, dS, W, row0, stats, columns)
                                if odd[0] != 0:
                                    add_seen_only(
                                        c, P, dS, Q_i, dO_i, K_j, dK_j, dV_j, W, dq_i, n_seen
                                    )
                                else:
                                    needed_products(
                                        c,
                                        P,
                                        dS,
                                        Q_i,
                                        dO_i,
                                        K_j,
                                        dK_j,
                                        dV_j,
                                        W,
                                        dq_i,
                                        columns,
                                        need_dq,
                                        need_dk,
                                        need_dv,
                                    )
                        if need_dk != 0:
                            # Q_i has the scale in it, and log2 e.
                            store_rows(dK, dK_j, b, j0, hk, n_keys, c.D, LN_2)
                        if need_dv != 0:
                            store_rows(dV, dV_j, b, j0, hk, n_keys, c.Dv, ONE)
        for task in range(T.Select(need_dq != 0, batch * heads * n_i, T.int64(0))):
            with T.sblock("dQ_i"):
                t = T.axis.spatial(batch * heads * n_i, task)
                T.reads()
                T.writes()
                b: T.let = T.truncdiv(t, heads * n_i)
                h: T.let = T.truncmod(T.truncdiv(t, n_i), heads)
                i0: T.let = T.truncmod(t, n_i) * c.Br
                store_dq(
                    c,
                    dQ,
                    W,
                    b,
                    h,
                    i0,
                    3 * stats + t * c.Br * c.Dp,
                    stats * c.Dp,
                    T.min(c.Br, seq_q - i0),
                    n_splits,
                    softmax_scale,
                )

    return backward


PRODUCTS = {"S": "S", "S_rows": "S", "dP": "dP", "dV": "dV", "dK": "dK", "dQ": "dQ"}
LANE_BLOCKS = (
    "K_zero",
    "Q_zero",
    "dO_zero",
    "dK_zero",
    "dV_zero",
    "P",
    "P_masked",
    "online",
)


def apply_tiles(sch: Any, variant: Variant, schedule: CpuBackward) -> None:
    """Register tiles of the products, vectors everywhere, tasks in parallel."""
    tiles = schedule.tiles(variant)
    found = sblocks(sch)
    for name, tile in PRODUCTS.items():
        row, column, inner = sch.get_loops(found[name])[-3:]
        n_rows, n_vectors = tiles[tile]
        row_tile, row = sch.split(row, [None, n_rows])
        column_tile, vector, lane = sch.split(column, [None, n_vectors, schedule.lanes])
        sch.reorder(column_tile, row_tile, inner, row, vector, lane)
        if name + "_add" in found:
            sch.reverse_compute_at(found[name + "_add"], row_tile)
            add_row, add_column = sch.get_loops(found[name + "_add"])[-2:]
            add_vector, add_lane = sch.split(add_column, [None, schedule.lanes])
            sch.vectorize(add_lane)
            sch.unroll(add_vector)
            sch.unroll(add_row)
        sch.vectorize(lane)
        sch.unroll(vector)
        sch.unroll(row)
        sch.decompose_reduction(found[name], inner)
    for name in LANE_BLOCKS:
        *_, column = sch.get_loops(found[name])
        _, lane = sch.split(column, [None, schedule.lanes])
        sch.vectorize(lane)
    row, inner = sch.get_loops(found["D"])[-2:]
    row_tile, row = sch.split(row, [None, 4])
    sch.reorder(row_tile, inner, row)
    sch.unroll(row)
    sch.decompose_reduction(found["D"], inner)
    for name in ("rows", "keys", "dQ_i"):
        sch.parallel(sch.get_loops(found[name])[0])
