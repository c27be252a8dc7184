"""The tensors that every peer gets, and whether what a peer makes of them is right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fa2tvm import reference
from fa2tvm.problem import DType, PassName
from fa2tvm.reference import Array
from fa2tvm.workloads import Workload

Tensors = tuple[torch.Tensor, ...]

# Logits in float64 that a check may visit; beyond it only the first and last heads are checked.
_CHECK_LOGITS = 1 << 26


@dataclass
class Case:
    """The tensors of a workload in one dtype, (batch, seq, heads, dim), the same for every peer."""

    workload: Workload
    dtype: DType
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def make(cls, workload: Workload, dtype: DType, seed: int) -> Case:
        """N(0, 1) data from a seed."""
        s = workload.shape
        generator = torch.Generator().manual_seed(seed)

        def normal(seq: int, heads: int, dim: int) -> torch.Tensor:
            x = torch.randn(s.batch, seq, heads, dim, generator=generator)
            return x.to(getattr(torch, dtype))

        d, dv = workload.head_dim_qk, workload.head_dim_v
        return cls(
            workload,
            dtype,
            q=normal(s.seq_q, s.heads_q, d),
            k=normal(s.seq_kv, s.heads_kv, d),
            v=normal(s.seq_kv, s.heads_kv, dv),
            dout=normal(s.seq_q, s.heads_q, dv),
        )

    def checked_heads(self) -> list[tuple[int, int]]:
        """The (batch, key head) pairs that the check looks at: all, or the first and the last."""
        s = self.workload.shape
        pairs = [(b, h) for b in range(s.batch) for h in range(s.heads_kv)]
        if s.batch * s.heads_q * s.seq_q * s.seq_kv <= _CHECK_LOGITS:
            return pairs
        return sorted({pairs[0], pairs[-1]})


class Oracle:
    """float64 results of one pass on the checked heads, and the error of plain attention there."""

    def __init__(self, case: Case, pass_: PassName) -> None:
        self.pass_ = pass_
        group = case.workload.shape.group
        self._heads = [(b, h, slice(h * group, (h + 1) * group)) for b, h in case.checked_heads()]
        self._right = [self._float64(case, *head) for head in self._heads]
        self._plain = self._relative([self._storage(case, *head) for head in self._heads])

    def errors(self, results: Tensors) -> tuple[float, float]:
        """Relative error of O, or the worst of dQ, dK and dV: of a peer, and of plain attention."""
        own = []
        for b, h, heads in self._heads:
            key_head = slice(h, h + 1)
            of_output = (heads,) if self.pass_ == "forward" else (heads, key_head, key_head)
            own.append(tuple(x[b : b + 1, :, n] for x, n in zip(results, of_output, strict=True)))
        return self._relative(own), self._plain

    def _relative(self, results: list[Tensors]) -> float:
        worst = 0.0
        for output in range(len(self._right[0])) if self._right else ():
            difference = norm = 0.0
            for right, got in zip(self._right, results, strict=True):
                x = got[output].detach().to(torch.float64).numpy()
                difference += float(np.square(x - right[output]).sum())
                norm += float(np.square(right[output]).sum())
            relative = (difference / norm) ** 0.5 if norm else difference**0.5
            worst = relative if not relative <= worst else worst
        return worst

    def _float64(self, case: Case, b: int, h: int, heads: slice) -> tuple[Array, ...]:
        workload = case.workload
        q, k, v, dout = (x.numpy() for x in self._slices(case, b, h, heads, torch.float64))
        causal, alignment = workload.causal, workload.alignment
        if self.pass_ == "forward":
            return reference.attention(q, k, v, None, causal, alignment)[:1]
        return reference.attention_backward(q, k, v, dout, causal=causal, alignment=alignment)

    def _storage(self, case: Case, b: int, h: int, heads: slice) -> Tensors:
        """Plain attention in the dtype itself: matmul, softmax, matmul."""
        dtype = getattr(torch, case.dtype)
        q, k, v, dout = self._slices(case, b, h, heads, dtype)
        inputs = [x.requires_grad_(self.pass_ == "backward") for x in (q, k, v)]
        out = _plain_attention(inputs, case.workload)
        if self.pass_ == "forward":
            return (out,)
        return torch.autograd.grad(out, inputs, dout)

    @staticmethod
    def _slices(case: Case, b: int, h: int, heads: slice, dtype: torch.dtype) -> Tensors:
        q, dout = (x[b : b + 1, :, heads] for x in (case.q, case.dout))
        k, v = (x[b : b + 1, :, h : h + 1] for x in (case.k, case.v))
        return tuple(x.to(dtype, copy=True) for x in (q, k, v, dout))


def _plain_attention(inputs: list[torch.Tensor], workload: Workload) -> torch.Tensor:
    q, k, v = inputs
    scale = reference.resolve_scale(None, workload.head_dim_qk)
    s = torch.einsum("bihd,bjkd->bhij", q * scale, k)
    if workload.causal:
        offset = reference.causal_offset(q.shape[1], k.shape[1], workload.alignment)
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(offset + 1)
        s = s.masked_fill(hidden, float("-inf"))
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return torch.einsum("bhij,bjkd->bihd", p, v)
