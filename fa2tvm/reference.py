"""The oracle: float64 attention and gradients in numpy, and the paper's algorithms line by line.

Layouts are BSHD as everywhere: Q [B, Sq, H, D], K [B, Sk, Hk, D], V [B, Sk, Hk, Dv], O and dO
[B, Sq, H, Dv], LSE and dLSE [B, H, Sq] in nats. H is a multiple of Hk.

Three errata of the paper (arXiv:2307.08691) are corrected here:

1. Algorithm 1, line 10 prints an inverse on diag(exp(m_old - m_new)) that must not be there.
   Source: Dao-AILab/flash-attention issue 991.
2. Both algorithms leave the softmax scale out; it multiplies S, and dQ and dK.
3. exp(-inf - -inf) is NaN, so a row that has seen nothing yet is guarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fa2tvm.blocks import ceil_div, clamp, key_blocks, query_blocks

if TYPE_CHECKING:
    from fa2tvm.problem import Alignment

Array = np.ndarray[Any, np.dtype[Any]]

# Elements of the largest logits matrix that is held at once (32 MiB in float64).
_CHUNK_ELEMENTS = 1 << 22


def causal_offset(seq_q: int, seq_kv: int, alignment: Alignment) -> int:
    """Query row i sees keys j <= i + this."""
    return seq_kv - seq_q if alignment == "bottom_right" else 0


def resolve_scale(softmax_scale: float | None, head_dim_qk: int) -> float:
    """The scale that a call means: None is 1/sqrt(head_dim_qk), any number is itself."""
    return 1 / math.sqrt(head_dim_qk) if softmax_scale is None else float(softmax_scale)


def attention(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    alignment: Alignment = "bottom_right",
) -> tuple[Array, Array]:
    """Softmax attention in float64.

    Returns
    -------
    O, LSE
        Both float64. A row that sees nothing, or only logits of -inf, has O = 0 and LSE = -inf.
        What a row cannot see has no influence on it, even if it is NaN.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    scale = resolve_scale(softmax_scale, q.shape[3])
    batch, seq_q, heads, _ = q.shape
    group = heads // k.shape[2] if k.shape[2] else 1
    out = np.zeros((batch, seq_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seq_q), -np.inf)
    offset = causal_offset(seq_q, k.shape[1], alignment) if causal else None
    finite = _all_finite(q, k, v)
    for b, h in np.ndindex(batch, heads):
        q_bh, k_bh, v_bh = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
        for rows, n_keys, hidden in _row_chunks(seq_q, k.shape[1], offset, finite):
            s = _logits(q_bh[rows], k_bh[:n_keys], scale, hidden)
            p, lse[b, h, rows] = _softmax(s)
            with np.errstate(invalid="ignore"):
                out[b, rows, h] = p @ v_bh[:n_keys]
    return out, lse


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    dO: Array,
    dLSE: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    alignment: Alignment = "bottom_right",
) -> tuple[Array, Array, Array]:
    """Gradients (dQ, dK, dV) of sum(O * dO) + sum(LSE * dLSE) in float64."""
    q, k, v, dO = (np.asarray(x, dtype=np.float64) for x in (q, k, v, dO))
    g = None if dLSE is None else np.asarray(dLSE, dtype=np.float64)
    scale = resolve_scale(softmax_scale, q.shape[3])
    batch, seq_q, heads, _ = q.shape
    group = heads // k.shape[2] if k.shape[2] else 1
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    offset = causal_offset(seq_q, k.shape[1], alignment) if causal else None
    finite = _all_finite(q, k, v, dO) and (g is None or _all_finite(g))
    for b, h in np.ndindex(batch, heads):
        hk = h // group
        q_bh, k_bh, v_bh, do_bh = q[b, :, h], k[b, :, hk], v[b, :, hk], dO[b, :, h]
        for rows, n_keys, hidden in _row_chunks(seq_q, k.shape[1], offset, finite):
            k_seen, v_seen = k_bh[:n_keys], v_bh[:n_keys]
            with np.errstate(invalid="ignore", over="ignore"):
                p, _ = _softmax(_logits(q_bh[rows], k_seen, scale, hidden))
                dp = do_bh[rows] @ v_seen.T
                delta = np.sum(p * dp, axis=1)
                if g is not None:
                    delta = delta - g[b, h, rows]
                ds = p * (dp - delta[:, None])
                dq[b, rows, h] = scale * (ds @ k_seen)
                dk[b, :n_keys, hk] += scale * (ds.T @ q_bh[rows])
                dv[b, :n_keys, hk] += p.T @ do_bh[rows]
    return dq, dk, dv


def _all_finite(*arrays: Array) -> bool:
    return all(bool(np.isfinite(x).all()) for x in arrays)


def _row_chunks(
    seq_q: int, seq_kv: int, offset: int | None, finite: bool
) -> Iterator[tuple[slice, int, Array | None]]:
    """Chunks of rows, the prefix of keys that they may see, and the mask of what each may not.

    Non-finite inputs are taken row by row: a prefix then is exact, so that what a row cannot see
    takes no part (0 * NaN is NaN, a mask alone would not do).
    """
    step = max(1, _CHUNK_ELEMENTS // max(seq_kv, 1)) if finite or offset is None else 1
    for start in range(0, seq_q, step):
        rows = np.arange(start, min(start + step, seq_q))
        if offset is None:
            n_keys, hidden = seq_kv, None
        else:
            n_keys = clamp(int(rows[-1]) + offset + 1, 0, seq_kv)
            hidden = np.arange(n_keys)[None, :] > rows[:, None] + offset
        if n_keys:
            yield slice(start, start + len(rows)), n_keys, hidden


def _logits(q: Array, k: Array, scale: float, hidden: Array | None) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        s: Array = scale * (q @ k.T)
    if hidden is not None:
        s[hidden] = -np.inf
    return s


def _softmax(s: Array) -> tuple[Array, Array]:
    """Row softmax (0 where a row is all -inf) and log-sum-exp of logits [rows, keys]."""
    m = s.max(axis=1)
    m_safe = np.where(m == -np.inf, 0.0, m)
    with np.errstate(invalid="ignore"):
        p = np.exp(s - m_safe[:, None])
    total = p.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = m_safe + np.log(total)
    return p / np.where(total == 0, 1.0, total)[:, None], lse


def algorithm_1(
    Q: Array,
    K: Array,
    V: Array,
    block_q: int,
    block_kv: int,
    softmax_scale: float,
    causal: bool = False,
    causal_offset: int = 0,
) -> tuple[Array, Array]:
    """Algorithm 1 of the paper, FlashAttention-2 forward pass, for one head.

    Parameters
    ----------
    Q, K, V
        [N_q, d], [N_kv, d] and [N_kv, d_v].
    block_q, block_kv
        B_r and B_c.

    Returns
    -------
    O, L
        [N_q, d_v] and the log-sum-exp [N_q].
    """
    N_q, N_kv = len(Q), len(K)
    T_r = ceil_div(N_q, block_q)  # line 1
    O, L = np.full((N_q, V.shape[1]), np.nan), np.full(N_q, np.nan)  # line 2
    for i in range(T_r):  # line 3
        rows = slice(i * block_q, min((i + 1) * block_q, N_q))
        Q_i = Q[rows]  # line 4
        O_i, l_i = np.zeros((len(Q_i), V.shape[1])), np.zeros(len(Q_i))  # line 5
        m_i = np.full(len(Q_i), -np.inf)
        seen = key_blocks(i, block_q, block_kv, N_q, N_kv, causal, causal_offset)
        for j in range(seen.start, seen.end):  # line 6
            keys = slice(j * block_kv, min((j + 1) * block_kv, N_kv))
            K_j, V_j = K[keys], V[keys]  # line 7
            S_ij = softmax_scale * (Q_i @ K_j.T)  # line 8, erratum 2
            if not seen.full_start <= j < seen.full_end:
                S_ij = _mask_block(S_ij, rows.start, keys.start, causal_offset)
            m_new = np.maximum(m_i, S_ij.max(axis=1))  # line 9
            m_safe = np.where(m_new == -np.inf, 0.0, m_new)  # erratum 3
            P_ij = np.exp(S_ij - m_safe[:, None])
            rescale = np.exp(m_i - m_safe)
            l_i = rescale * l_i + P_ij.sum(axis=1)
            O_i = rescale[:, None] * O_i + P_ij @ V_j  # line 10, erratum 1
            m_i = m_new
        blind = l_i == 0
        O[rows] = O_i / np.where(blind, 1.0, l_i)[:, None]  # lines 12 and 14
        L[rows] = np.where(blind, -np.inf, m_i + np.log(np.where(blind, 1.0, l_i)))  # 13 and 15
    return O, L  # line 17


def algorithm_2(
    Q: Array,
    K: Array,
    V: Array,
    O: Array,
    dO: Array,
    L: Array,
    block_q: int,
    block_kv: int,
    softmax_scale: float,
    causal: bool = False,
    causal_offset: int = 0,
) -> tuple[Array, Array, Array]:
    """Algorithm 2 of the paper, FlashAttention-2 backward pass, for one head.

    Parameters
    ----------
    Q, K, V, block_q, block_kv
        As for `algorithm_1`.
    O, dO, L
        [N_q, d_v], [N_q, d_v] and [N_q].

    Returns
    -------
    dQ, dK, dV
        Shaped as Q, K and V.
    """
    N_q, N_kv = len(Q), len(K)
    T_c = ceil_div(N_kv, block_kv)  # line 1
    dQ, dK, dV = np.zeros_like(Q), np.full_like(K, np.nan), np.full_like(V, np.nan)  # lines 2, 3
    D = np.sum(dO * O, axis=1)  # line 4
    for j in range(T_c):  # line 5
        keys = slice(j * block_kv, min((j + 1) * block_kv, N_kv))
        K_j, V_j = K[keys], V[keys]  # line 6
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)  # line 7
        seen = query_blocks(j, block_q, block_kv, N_q, N_kv, causal, causal_offset)
        for i in range(seen.start, seen.end):  # line 8
            rows = slice(i * block_q, min((i + 1) * block_q, N_q))
            Q_i, dO_i, L_i, D_i = Q[rows], dO[rows], L[rows], D[rows]  # line 9
            S_ij = softmax_scale * (Q_i @ K_j.T)  # line 10, erratum 2
            if not seen.full_start <= i < seen.full_end:
                S_ij = _mask_block(S_ij, rows.start, keys.start, causal_offset)
            L_safe = np.where(L_i == -np.inf, 0.0, L_i)  # erratum 3
            P_ij = np.exp(S_ij - L_safe[:, None])  # line 11
            dV_j += P_ij.T @ dO_i  # line 12
            dP_ij = dO_i @ V_j.T  # line 13
            dS_ij = P_ij * (dP_ij - D_i[:, None])  # line 14
            dQ[rows] += softmax_scale * (dS_ij @ K_j)  # line 15, erratum 2
            dK_j += softmax_scale * (dS_ij.T @ Q_i)  # line 16, erratum 2
        dK[keys], dV[keys] = dK_j, dV_j  # line 18
    return dQ, dK, dV  # line 20


def _mask_block(S_ij: Array, first_row: int, first_key: int, causal_offset: int) -> Array:
    """S_ij with -inf where row i may not see key j."""
    i = first_row + np.arange(S_ij.shape[0])[:, None]
    j = first_key + np.arange(S_ij.shape[1])[None, :]
    return np.where(j <= i + causal_offset, S_ij, -np.inf)
