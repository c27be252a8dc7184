"""Plain eager calls on a GPU, past the operator: every microsecond is the CPU's.

Each look at a tensor costs about 0.1 us, an allocation 1.8 us, of a call of 12 to 14 us (H200 host,
2026-11-30); hence the long lines of conditions, and no allocation that nobody reads.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fa2tvm import cuda_launch, launch, torch_op
from fa2tvm.modules import module_for, prepared
from fa2tvm.problem import Alignment

# Shapes whose checks and module are remembered, before all are forgotten.
MAX_PREPARED = 1024

Tensor = torch.Tensor
_C: Any = torch._C
_any_autocast = _C._is_any_autocast_enabled
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_transforms, _tracer = _C._are_functorch_transforms_active, _C._get_tracing_state
_current_device: Any = getattr(_C, "_cuda_getDevice", None)
# Whether the tensors' GPU may be another than the current one; None until a GPU is used.
several_gpus: bool | None = None
_empty_like, _strided = torch.empty_like, torch.strided


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
    keep_lse: bool = True,
) -> tuple[Tensor, Tensor] | None:
    """O and LSE, or None where the operator is needed: somebody looks, or a tensor must be copied.

    Parameters
    ----------
    q, k, v
        Of `torch.Tensor` itself, q on a GPU.
    keep_lse
        False where nobody reads the LSE: then it may be memory that the next call writes to.

    Raises
    ------
    UnsupportedProblem
        As `launch.check` and `module_for` do.
    """
    index = q.get_device()
    if (
        # Autocast, modes, transforms and tracers, as in `direct`.
        _any_autocast()
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or _tracer() is not None
        or (several_gpus and _current_device() != index)
        # What a kernel cannot read as it is. Contiguous strides are multiples of the head dim,
        # which is one of 8 where a kernel takes it.
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or not (q.is_contiguous() or _is_readable(q))
        or not (k.is_contiguous() or _is_readable(k))
        or not (v.is_contiguous() or _is_readable(v))
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    ):
        return None
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        index,
        causal,
        alignment,
    )
    call = prepared.get(key) or _prepare(key, q, k, v)
    if call is None:
        return None
    function, out_like, lse_like, spare_lse, scale, causal_offset, counter = call
    if softmax_scale is not None:
        scale = float(softmax_scale)
        if not scale > 0:
            return None
    out = _empty_like(out_like)
    lse = spare_lse if spare_lse is not None and not keep_lse else _empty_like(lse_like)
    if counter is _EACH_STREAM:
        counter = cuda_launch.counter(index)
    try:
        if counter is None:
            function(q, k, v, out, lse, scale, causal_offset)
        else:
            function(q, k, v, out, lse, counter, scale, causal_offset)
    except (RuntimeError, TypeError, ValueError):
        # The key holds neither dtype nor device of k and v, which the program looks at itself.
        launch.check(q, k, v)
        raise
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """The gradients that are needed, or None where `launch.backward` is: a tensor must be copied.

    Parameters
    ----------
    q, k, v, out, lse
        What went into the forward on a GPU and what came out of it.
    dout
        The gradient that arrives on `out`; none arrives on `lse`.
    """
    index = q.get_device()
    if (
        (several_gpus and _current_device() != index)
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or dout.is_neg()
        or not (q.is_contiguous() or _is_readable(q))
        or not (k.is_contiguous() or _is_readable(k))
        or not (v.is_contiguous() or _is_readable(v))
        or not (dout.is_contiguous() or _is_readable(dout))
        or not (out.is_contiguous() and lse.is_contiguous())
        or (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()) & 15
    ):
        return None
    key = (q.shape, k.shape, v.shape, q.dtype, index, causal, alignment, needs)
    call = prepared.get(key) or _prepare_backward(key, q, k, v)
    if call is None:
        return None
    function, like, workspace_like, scale, numbers = call
    if softmax_scale is not None:
        scale = float(softmax_scale)
        if not scale > 0:
            return None
    dq, dk, dv = (None if x is None else _empty_like(x) for x in like)
    function(
        q,
        k,
        v,
        out,
        lse,
        dout,
        lse,
        q if dq is None else dq,
        k if dk is None else dk,
        v if dv is None else dv,
        _empty_like(workspace_like),
        scale,
        *numbers,
    )
    return dq, dk, dv


def _is_readable(tensor: Tensor) -> bool:
    return tensor.layout is _strided and tensor.stride(-1) == 1 and cuda_launch.is_aligned(tensor)


# Stands for the counter of the stream that is current when a call is made.
_EACH_STREAM = object()


def _prepare(key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...] | None:
    """Check the tensors once for their shapes and keep what a call needs; None for empty ones."""
    global several_gpus
    launch.check(q, k, v)
    several_gpus = torch.cuda.device_count() > 1
    if several_gpus and _current_device() != q.get_device():
        return None
    if q.numel() == 0 or k.numel() == 0:
        return None
    problem = launch.problem_of(q, k, v, causal=key[-2], alignment=key[-1])
    module = module_for(problem, torch_op.device_of(q))
    index, element = q.get_device(), cuda_launch.element
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    counter: Any = None
    if module.schedule.takes_counter:
        counter = (
            _EACH_STREAM if module.schedule.counts_tiles else cuda_launch.unused_counter(index)
        )
    spare_lse = None
    rows = math.prod(lse_shape)
    if rows <= cuda_launch.UNREAD_FLOATS:
        spare_lse = cuda_launch.unread(index)[:rows].view(lse_shape)
    call = (
        module.function,
        element(q.dtype, index).expand(q.shape[0], q.shape[1], q.shape[2], v.shape[3]),
        element(torch.float32, index).expand(lse_shape),
        spare_lse,
        launch.default_scale(q.shape[3]),
        problem.causal_offset,
        counter,
    )
    return remember(key, call)


def _prepare_backward(
    key: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Any, ...] | None:
    *_, index, causal, alignment, needs = key
    if q.numel() == 0 or k.numel() == 0 or not any(needs):
        return None
    problem = launch.problem_of(q, k, v, causal=causal, alignment=alignment, pass_="backward")
    module = module_for(problem, torch_op.device_of(q))
    schedule: Any = module.schedule
    splits = schedule.splits(problem, 1)
    floats = schedule.workspace_floats(problem, splits)
    element = cuda_launch.element(q.dtype, index)
    call = (
        module.function,
        [element.expand(x.shape) if n else None for x, n in zip((q, k, v), needs, strict=True)],
        cuda_launch.element(torch.float32, index).expand(floats),
        launch.default_scale(q.shape[3]),
        (problem.causal_offset, 0, *map(int, needs), splits),
    )
    return remember(key, call)


def remember(key: tuple[Any, ...], call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep what a call needs; all is forgotten where it is too much."""
    if len(prepared) >= MAX_PREPARED:
        prepared.clear()
    prepared[key] = call
    return call
