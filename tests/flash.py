"""FlashAttention in torch's float32, block by block, and what goes wrong in kernels of it."""

from __future__ import annotations

import math

import torch
from yardstick import Case, Tensors

# What each bug shows in: a pattern of the yardstick's message.
BUGS = {
    "P_in_storage": "O|dV|dQ|dK",
    "P_in_bfloat16": "O: ",
    "products_in_tf32": "O: ",
    "sums_in_float16": "O: ",
    "last_key_dropped": "O: ",
    "last_key_of_one_row_dropped": "O: ",
    "one_row_one_key_short": "O: ",
    "one_row_one_key_far": "O: ",
    "one_rescale_missed": "O: ",
    "keys_of_the_wrong_head": "O: ",
    "exponential_off_by_3e-6": "O: |LSE: ",
    "one_LSE_off_by_1e-5": "LSE: ",
    "one_row_off_by_1e-5": "O: ",
    "no_dLSE": "dQ: ",
    "D_without_the_last_column": "dQ: ",
    "D_of_one_row_off_by_1e-4": "dQ: ",
    "one_key_block_of_dQ_missed": "dQ: ",
    "one_head_missing_in_dK": "dK: ",
    "one_column_of_dV_off_by_1e-5": "dV: ",
    "one_row_of_dK_off_by_1e-4": "dK: ",
    "one_element_of_dK_off_by_1e-3": "dK: ",
    "dK_off_by_1e-5": "dK: ",
}
# Smaller than the rounding of a stored half.
BELOW_HALF = {
    "exponential_off_by_3e-6",
    "one_row_off_by_1e-5",
    "D_of_one_row_off_by_1e-4",
    "one_column_of_dV_off_by_1e-5",
    "one_row_of_dK_off_by_1e-4",
    "one_element_of_dK_off_by_1e-3",
    "dK_off_by_1e-5",
}


def attention(case: Case, bug: str = "", block_q: int = 64, block_kv: int = 64) -> Tensors:
    """O, LSE, dQ, dK and dV by Algorithms 1 and 2, with at most one bug."""
    forward = _forward(case, bug, block_kv)
    return {**forward, **_backward(case, forward, bug, block_q, block_kv)}


def _rounded(x: torch.Tensor, bug: str, storage: torch.dtype) -> torch.Tensor:
    """An operand of a product as a kernel with this bug sees it."""
    if bug == "products_in_tf32":
        # 13 bits less, to nearest.
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    narrow = {"P_in_storage": storage, "P_in_bfloat16": torch.bfloat16}.get(bug)
    return x.to(narrow).float() if narrow else x


def _visible(case: Case, bug: str) -> torch.Tensor:
    visible = case.visible().clone()
    if "key" not in bug:
        return visible
    row = len(visible) * 2 // 3
    n_seen = int(visible[row].sum())
    if bug == "last_key_dropped":
        visible[:, -1] = False
    elif bug == "last_key_of_one_row_dropped":
        visible[-1, -1] = False
    elif bug == "one_row_one_key_short":
        visible[row, n_seen - 1] = False
    elif bug == "one_row_one_key_far":
        visible[row, n_seen] = True
    return visible


def _forward(case: Case, bug: str, block_kv: int) -> Tensors:
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    heads = [h % k.shape[2] if "wrong_head" in bug else h // case.group for h in range(q.shape[2])]
    q, k, v = q.transpose(1, 2), k[:, :, heads].transpose(1, 2), v[:, :, heads].transpose(1, 2)
    visible = _visible(case, bug)
    m = q.new_full((*q.shape[:3], 1), -math.inf)
    l, o = torch.zeros_like(m), q.new_zeros(*q.shape[:3], v.shape[3])
    for j in range(0, k.shape[2], block_kv):
        keys = slice(j, j + block_kv)
        s = (case.scale * q) @ k[:, :, keys].mT
        s = s.masked_fill(~visible[:, keys], -math.inf)
        m_new = m.maximum(s.amax(dim=-1, keepdim=True))
        safe = m_new.where(m_new > -math.inf, 0)
        p, alpha = (s - safe).exp(), (m - safe).exp()
        if bug == "exponential_off_by_3e-6":
            p = p * (1 + 3e-6 * torch.sin(7 * s).where(s > -math.inf, 0))
        l, m = l * alpha + p.sum(dim=-1, keepdim=True), m_new
        if bug == "one_rescale_missed" and j == block_kv:
            alpha[:, :, -5] = 1
        o = o * alpha + _rounded(p, bug, case.q.dtype) @ _rounded(v[:, :, keys], bug, case.q.dtype)
        o = o.half().float() if bug == "sums_in_float16" else o
    lse = (m + l.log()).where(l > 0, -math.inf)[..., 0]
    out = (o / l.where(l > 0, 1)).transpose(1, 2)
    if bug == "one_LSE_off_by_1e-5":
        lse[:, -1, lse.shape[2] // 2] += 1e-5
    if bug == "one_row_off_by_1e-5":
        out[:, out.shape[1] // 2, -1] *= 1 + 1e-5
    return {"O": out.to(case.q.dtype), "LSE": lse}


def _backward(case: Case, forward: Tensors, bug: str, block_q: int, block_kv: int) -> Tensors:
    assert case.dO is not None
    storage, heads_kv = case.q.dtype, case.k.shape[2]
    q, do, o = (x.float().transpose(1, 2) for x in (case.q, case.dO, forward["O"]))
    k, v = (
        x.float().transpose(1, 2).repeat_interleave(case.group, dim=1) for x in (case.k, case.v)
    )
    lse = forward["LSE"][..., None]
    visible = case.visible() & (lse > -math.inf)
    lse = lse.where(lse > -math.inf, 0)
    delta = (do * o).sum(dim=-1, keepdim=True)
    if bug == "D_without_the_last_column":
        delta = (do * o)[..., :-1].sum(dim=-1, keepdim=True)
    if bug == "D_of_one_row_off_by_1e-4":
        delta[:, :, delta.shape[2] // 2] *= 1 + 1e-4
    if case.dLSE is not None and bug != "no_dLSE":
        delta = delta - case.dLSE[..., None]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i in range(0, q.shape[2], block_q):
        rows = slice(i, i + block_q)
        p = ((case.scale * q[:, :, rows]) @ k.mT - lse[:, :, rows]).exp()
        p = p.where(visible[:, :, rows], 0)
        ds = p * (do[:, :, rows] @ v.mT - delta[:, :, rows])
        p, ds = _rounded(p, bug, storage), _rounded(ds, bug, storage)
        dq[:, :, rows] = case.scale * (ds @ k)
        if bug == "one_key_block_of_dQ_missed" and i == 0:
            dq[:, :, rows] = case.scale * (ds[..., block_kv // 2 :] @ k[:, :, block_kv // 2 :])
        dk += case.scale * (ds.mT @ q[:, :, rows])
        dv += p.mT @ do[:, :, rows]
    if bug == "one_head_missing_in_dK":
        dk[:, -1] = 0
    dk, dv = (x.unflatten(1, (heads_kv, case.group)).sum(dim=2).transpose(1, 2) for x in (dk, dv))
    if bug == "one_column_of_dV_off_by_1e-5":
        dv[..., 3] *= 1 + 1e-5
    if bug == "one_row_of_dK_off_by_1e-4":
        dk[:, dk.shape[1] // 2] *= 1 + 1e-4
    if bug == "one_element_of_dK_off_by_1e-3":
        dk[0, dk.shape[1] // 2, 0, 0] *= 1 + 1e-3
    if bug == "dK_off_by_1e-5":
        dk *= 1 + 1e-5
    return {"dQ": dq.transpose(1, 2).to(storage), "dK": dk.to(storage), "dV": dv.to(storage)}
