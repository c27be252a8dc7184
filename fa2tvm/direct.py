"""Calls in which nothing but the kernel has to happen, past the operator's machinery.

The operator costs several times a tiny kernel: autograd, autocast, modes and transforms each look
at a call. Here they are asked, once each, whether there is anything for them to do.
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tvm import launch, parallel
from fa2tvm.modules import module_for, prepared
from fa2tvm.problem import Alignment

# Shapes whose checks and module are remembered, before all are forgotten.
_MAX_PREPARED = 1024

Tensor = torch.Tensor
_C = torch._C


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
) -> tuple[Tensor, Tensor] | None:
    """O and LSE as the operator gives them, or None where the operator is needed.

    Raises
    ------
    UnsupportedProblem
        As `launch.check` does.
    """
    for tensor in (q, k, v):
        if (
            type(tensor) is not Tensor
            or tensor.requires_grad
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or not (tensor.is_contiguous() or tensor.stride(-1) == 1)
        ):
            return None
    if (
        _C._is_any_autocast_enabled()
        or _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
    ):
        return None
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, alignment)
    call = prepared.get(key) or _prepare(key, q, k, v)
    if call is None:
        return None
    function, out_shape, lse_shape, scale, causal_offset, threads = call
    out = torch.empty(out_shape, dtype=q.dtype, device="cpu")
    lse = torch.empty(lse_shape, dtype=torch.float32, device="cpu")
    if threads > 1:
        threads = min(threads, parallel.count())
    if softmax_scale is not None:
        scale = float(softmax_scale)
    function(q, k, v, out, lse, scale, causal_offset, threads)
    return out, lse


def _prepare(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...] | None:
    """Check the tensors once for their shapes and keep what a call needs.

    None for shapes that the operator treats: those with a size of 0, and head dims of 1, whose
    innermost stride may be anything in a contiguous tensor.
    """
    launch.check(q, k, v)
    if q.numel() == 0 or k.numel() == 0 or q.shape[3] == 1 or v.shape[3] == 1:
        return None
    problem = launch.problem_of(q, k, v, causal=key[-2], alignment=key[-1])
    call = (
        module_for(problem).function_on,
        (q.shape[0], q.shape[1], q.shape[2], v.shape[3]),
        (q.shape[0], q.shape[2], q.shape[1]),
        launch.default_scale(q.shape[3]),
        problem.causal_offset,
        launch.threads_for(problem),
    )
    if len(prepared) >= _MAX_PREPARED:
        prepared.clear()
    prepared[key] = call
    return call
