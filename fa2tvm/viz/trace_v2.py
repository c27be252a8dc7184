"""FlashAttention-2 as events: the arithmetic of reference.py's Algorithms 1 and 2, step by step."""

from __future__ import annotations

import numpy as np

from fa2tvm.reference import Array
from fa2tvm.viz.case import Case, left_out, safe, visits
from fa2tvm.viz.events import STATISTIC_BYTES, TENSOR_BYTES, Event, Tape, final
from fa2tvm.viz.gradients import gradients, scores


def forward(case: Case) -> list[Event]:
    """Algorithm 1, FlashAttention-2."""
    Q, V = case.arrays["Q"], case.arrays["V"]
    O, L = np.full_like(Q, np.nan), np.full(len(Q), np.nan)
    d = V.shape[1]
    tape = Tape()
    tape.add("start", 2, (None, None), {"O": O, "L": L})
    for i in range(case.n_query_blocks):
        rows = case.rows(i)
        Q_i = Q[rows]
        n = len(Q_i)
        tape.load("Q_i")
        tape.add("load_q", 4, (i, None), {"Q_i": Q_i}, traffic=(TENSOR_BYTES * Q_i.size, 0))
        O_i, l_i, m_i = np.zeros((n, d)), np.zeros(n), np.full(n, -np.inf)
        tape.hold("m_i", "l_i", "O_i")
        tape.add("init", 5, (i, None), {"O_i": O_i, "l_i": l_i, "m_i": m_i})
        seen = case.key_blocks(i)
        for j, masked in visits(seen):
            O_i, l_i, m_i = _forward_block(tape, case, (i, j), masked, (O_i, l_i, m_i))
        if left_out(seen, case.n_key_blocks):
            skipped = {"skipped": left_out(seen, case.n_key_blocks)}
            tape.add("skip", 6, (i, None), skipped)
        tape.drop("K_j", "V_j")
        blind = l_i == 0
        O_i = O_i / np.where(blind, 1.0, l_i)[:, None]
        tape.add("divide", 12, (i, None), {"O_i": O_i}, (0, n * d))
        L_i = np.where(blind, -np.inf, m_i + np.log(np.where(blind, 1.0, l_i)))
        tape.hold("L_i")
        tape.add("lse", 13, (i, None), {"L_i": L_i}, (0, 2 * n))
        O[rows], L[rows] = O_i, L_i
        tape.drop("Q_i", "m_i", "l_i", "O_i", "L_i")
        written = TENSOR_BYTES * O_i.size + STATISTIC_BYTES * n
        tape.add("store", 14, (i, None), {"O": O, "L": L}, traffic=(0, written))
    tape.add("end", 17, (None, None), {})
    return tape.events


def _forward_block(
    tape: Tape,
    case: Case,
    at: tuple[int, int],
    masked: bool,
    carried: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Lines 7 to 10 for one block; `carried` is (O_i, l_i, m_i)."""
    O_i, l_i, m_i = carried
    i, j = at
    K_j, V_j = case.arrays["K"][case.keys(j)], case.arrays["V"][case.keys(j)]
    n, c, d = len(O_i), len(K_j), K_j.shape[1]
    tape.load("K_j", "V_j")
    traffic = (TENSOR_BYTES * (K_j.size + V_j.size), 0)
    tape.add("load_kv", 7, at, {"K_j": K_j, "V_j": V_j}, traffic=traffic)
    S_ij = case.setting.scale * (case.arrays["Q"][case.rows(i)] @ K_j.T)
    tape.hold("S_ij")
    tape.add("scores", 8, at, {"S_ij": S_ij}, (2 * n * c * d, n * c))
    if masked:
        S_ij = case.hide(S_ij, i, j)
        tape.add("mask", 8, at, {"S_ij": S_ij})
    m_new = np.maximum(m_i, S_ij.max(axis=1))
    raised = {"m_old": m_i, "m_i": m_new, "raised": m_new > m_i}
    tape.hold("m_old")
    tape.add("row_max", 9, at, raised, (0, n * c))
    P_ij = np.exp(S_ij - safe(m_new)[:, None])
    tape.hold("P_ij")
    tape.add("probabilities", 9, at, {"P_ij": P_ij}, (0, 2 * n * c))
    rescale = np.exp(m_i - safe(m_new))
    tape.hold("rescale")
    tape.drop("m_old", "S_ij")
    tape.add("rescale", 9, at, {"rescale": rescale}, (0, 2 * n))
    l_i = rescale * l_i + P_ij.sum(axis=1)
    tape.add("row_sum", 9, at, {"l_i": l_i}, (0, n * c + n))
    O_i = rescale[:, None] * O_i + P_ij @ V_j
    tape.add("accumulate", 10, at, {"O_i": O_i}, (2 * n * c * d, n * d))
    tape.drop("P_ij", "rescale")
    return O_i, l_i, m_new


def backward(case: Case) -> list[Event]:
    """Algorithm 2, FlashAttention-2; O and L are those of `forward`."""
    ends = final(forward(case))
    O, L, dO = ends["O"], ends["L"], case.arrays["dO"]
    Q, K, V = (case.arrays[name] for name in "QKV")
    N, d = Q.shape
    dQ, dK, dV = np.zeros_like(Q), np.full_like(K, np.nan), np.full_like(V, np.nan)
    D = np.sum(dO * O, axis=1)
    tape = Tape()
    tape.add("start", 3, (None, None), {"O": O, "L": L, "dQ": dQ, "dK": dK, "dV": dV})
    traffic = (2 * TENSOR_BYTES * O.size, STATISTIC_BYTES * N)
    tape.add("delta", 4, (None, None), {"D": D}, (0, 2 * N * d), traffic)
    for j in range(case.n_key_blocks):
        keys = case.keys(j)
        K_j, V_j = K[keys], V[keys]
        tape.load("K_j", "V_j")
        traffic = (TENSOR_BYTES * (K_j.size + V_j.size), 0)
        tape.add("load_kv", 6, (None, j), {"K_j": K_j, "V_j": V_j}, traffic=traffic)
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)
        tape.hold("dK_j", "dV_j")
        tape.add("init", 7, (None, j), {"dK_j": dK_j, "dV_j": dV_j})
        seen = case.query_blocks(j)
        for i, masked in visits(seen):
            rows = case.rows(i)
            given = {"Q_i": Q[rows], "dO_i": dO[rows], "L_i": L[rows], "D_i": D[rows]}
            tape.load("Q_i", "dO_i")
            tape.hold("L_i", "D_i")
            read = 2 * TENSOR_BYTES * given["Q_i"].size + 2 * STATISTIC_BYTES * len(given["Q_i"])
            tape.add("load_q", 9, (i, j), given, traffic=(read, 0))
            P_ij = np.exp(scores(tape, case, (i, j), masked, 10) - safe(L[rows])[:, None])
            tape.hold("P_ij")
            tape.drop("S_ij")
            tape.add("probabilities", 11, (i, j), {"P_ij": P_ij}, (0, 2 * P_ij.size))
            gradients(tape, case, (i, j), (P_ij, D[rows]), (dQ, dK_j, dV_j), (12, 13, 14, 15, 16))
        if left_out(seen, case.n_query_blocks):
            skipped = {"skipped": left_out(seen, case.n_query_blocks)}
            tape.add("skip", 8, (None, j), skipped)
        dK[keys], dV[keys] = dK_j, dV_j
        tape.drop("K_j", "V_j", "dK_j", "dV_j", "Q_i", "dO_i", "L_i", "D_i")
        traffic = (0, TENSOR_BYTES * (dK_j.size + dV_j.size))
        tape.add("store", 18, (None, j), {"dK": dK, "dV": dV}, traffic=traffic)
    tape.add("end", 20, (None, None), {})
    return tape.events
