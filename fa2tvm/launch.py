"""PyTorch tensors to modules: checks, allocation, strides, thread counts and empty sizes.

What only GPUs need is in cuda_launch.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fa2tvm import cuda_launch, parallel
from fa2tvm.compile import Module
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import MAX_HEAD_DIM, Alignment, PassName, Problem, Shape, Variant

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# Work that pays for waking one more thread: about 20 us of one core.
_FLOPS_PER_THREAD = 1_000_000


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse what no kernel can do. Symbolic sizes are welcome.

    Raises
    ------
    UnsupportedProblem
        For wrong types, dtypes, devices or shapes.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.layout != torch.strided:
            raise UnsupportedProblem(
                f"{name} has layout {tensor.layout}, but only dense tensors are supported; "
                "call to_dense()."
            )
        if tensor.dim() != 4:
            raise UnsupportedProblem(
                f"{name} has {tensor.dim()} dimensions, but it must have 4 "
                "(batch, seq, heads, head_dim); reshape it."
            )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        raise UnsupportedProblem(
            f"the dtypes of q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but all three must be the "
            "same one of float32, float16, bfloat16; convert them."
        )
    if not (q.device == k.device == v.device):
        raise UnsupportedProblem(
            f"q, k, v are on {q.device}, {k.device}, {v.device}, but all three must be on one "
            "device; move them."
        )
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedProblem(
            f"q is on {q.device}, but kernels exist only for cpu and cuda; move the tensors there."
        )
    _check_shapes(q, k, v)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[0] != k.shape[0] or k.shape[0] != v.shape[0]:
        raise UnsupportedProblem(f"the batch sizes of {shapes} differ, but they must be equal.")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise UnsupportedProblem(f"k and v of {shapes} must have equal lengths and equal heads.")
    if q.shape[3] != k.shape[3]:
        raise UnsupportedProblem(f"q and k of {shapes} must have the same head_dim.")
    for name, size in (("q", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise UnsupportedProblem(
                f"the head_dim of {name} is {size}, but only 1 to {MAX_HEAD_DIM} is supported; "
                "split the heads differently."
            )
    if q.shape[2] % k.shape[2] if k.shape[2] != 0 else q.shape[2]:
        raise UnsupportedProblem(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}, but the first must be a multiple of "
            "the second; repeat or drop key heads."
        )


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    alignment: Alignment = "bottom_right",
    pass_: PassName = "forward",
) -> Problem:
    """The problem that checked tensors pose."""
    variant = Variant(pass_, DTYPES[q.dtype], q.shape[3], v.shape[3], causal)
    shape = Shape(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
    return Problem(variant, shape, alignment)


def default_scale(head_dim_qk: int) -> float:
    """The softmax scale that None stands for: 1/sqrt(head_dim_qk)."""
    return 1.0 / math.sqrt(head_dim_qk)


def threads_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Threads that the work of these shapes pays for; how many there are is another matter."""
    batch, seq_q, heads, head_dim = q.shape
    flops = 2 * batch * heads * seq_q * k.shape[1] * (head_dim + v.shape[3])
    return 1 + flops // _FLOPS_PER_THREAD


@functools.lru_cache(maxsize=1024)
def _scratch(
    schedule: Any, variant: Variant, shape: tuple[int, ...], causal_offset: int, threads: int
) -> tuple[int, int]:
    """Splits of the key range, and floats of workspace, for a backward pass."""
    alignment: Alignment = "top_left" if causal_offset == 0 else "bottom_right"
    problem = Problem(variant, Shape(*shape), alignment)
    splits = schedule.splits(problem, threads)
    return splits, schedule.workspace_floats(problem, splits)


def forward(
    module: Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    causal_offset: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Algorithm 1 on checked tensors.

    Parameters
    ----------
    q, k, v
        (batch, seq, heads, head_dim) with any strides; copied only where the innermost is not 1.
    causal_offset
        Query i sees keys j <= i + causal_offset, where the module is causal.
    out, lse
        Results to write into, instead of new ones.

    Returns
    -------
    tuple
        O (batch, seq_q, heads_q, head_dim_v), contiguous, and LSE (batch, heads_q, seq_q) in
        nats, float32.

    Raises
    ------
    UnsupportedProblem
        For an `out` or `lse` of the wrong shape, dtype, device or strides, or that overlaps
        another tensor in memory.
    """
    q, k, v = _readable(q), _readable(k), _readable(v)
    batch, seq_q, heads, _ = q.shape
    if out is not None or lse is not None:
        _require_apart({"out": out, "lse": lse}, {"q": q, "k": k, "v": v})
    out = _result("out", out, q, (batch, seq_q, heads, v.shape[3]), q.dtype)
    lse = _result("lse", lse, q, (batch, heads, seq_q), torch.float32)
    if out.numel() == 0:
        return out, lse
    if k.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    if q.is_cuda:
        _forward_on_gpu(module, q, k, v, out, lse, softmax_scale, causal_offset)
        return out, lse
    threads = min(threads_for(q, k, v), parallel.count())
    module.function_on(q, k, v, out, lse, softmax_scale, causal_offset, threads)
    return out, lse


def _forward_on_gpu(
    module: Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal_offset: int,
) -> None:
    """Launch on the tensors' GPU and its current stream; nothing waits for it."""
    with cuda_launch.on_device_of(q):
        q, softmax_scale, _ = cuda_launch.positive_scale(q, softmax_scale)
        q, k, v = (cuda_launch.aligned(x) for x in (q, k, v))
        result = out if cuda_launch.is_aligned(out) else torch.empty_like(out)
        schedule = module.schedule
        extra: tuple[torch.Tensor, ...] = ()
        if schedule.takes_counter:
            extra = (cuda_launch.counter(q.device.index, is_used=schedule.counts_tiles),)
        module.function(q, k, v, result, lse, *extra, softmax_scale, causal_offset)
        if result is not out:
            out.copy_(result)


def backward(
    module: Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    causal_offset: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Run Algorithm 2 for the gradients that are needed; the others are None.

    Parameters
    ----------
    out, lse
        What `forward` returned.
    dout, dlse
        Gradients that arrive on them, with any strides; None stands for zero.
    """
    q, k, v, out = _readable(q), _readable(k), _readable(v), _readable(out)
    dq, dk, dv = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if needed else None
        for tensor, needed in zip((q, k, v), needs, strict=True)
    )
    nothing_seen = q.numel() == 0 or k.numel() == 0
    if nothing_seen or (dout is None and dlse is None) or not any(needs):
        for grad in (dq, dk, dv):
            if grad is not None:
                grad.zero_()
        return dq, dk, dv
    dout = torch.zeros_like(out) if dout is None else _readable(dout)
    if q.is_cuda:
        arguments = q, k, v, out, lse, dout, dlse, softmax_scale, causal_offset
        _backward_on_gpu(module, *arguments, (dq, dk, dv))
        return dq, dk, dv
    threads = min(threads_for(q, k, v), parallel.count())
    shape = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
    splits, floats = _scratch(module.schedule, module.variant, shape, causal_offset, threads)
    workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
    # An unneeded gradient's place is taken by a tensor of its shape, which stays untouched.
    module.function_on(
        q,
        k,
        v,
        out,
        _readable(lse).contiguous(),
        dout,
        lse if dlse is None else dlse.detach().resolve_neg().contiguous(),
        q if dq is None else dq,
        k if dk is None else dk,
        v if dv is None else dv,
        workspace,
        softmax_scale,
        causal_offset,
        int(dlse is not None),
        *(int(needed) for needed in needs),
        splits,
        threads,
    )
    return dq, dk, dv


def _backward_on_gpu(
    module: Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    softmax_scale: float,
    causal_offset: int,
    gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Launch on the tensors' GPU and its current stream; nothing waits for it."""
    dq, dk, dv = gradients
    with cuda_launch.on_device_of(q):
        q, softmax_scale, factor = cuda_launch.positive_scale(q, softmax_scale)
        q, k, v, out, dout = (cuda_launch.aligned(x) for x in (q, k, v, out, dout))
        shape = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        splits, floats = _scratch(module.schedule, module.variant, shape, causal_offset, 1)
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
        lse = _readable(lse).contiguous()
        module.function(
            q,
            k,
            v,
            out,
            lse,
            dout,
            lse if dlse is None else _readable(dlse).contiguous(),
            q if dq is None else dq,
            k if dk is None else dk,
            v if dv is None else dv,
            workspace,
            softmax_scale,
            causal_offset,
            int(dlse is not None),
            *(int(gradient is not None) for gradient in gradients),
            splits,
        )
        if dq is not None and factor != 1:
            # The kernel's Q is `factor` times the caller's.
            dq.mul_(factor)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a kernel reads them: detached, not lazily negated, innermost stride 1."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _result(
    name: str,
    given: torch.Tensor | None,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    wanted = (shape, dtype, like.device)
    found = (tuple(given.shape), given.dtype, given.device)
    if found != wanted:
        raise UnsupportedProblem(
            f"{name} is {found[0]}, {found[1]} on {found[2]}, but the result is {wanted[0]}, "
            f"{wanted[1]} on {wanted[2]}; pass such a tensor or none."
        )
    if not given.is_contiguous() or given.is_neg() or given.requires_grad:
        raise UnsupportedProblem(
            f"{name} is not contiguous, is lazily negated or requires grad, but results are "
            "written into plain contiguous memory; pass such a tensor or none."
        )
    return given


def _require_apart(
    results: dict[str, torch.Tensor | None], inputs: dict[str, torch.Tensor]
) -> None:
    """Refuse results whose memory is also that of an input or of the other result."""
    given = {name: x for name, x in results.items() if x is not None}
    for name, x in given.items():
        for other, y in {**inputs, **given}.items():
            if other == name or x.device != y.device or not x.numel() or not y.numel():
                continue
            (first, last), (start, end) = _span(x), _span(y)
            if first < end and start < last:
                raise UnsupportedProblem(
                    f"{name} overlaps {other} in memory, but it is written while {other} is in "
                    "use; pass a tensor of its own or none."
                )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First and last byte address, the last exclusive, of what a tensor may touch."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
