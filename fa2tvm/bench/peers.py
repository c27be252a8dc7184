"""Who is compared: every peer behind one call in the layout (batch, seq, heads, dim).

A peer is one entry of `PEERS`. GPU peers register the same way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import DType, Problem
from fa2tvm.workloads import Workload

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Context = contextlib.AbstractContextManager[Any]

# A peer that holds the whole logits matrix is left out where that takes more of the free memory.
_MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Prepared:
    """A peer made ready for one workload.

    Attributes
    ----------
    attention
        (Q, K, V) -> O, each (batch, seq, heads, dim), differentiable.
    context
        Entered around the check and every timed call, outside the clock.
    prime
        Called in the context before every timed call, outside the clock: fills the caches that
        another peer's context emptied.
    provenance
        What else its rows say: ours, the family, schedule and where it came from.
    """

    attention: AttentionFunction
    context: Callable[[], Context] = contextlib.nullcontext
    prime: Callable[[], object] = lambda: None
    provenance: dict[str, Any] | None = None


@dataclass(frozen=True)
class Peer:
    """A named implementation of attention.

    Attributes
    ----------
    prepare
        (workload, dtype) -> Prepared; raises PeerUnavailable with the reason.
    ours
        Whether it is held to twice the error of plain PyTorch attention.
    """

    name: str
    prepare: Callable[[Workload, DType], Prepared]
    ours: bool = False


PEERS: dict[str, Peer] = {}


def register(name: str, *, ours: bool = False) -> Callable[..., Any]:
    """Decorate a `prepare` function: it becomes the peer of that name."""

    def add(prepare: Callable[[Workload, DType], Prepared]) -> Callable[..., Prepared]:
        PEERS[name] = Peer(name, prepare, ours)
        return prepare

    return add


@register("fa2tvm", ours=True)
def _ours(workload: Workload, dtype: DType) -> Prepared:
    from fa2tvm import api
    from fa2tvm.device import detect
    from fa2tvm.lookup import lookup

    problems = _problems(workload, dtype)
    found = {problem.variant.pass_: lookup(problem, detect()) for problem in problems}
    provenance = {
        "family": found["forward"].family,
        "schedule": {p: f.schedule.to_dict() for p, f in found.items()},
        "origin": {p: f.origin for p, f in found.items()},
    }
    return Prepared(
        _public_call(api.attention, workload),
        prime=lambda: [api.module_for(problem) for problem in problems],
        provenance=provenance,
    )


@register("fa2tvm-default", ours=True)
def _ours_default(workload: Workload, dtype: DType) -> Prepared:
    from fa2tvm import api
    from fa2tvm.device import detect
    from fa2tvm.schedule import schedule_class

    problems = _problems(workload, dtype)
    schedules = {
        p.variant.pass_: schedule_class("cpu", p.variant.pass_).default(p.variant, detect())
        for p in problems
    }

    @contextlib.contextmanager
    def untuned() -> Iterator[None]:
        with api.use_schedule(schedules["forward"]), api.use_schedule(schedules["backward"]):
            yield

    provenance = {
        "family": "cpu",
        "schedule": {name: schedule.to_dict() for name, schedule in schedules.items()},
        "origin": dict.fromkeys(schedules, "default"),
    }
    return Prepared(
        _public_call(api.attention, workload),
        untuned,
        lambda: [api.module_for(problem) for problem in problems],
        provenance,
    )


def _problems(workload: Workload, dtype: DType) -> tuple[Problem, Problem]:
    return workload.problem("forward", dtype), workload.problem("backward", dtype)


def _public_call(attention: Callable[..., torch.Tensor], workload: Workload) -> AttentionFunction:
    causal, alignment = workload.causal, workload.alignment

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal, alignment=alignment)

    return call


def _sdpa(backend: SDPBackend, workload: Workload) -> Prepared:
    shape = workload.shape
    if workload.causal and workload.alignment != "top_left" and shape.seq_q != shape.seq_kv:
        raise PeerUnavailable(
            f"is_causal of F.scaled_dot_product_attention aligns top-left, and {workload.name} "
            "aligns bottom-right."
        )
    causal, gqa = workload.causal, shape.heads_q != shape.heads_kv

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=gqa,
        )
        return out.transpose(1, 2)

    return Prepared(attention, lambda: sdpa_kernel(backend))


@register("sdpa-flash")
def _sdpa_flash(workload: Workload, dtype: DType) -> Prepared:
    del dtype
    return _sdpa(SDPBackend.FLASH_ATTENTION, workload)


@register("sdpa-math")
def _sdpa_math(workload: Workload, dtype: DType) -> Prepared:
    del dtype
    shape = workload.shape
    # S, P and, backward, dP and dS are all alive at once, in float32.
    needed_bytes = 4 * 4 * shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv
    free_bytes = _available_bytes()
    if needed_bytes > _MEMORY_SHARE * free_bytes:
        raise PeerUnavailable(
            f"its logits take about {needed_bytes / 2**30:.1f} GiB and only "
            f"{free_bytes / 2**30:.1f} GiB are free."
        )
    return _sdpa(SDPBackend.MATH, workload)


@register("flex-compiled")
def _flex(workload: Workload, dtype: DType) -> Prepared:
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        raise PeerUnavailable("this PyTorch has no flex_attention.")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise PeerUnavailable("torch.compile needs a C++ compiler and none is on PATH.")
    from torch.nn.attention.flex_attention import create_block_mask

    shape = workload.shape
    block_mask = None
    if workload.causal:
        offset = shape.seq_kv - shape.seq_q if workload.alignment == "bottom_right" else 0
        block_mask = create_block_mask(
            lambda _b, _h, i, j: j <= i + offset, None, None, shape.seq_q, shape.seq_kv, "cpu"
        )
    gqa = shape.heads_q != shape.heads_kv
    compiled = _compiled_flex(
        dtype, workload.head_dim_qk, workload.head_dim_v, workload.causal, gqa
    )

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=block_mask,
            enable_gqa=gqa,
        )
        return out.transpose(1, 2)

    return Prepared(attention)


@functools.lru_cache(maxsize=1)
def _compiled_flex(*variant: object) -> Callable[..., torch.Tensor]:
    """Compiled for any length of one variant; the least recent variant is dropped."""
    del variant
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamo falls back to eager code after eight versions of one function.
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=True)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
