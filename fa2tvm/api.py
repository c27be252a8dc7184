"""What users call: attention in flash_attn's and in PyTorch's conventions."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from fa2tvm import cuda_direct, direct, torch_op
from fa2tvm.errors import UnsupportedProblem, shown
from fa2tvm.modules import forget, module_for, use_pack, use_schedule
from fa2tvm.problem import ALIGNMENTS, Alignment

__all__ = [
    "attention",
    "flash_attn_func",
    "forget",
    "module_for",
    "scaled_dot_product_attention",
    "use_pack",
    "use_schedule",
]

Tensor = torch.Tensor


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    alignment: Alignment = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    alignment: Alignment = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    alignment: Alignment = "bottom_right",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(softmax_scale * q k^T) v, differentiable in q, k and v.

    Parameters
    ----------
    q
        (batch, seq_q, heads_q, head_dim); float32, float16 or bfloat16, any strides.
    k, v
        (batch, seq_kv, heads_kv, head_dim) and (batch, seq_kv, heads_kv, head_dim_v). heads_q is
        a multiple of heads_kv; consecutive query heads share a key head (GQA, MQA).
    causal
        Hide keys from queries before them; which those are, `alignment` says.
    softmax_scale
        1/sqrt(head_dim) if None; any number, also 0 and below.
    alignment
        "bottom_right": query i sees keys j <= i + seq_kv - seq_q, as in flash_attn.
        "top_left": j <= i, as torch's is_causal. They differ where seq_q != seq_kv.
    return_lse
        Also return the log-sum-exp of each row.

    Returns
    -------
    Tensor or tuple
        O (batch, seq_q, heads_q, head_dim_v), contiguous, in the dtype of q. A query that sees no
        key gives 0. With `return_lse` also LSE (batch, heads_q, seq_q), float32, in nats, which is
        differentiable too; -inf where no key is seen.

    Raises
    ------
    UnsupportedProblem
        For wrong types, dtypes, devices or shapes.

    Examples
    --------
    >>> import torch, fa2tvm
    >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 256, 2, 64).unbind()
    >>> out, lse = fa2tvm.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    >>> out.sum().backward()
    >>> q.grad.shape
    torch.Size([2, 128, 8, 64])
    """
    found = None
    if not (type(causal) is type(return_lse) is bool):
        _require_flags(causal=causal, return_lse=return_lse)  # type: ignore[unreachable]
    if not torch.compiler.is_compiling():
        if softmax_scale is not None and type(softmax_scale) is not float:
            softmax_scale = _number("softmax_scale", softmax_scale)
        on_gpu = type(q) is type(k) is type(v) is Tensor and q.is_cuda
        if on_gpu and not (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        ):
            found = cuda_direct.attention(q, k, v, softmax_scale, causal, alignment, return_lse)
        else:
            found = direct.attention(q, k, v, softmax_scale, causal, alignment, return_lse)
    if found is None:
        found = _through_operator(q, k, v, softmax_scale, causal, alignment)
    return found if return_lse else found[0]


def _through_operator(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _require_tensors(q=q, k=k, v=v)
    if not isinstance(options[-1], str) or options[-1] not in ALIGNMENTS:
        raise UnsupportedProblem(
            f"alignment is {shown(options[-1])}, but only 'bottom_right' and 'top_left' exist; "
            "choose one."
        )
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        apply: Any = torch_op.Transformable.apply
        result: tuple[Tensor, Tensor] = apply(q, k, v, *options)
        return result
    return torch_op.attention(q, k, v, *options)


def _require_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise UnsupportedProblem(
                f"{name} is of type {type(tensor).__name__}, but it must be a torch.Tensor; "
                "convert it."
            )
        if tensor.is_nested:
            raise UnsupportedProblem(
                f"{name} is a nested tensor, but only dense ones will do; pad it."
            )


def _require_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UnsupportedProblem(
                f"{name} is {shown(value)}, but it must be True or False; choose one."
            )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UnsupportedProblem(
            f"{name} is {shown(value)}, but it must be a number; pass a float or None."
        ) from error


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """`flash_attn.flash_attn_func`: tensors are (batch, seq, heads, head_dim).

    The causal mask is aligned to the bottom right. Gradients are deterministic on a CPU; on a GPU
    `deterministic` wants PyTorch's own switch, `torch.use_deterministic_algorithms(True)`. With
    `return_attn_probs` the result is (O, LSE, None): the probabilities of dropout, the third, do
    not exist without dropout.

    Raises
    ------
    UnsupportedProblem
        For dropout_p, window_size, softcap or alibi_slopes other than their defaults.

    Examples
    --------
    >>> import torch
    >>> from fa2tvm import flash_attn_func
    >>> flash_attn_func(*torch.randn(3, 1, 128, 4, 64), causal=True).shape
    torch.Size([1, 128, 4, 64])
    """
    _require_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    if deterministic and isinstance(q, Tensor) and q.is_cuda and not torch_op.is_deterministic():
        raise UnsupportedProblem(
            "deterministic is True, but on a GPU PyTorch's own switch decides; call "
            "torch.use_deterministic_algorithms(True)."
        )
    _refuse("dropout_p", dropout_p, 0.0)
    _refuse("window_size", tuple(window_size), (-1, -1))
    _refuse("softcap", softcap, 0.0)
    _refuse("alibi_slopes", alibi_slopes, None)
    if not return_attn_probs:
        return attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True)
    return out, lse, None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of PyTorch: tensors are (batch, heads, seq, head_dim).

    Any number of leading dimensions will do, as in PyTorch. The causal mask is aligned to the top
    left: query i sees keys j <= i.

    Raises
    ------
    UnsupportedProblem
        For attn_mask or dropout_p, and for unequal heads without enable_gqa.

    Examples
    --------
    >>> import torch
    >>> from fa2tvm import scaled_dot_product_attention
    >>> scaled_dot_product_attention(*torch.randn(3, 1, 4, 128, 64), is_causal=True).shape
    torch.Size([1, 4, 128, 64])
    """
    _refuse("attn_mask", attn_mask, None)
    _refuse("dropout_p", dropout_p, 0.0)
    tensors = (query, key, value)
    _require_tensors(query=query, key=key, value=value)
    _require_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if any(t.dim() != query.dim() for t in tensors) or query.dim() < 2:
        raise UnsupportedProblem(
            f"query, key, value have {', '.join(str(t.dim()) for t in tensors)} dimensions, but "
            "all must have equally many, at least 2 (..., seq, head_dim); reshape them."
        )
    if query.dim() == 4:
        q, k, v = (t.transpose(1, 2) for t in tensors)
    else:
        q, k, v = (_four_dimensional(t).transpose(1, 2) for t in tensors)
    if not enable_gqa and q.shape[2] != k.shape[2]:
        raise UnsupportedProblem(
            f"query has {q.shape[2]} heads and key has {k.shape[2]}, but they must be equal "
            "without enable_gqa; pass enable_gqa=True."
        )
    out = attention(q, k, v, causal=is_causal, softmax_scale=scale, alignment="top_left")
    out = out.transpose(1, 2)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-2], *out.shape[-2:])


def _four_dimensional(tensor: Tensor) -> Tensor:
    """(seq, dim) and (batch, seq, dim) with one head; more leading dimensions become one batch."""
    if tensor.dim() < 4:
        return tensor.reshape(-1, 1, *tensor.shape[-2:])
    return tensor.flatten(0, -4)


def _refuse(name: str, value: Any, supported: Any) -> None:
    if value is not supported and (isinstance(value, Tensor) or value != supported):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
        raise UnsupportedProblem(
            f"{name} is {what or shown(value)}, but only {supported} is supported; leave it out."
        )
