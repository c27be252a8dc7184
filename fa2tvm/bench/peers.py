"""Who is compared: every peer behind one call in the layout (batch, seq, heads, dim).

A peer is one entry of `PEERS`; those of packages are in packages.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2tvm.device import Device, detect
from fa2tvm.errors import PeerUnavailable
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule import Schedule, schedule_class

Prepare: TypeAlias = "Callable[[Problem, str], Prepared]"
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
        (Problem, "cpu" or "cuda") -> Prepared; raises PeerUnavailable with the reason.
    ours
        Whether it is held to twice the error of plain PyTorch attention.
    kinds
        The devices on which it is a peer: "cpu", "cuda".
    """

    name: str
    prepare: Prepare
    ours: bool = False
    kinds: tuple[str, ...] = ("cpu", "cuda")


PEERS: dict[str, Peer] = {}


def register(
    name: str, *, ours: bool = False, kinds: tuple[str, ...] = ("cpu", "cuda")
) -> Callable[[Prepare], Prepare]:
    """Decorate a `prepare` function: it becomes the peer of that name."""

    def add(prepare: Prepare) -> Prepare:
        PEERS[name] = Peer(name, prepare, ours, kinds)
        return prepare

    return add


@register("fa2tvm", ours=True)
def _ours(problem: Problem, device: str) -> Prepared:
    from fa2tvm import api
    from fa2tvm.lookup import lookup

    here = device_of(device)
    schedules, origins = {}, {}
    for part in _parts(problem):
        pass_ = part.variant.pass_
        schedules[pass_] = api.module_for(part, _gpu(here)).schedule
        found = lookup(part, here)
        origins[pass_] = found.origin if found.schedule == schedules[pass_] else "pack"
    return _prepared(problem, here, schedules, origins, contextlib.nullcontext)


@register("fa2tvm-default", ours=True)
def _ours_default(problem: Problem, device: str) -> Prepared:
    from fa2tvm import api
    from fa2tvm.lookup import family_for

    here = device_of(device)
    schedules = {
        part.variant.pass_: schedule_class(
            family_for(here, part.variant), part.variant.pass_
        ).default(part.variant, here)
        for part in _parts(problem)
    }

    @contextlib.contextmanager
    def untuned() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for schedule in schedules.values():
                stack.enter_context(api.use_schedule(schedule))
            yield

    return _prepared(problem, here, schedules, dict.fromkeys(schedules, "default"), untuned)


def device_of(kind: str) -> Device:
    """The CPU or the current GPU."""
    if kind == "cpu":
        return detect()
    from fa2tvm import cuda_runtime

    return cuda_runtime.device(torch.cuda.current_device())


def _gpu(device: Device) -> Device | None:
    """What `module_for` wants: a GPU, or None for the CPU."""
    return device if device.kind == "cuda" else None


def _parts(problem: Problem) -> list[Problem]:
    """What runs: a backward needs its forward."""
    if problem.variant.pass_ == "forward":
        return [problem]
    return [replace(problem, variant=replace(problem.variant, pass_="forward")), problem]


def _prepared(
    problem: Problem,
    device: Device,
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
        prime=lambda: [api.module_for(part, _gpu(device)) for part in _parts(problem)],
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
def _sdpa_flash(problem: Problem, device: str) -> Prepared:
    """On a GPU this is FlashAttention-2."""
    del device
    return _sdpa(SDPBackend.FLASH_ATTENTION, problem)


@register("sdpa-cudnn", kinds=("cuda",))
def _sdpa_cudnn(problem: Problem, device: str) -> Prepared:
    del device
    return _sdpa(SDPBackend.CUDNN_ATTENTION, problem)


@register("sdpa-efficient", kinds=("cuda",))
def _sdpa_efficient(problem: Problem, device: str) -> Prepared:
    del device
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, problem)


@register("sdpa-math", kinds=("cpu",))
def _sdpa_math(problem: Problem, device: str) -> Prepared:
    del device
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
def _flex(problem: Problem, device: str) -> Prepared:
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        raise PeerUnavailable("this PyTorch has no flex_attention.")
    if not any(shutil.which(name) for name in ("g++", "clang++", "gcc", "cc")):
        raise PeerUnavailable("torch.compile needs a C++ compiler and none is on PATH.")
    if device == "cpu" and problem.variant.pass_ == "backward":
        raise PeerUnavailable("flex_attention has no backward on CPUs.")
    from torch.nn.attention.flex_attention import create_block_mask

    shape, variant = problem.shape, problem.variant
    block_mask = None
    if variant.causal:
        offset = problem.causal_offset
        block_mask = create_block_mask(
            lambda _b, _h, i, j: j <= i + offset, None, None, shape.seq_q, shape.seq_kv, device
        )
    gqa = shape.heads_q != shape.heads_kv
    compiled = _compiled_flex(variant, gqa, device)

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
def _compiled_flex(variant: Variant, gqa: bool, device: str) -> Callable[..., torch.Tensor]:
    """Compiled for one variant, the least recent is dropped: for any length, on a GPU for each."""
    del variant, gqa
    from torch.nn.attention.flex_attention import flex_attention

    # Dynamo falls back to eager code after eight versions of one function.
    torch._dynamo.reset()
    # A backward that is timed again and again on one graph may not give its inputs away.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=device == "cpu")


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
