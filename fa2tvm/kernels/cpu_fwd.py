"""Algorithm 1 for CPUs: queries on the vector lanes, keys and value columns broadcast.

The plan, its floor and the measurements behind it are in cpu_fwd.md.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir
from tvm.script import tirx as T

from fa2tvm.device import Device
from fa2tvm.kernels import softmax
from fa2tvm.problem import DTYPE_BYTES, Variant
from fa2tvm.schedule import CpuForward


def build(variant: Variant, schedule: CpuForward, device: Device) -> tvm.IRModule:
    """The module of the forward pass; its one function is `forward`.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
    """
    sch = s_tir.Schedule(program(variant, schedule))
    apply_tiles(sch, device.lanes, variant.causal)
    return tvm.IRModule({"forward": sch.mod["main"]})


def _ceil(a: Any, b: Any) -> Any:
    return T.truncdiv(a + (b - 1), b)


def program(variant: Variant, schedule: CpuForward) -> Any:
    """Algorithm 1 as block-level TensorIR, before any loop is vectorised or unrolled."""
    dtype, align = variant.dtype, DTYPE_BYTES[variant.dtype]
    causal = variant.causal
    i64 = T.int64
    D, Dv = i64(variant.head_dim_qk), i64(variant.head_dim_v)
    BR, BC = i64(schedule.block_q), i64(schedule.block_kv)
    W, RS, RO = i64(schedule.panel), i64(schedule.s_rows), i64(schedule.o_rows)
    keys = i64(-(-schedule.block_kv // schedule.s_rows) * schedule.s_rows)
    o_tiles = i64(-(-variant.head_dim_v // schedule.o_rows))
    n_panels_max = i64(schedule.block_q // schedule.panel)
    one = i64(1)
    minus_inf = T.float32(float("-inf"))
    f32 = "float32"

    @T.prim_func(s_tir=True)
    def forward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
    ):
        T.func_attr({"global_symbol": "forward", "tirx.noalias": True})
        batch = T.int64()
        seq_q = T.int64()
        seq_kv = T.int64()
        heads = T.int64()
        heads_kv = T.int64()
        qs0, qs1, qs2 = T.int64(), T.int64(), T.int64()
        ks0, ks1, ks2 = T.int64(), T.int64(), T.int64()
        vs0, vs1, vs2 = T.int64(), T.int64(), T.int64()
        os0, os1, os2 = T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (batch, seq_q, heads, D), dtype, strides=(qs0, qs1, qs2, one), align=align)
        K = T.match_buffer(k, (batch, seq_kv, heads_kv, D), dtype, strides=(ks0, ks1, ks2, one), align=align)
        V = T.match_buffer(v, (batch, seq_kv, heads_kv, Dv), dtype, strides=(vs0, vs1, vs2, one), align=align)
        O = T.match_buffer(o, (batch, seq_q, heads, Dv), dtype, strides=(os0, os1, os2, one), align=align)
        LSE = T.match_buffer(lse, (batch, heads, seq_q), f32, align=4)
        for task in range(batch * heads * _ceil(seq_q, BR)):
            with T.sblock("task"):
                t = T.axis.spatial(batch * heads * _ceil(seq_q, BR), task)
                T.reads()
                T.writes()
                QT = T.sblock_alloc_buffer((n_panels_max, D, W), f32)
                OT = T.sblock_alloc_buffer((n_panels_max, o_tiles * RO, W), f32)
                m = T.sblock_alloc_buffer((n_panels_max, W), f32)
                l = T.sblock_alloc_buffer((n_panels_max, W), f32)
                K_j = T.sblock_alloc_buffer((keys, D), f32)
                V_j = T.sblock_alloc_buffer((o_tiles, BC, RO), f32)
                S = T.sblock_alloc_buffer((keys, W), f32)
                alpha = T.sblock_alloc_buffer((W,), f32)
                m_tile = T.sblock_alloc_buffer((_ceil(BC, RS), W), f32)
                m_new = T.sblock_alloc_buffer((W,), f32)
                m_safe = T.sblock_alloc_buffer((W,), f32)
                l_new = T.sblock_alloc_buffer((W,), f32)
                for _ in range(one):
                    with T.sblock("Q_i"):
                        n_blocks = T.meta_var(_ceil(seq_q, BR))
                        bh = T.meta_var(T.truncdiv(t, n_blocks))
                        u = T.meta_var(T.truncmod(t, n_blocks))
                        first_row = T.meta_var(BR * T.Select(u % 2 == 0, T.truncdiv(u, i64(2)), n_blocks - 1 - T.truncdiv(u, i64(2))))
                        i0 = T.axis.spatial(seq_q, first_row)
                        b = T.axis.spatial(batch, T.truncdiv(bh, heads))
                        h = T.axis.spatial(heads, T.truncmod(bh, heads))
                        hk = T.axis.spatial(heads_kv, T.truncdiv(T.truncmod(bh, heads), T.truncdiv(heads, heads_kv)))
                        n_panels = T.axis.spatial(n_panels_max + 1, _ceil(T.min(BR, seq_q - first_row), W))
                        T.reads()
                        T.writes()
                        for p_ in range(n_panels):
                            with T.sblock("QT"):
                                p = T.axis.spatial(n_panels, p_)
                                T.reads()
                                T.writes()
                                for ii, d in T.grid(W, D):
                                    QT[p, d, ii] = T.cast(Q[b, T.min(i0 + p * W + ii, seq_q - 1), h, d], f32) * (softmax_scale * T.float32(softmax.LOG2_E))
                                for r, ii in T.grid(o_tiles * RO, W):
                                    with T.sblock("OT_zero"):
                                        vr, vi = T.axis.remap("SS", [r, ii])
                                        OT[p, vr, vi] = T.float32(0)
                                for ii in range(W):
                                    with T.sblock("ml_zero"):
                                        vi = T.axis.remap("S", [ii])
                                        m[p, vi] = minus_inf
                                        l[p, vi] = T.float32(0)
                        for j_ in range(_ceil(_visible(causal, T.min(i0 + BR, seq_q) - 1, causal_offset, seq_kv), BC)):
                            with T.sblock("K_j"):
                                j = T.axis.opaque(_ceil(seq_kv, BC), j_)
                                j0 = T.axis.opaque(seq_kv, j_ * BC)
                                n_keys = T.axis.opaque(BC + 1, T.min(BC, seq_kv - j_ * BC))
                                T.reads()
                                T.writes()
                                for jj in range(_ceil(n_keys, RS) * RS):
                                    for dd in range(D):
                                        with T.sblock("K_pack"):
                                            vj = T.axis.spatial(keys, jj)
                                            vd = T.axis.spatial(D, dd)
                                            K_j[vj, vd] = T.cast(K[b, j0 + T.min(vj, n_keys - 1), hk, vd], f32)
                                for jj in range(n_keys):
                                    for dd in range(Dv):
                                        with T.sblock("V_pack"):
                                            vj = T.axis.spatial(BC, jj)
                                            vd = T.axis.spatial(Dv, dd)
                                            V_j[T.truncdiv(vd, RO), vj, T.truncmod(vd, RO)] = T.cast(V[b, j0 + vj, hk, vd], f32)
                                for p_ in range(n_panels):
                                    with T.sblock("panel"):
                                        p = T.axis.spatial(n_panels, p_)
                                        ip = T.axis.spatial(seq_q, i0 + p_ * W)
                                        n_seen = T.axis.spatial(BC + 1, T.max(T.min(n_keys, _visible(causal, i0 + p_ * W + W - 1, causal_offset, seq_kv) - j0), i64(0)))
                                        n_all = T.axis.spatial(BC + 1, T.max(T.min(n_keys, _visible(causal, i0 + p_ * W, causal_offset, seq_kv) - j0), i64(0)))
                                        T.reads()
                                        T.writes()
                                        for jt_ in range(_ceil(n_seen, RS)):
                                            with T.sblock("S_tile"):
                                                jt = T.axis.spatial(_ceil(BC, RS), jt_)
                                                T.reads()
                                                T.writes()
                                                S_frag = T.sblock_alloc_buffer((RS, W), f32, scope="local")
                                                for d, jj, ii in T.grid(D, RS, W):
                                                    with T.sblock("S_update"):
                                                        vd, vj, vi = T.axis.remap("RSS", [d, jj, ii])
                                                        with T.init():
                                                            S_frag[vj, vi] = T.float32(0)
                                                        S_frag[vj, vi] += K_j[jt * RS + vj, vd] * QT[p, vd, vi]
                                                if causal:
                                                    if jt * RS + RS > n_all:
                                                        for jj, ii in T.grid(RS, W):
                                                            with T.sblock("S_mask"):
                                                                vj, vi = T.axis.remap("SS", [jj, ii])
                                                                S[jt * RS + vj, vi] = T.Select(
                                                                    T.cast(jt * RS + vj, "int32") <= T.cast(ip + causal_offset - j0, "int32") + T.cast(vi, "int32"),
                                                                    S_frag[vj, vi], minus_inf)
                                                    else:
                                                        for jj, ii in T.grid(RS, W):
                                                            with T.sblock("S_store"):
                                                                vj, vi = T.axis.remap("SS", [jj, ii])
                                                                S[jt * RS + vj, vi] = S_frag[vj, vi]
                                                else:
                                                    for jj, ii in T.grid(RS, W):
                                                        with T.sblock("S_store"):
                                                            vj, vi = T.axis.remap("SS", [jj, ii])
                                                            S[jt * RS + vj, vi] = S_frag[vj, vi]
                                                for jj, ii in T.grid(RS, W):
                                                    with T.sblock("S_max"):
                                                        vj, vi = T.axis.remap("RS", [jj, ii])
                                                        with T.init():
                                                            m_tile[jt, vi] = minus_inf
                                                        m_tile[jt, vi] = T.max(m_tile[jt, vi], S[jt * RS + vj, vi])
                                        for jt, ii in T.grid(_ceil(n_seen, RS), W):
                                            with T.sblock("m_new"):
                                                vt = T.axis.reduce(_ceil(n_seen, RS), jt)
                                                vi = T.axis.spatial(W, ii)
                                                with T.init():
                                                    m_new[vi] = m[p, vi]
                                                m_new[vi] = T.max(m_new[vi], m_tile[vt, vi])
                                        for ii in range(W):
                                            with T.sblock("m_safe"):
                                                vi = T.axis.remap("S", [ii])
                                                m_safe[vi] = T.Select(m_new[vi] == minus_inf, T.float32(0), m_new[vi])
                                        for ii in range(W):
                                            with T.sblock("alpha"):
                                                vi = T.axis.remap("S", [ii])
                                                alpha[vi] = softmax.exp2(m[p, vi] - m_safe[vi])
                                        for ii in range(W):
                                            with T.sblock("m"):
                                                vi = T.axis.remap("S", [ii])
                                                m[p, vi] = m_new[vi]
                                        for jj in range(n_seen):
                                            for ii in range(W):
                                                with T.sblock("P"):
                                                    vj = T.axis.spatial(BC, jj)
                                                    vi = T.axis.spatial(W, ii)
                                                    T.reads(m_safe[vi])
                                                    T.writes(S[vj, vi])
                                                    S[vj, vi] = softmax.exp2(S[vj, vi] - m_safe[vi])
                                            for ii in range(W):
                                                with T.sblock("l_new"):
                                                    vj = T.axis.reduce(BC, jj)
                                                    vi = T.axis.spatial(W, ii)
                                                    with T.init():
                                                        l_new[vi] = l[p, vi] * alpha[vi]
                                                    l_new[vi] = l_new[vi] + S[vj, vi]
                                        for ii in range(W):
                                            with T.sblock("l"):
                                                vi = T.axis.remap("S", [ii])
                                                l[p, vi] = l_new[vi]
                                        for dt_ in range(o_tiles):
                                            with T.sblock("O_tile"):
                                                dt = T.axis.spatial(o_tiles, dt_)
                                                T.reads()
                                                T.writes()
                                                O_frag = T.sblock_alloc_buffer((RO, W), f32, scope="local")
                                                for jj in range(n_seen):
                                                    for r, ii in T.grid(RO, W):
                                                        with T.sblock("O_update"):
                                                            vj = T.axis.reduce(n_seen, jj)
                                                            vr, vi = T.axis.remap("SS", [r, ii])
                                                            with T.init():
                                                                O_frag[vr, vi] = OT[p, dt * RO + vr, vi] * alpha[vi]
                                                            O_frag[vr, vi] += V_j[dt, vj, vr] * S[vj, vi]
                                                for r, ii in T.grid(RO, W):
                                                    with T.sblock("O_store"):
                                                        vr, vi = T.axis.remap("SS", [r, ii])
                                                        OT[p, dt * RO + vr, vi] = O_frag[vr, vi]
                        for p_ in range(n_panels):
                            with T.sblock("O_i"):
                                p = T.axis.spatial(n_panels, p_)
                                ip = T.axis.spatial(seq_q, i0 + p_ * W)
                                T.reads()
                                T.writes()
                                for ii in range(T.min(W, seq_q - ip)):
                                    for d in range(Dv):
                                        O[b, ip + ii, h, d] = T.cast(T.Select(l[p, ii] == T.float32(0), T.float32(0), OT[p, d, ii] / l[p, ii]), dtype)
                                    LSE[b, h, ip + ii] = m[p, ii] * T.float32(softmax.LN_2) + softmax.log(l[p, ii])

    return forward


def _visible(causal: bool, row: Any, causal_offset: Any, seq_kv: Any) -> Any:
    if not causal:
        return seq_kv
    return T.max(T.min(row + causal_offset + 1, seq_kv), T.int64(0))


def apply_tiles(sch: Any, lanes: int, causal: bool) -> None:
    """Register tiles: unrolled rows, vectors of the native width; tasks in parallel."""
    names = ["OT_zero", "ml_zero", "S_update", "S_store", "S_max", "m_new", "m_safe", "alpha", "m",
             "P", "l_new", "l", "O_update", "O_store"]
    if causal:
        names.append("S_mask")
    for name in names:
        block = sch.get_sblock(name)
        *outer, i = sch.get_loops(block)
        vectors, lane = sch.split(i, [None, lanes])
        sch.vectorize(lane)
        sch.unroll(vectors)
        if name in ("S_update", "O_update", "S_store", "S_max", "O_store", "S_mask"):
            sch.unroll(outer[-1])
        if name in ("S_update", "O_update", "S_max", "m_new", "l_new"):
            sch.decompose_reduction(block, outer[0])
    sch.parallel(sch.get_loops(sch.get_sblock("task"))[0])
