"""Plain eager calls, past the operator's machinery.

The operator costs several times a tiny kernel: autograd, autocast, modes and transforms each look
at a call. Here they are asked, once each, whether there is anything for them to do.
"""

from __future__ import annotations

from typing import Any

import torch

from fa2tvm import cuda_direct, launch, parallel, torch_op
from fa2tvm.cuda_direct import remember
from fa2tvm.modules import module_for, prepared
from fa2tvm.problem import Alignment

Tensor = torch.Tensor
_C = torch._C
_any_autocast = _C._is_any_autocast_enabled
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_transforms, _tracer = _C._are_functorch_transforms_active, _C._get_tracing_state


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
    keep_lse: bool = True,
) -> tuple[Tensor, Any] | None:
    """O and LSE as the operator gives them, or None where the operator is needed.

    Parameters
    ----------
    keep_lse
        False where nobody reads the LSE: then it may be None.

    Raises
    ------
    UnsupportedProblem
        As `launch.check` does.
    """
    on_gpu = type(q) is type(k) is type(v) is Tensor and q.is_cuda
    if not _nobody_looks() or not (on_gpu or (_is_plain(q) and _is_plain(k) and _is_plain(v))):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        function: Any = _OutAndLse if keep_lse else _Out
        found = function.apply(q, k, v, (softmax_scale, causal, alignment))
        return found if keep_lse else (found, None)
    if on_gpu:
        return cuda_direct.attention(q, k, v, softmax_scale, causal, alignment)
    return _run(q, k, v, softmax_scale, causal, alignment)


class _OutAndLse(torch.autograd.Function):
    """Plain tensors with gradients.

    A `setup_context` would cost each call 40 us, hence none. A second result and three arguments
    for the options made 47 us of both passes 55 (Zen 4), hence one argument, and `_Out`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _forward(ctx, q, k, v, options)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, dout, dlse)


class _Out(torch.autograd.Function):
    """As `_OutAndLse`, where nobody reads the LSE."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor:
        return _forward(ctx, q, k, v, options)[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return _gradients(ctx, dout, None)


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """O and LSE, and what the backward needs, under the eyes of the version counter."""
    if q.is_cuda:
        output = cuda_direct.attention(q, k, v, *options)
    else:
        output = _run(q.detach(), k.detach(), v.detach(), *options)
    output = output or torch_op.attention(q, k, v, *options)
    ctx.save_for_backward(q, k, v, *output)
    ctx.options = options
    return output


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Gradients of q, k and v, each where it is needed, and None for the options."""
    q, k, v, out, lse = saved = ctx.saved_tensors
    where = q.device
    plain = all(type(x) is Tensor and x.device == where for x in (dout, dlse) if x is not None)
    if (
        torch.is_grad_enabled()
        or not plain
        or not _nobody_looks()
        or (q.is_cuda and torch_op.is_deterministic())
    ):
        return (*torch_op.gradients(ctx, saved, dout, dlse)[:3], None)
    needs = ctx.needs_input_grad[:3]
    softmax_scale, causal, alignment = ctx.options
    if dout is not None and dlse is None and q.is_cuda:
        options = softmax_scale, causal, alignment, needs
        found = cuda_direct.backward(q, k, v, out, lse, dout, *options)
        if found is not None:
            return (*found, None)
    key = ("backward", q.shape, k.shape, v.shape, q.dtype, q.get_device(), causal, alignment)
    module, scale, causal_offset = prepared.get(key) or _prepare_backward(key, q, k, v)
    if softmax_scale is not None:
        scale = float(softmax_scale)
    grads = launch.backward(module, q, k, v, out, lse, dout, dlse, scale, causal_offset, needs)
    return (*grads, None)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can read the tensor as it is, and no subclass has a say."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and (tensor.is_contiguous() or tensor.stride(-1) == 1)
    )


def _nobody_looks() -> bool:
    """Whether autocast, modes, transforms and tracers are off."""
    return not (
        _any_autocast()
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or _tracer() is not None
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
) -> tuple[Tensor, Tensor] | None:
    try:
        key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, causal, alignment)
    except RuntimeError:  # a nested tensor has no shape
        return None
    call = prepared.get(key) or _prepare(key, q, k, v)
    if call is None:
        return None
    function, out_like, lse_like, scale, causal_offset, threads = call
    out, lse = torch.empty_like(out_like), torch.empty_like(lse_like)
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
        _pattern((q.shape[0], q.shape[1], q.shape[2], v.shape[3]), q.dtype),
        _pattern((q.shape[0], q.shape[2], q.shape[1]), torch.float32),
        launch.default_scale(q.shape[3]),
        problem.causal_offset,
        launch.threads_for(q, k, v),
    )
    return remember(key, call)


def _pattern(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One element seen as a whole tensor: `empty_like` of it takes half the time of `empty`."""
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


def _prepare_backward(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    problem = launch.problem_of(q, k, v, causal=key[-2], alignment=key[-1], pass_="backward")
    module = module_for(problem, torch_op.device_of(q))
    call = (module, launch.default_scale(q.shape[3]), problem.causal_offset)
    return remember(key, call)
