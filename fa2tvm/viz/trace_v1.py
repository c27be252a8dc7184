"""FlashAttention-1 as events, for comparison with version 2.

Its forward has the key blocks outside: O_i, l_i and m_i travel to HBM and back at every step, and
O_i is divided by l_i each time. Its backward needs both m and l. Source: arXiv:2205.14135,
Algorithm 1 and, in the appendix, Algorithm 4. Causal blocks are skipped as in version 2.
"""

from __future__ import annotations

import numpy as np

from fa2tvm.reference import Array
from fa2tvm.viz.case import Case, left_out, safe, visits
from fa2tvm.viz.events import STATISTIC_BYTES, TENSOR_BYTES, Event, Tape, final
from fa2tvm.viz.gradients import gradients, scores


def forward(case: Case) -> list[Event]:
    """Algorithm 1 of FlashAttention-1."""
    Q, K, V = (case.arrays[name] for name in "QKV")
    O, l, m = np.zeros_like(Q), np.zeros(len(Q)), np.full(len(Q), -np.inf)
    tape = Tape()
    written = TENSOR_BYTES * O.size + 2 * STATISTIC_BYTES * len(Q)
    tape.add("start", 2, (None, None), {"O": O, "l": l, "m": m}, traffic=(0, written))
    for j in range(case.n_key_blocks):
        K_j, V_j = K[case.keys(j)], V[case.keys(j)]
        tape.load("K_j", "V_j")
        traffic = (TENSOR_BYTES * (K_j.size + V_j.size), 0)
        tape.add("load_kv", 6, (None, j), {"K_j": K_j, "V_j": V_j}, traffic=traffic)
        seen = case.query_blocks(j)
        for i, masked in visits(seen):
            _forward_block(tape, case, (i, j), masked, (O, l, m))
        if left_out(seen, case.n_query_blocks):
            tape.add("skip", 7, (None, j), {"skipped": left_out(seen, case.n_query_blocks)})
        tape.drop("K_j", "V_j")
    tape.add("end", 16, (None, None), {})
    return tape.events


def _forward_block(
    tape: Tape,
    case: Case,
    at: tuple[int, int],
    masked: bool,
    out: tuple[Array, Array, Array],
) -> None:
    """Lines 8 to 13 for one block; `out` is (O, l, m) in HBM."""
    O, l, m = out
    rows, keys = case.rows(at[0]), case.keys(at[1])
    Q_i, V_j = case.arrays["Q"][rows], case.arrays["V"][keys]
    O_i, l_i, m_i = O[rows].copy(), l[rows].copy(), m[rows].copy()
    n, c, d = len(Q_i), len(V_j), Q_i.shape[1]
    moved = TENSOR_BYTES * O_i.size + 2 * STATISTIC_BYTES * n
    tape.load("Q_i")
    tape.hold("O_i", "l_i", "m_i")
    given = {"Q_i": Q_i, "O_i": O_i, "l_i": l_i, "m_i": m_i}
    tape.add("load_qo", 8, at, given, traffic=(TENSOR_BYTES * Q_i.size + moved, 0))
    S_ij = scores(tape, case, at, masked, 9)
    m_block = S_ij.max(axis=1)
    tape.hold("m_block")
    tape.add("block_max", 10, at, {"m_block": m_block}, (0, n * c))
    P_ij = np.exp(S_ij - safe(m_block)[:, None])
    tape.hold("P_ij")
    tape.drop("S_ij")
    tape.add("block_probabilities", 10, at, {"P_ij": P_ij}, (0, 2 * n * c))
    l_block = P_ij.sum(axis=1)
    tape.hold("l_block")
    tape.add("block_sum", 10, at, {"l_block": l_block}, (0, n * c))
    m_new = np.maximum(m_i, m_block)
    tape.hold("m_old")
    values = {"m_old": m_i, "m_i": m_new, "raised": m_new > m_i}
    tape.add("row_max", 11, at, values, (0, n))
    rescale = np.exp(m_i - safe(m_new))
    rescale_block = np.exp(m_block - safe(m_new))
    tape.hold("rescale", "rescale_block")
    tape.drop("m_old", "m_block")
    values = {"rescale": rescale, "rescale_block": rescale_block}
    tape.add("rescale", 11, at, values, (0, 4 * n))
    l_old, l_new = l_i, rescale * l_i + rescale_block * l_block
    tape.hold("l_old")
    tape.add("row_sum", 11, at, {"l_old": l_old, "l_i": l_new}, (0, 3 * n))
    blind = l_new == 0
    unnormalised = (rescale * l_old)[:, None] * O_i + rescale_block[:, None] * (P_ij @ V_j)
    O_i = unnormalised / np.where(blind, 1.0, l_new)[:, None]
    other = n + 4 * n * d
    tape.add("accumulate_divide", 12, at, {"O_i": O_i}, (2 * n * c * d, other))
    O[rows], l[rows], m[rows] = O_i, l_new, m_new
    tape.drop("Q_i", "O_i", "l_i", "m_i", "l_old", "l_block", "P_ij", "rescale", "rescale_block")
    tape.add("store_all", 13, at, {"O": O, "l": l, "m": m}, traffic=(0, moved))


def backward(case: Case) -> list[Event]:
    """Algorithm 4 of FlashAttention-1, without dropout."""
    ends = final(forward(case))
    O, l, m, dO = ends["O"], ends["l"], ends["m"], case.arrays["dO"]
    Q, K, V = (case.arrays[name] for name in "QKV")
    dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    tape = Tape()
    written = STATISTIC_BYTES * dQ.size + TENSOR_BYTES * (dK.size + dV.size)
    values = {"O": O, "l": l, "m": m, "dQ": dQ, "dK": dK, "dV": dV}
    tape.add("start", 5, (None, None), values, traffic=(0, written))
    for j in range(case.n_key_blocks):
        keys = case.keys(j)
        K_j, V_j = K[keys], V[keys]
        tape.load("K_j", "V_j")
        traffic = (TENSOR_BYTES * (K_j.size + V_j.size), 0)
        tape.add("load_kv", 7, (None, j), {"K_j": K_j, "V_j": V_j}, traffic=traffic)
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)
        tape.hold("dK_j", "dV_j")
        tape.add("init", 8, (None, j), {"dK_j": dK_j, "dV_j": dV_j})
        seen = case.query_blocks(j)
        for i, masked in visits(seen):
            rows = case.rows(i)
            given = {"Q_i": Q[rows], "O_i": O[rows], "dO_i": dO[rows]}
            given |= {"l_i": l[rows], "m_i": m[rows]}
            n, d = given["Q_i"].shape
            tape.load("Q_i", "O_i", "dO_i")
            tape.hold("l_i", "m_i")
            read = 3 * TENSOR_BYTES * n * d + 2 * STATISTIC_BYTES * n
            tape.add("load_qo", 10, (i, j), given, traffic=(read, 0))
            S_ij = scores(tape, case, (i, j), masked, 11)
            l_safe = np.where(l[rows] == 0, 1.0, l[rows])
            P_ij = np.exp(S_ij - safe(m[rows])[:, None]) / l_safe[:, None]
            tape.hold("P_ij")
            tape.drop("S_ij")
            tape.add("probabilities_divide", 13, (i, j), {"P_ij": P_ij}, (0, 3 * P_ij.size))
            D_i = np.sum(dO[rows] * O[rows], axis=1)
            tape.hold("D_i")
            tape.add("delta", 19, (i, j), {"D_i": D_i}, (0, 2 * n * d))
            gradients(tape, case, (i, j), (P_ij, D_i), (dQ, dK_j, dV_j), (16, 17, 20, 21, 22))
        if left_out(seen, case.n_query_blocks):
            tape.add("skip", 9, (None, j), {"skipped": left_out(seen, case.n_query_blocks)})
        dK[keys], dV[keys] = dK_j, dV_j
        tape.drop("K_j", "V_j", "dK_j", "dV_j", "Q_i", "O_i", "dO_i", "l_i", "m_i", "D_i")
        traffic = (0, TENSOR_BYTES * (dK_j.size + dV_j.size))
        tape.add("store", 24, (None, j), {"dK": dK, "dV": dV}, traffic=traffic)
    tape.add("end", 26, (None, None), {})
    return tape.events
