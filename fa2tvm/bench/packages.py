"""Peers from packages for NVIDIA GPUs: FlashAttention 2, 3 and 4, where they can be imported."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from fa2tvm.bench.peers import Prepared, register
from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import Problem

# A library of FlashAttention-3 that was given by its path may be cut down, and ends the process
# where a kernel is missing: it is asked for these only.
_GIVEN_FA3_HEAD_DIMS = (64, 128, 256)
_given: list[Path] = []


def give_flash_attention_3(folder: Path) -> None:
    """Take FlashAttention-3 from a folder: `fa3/_C.so` (bfloat16, head dims 64, 128 and 256).

    Raises
    ------
    PeerUnavailable
        Where it cannot be loaded.
    """
    operators: Any = torch.ops  # untyped
    try:
        for runtime in sorted(folder.glob("libcudart.so*")):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        operators.load_library(str(folder / "fa3" / "_C.so"))
    except (OSError, RuntimeError) as error:
        raise PeerUnavailable(f"FlashAttention-3 in {folder} cannot be loaded: {error}") from None
    _given.append(folder)


@register("flash-attn-3", kinds=("cuda",))
def _flash_attn_3(problem: Problem, device: str) -> Prepared:
    del device
    _require_bottom_right(problem)
    v = problem.variant
    if _given:
        fits = v.head_dim_qk in _GIVEN_FA3_HEAD_DIMS and v.head_dim_v == v.head_dim_qk
        if v.dtype != "bfloat16" or not fits:
            raise PeerUnavailable("the library that was given may lack this dtype or head dim.")
        return Prepared(_Fa3Operators(v.causal))
    function = _imported("flash_attn_interface", "flash_attn_func", "flash-attn-3")
    return Prepared(lambda q, k, v: _first(function(q, k, v, causal=problem.variant.causal)))


@register("flash-attn-2", kinds=("cuda",))
def _flash_attn_2(problem: Problem, device: str) -> Prepared:
    del device
    _require_bottom_right(problem)
    function = _imported("flash_attn", "flash_attn_func", "flash-attn")
    return Prepared(lambda q, k, v: _first(function(q, k, v, causal=problem.variant.causal)))


@register("flash-attn-4", kinds=("cuda",))
def _flash_attn_4(problem: Problem, device: str) -> Prepared:
    del device
    _require_bottom_right(problem)
    function = _imported("flash_attn.cute", "flash_attn_func", "flash-attn-4")
    return Prepared(lambda q, k, v: _first(function(q, k, v, causal=problem.variant.causal)))


def _require_bottom_right(problem: Problem) -> None:
    shape = problem.shape
    if problem.variant.causal and problem.causal_offset != shape.seq_kv - shape.seq_q:
        raise PeerUnavailable("its causal mask aligns bottom-right, and this problem top-left.")


@functools.cache
def _imported(module: str, name: str, package: str) -> Any:
    """A function of a package.

    Raises
    ------
    PeerUnavailable
        Where it cannot be imported.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise PeerUnavailable(f"{package} cannot be imported: {first_line}.") from None


def _first(result: Any) -> torch.Tensor:
    """O, of a function that may return LSE beside it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


class _Fa3Operators:
    """FlashAttention-3's operators as one differentiable call."""

    def __init__(self, causal: bool) -> None:
        self._options = {"is_causal": causal}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and q.requires_grad:
            apply: Any = _Fa3Function.apply
            out: torch.Tensor = apply(q, k, v, self._options)
            return out
        return _fa3_forward(q, k, v, self._options)[0]


def _fa3_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, num_splits=1, **options)
    return out, lse


class _Fa3Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        out, lse = _fa3_forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(
            dout, q, k, v, out, lse, *grads, softmax_scale=q.shape[-1] ** -0.5, **ctx.options
        )
        return (*grads, None)
