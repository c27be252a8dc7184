"""The custom operators `fa2tvm::attention_forward` and `fa2tvm::attention_backward`.

They make attention a citizen of PyTorch: autograd, autocast, torch.compile, fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fa2tvm import cuda_runtime, launch
from fa2tvm.device import Device
from fa2tvm.launch import check, default_scale, problem_of
from fa2tvm.modules import module_for
from fa2tvm.problem import Alignment

# Any: torch's annotations leave its methods untyped.
_library: Any = torch.library.Library("fa2tvm", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool causal, "
    "str alignment) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, "
    "Tensor? dlse, float? softmax_scale, bool causal, str alignment, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

Tensor = torch.Tensor


def device_of(tensor: Tensor) -> Device | None:
    """What `module_for` wants to know of where a tensor is: its GPU, or None for the CPU."""
    return cuda_runtime.device(tensor.device.index) if tensor.is_cuda else None


def is_deterministic() -> bool:
    """Whether PyTorch is told to compute the same bits in every run."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, alignment: Alignment
) -> tuple[Tensor, Tensor]:
    """O and LSE through the operator; see `api.attention`."""
    out: tuple[Tensor, Tensor] = torch.ops.fa2tvm.attention_forward(
        q, k, v, softmax_scale, causal, alignment
    )
    return out


def _forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, alignment: Alignment
) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    problem = problem_of(q, k, v, causal=causal, alignment=alignment)
    scale = default_scale(q.shape[3]) if softmax_scale is None else softmax_scale
    return launch.forward(module_for(problem, device_of(q)), q, k, v, scale, problem.causal_offset)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    batch, seq_q, heads = q.shape[:3]
    return (
        q.new_empty((batch, seq_q, heads, v.shape[3])),
        q.new_empty((batch, heads, seq_q), dtype=torch.float32),
    )


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    problem = problem_of(q, k, v, causal=causal, alignment=alignment, pass_="backward")
    scale = default_scale(q.shape[3]) if softmax_scale is None else softmax_scale
    dq, dk, dv = launch.backward(
        module_for(problem, device_of(q), deterministic=is_deterministic()),
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        scale,
        problem.causal_offset,
        (needs[0], needs[1], needs[2]),
    )
    # An operator's results are tensors; an empty one stands for what was not asked for.
    return (
        q.new_empty(0) if dq is None else dq,
        k.new_empty(0) if dk is None else dk,
        v.new_empty(0) if dv is None else dv,
    )


def _backward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-1]
    dq, dk, dv = (
        tensor.new_empty(tensor.shape) if needed else tensor.new_empty(0)
        for tensor, needed in zip((q, k, v), needs, strict=True)
    )
    return dq, dk, dv


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward needs, under the eyes of the version counter."""
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    saved: tuple[Tensor, ...],
    dout: Tensor | None,
    dlse: Tensor | None,
    operator: Callable[..., Any] | None = None,
) -> tuple[Any, ...]:
    """Gradients of q, k and v, each where it is needed, and None for the options.

    Parameters
    ----------
    saved
        `ctx.saved_tensors`, which may be read only once.
    operator
        Instead of `fa2tvm::attention_backward`.
    """
    nothing = (None,) * len(ctx.options)
    needs = list(ctx.needs_input_grad[:3])
    if dout is None and dlse is None:
        return None, None, None, *nothing
    operator = operator or torch.ops.fa2tvm.attention_backward
    grads = operator(*saved, dout, dlse, *ctx.options, needs)
    return (
        *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)),
        *nothing,
    )


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    return gradients(ctx, ctx.saved_tensors, dout, dlse)


def _refuse_second_derivative(*_: Any) -> Any:
    raise RuntimeError(
        "a second derivative through fa2tvm.attention was asked for, but only first derivatives "
        "exist; use F.scaled_dot_product_attention with the MATH backend there."
    )


class Transformable(torch.autograd.Function):
    """The operator for torch.func, whose transforms do not enter a registered autograd formula."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """O and LSE."""
        return attention(q, k, v, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward needs."""
        save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k and v, each where it is needed."""
        return gradients(ctx, ctx.saved_tensors, dout, dlse, _TransformableBackward.apply)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.fa2tvm.attention_backward(*arguments)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _refuse_second_derivative(ctx, *grads)


def _forward_autocast(
    device_type: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    alignment: Alignment,
) -> tuple[Tensor, Tensor]:
    """Compute in autocast's dtype, as torch's own attention does; gradients are cast back."""
    dtype = torch.get_autocast_dtype(device_type)
    cast = [
        tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        for tensor in (q, k, v)
    ]
    with torch.autocast(device_type, enabled=False):
        return attention(cast[0], cast[1], cast[2], softmax_scale, causal, alignment)


def _folded(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The dimension of vmap made part of the batch; a tensor without one is repeated."""
    if tensor is None:
        return None
    whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return whole.flatten(0, 1)


def _mapped(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The rule of vmap for both operators: more batches."""
    size = info.batch_size
    folded = [
        _folded(x, dim, size) if x is None or isinstance(x, Tensor) else x
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    results = operator(*folded)
    # A gradient that is not needed is empty and has no batch.
    dims = tuple(None if x.dim() == 1 else 0 for x in results)
    unfolded = tuple(
        x if dim is None else x.unflatten(0, (size, x.shape[0] // size))
        for x, dim in zip(results, dims, strict=True)
    )
    return unfolded, dims


# Any device, so that `check` says which ones there are.
_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
for _key, _type in (("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")):
    _library.impl("attention_forward", functools.partial(_forward_autocast, _type), _key)
torch.library.register_fake("fa2tvm::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("fa2tvm::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "fa2tvm::attention_forward", _gradients, setup_context=save, lib=_library
)
torch.library.register_autograd(
    "fa2tvm::attention_backward", _refuse_second_derivative, lib=_library
)
for _name in ("attention_forward", "attention_backward"):
    _rule = functools.partial(_mapped, getattr(torch.ops.fa2tvm, _name))
    torch.library.register_vmap(f"fa2tvm::{_name}", _rule, lib=_library)
