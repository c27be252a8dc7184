"""The steps of a backward pass that FlashAttention-1 and -2 share."""

from __future__ import annotations

from fa2tvm.reference import Array
from fa2tvm.viz.case import Case
from fa2tvm.viz.events import STATISTIC_BYTES, Tape


def scores(tape: Tape, case: Case, at: tuple[int, int], masked: bool, line: int) -> Array:
    """S_ij of a backward pass, masked where it must be."""
    i, j = at
    Q_i, K_j = case.arrays["Q"][case.rows(i)], case.arrays["K"][case.keys(j)]
    S_ij: Array = case.setting.scale * (Q_i @ K_j.T)
    tape.hold("S_ij")
    tape.add("scores", line, at, {"S_ij": S_ij}, (2 * Q_i.size * len(K_j), S_ij.size))
    if masked:
        S_ij = case.hide(S_ij, i, j)
        tape.add("mask", line, at, {"S_ij": S_ij})
    return S_ij


def gradients(
    tape: Tape,
    case: Case,
    at: tuple[int, int],
    given: tuple[Array, Array],
    out: tuple[Array, Array, Array],
    lines: tuple[int, int, int, int, int],
) -> None:
    """What both versions do after P_ij: `given` is (P_ij, D_i), `out` (dQ, dK_j, dV_j) is added to.

    `lines` are those of dV_j, dP_ij, dS_ij, dQ and dK_j.
    """
    (P_ij, D_i), (dQ, dK_j, dV_j) = given, out
    rows, keys, scale = case.rows(at[0]), case.keys(at[1]), case.setting.scale
    Q_i, dO_i = case.arrays["Q"][rows], case.arrays["dO"][rows]
    K_j, V_j = case.arrays["K"][keys], case.arrays["V"][keys]
    product = 2 * P_ij.size * K_j.shape[1]
    dV_j += P_ij.T @ dO_i
    tape.add("dv", lines[0], at, {"dV_j": dV_j}, (product, 0))
    dP_ij = dO_i @ V_j.T
    tape.hold("dP_ij")
    tape.add("dp", lines[1], at, {"dP_ij": dP_ij}, (product, 0))
    dS_ij = P_ij * (dP_ij - D_i[:, None])
    tape.hold("dS_ij")
    tape.drop("P_ij", "dP_ij")
    tape.add("ds", lines[2], at, {"dS_ij": dS_ij}, (0, 2 * P_ij.size))
    dQ_ij = scale * (dS_ij @ K_j)
    dQ[rows] += dQ_ij
    moved = STATISTIC_BYTES * dQ_ij.size
    values = {"dQ_ij": dQ_ij, "dQ": dQ}
    tape.hold("dQ_ij")
    tape.add("dq", lines[3], at, values, (product, 2 * dQ_ij.size), (moved, moved))
    tape.drop("dQ_ij")
    dK_j += scale * (dS_ij.T @ Q_i)
    tape.add("dk", lines[4], at, {"dK_j": dK_j}, (product, dK_j.size))
    tape.drop("dS_ij")
