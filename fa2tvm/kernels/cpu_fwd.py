"""Algorithm 1 for CPUs: queries lie on the vector lanes, keys and value columns are broadcast.

One task is one query block of one head. Its rows are cut in panels of `panel` queries; S^T and
O^T of a panel are computed in register tiles of `s_rows` keys or `o_rows` value columns, so that
the softmax needs no reduction across lanes. The plan, its floor and the measurements behind it
are in cpu_fwd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir
from tvm.script import tirx as T

from fa2tvm import blocks
from fa2tvm.device import Device
from fa2tvm.kernels import softmax
from fa2tvm.kernels.script import ceil_div, clamp, lanes_of, partial_sum, sblocks, transpose
from fa2tvm.problem import DTYPE_BYTES, Variant
from fa2tvm.schedule import CpuForward

MINUS_INF = T.float32(float("-inf"))
ZERO = T.float32(0)


def build(variant: Variant, schedule: CpuForward, device: Device) -> tvm.IRModule:
    """The module of the forward pass; its one function is `forward`.

    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1.
    """
    sch = s_tir.Schedule(program(Sizes.of(variant, schedule, device)))
    apply_tiles(sch, device.lanes)
    return tvm.IRModule({"forward": sch.mod["main"]})


@dataclass(frozen=True)
class Sizes:
    """Compile-time sizes of the program as TensorIR int64 constants.

    `Wq` is the panel width; `wide` heads add up `Dsum` products at a time.
    """

    dtype: str
    causal: bool
    wide: bool
    Dsum: Any
    lanes: Any
    D: Any
    Dv: Any
    Br: Any
    Bc: Any
    Wq: Any
    Rs: Any
    Ro: Any
    panels: Any
    s_tiles: Any
    o_tiles: Any
    whole_o_tiles: Any

    @classmethod
    def of(cls, variant: Variant, schedule: CpuForward, device: Device) -> Sizes:
        """The sizes that a variant, a schedule and a device give."""
        sizes = {
            "lanes": device.lanes,
            "Dsum": partial_sum(variant.head_dim_qk),
            "D": variant.head_dim_qk,
            "Dv": variant.head_dim_v,
            "Br": schedule.block_q,
            "Bc": schedule.block_kv,
            "Wq": schedule.panel,
            "Rs": schedule.s_rows,
            "Ro": schedule.o_rows,
            "panels": blocks.ceil_div(schedule.block_q, schedule.panel),
            "s_tiles": blocks.ceil_div(schedule.block_kv, schedule.s_rows),
            "o_tiles": blocks.ceil_div(variant.head_dim_v, schedule.o_rows),
            "whole_o_tiles": variant.head_dim_v // schedule.o_rows,
        }
        wide = sizes["Dsum"] < variant.head_dim_qk
        constants = {k: T.int64(x) for k, x in sizes.items()}
        return cls(variant.dtype, variant.causal, wide, **constants)


def balanced(u: Any, n: Any) -> Any:
    """The u-th query block to run: first, last, second, last but one, ...

    Each thread takes one contiguous run of tasks, and under a causal mask the work of a block grows
    with its index.
    """
    # half for an even u, n - 1 - half for an odd one; as bits, because a Select costs the
    # simplifier 2 s at every use.
    half, odd = T.shift_right(u, T.int64(1)), T.bitwise_and(u, T.int64(1))
    return T.bitwise_xor(half, -odd) + n * odd


def query_tile(c, Q, QT, b, h, i0, p, i, d, seq_q, softmax_scale):
    """A square tile of Q_i, transposed in registers."""
    n = int(c.lanes)
    row = i0 + p * c.Wq + i
    rows = [
        T.cast(Q[b, T.min(row + r, seq_q - 1), h, lanes_of(d, n)], f"float32x{n}") for r in range(n)
    ]
    scale_log2 = T.Broadcast(softmax_scale * T.float32(softmax.LOG2_E), n)
    for r, column in enumerate(transpose(rows)):
        T.buffer_store(QT, column * scale_log2, [p, d + r, lanes_of(i, n)])


@T.inline
def load_query_panel(c, Q, QT, OT, m, l, b, h, i0, p, seq_q, softmax_scale):
    """Line 3-5: Q_i transposed and scaled to base 2; rows past the end repeat the last one."""
    for it, dt in T.grid(T.truncdiv(c.Wq, c.lanes), T.truncdiv(c.D, c.lanes)):
        query_tile(c, Q, QT, b, h, i0, p, it * c.lanes, dt * c.lanes, seq_q, softmax_scale)
    for i, dd in T.grid(c.Wq, T.truncmod(c.D, c.lanes)):
        QT[p, c.D - 1 - dd, i] = (
            T.cast(Q[b, T.min(i0 + p * c.Wq + i, seq_q - 1), h, c.D - 1 - dd], "float32")
            * softmax_scale
            * T.float32(softmax.LOG2_E)
        )
    for r, i in T.grid(c.o_tiles * c.Ro, c.Wq):
        with T.sblock("O_zero"):
            vr, vi = T.axis.remap("SS", [r, i])
            OT[p, vr, vi] = ZERO
    for i in range(c.Wq):
        with T.sblock("m_l_zero"):
            vi = T.axis.remap("S", [i])
            m[p, vi] = MINUS_INF
            l[p, vi] = ZERO


@T.inline
def load_key_block(c, K, V, K_j, V_j, b, hk, j0, n_keys):
    """Line 7: K_j and V_j widened into fixed strides; a tile past the end repeats the last key."""
    for jj in range(ceil_div(n_keys, c.Rs) * c.Rs):
        for d in range(c.D):
            K_j[jj, d] = T.cast(K[b, j0 + T.min(jj, n_keys - 1), hk, d], "float32")
    for jj in range(n_keys):
        for dt, r in T.grid(c.whole_o_tiles, c.Ro):
            with T.sblock("V_j"):
                vj = T.axis.spatial(c.Bc, jj)
                vt, vr = T.axis.remap("SS", [dt, r])
                V_j[vt, vj, vr] = T.cast(V[b, j0 + vj, hk, vt * c.Ro + vr], "float32")
        for r in range(c.Dv - c.whole_o_tiles * c.Ro):
            V_j[c.whole_o_tiles, jj, r] = T.cast(
                V[b, j0 + jj, hk, c.whole_o_tiles * c.Ro + r], "float32"
            )


@T.inline
def store_scores(c, S, S_frag, jt):
    """An S tile that every lane sees whole."""
    for jj, i in T.grid(c.Rs, c.Wq):
        with T.sblock("S_store"):
            vj, vi = T.axis.remap("SS", [jj, i])
            S[jt * c.Rs + vj, vi] = S_frag[vj, vi]


@T.inline
def multiply(c, K_j, QT, S_frag, p, jt, d0, n):
    """An S tile's products of n columns from d0."""
    for d, jj, i in T.grid(n, c.Rs, c.Wq):
        with T.sblock("S_update"):
            vd, vj, vi = T.axis.remap("RSS", [d, jj, i])
            with T.init():
                S_frag[vj, vi] = ZERO
            S_frag[vj, vi] += K_j[jt * c.Rs + vj, d0 + vd] * QT[p, d0 + vd, vi]


@T.inline
def add_parts(c, K_j, QT, S_frag, p, jt):
    """An S tile of a wide head: partial sums, added up."""
    for part in range(ceil_div(c.D, c.Dsum)):
        with T.sblock("S_part"):
            d0 = T.axis.opaque(c.D, part * c.Dsum)
            T.reads()
            T.writes()
            S_part = T.sblock_alloc_buffer((c.Rs, c.Wq), scope="local")
            multiply(c, K_j, QT, S_part, p, jt, d0, T.min(c.Dsum, c.D - d0))
            for jj, i in T.grid(c.Rs, c.Wq):
                with T.sblock("S_add"):
                    vj, vi = T.axis.remap("SS", [jj, i])
                    # In place, which `vectorize` accepts only if S_frag is not declared as read.
                    T.reads(S_part[vj, vi])
                    T.writes(S_frag[vj, vi])
                    S_frag[vj, vi] = T.Select(d0 == 0, ZERO, S_frag[vj, vi]) + S_part[vj, vi]


@T.inline
def scores(c, K_j, QT, S, m_tile, p, jt, n_all, diagonal):
    """Line 8: a register tile of S_ij, masked where some lane needs it, and its maximum."""
    S_frag = T.sblock_alloc_buffer((c.Rs, c.Wq), scope="local")
    if c.wide:
        add_parts(c, K_j, QT, S_frag, p, jt)
    else:
        multiply(c, K_j, QT, S_frag, p, jt, 0, c.D)
    if c.causal:
        if jt * c.Rs + c.Rs > n_all:
            for jj, i in T.grid(c.Rs, c.Wq):
                with T.sblock("S_mask"):
                    vj, vi = T.axis.remap("SS", [jj, i])
                    S[jt * c.Rs + vj, vi] = T.Select(
                        T.cast(jt * c.Rs + vj, "int32") <= diagonal + T.cast(vi, "int32"),
                        S_frag[vj, vi],
                        MINUS_INF,
                    )
        else:
            store_scores(c, S, S_frag, jt)
    else:
        store_scores(c, S, S_frag, jt)
    for jj, i in T.grid(c.Rs, c.Wq):
        with T.sblock("S_max"):
            vj, vi = T.axis.remap("RS", [jj, i])
            with T.init():
                m_tile[jt, vi] = MINUS_INF
            m_tile[jt, vi] = T.max(m_tile[jt, vi], S[jt * c.Rs + vj, vi])


@T.inline
def online_softmax(c, S, m_tile, alpha, m, l, p, n_any):
    """Line 9: m_i, P_ij in the place of S_ij, l_i, and alpha = 2**(m_old - m_new) for line 10."""
    m_new = T.sblock_alloc_buffer((c.Wq,))
    m_safe = T.sblock_alloc_buffer((c.Wq,))
    l_new = T.sblock_alloc_buffer((c.Wq,))
    for jt, i in T.grid(ceil_div(n_any, c.Rs), c.Wq):
        with T.sblock("m_new"):
            vj, vi = T.axis.remap("RS", [jt, i])
            with T.init():
                m_new[vi] = m[p, vi]
            m_new[vi] = T.max(m_new[vi], m_tile[vj, vi])
    for i in range(c.Wq):
        with T.sblock("m_safe"):
            # A row that sees nothing yet has m = -inf, and -inf - -inf is NaN.
            vi = T.axis.remap("S", [i])
            m_safe[vi] = T.Select(m_new[vi] == MINUS_INF, ZERO, m_new[vi])
    for i in range(c.Wq):
        with T.sblock("alpha"):
            vi = T.axis.remap("S", [i])
            alpha[vi] = softmax.exp2(m[p, vi] - m_safe[vi])
    for i in range(c.Wq):
        with T.sblock("m"):
            vi = T.axis.remap("S", [i])
            m[p, vi] = m_new[vi]
    for i in range(c.Wq):
        with T.sblock("l_zero"):
            vi = T.axis.remap("S", [i])
            l_new[vi] = ZERO
    for tile in range(ceil_div(n_any, c.Rs)):
        with T.sblock("P_tile"):
            j0 = T.axis.opaque(c.Bc, tile * c.Rs)
            T.reads()
            T.writes()
            l_tile = T.sblock_alloc_buffer((c.Wq,))
            for jj in range(T.min(c.Rs, n_any - j0)):
                for i in range(c.Wq):
                    with T.sblock("P_ij"):
                        vj, vi = T.axis.remap("SS", [jj, i])
                        # In place, which `vectorize` accepts only if S is not declared as read.
                        T.reads(m_safe[vi])
                        T.writes(S[j0 + vj, vi])
                        S[j0 + vj, vi] = softmax.exp2(S[j0 + vj, vi] - m_safe[vi])
                for i in range(c.Wq):
                    with T.sblock("l_tile"):
                        vj, vi = T.axis.remap("RS", [jj, i])
                        # Sums of a tile, of a block, of all: the error of l is common to all
                        # columns of O, and in one long sum twice that of PyTorch's softmax.
                        with T.init():
                            l_tile[vi] = ZERO
                        l_tile[vi] = l_tile[vi] + S[j0 + vj, vi]
            for i in range(c.Wq):
                with T.sblock("l_new"):
                    vi = T.axis.remap("S", [i])
                    T.reads(l_tile[vi])
                    T.writes(l_new[vi])
                    l_new[vi] = l_new[vi] + l_tile[vi]
    for i in range(c.Wq):
        with T.sblock("l"):
            vi = T.axis.remap("S", [i])
            T.reads(alpha[vi], l_new[vi])
            T.writes(l[p, vi])
            l[p, vi] = l[p, vi] * alpha[vi] + l_new[vi]


@T.inline
def accumulate(c, V_j, P, alpha, OT, p, dt, n_all, n_any, diagonal):
    """Line 10: one register tile of O_i = alpha O_i + P_ij V_j.

    Keys that only some lanes see are added under the mask: P is 0 there, but V may be NaN or inf.
    """
    O_frag = T.sblock_alloc_buffer((c.Ro, c.Wq), scope="local")
    for jj, r, i in T.grid(n_all, c.Ro, c.Wq):
        with T.sblock("O_update"):
            vj, vr, vi = T.axis.remap("RSS", [jj, r, i])
            with T.init():
                O_frag[vr, vi] = ZERO
            O_frag[vr, vi] += V_j[dt, vj, vr] * P[vj, vi]
    if c.causal:
        for jj in range(n_any - n_all):
            with T.sblock("masked"):
                j = T.axis.opaque(c.Bc, n_all + jj)
                T.reads()
                T.writes()
                for r, i in T.grid(c.Ro, c.Wq):
                    with T.sblock("O_update_masked"):
                        vr, vi = T.axis.remap("SS", [r, i])
                        T.reads(V_j[dt, j, vr], P[j, vi])
                        T.writes(O_frag[vr, vi])
                        O_frag[vr, vi] += P[j, vi] * T.Select(
                            T.cast(j, "int32") <= diagonal + T.cast(vi, "int32"),
                            V_j[dt, j, vr],
                            ZERO,
                        )
    for r, i in T.grid(c.Ro, c.Wq):
        with T.sblock("O_store"):
            vr, vi = T.axis.remap("SS", [r, i])
            T.reads(alpha[vi], O_frag[vr, vi])
            T.writes(OT[p, dt * c.Ro + vr, vi])
            OT[p, dt * c.Ro + vr, vi] = OT[p, dt * c.Ro + vr, vi] * alpha[vi] + O_frag[vr, vi]


def output_tile(c, OT, inverse_l, O, b, h, row, p, i, d):
    """A square tile of O_i, divided by l_i and transposed in registers."""
    n = int(c.lanes)
    columns = [OT[p, d + r, lanes_of(i, n)] * inverse_l[lanes_of(i, n)] for r in range(n)]
    for r, values in enumerate(transpose(columns)):
        T.buffer_store(O, T.cast(values, f"{c.dtype}x{n}"), [b, row + i + r, h, lanes_of(d, n)])


@T.inline
def store_panel(c, OT, m, l, O, LSE, b, h, row, p, n_rows):
    """Lines 12-13: O_i = O_i / l_i, L_i = m_i + ln l_i; 0 and -inf for a row that saw nothing."""
    inverse_l = T.sblock_alloc_buffer((c.Wq,))
    L_i = T.sblock_alloc_buffer((c.Wq,))
    for i in range(c.Wq):
        with T.sblock("inverse_l"):
            vi = T.axis.remap("S", [i])
            inverse_l[vi] = T.Select(l[p, vi] == ZERO, ZERO, T.float32(1) / l[p, vi])
    for i in range(c.Wq):
        with T.sblock("L_i"):
            vi = T.axis.remap("S", [i])
            L_i[vi] = m[p, vi] * T.float32(softmax.LN_2) + softmax.log(l[p, vi])
    if n_rows == c.Wq:
        for it, dt in T.grid(T.truncdiv(c.Wq, c.lanes), T.truncdiv(c.Dv, c.lanes)):
            output_tile(c, OT, inverse_l, O, b, h, row, p, it * c.lanes, dt * c.lanes)
        for i, dd in T.grid(c.Wq, T.truncmod(c.Dv, c.lanes)):
            d = T.meta_var(c.Dv - 1 - dd)
            O[b, row + i, h, d] = T.cast(OT[p, d, i] * inverse_l[i], c.dtype)
    else:
        for i, d in T.grid(n_rows, c.Dv):
            O[b, row + i, h, d] = T.cast(OT[p, d, i] * inverse_l[i], c.dtype)
    for i in range(n_rows):
        LSE[b, h, row + i] = L_i[i]


def program(c: Sizes) -> Any:
    """Algorithm 1 as block-level TensorIR, before any loop is vectorised, unrolled or parallel."""
    one = T.int64(1)
    align = DTYPE_BYTES[c.dtype]

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
        batch, seq_q, seq_kv = T.int64(), T.int64(), T.int64()
        heads, heads_kv = T.int64(), T.int64()
        qb, qs, qh = T.int64(), T.int64(), T.int64()
        kb, ks, kh = T.int64(), T.int64(), T.int64()
        vb, vs, vh = T.int64(), T.int64(), T.int64()
        ob, os, oh = T.int64(), T.int64(), T.int64()
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
        for task in range(batch * heads * ceil_div(seq_q, c.Br)):
            with T.sblock("task"):
                t = T.axis.spatial(batch * heads * ceil_div(seq_q, c.Br), task)
                T.reads()
                T.writes()
                QT = T.sblock_alloc_buffer((c.panels, c.D, c.Wq))
                OT = T.sblock_alloc_buffer((c.panels, c.o_tiles * c.Ro, c.Wq))
                m = T.sblock_alloc_buffer((c.panels, c.Wq))
                l = T.sblock_alloc_buffer((c.panels, c.Wq))
                K_j = T.sblock_alloc_buffer((c.s_tiles * c.Rs, c.D))
                V_j = T.sblock_alloc_buffer((c.o_tiles, c.Bc, c.Ro))
                n_blocks: T.let = ceil_div(seq_q, c.Br)
                bh: T.let = T.truncdiv(t, n_blocks)
                b: T.let = T.truncdiv(bh, heads)
                h: T.let = T.truncmod(bh, heads)
                hk: T.let = T.truncdiv(h, T.truncdiv(heads, heads_kv))
                i0: T.let = c.Br * balanced(T.truncmod(t, n_blocks), n_blocks)
                n_panels: T.let = ceil_div(T.min(c.Br, seq_q - i0), c.Wq)
                visible: T.let = blocks.visible_keys(
                    T.min(i0 + c.Br, seq_q) - 1, seq_kv, c.causal, causal_offset, clamp
                )
                for panel in range(n_panels):
                    with T.sblock("Q_i"):
                        p = T.axis.spatial(n_panels, panel)
                        T.reads()
                        T.writes()
                        load_query_panel(c, Q, QT, OT, m, l, b, h, i0, p, seq_q, softmax_scale)
                for block in range(ceil_div(visible, c.Bc)):
                    with T.sblock("j"):
                        j = T.axis.opaque(ceil_div(visible, c.Bc), block)
                        T.reads()
                        T.writes()
                        j0: T.let = j * c.Bc
                        n_keys: T.let = T.min(c.Bc, seq_kv - j0)
                        load_key_block(c, K, V, K_j, V_j, b, hk, j0, n_keys)
                        for panel in range(n_panels):
                            with T.sblock("panel"):
                                p = T.axis.spatial(n_panels, panel)
                                T.reads()
                                T.writes()
                                row: T.let = i0 + p * c.Wq
                                # Keys of the block that every row, and any row, of the panel sees.
                                n_all: T.let = blocks.visible_keys(
                                    row, n_keys, c.causal, causal_offset - j0, clamp
                                )
                                n_any: T.let = blocks.visible_keys(
                                    row + (c.Wq - 1), n_keys, c.causal, causal_offset - j0, clamp
                                )
                                # Lane i sees key j of the block iff j <= diagonal + i.
                                diagonal: T.let = T.cast(
                                    clamp(row + causal_offset - j0, -c.Bc - c.Wq, c.Bc), "int32"
                                )
                                S = T.sblock_alloc_buffer((c.s_tiles * c.Rs, c.Wq))
                                m_tile = T.sblock_alloc_buffer((c.s_tiles, c.Wq))
                                alpha = T.sblock_alloc_buffer((c.Wq,))
                                for tile in range(ceil_div(n_any, c.Rs)):
                                    with T.sblock("S_ij"):
                                        jt = T.axis.spatial(c.s_tiles, tile)
                                        T.reads()
                                        T.writes()
                                        scores(c, K_j, QT, S, m_tile, p, jt, n_all, diagonal)
                                online_softmax(c, S, m_tile, alpha, m, l, p, n_any)
                                for tile in range(c.o_tiles):
                                    with T.sblock("O_i"):
                                        dt = T.axis.spatial(c.o_tiles, tile)
                                        T.reads()
                                        T.writes()
                                        accumulate(
                                            c, V_j, S, alpha, OT, p, dt, n_all, n_any, diagonal
                                        )
                for panel in range(n_panels):
                    with T.sblock("epilogue"):
                        p = T.axis.spatial(n_panels, panel)
                        T.reads()
                        T.writes()
                        store_panel(
                            c,
                            OT,
                            m,
                            l,
                            O,
                            LSE,
                            b,
                            h,
                            i0 + p * c.Wq,
                            p,
                            T.min(c.Wq, seq_q - i0 - p * c.Wq),
                        )

    return forward


# Blocks whose last loop runs over the queries of a panel; in the second list the loop before it
# runs over the rows of a register tile.
LANE_BLOCKS = (
    "O_zero",
    "m_l_zero",
    "m_new",
    "m_safe",
    "alpha",
    "m",
    "P_ij",
    "l_zero",
    "l_tile",
    "l_new",
    "l",
    "inverse_l",
    "L_i",
)
TILE_BLOCKS = (
    "S_update",
    "S_add",
    "S_store",
    "S_mask",
    "S_max",
    "O_update",
    "O_update_masked",
    "O_store",
)
REDUCTIONS = ("S_update", "S_max", "m_new", "l_tile", "O_update")


def apply_tiles(sch: Any, lanes: int) -> None:
    """Register tiles: rows unrolled, vectors of the native width; tasks in parallel."""
    for name, block in sblocks(sch).items():
        *outer, last = sch.get_loops(block) or (None,)
        if name in LANE_BLOCKS + TILE_BLOCKS:
            vectors, lane = sch.split(last, [None, lanes])
            sch.vectorize(lane)
            sch.unroll(vectors)
        if name in TILE_BLOCKS:
            sch.unroll(outer[-1])
        if name in REDUCTIONS:
            sch.decompose_reduction(block, outer[0])
        if name == "V_j":
            sch.vectorize(last)
            sch.unroll(outer[-1])
    sch.parallel(sch.get_loops(sch.get_sblock("task"))[0])
