"""Who is compared: every peer behind one call in the layout (batch, seq, heads, dim).

A peer is one entry of `PEERS`. GPU peers register the same way.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule import Schedule, schedule_class

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Context = contextlib.AbstractContextManager[Any]

# A peer that holds the whole logits matrix is left out where that takes more of the free memory.
_MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Prepared:
    """A peer made ready for one problem.

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
        What else its rows say: of ours, family, schedule and origin.
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
        Problem -> Prepared; raises PeerUnavailable with the reason.
    ours
        Whether it is held to twice the error of plain PyTorch attention.
    """

    name: str
    prepare: Callable[[Problem], Prepared]
    ours: bool = False


PEERS: dict[str, Peer] = {}


def register(
    name: str, *, ours: bool = False
) -> Callable[[Callable[[Problem], Prepared]], Callable[[Problem], Prepared]]:
    """Decorate a `prepare` function: it becomes the peer of that name."""

    def add(prepare: Callable[[Problem], Prepared]) -> Callable[[Problem], Prepared]:
        PEERS[name] = Peer(name, prepare, ours)
        return prepare

    return add


@register("fa2tvm", ours=True)
def _ours(problem: Problem) -> Prepared:
    from fa2tvm import api
    from fa2tvm.device import detect
    from fa2tvm.lookup import lookup

    schedules, origins = {}, {}
    for part in _parts(problem):
        pass_ = part.variant.pass_
        schedules[pass_] = api.module_for(part).schedule
        found = lookup(part, detect())
        origins[pass_] = found.origin if found.schedule == schedules[pass_] else "pack"
    return _prepared(problem, schedules, origins, contextlib.nullcontext)


@register("fa2tvm-default", ours=True)
def _ours_default(problem: Problem) -> Prepared:
    from fa2tvm import api
    from fa2tvm.device import detect
    from fa2tvm.lookup import family_for

    device = detect()
    schedules = {
        part.variant.pass_: schedule_class(family_for(device), part.variant.pass_).default(
            part.variant, device
        )
        for part in _parts(problem)
    }

    @contextlib.contextmanager
    def untuned() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for schedule in schedules.values():
                stack.enter_context(api.use_schedule(schedule))
            yield

    return _prepared(problem, schedules, dict.fromkeys(schedules, "default"), untuned)


def _parts(problem: Problem) -> list[Problem]:
    """What runs: a backward needs its forward."""
    if problem.variant.pass_ == "forward":
        return [problem]
    return [replace(problem, variant=replace(problem.variant, pass_="forward")), problem]


def _prepared(
    problem: Problem,
    schedules: Mapping[PassName, Schedule],
    origins: Mapping[PassName, str],
    context: Callable[[], Context],
) -> Prepared:
    from fa2tvm import api

    causal, alignment = problem.variant.causal, problem.alignment
    pass_ = problem.variant.pass_

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return api.attention(q, k, v, causal=causal, alignment=alignment)

    return Prepared(
        attention,
        context,
        prime=lambda: [api.module_for(part) for part in _parts(problem)],
        provenance={
            "family": schedules[pass_].family,
            "schedule": schedules[pass_].to_dict(),
            "origin": origins[pass_],
        },
    )


def _sdpa(backend: SDPBackend, problem: Problem) -> Prepared:
    shape, causal = problem.shape, problem.variant.causal
    if causal and problem.causal_offset != 0:
        raise PeerUnavailable(
            "is_causal of F.scaled_dot_product_attention aligns top-left, and this problem "
            "bottom-right."
        )
    gqa = shape.heads_q != shape.heads_kv

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
def _sdpa_flash(problem: Problem) -> Prepared:
    return _sdpa(SDPBackend.FLASH_ATTENTION, problem)


@register("sdpa-math")
def _sdpa_math(problem: Problem) -> Prepared:
    shape = problem.shape
    # S, P and, backward, dP and dS are all alive at once, in float32.
    needed_bytes = 4 * 4 * shape.batch * shape.heads_q * shape.seq_q * shape.seq_kv
    free_bytes = _available_bytes()
    if needed_bytes > _MEMORY_SHARE * free_bytes:
        raise PeerUnavailable(
            f"its logits take about {needed_bytes / 2**30:.1f} GiB and only "
            f"{free_bytes / 2**30:.1f} GiB are free."
        )
    return _sdpa(SDPBackend.MATH, problem)


@register("flex-compiled")
def _flex(problem: Problem) -> Prepared:
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        raise PeerUnavailable("this PyTorch has no flex_attention.")
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise PeerUnavailable("torch.compile needs a C++ compiler and none is on PATH.")
    if problem.variant.pass_ == "backward":
        raise PeerUnavailable("flex_attention has no backward on CPUs.")
    from torch.nn.attention.flex_attention import create_block_mask

    shape, variant = problem.shape, problem.variant
    block_mask = None
    if variant.causal:
        offset = problem.causal_offset
        block_mask = create_block_mask(
            lambda _b, _h, i, j: j <= i + offset, None, None, shape.seq_q, shape.seq_kv, "cpu"
        )
    gqa = shape.heads_q != shape.heads_kv
    compiled = _compiled_flex(variant, gqa)

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
def _compiled_flex(variant: Variant, gqa: bool) -> Callable[..., torch.Tensor]:
    """Compiled for any length of one variant; the least recent variant is dropped."""
    del variant, gqa
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamo falls back to eager code after eight versions of one function.
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=True)


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
