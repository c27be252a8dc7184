"""The tensors that every peer gets, and whether what a peer makes of them is right.

A peer is right where each output's error, as one norm over the checked heads, is within a factor of
that of plain attention in the same dtype. This is not the yardstick (`fa2tvm.yardstick`) that tests
and tuner use, for two reasons. It is what other libraries, which round where they like, are asked
too; the yardstick's units are those of our arithmetic. And it is cheap: for the backward of one
head at 512, 2048 and 4096 tokens it takes 0.7, 0.8 and 1.4 s of CPU, the yardstick 4.4, 7.7 and
16.9 s (AMD Zen 4, float32, head dim 64, causal); both grow with the square of the length. So it
finds another mask, scale or head, and not a wrong row among thousands; that our programs have none
is shown by the tests and, for each schedule that is promoted, by the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fa2tvm import reference
from fa2tvm.problem import DType, PassName
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
    def make(cls, workload: Workload, dtype: DType, seed: int, device: str = "cpu") -> Case:
        """N(0, 1) data from a seed, on "cpu" or "cuda"."""
        s = workload.shape
        generator = torch.Generator(device).manual_seed(seed)

        def normal(seq: int, heads: int, dim: int) -> torch.Tensor:
            x = torch.randn(s.batch, seq, heads, dim, generator=generator, device=device)
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
    """float64 results of one pass on the checked heads, and the error of plain attention there.

    On a CPU they are those of `fa2tvm.reference`, on a GPU of plain attention in float64 there.
    """

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
                x = got[output].detach().to(torch.float64)
                difference += float((x - right[output]).square().sum())
                norm += float(right[output].square().sum())
            relative = (difference / norm) ** 0.5 if norm else difference**0.5
            worst = relative if not relative <= worst else worst
        return worst

    def _float64(self, case: Case, b: int, h: int, heads: slice) -> Tensors:
        if case.q.is_cuda:
            return self._plain_results(case, b, h, heads, torch.float64)
        workload = case.workload
        q, k, v, dout = (x.numpy() for x in self._slices(case, b, h, heads, torch.float64))
        causal, alignment = workload.causal, workload.alignment
        if self.pass_ == "forward":
            return (torch.from_numpy(reference.attention(q, k, v, None, causal, alignment)[0]),)
        grads = reference.attention_backward(q, k, v, dout, causal=causal, alignment=alignment)
        return tuple(torch.from_numpy(x) for x in grads)

    def _storage(self, case: Case, b: int, h: int, heads: slice) -> Tensors:
        """Plain attention in the dtype itself: matmul, softmax, matmul."""
        return self._plain_results(case, b, h, heads, getattr(torch, case.dtype))

    def _plain_results(
        self, case: Case, b: int, h: int, heads: slice, dtype: torch.dtype
    ) -> Tensors:
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
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(offset + 1)
        blind = hidden.all(-1, keepdim=True)
        # A row that sees nothing stays finite: autograd through a row of -inf gives NaN.
        s = s.masked_fill(hidden & ~blind, float("-inf"))
        p = torch.softmax(s, -1).masked_fill(blind, 0.0)
    else:
        p = torch.softmax(s, -1)
    return torch.einsum("bhij,bjkd->bihd", p, v)
