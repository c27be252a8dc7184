"""Algorithm 2 for CPUs: five GEMMs a block pair, keys or head columns on the vector lanes.

The plan, its floor and the measurements behind it are in cpu_bwd.md.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.script import tirx as T

from fa2tvm.device import Device
from fa2tvm.kernels import softmax
from fa2tvm.problem import DTYPE_BYTES, Variant
from fa2tvm.schedule import CpuBackward


def build(variant: Variant, schedule: CpuBackward, device: Device) -> tvm.IRModule:
    """The module of the backward pass; its one function is `backward`.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 2.
    """
    sch = s_tir.Schedule(program(variant, schedule))
    apply_tiles(sch, variant, schedule)
    return tvm.IRModule({"backward": sch.mod["main"]})


def program(variant: Variant, schedule: CpuBackward) -> Any:
    """Algorithm 2 as block-level TensorIR, before any loop is tiled, vectorised or unrolled."""
    dtype, align = variant.dtype, DTYPE_BYTES[variant.dtype]
    causal = variant.causal
    i64, f32 = T.int64, "float32"
    D, Dv = i64(variant.head_dim_qk), i64(variant.head_dim_v)
    D_pad, Dv_pad = (i64(schedule.padded(d)) for d in (variant.head_dim_qk, variant.head_dim_v))
    BR, BC = i64(schedule.block_q), i64(schedule.block_kv)
    zero, one = i64(0), i64(1)
    f_zero = T.float32(0)
    infinity = T.float32(float("inf"))

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
        scratch: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
        has_dlse: T.int32,
        need_dq: T.int32,
        need_dk: T.int32,
        need_dv: T.int32,
        splits: T.int32,
    ):
        T.func_attr({"global_symbol": "backward", "tirx.noalias": True})
        batch, seq_q, seq_kv, heads, heads_kv = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
        qs0, qs1, qs2 = T.int64(), T.int64(), T.int64()
        ks0, ks1, ks2 = T.int64(), T.int64(), T.int64()
        vs0, vs1, vs2 = T.int64(), T.int64(), T.int64()
        os0, os1, os2 = T.int64(), T.int64(), T.int64()
        dos0, dos1, dos2 = T.int64(), T.int64(), T.int64()
        # A gradient that is not needed is passed as a dummy, so its sizes are its own.
        dls = [T.int64() for _ in range(3)]
        dqs = [T.int64() for _ in range(6)]
        dks = [T.int64() for _ in range(6)]
        dvs = [T.int64() for _ in range(6)]
        floats = T.int64()
        Q = T.match_buffer(q, (batch, seq_q, heads, D), dtype, strides=(qs0, qs1, qs2, one), align=align)
        K = T.match_buffer(k, (batch, seq_kv, heads_kv, D), dtype, strides=(ks0, ks1, ks2, one), align=align)
        V = T.match_buffer(v, (batch, seq_kv, heads_kv, Dv), dtype, strides=(vs0, vs1, vs2, one), align=align)
        O = T.match_buffer(o, (batch, seq_q, heads, Dv), dtype, strides=(os0, os1, os2, one), align=align)
        LSE = T.match_buffer(lse, (batch, heads, seq_q), f32, align=4)
        dO = T.match_buffer(do, (batch, seq_q, heads, Dv), dtype, strides=(dos0, dos1, dos2, one), align=align)
        dLSE = T.match_buffer(dlse, (dls[0], dls[1], dls[2]), f32, align=4)
        dQ = T.match_buffer(dq, (dqs[0], dqs[1], dqs[2], D), dtype, strides=(dqs[3], dqs[4], dqs[5], one), align=align)
        dK = T.match_buffer(dk, (dks[0], dks[1], dks[2], D), dtype, strides=(dks[3], dks[4], dks[5], one), align=align)
        dV = T.match_buffer(dv, (dvs[0], dvs[1], dvs[2], Dv), dtype, strides=(dvs[3], dvs[4], dvs[5], one), align=align)
        W = T.match_buffer(scratch, (floats,), f32, align=4)
        # W: L in log2 units [batch, heads, rows], D [batch, heads, rows], dQ [splits, batch, heads, rows, D_pad].
        n_i = T.meta_var(_ceil(seq_q, BR))
        n_j = T.meta_var(_ceil(seq_kv, BC))
        rows = T.meta_var(_ceil(seq_q, BR) * BR)
        stats = T.meta_var(batch * heads * rows)
        group = T.meta_var(T.truncdiv(heads, T.max(heads_kv, one)))
        n_splits = T.meta_var(T.cast(splits, "int64"))

        for task in range(batch * heads * n_i):
            with T.sblock("D_i"):
                t = T.axis.spatial(batch * heads * n_i, task)
                T.reads()
                T.writes()
                bh = T.meta_var(T.truncdiv(t, n_i))
                i0 = T.meta_var(T.truncmod(t, n_i) * BR)
                b = T.meta_var(T.truncdiv(bh, heads))
                h = T.meta_var(T.truncmod(bh, heads))
                for r in range(BR):
                    if i0 + r < seq_q:
                        W[stats + bh * rows + i0 + r] = f_zero
                        for c in range(Dv):
                            W[stats + bh * rows + i0 + r] = W[stats + bh * rows + i0 + r] + T.cast(dO[b, i0 + r, h, c], f32) * T.cast(O[b, i0 + r, h, c], f32)
                        if has_dlse != 0:
                            W[stats + bh * rows + i0 + r] = W[stats + bh * rows + i0 + r] - dLSE[b, h, i0 + r]
                        W[bh * rows + i0 + r] = _marked(LSE[b, h, i0 + r])
                    else:
                        W[stats + bh * rows + i0 + r] = f_zero
                        W[bh * rows + i0 + r] = infinity

        for task in range(batch * heads_kv * n_splits):
            with T.sblock("task"):
                t = T.axis.spatial(batch * heads_kv * n_splits, task)
                T.reads()
                T.writes()
                K_j = T.sblock_alloc_buffer((BC, D_pad), f32)
                KT_j = T.sblock_alloc_buffer((D, BC), f32)
                VT_j = T.sblock_alloc_buffer((Dv, BC), f32)
                dK_j = T.sblock_alloc_buffer((BC, D_pad), f32)
                dV_j = T.sblock_alloc_buffer((BC, Dv_pad), f32)
                Q_i = T.sblock_alloc_buffer((BR, D_pad), f32)
                dO_i = T.sblock_alloc_buffer((BR, Dv_pad), f32)
                S = T.sblock_alloc_buffer((BR, BC), f32)
                dP = T.sblock_alloc_buffer((BR, BC), f32)
                P = T.sblock_alloc_buffer((BR, BC), f32)
                dS = T.sblock_alloc_buffer((BR, BC), f32)
                for _ in range(one):
                    with T.sblock("head"):
                        split_ = T.meta_var(T.truncmod(t, n_splits))
                        b_ = T.meta_var(T.truncdiv(t, n_splits * heads_kv))
                        hk_ = T.meta_var(T.truncmod(T.truncdiv(t, n_splits), heads_kv))
                        split = T.axis.opaque(n_splits, split_)
                        b = T.axis.opaque(batch, b_)
                        hk = T.axis.opaque(heads_kv, hk_)
                        # First float of this task's dQ in W; its heads follow one another.
                        dq0 = T.axis.opaque(floats, 2 * stats + (split_ * batch * heads + b_ * heads + hk_ * group) * rows * D_pad)
                        T.reads()
                        T.writes()
                        for x in range(group * rows * D_pad):
                            W[dq0 + x] = f_zero
                        for j_ in range(T.truncdiv(n_j - split + n_splits - 1, n_splits)):
                            with T.sblock("K_j"):
                                j0 = T.axis.opaque(seq_kv, (split + j_ * n_splits) * BC)
                                n_keys = T.axis.opaque(BC + 1, T.min(BC, seq_kv - (split + j_ * n_splits) * BC))
                                T.reads()
                                T.writes()
                                for y in range(BC):
                                    if y < n_keys:
                                        for x in range(D):
                                            K_j[y, x] = T.cast(K[b, j0 + y, hk, x], f32)
                                    else:
                                        for x in range(D):
                                            K_j[y, x] = f_zero
                                for y, x in T.grid(BC, D):
                                    KT_j[x, y] = K_j[y, x] * (softmax_scale * T.float32(softmax.LOG2_E))
                                for y in range(BC):
                                    if y < n_keys:
                                        for x in range(Dv):
                                            VT_j[x, y] = T.cast(V[b, j0 + y, hk, x], f32)
                                    else:
                                        for x in range(Dv):
                                            VT_j[x, y] = f_zero
                                for y, x in T.grid(BC, D_pad):
                                    with T.sblock("dK_zero"):
                                        vj, vd = T.axis.remap("SS", [y, x])
                                        dK_j[vj, vd] = f_zero
                                for y, x in T.grid(BC, Dv_pad):
                                    with T.sblock("dV_zero"):
                                        vj, vd = T.axis.remap("SS", [y, x])
                                        dV_j[vj, vd] = f_zero
                                for g, i_ in T.grid(group, n_i - _first_i(causal, j0, causal_offset, seq_q, BR)):
                                    with T.sblock("Q_i"):
                                        first = T.meta_var((i_ + _first_i(causal, j0, causal_offset, seq_q, BR)) * BR)
                                        h = T.axis.opaque(heads, hk * group + g)
                                        i0 = T.axis.opaque(rows, first)
                                        # Where W holds L of these rows, and their dQ.
                                        row0 = T.axis.opaque(stats, (b * heads + hk * group + g) * rows + first)
                                        dqi = T.axis.opaque(floats, dq0 + (g * rows + first) * D_pad)
                                        T.reads()
                                        T.writes()
                                        for y in range(BR):
                                            if W[row0 + y] != infinity:
                                                for x in range(D):
                                                    Q_i[y, x] = T.cast(Q[b, i0 + y, h, x], f32)
                                                for x in range(Dv):
                                                    dO_i[y, x] = T.cast(dO[b, i0 + y, h, x], f32)
                                            else:
                                                for x in range(D):
                                                    Q_i[y, x] = f_zero
                                                for x in range(Dv):
                                                    dO_i[y, x] = f_zero
                                        for i, j, d in T.grid(BR, BC, D):
                                            with T.sblock("S"):
                                                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                                                with T.init():
                                                    S[vi, vj] = f_zero
                                                S[vi, vj] = S[vi, vj] + Q_i[vi, vd] * KT_j[vd, vj]
                                        for i, j, d in T.grid(BR, BC, Dv):
                                            with T.sblock("dP"):
                                                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                                                with T.init():
                                                    dP[vi, vj] = f_zero
                                                dP[vi, vj] = dP[vi, vj] + dO_i[vi, vd] * VT_j[vd, vj]
                                        if _needs_mask(causal, i0, j0, n_keys, BC, causal_offset):
                                            for i, j in T.grid(BR, BC):
                                                with T.sblock("P_masked"):
                                                    vi, vj = T.axis.remap("SS", [i, j])
                                                    P[vi, vj] = T.Select(
                                                        T.cast(vj, "int32") < T.cast(_visible(causal, i0 + vi, j0, n_keys, causal_offset), "int32"),
                                                        softmax.exp2(S[vi, vj] - W[row0 + vi]), f_zero)
                                            for i, j in T.grid(BR, BC):
                                                with T.sblock("dS_masked"):
                                                    vi, vj = T.axis.remap("SS", [i, j])
                                                    dS[vi, vj] = T.Select(
                                                        T.cast(vj, "int32") < T.cast(_visible(causal, i0 + vi, j0, n_keys, causal_offset), "int32"),
                                                        P[vi, vj] * (dP[vi, vj] - W[stats + row0 + vi]), f_zero)
                                        else:
                                            for i, j in T.grid(BR, BC):
                                                with T.sblock("P_full"):
                                                    vi, vj = T.axis.remap("SS", [i, j])
                                                    P[vi, vj] = softmax.exp2(S[vi, vj] - W[row0 + vi])
                                            for i, j in T.grid(BR, BC):
                                                with T.sblock("dS_full"):
                                                    vi, vj = T.axis.remap("SS", [i, j])
                                                    dS[vi, vj] = P[vi, vj] * (dP[vi, vj] - W[stats + row0 + vi])
                                        if need_dv != 0:
                                            for j, d, i in T.grid(BC, Dv_pad, BR):
                                                with T.sblock("dV"):
                                                    vj, vd, vi = T.axis.remap("SSR", [j, d, i])
                                                    with T.init():
                                                        dV_j[vj, vd] = dV_j[vj, vd]
                                                    dV_j[vj, vd] = dV_j[vj, vd] + P[vi, vj] * dO_i[vi, vd]
                                        if need_dk != 0:
                                            for j, d, i in T.grid(BC, D_pad, BR):
                                                with T.sblock("dK"):
                                                    vj, vd, vi = T.axis.remap("SSR", [j, d, i])
                                                    with T.init():
                                                        dK_j[vj, vd] = dK_j[vj, vd]
                                                    dK_j[vj, vd] = dK_j[vj, vd] + dS[vi, vj] * Q_i[vi, vd]
                                        if need_dq != 0:
                                            for i, d, j in T.grid(BR, D_pad, BC):
                                                with T.sblock("dQ"):
                                                    vi, vd, vj = T.axis.remap("SSR", [i, d, j])
                                                    with T.init():
                                                        W[dqi + vi * D_pad + vd] = W[dqi + vi * D_pad + vd]
                                                    W[dqi + vi * D_pad + vd] = W[dqi + vi * D_pad + vd] + dS[vi, vj] * K_j[vj, vd]
                                if need_dk != 0:
                                    for y, x in T.grid(n_keys, D):
                                        dK[b, j0 + y, hk, x] = T.cast(dK_j[y, x] * softmax_scale, dtype)
                                if need_dv != 0:
                                    for y, x in T.grid(n_keys, Dv):
                                        dV[b, j0 + y, hk, x] = T.cast(dV_j[y, x], dtype)

        for task in range(T.Select(need_dq != 0, batch * heads * n_i, zero)):
            with T.sblock("dQ_i"):
                t = T.axis.spatial(batch * heads * n_i, task)
                T.reads()
                T.writes()
                sum_ = T.sblock_alloc_buffer((D,), f32)
                for r in range(T.min(BR, seq_q - T.truncmod(t, n_i) * BR)):
                    for x in range(D):
                        sum_[x] = f_zero
                    for s in range(n_splits):
                        for x in range(D):
                            sum_[x] = sum_[x] + W[2 * stats + ((s * batch * heads + T.truncdiv(t, n_i)) * rows + T.truncmod(t, n_i) * BR + r) * D_pad + x]
                    for x in range(D):
                        dQ[T.truncdiv(T.truncdiv(t, n_i), heads), T.truncmod(t, n_i) * BR + r, T.truncmod(T.truncdiv(t, n_i), heads), x] = T.cast(sum_[x] * softmax_scale, dtype)

    return backward


def _ceil(a: Any, b: Any) -> Any:
    return T.truncdiv(a + (b - 1), b)


def _marked(lse: Any) -> Any:
    """LSE in log2 units; +inf for a row that sees nothing, so that exp2(S - L) is 0 there."""
    nothing = lse == T.float32(float("-inf"))
    nan = lse == T.float32(float("inf"))
    scaled = lse * T.float32(softmax.LOG2_E)
    return T.Select(nothing, T.float32(float("inf")), T.Select(nan, T.float32(float("nan")), scaled))


def _first_i(causal: bool, j0: Any, causal_offset: Any, seq_q: Any, block_q: Any) -> Any:
    """The first query block that sees key j0."""
    if not causal:
        return T.int64(0)
    row = T.max(T.int64(0), T.min(j0 - causal_offset, _ceil(seq_q, block_q) * block_q))
    return T.truncdiv(row, block_q)


def _visible(causal: bool, i: Any, j0: Any, n_keys: Any, causal_offset: Any) -> Any:
    """How many keys of the block at j0 row i sees."""
    if not causal:
        return n_keys
    return T.max(T.int64(0), T.min(n_keys, i + causal_offset + 1 - j0))


def _needs_mask(causal: bool, i0: Any, j0: Any, n_keys: Any, block_kv: Any, causal_offset: Any) -> Any:
    if not causal:
        return n_keys < block_kv
    return T.Or(n_keys < block_kv, i0 + causal_offset + 1 - j0 < block_kv)


def apply_tiles(sch: Any, variant: Variant, schedule: CpuBackward) -> None:
    """Register tiles: unrolled rows, vectors of the native width; tasks in parallel."""
    lanes = schedule.lanes
    tiles = schedule.tiles(variant)
    for name, (n_rows, n_vectors) in tiles.items():
        block = sch.get_sblock(name)
        row, column, inner = sch.get_loops(block)[-3:]
        row_tile, row = sch.split(row, [None, n_rows])
        column_tile, vector, lane = sch.split(column, [None, n_vectors, lanes])
        sch.reorder(column_tile, row_tile, inner, row, vector, lane)
        sch.vectorize(lane)
        sch.unroll(vector)
        sch.unroll(row)
        sch.decompose_reduction(block, inner)
    for name in ("dK_zero", "dV_zero", "P_masked", "dS_masked", "P_full", "dS_full"):
        *_, column = sch.get_loops(sch.get_sblock(name))
        _, lane = sch.split(column, [None, lanes])
        sch.vectorize(lane)
    for name in ("D_i", "task", "dQ_i"):
        sch.parallel(sch.get_loops(sch.get_sblock(name))[0])
