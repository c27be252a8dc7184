"""Building blocks of the backward programs for CPUs: sizes, visibility, loads and products.

S, dP, P and dS [query, key] have keys on the vector lanes, dV_j, dK_j and dQ_i have head columns
there, so no product needs a reduction across lanes, and only K_j and V_j are transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from fa2tvm import blocks
from fa2tvm.kernels import softmax
from fa2tvm.kernels.script import ceil_div, clamp, partial_sum
from fa2tvm.problem import Variant
from fa2tvm.schedule import CpuBackward

ZERO = T.float32(0)
ONE = T.float32(1)
INF = T.float32(float("inf"))
LOG2_E = T.float32(softmax.LOG2_E)


@dataclass(frozen=True)
class Sizes:
    """Compile-time sizes as TensorIR int64 constants.

    `Dp` and `Dvp` are head dims rounded up to register tiles; `unit` keys are one tile of S.
    """

    dtype: str
    causal: bool
    D: Any
    Dv: Any
    Dp: Any
    Dvp: Any
    Br: Any
    Bc: Any
    lanes: Any
    unit: Any

    @classmethod
    def of(cls, variant: Variant, schedule: CpuBackward) -> Sizes:
        """The sizes that a variant and a schedule give."""
        sizes = {
            "D": variant.head_dim_qk,
            "Dv": variant.head_dim_v,
            "Dp": schedule.padded(variant.head_dim_qk),
            "Dvp": schedule.padded(variant.head_dim_v),
            "Br": schedule.block_q,
            "Bc": schedule.block_kv,
            "lanes": schedule.lanes,
            "unit": schedule.tile_vectors(schedule.block_kv) * schedule.lanes,
        }
        return cls(variant.dtype, variant.causal, **{k: T.int64(x) for k, x in sizes.items()})


def visible(c: Sizes, i: Any, j0: Any, n_keys: Any, causal_offset: Any) -> Any:
    """How many of the n_keys keys of the block at j0 query row i sees."""
    return blocks.visible_keys(i, n_keys, c.causal, causal_offset - j0, clamp)


def first_query_block(c: Sizes, j0: Any, seq_q: Any, causal_offset: Any) -> Any:
    """The first query block that sees key j0; the number of query blocks if none does."""
    if not c.causal:
        return T.int64(0)
    row = blocks.first_row(j0, seq_q, c.causal, causal_offset, clamp)
    return T.Select(row == seq_q, ceil_div(seq_q, c.Br), T.truncdiv(row, c.Br))


@T.inline
def count_seen(c, W, n_seen, i0, j0, row0, n_keys, causal_offset):
    """How many keys of the block each row sees."""
    for i in range(c.Br):
        n_seen[i] = T.Select(
            W[row0 + i] == INF,
            T.int32(0),
            T.cast(visible(c, i0 + i, j0, n_keys, causal_offset), "int32"),
        )


@T.inline
def load_keys(c, K, K_j, KT_j, b, hk, j0, n_keys):
    """Line 6: K_j widened, zero past the end, and its transpose."""
    for j in range(c.Bc):
        if j < n_keys:
            for d in range(c.D):
                K_j[j, d] = T.cast(K[b, j0 + j, hk, d], "float32")
        else:
            for d in range(c.D):
                K_j[j, d] = ZERO
    for j, d in T.grid(c.Bc, c.D):
        KT_j[d, j] = K_j[j, d]


@T.inline
def load_values(c, V, VT_j, b, hk, j0, n_keys):
    """Line 6: V_j transposed, zero past the end."""
    for j in range(c.Bc):
        if j < n_keys:
            for d in range(c.Dv):
                VT_j[d, j] = T.cast(V[b, j0 + j, hk, d], "float32")
        else:
            for d in range(c.Dv):
                VT_j[d, j] = ZERO


@T.inline
def load_queries(c, Q, Q_i, W, b, h, i0, row0, softmax_scale):
    """Line 9: Q_i scaled to base 2, zero for rows that see nothing.

    With the forward's roundings, those of its last columns too, so that S_ij is the forward's bit
    by bit: P = exp(S - LSE) of a row that sees one key is then 1 up to LSE's rounding.
    """
    whole = T.meta_var(c.D - T.truncmod(c.D, c.lanes))
    for i in range(c.Br):
        if W[row0 + i] != INF:
            for d in range(whole):
                Q_i[i, d] = T.cast(Q[b, i0 + i, h, d], "float32") * (softmax_scale * LOG2_E)
            for d in range(c.D - whole):
                Q_i[i, whole + d] = (
                    T.cast(Q[b, i0 + i, h, whole + d], "float32") * softmax_scale * LOG2_E
                )
        else:
            for d in range(c.D):
                Q_i[i, d] = ZERO


@T.inline
def load_rows(X, X_i, W, b, h, i0, row0, D):
    """Line 9: rows of dO widened; zero for those that see nothing."""
    for i in range(X_i.shape[0]):
        if W[row0 + i] != INF:
            for d in range(D):
                X_i[i, d] = T.cast(X[b, i0 + i, h, d], "float32")
        else:
            for d in range(D):
                X_i[i, d] = ZERO


@T.inline
def clear(name, X):
    """X = 0."""
    for i, d in T.grid(X.shape[0], X.shape[1]):
        with T.sblock(name):
            vi, vd = T.axis.remap("SS", [i, d])
            X[vi, vd] = ZERO


def is_wide(n: Any) -> bool:
    """Whether sums of n products are added up in parts."""
    return partial_sum(int(n)) < int(n)


@T.inline
def multiply(name, C, A, B, k0, n, columns):
    """C = A[:, k0 : k0 + n] B[k0 : k0 + n] for the first `columns` of C."""
    for i, j, k in T.grid(C.shape[0], columns, n):
        with T.sblock(name):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = ZERO
            C[vi, vj] = C[vi, vj] + A[vi, k0 + vk] * B[k0 + vk, vj]


@T.inline
def add_parts(name, C, A, B, n, step, columns):
    """The same for n columns of A from 0 in partial sums of `step` products."""
    for part in range(ceil_div(n, step)):
        with T.sblock(name + "_part"):
            k0 = T.axis.opaque(n, part * step)
            T.reads()
            T.writes()
            frag = T.sblock_alloc_buffer(C.shape, scope="local")
            multiply(name, frag, A, B, k0, T.min(step, n - k0), columns)
            for i, j in T.grid(C.shape[0], columns):
                with T.sblock(name + "_add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    # In place, which `vectorize` accepts only if C is not declared as read.
                    T.reads(frag[vi, vj])
                    T.writes(C[vi, vj])
                    C[vi, vj] = T.Select(k0 == 0, ZERO, C[vi, vj]) + frag[vi, vj]


@T.inline
def product(name, C, A, B, n, columns):
    """C = A[:, :n] B for the first `columns` of C; for wide heads the forward's partial sums."""
    if is_wide(n):
        add_parts(name, C, A, B, n, T.int64(partial_sum(int(n))), columns)
    else:
        multiply(name, C, A, B, 0, n, columns)


@T.inline
def add_transposed_product(name, C, A, B, columns):
    """C = C + A^T B for the first `columns` of A."""
    for _ in range(T.int64(1)):
        with T.sblock(name + "_scope"):
            T.reads()
            T.writes()
            frag = T.sblock_alloc_buffer(C.shape, scope="local")
            for i, j, k in T.grid(columns, C.shape[1], A.shape[0]):
                with T.sblock(name):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    # From 0 in each block: rounding errors then grow with its length, not with N.
                    with T.init():
                        frag[vi, vj] = ZERO
                    frag[vi, vj] = frag[vi, vj] + A[vk, vi] * B[vk, vj]
            for i, j in T.grid(columns, C.shape[1]):
                with T.sblock(name + "_add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    # In place, which `vectorize` accepts only if C is not declared as read.
                    T.reads(frag[vi, vj])
                    T.writes(C[vi, vj])
                    C[vi, vj] = C[vi, vj] + frag[vi, vj]


@T.inline
def add_dq(c, W, dq0, dS, K_j, columns):
    """Line 15: dQ_i = dQ_i + dS_ij K_j for the first `columns` of dS_ij; dQ_i is at dq0 of W."""
    for _ in range(T.int64(1)):
        with T.sblock("dQ_scope"):
            T.reads()
            T.writes()
            frag = T.sblock_alloc_buffer((c.Br, c.Dp), scope="local")
            for i, d, j in T.grid(c.Br, c.Dp, columns):
                with T.sblock("dQ"):
                    vi, vd, vj = T.axis.remap("SSR", [i, d, j])
                    with T.init():
                        frag[vi, vd] = ZERO
                    frag[vi, vd] = frag[vi, vd] + dS[vi, vj] * K_j[vj, vd]
            for i, d in T.grid(c.Br, c.Dp):
                with T.sblock("dQ_add"):
                    vi, vd = T.axis.remap("SS", [i, d])
                    T.reads(frag[vi, vd])
                    T.writes(W[dq0 + vi * c.Dp + vd])
                    W[dq0 + vi * c.Dp + vd] = W[dq0 + vi * c.Dp + vd] + frag[vi, vd]
