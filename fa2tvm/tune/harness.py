"""Inside the runner's worker: one module against the oracle, then (stopwatch.py) the clock."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fa2tvm import launch, yardstick
from fa2tvm.compile import Module, load
from fa2tvm.problem import Shape, Variant
from fa2tvm.records import problem_from_dict
from fa2tvm.schedule import Schedule
from fa2tvm.tune import stopwatch

# An input is surrounded by this many rows of NaN, an output by so many elements of a guard value.
_MARGIN = 3
_GUARD = 12345.0
_GUARD_ELEMENTS = 1024
# What surrounds an input row: a GPU's copy engine takes strides of whole 16 bytes only.
_PADDING = {"cpu": 1, "cuda": 8}
LOST_GPU = 77
# No block of queries or keys of a GPU family is larger.
_GPU_BLOCK = 256
_answers = ThreadPoolExecutor(1)
_SWITCH_S = 1e-4
_guard = threading.Lock()
_locks: dict[tuple[Variant, Case, int, str], threading.Lock] = {}


@dataclass(frozen=True)
class Case:
    """One awkward call; causal ones align bottom-right."""

    shape: Shape
    softmax_scale: float

    @property
    def causal_offset(self) -> int:
        """Query i sees keys j <= i + this."""
        return self.shape.seq_kv - self.shape.seq_q


Tensors = dict[str, torch.Tensor]


def prepare() -> None:
    """Importing this module has imported all that a request needs."""
    # The thread that makes the oracle's answers gives way before a spin of the GPU's clock is over.
    sys.setswitchinterval(_SWITCH_S)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Answer `expect`, `check` (an empty answer means right), `time` or `sustain` (`us`).

    After a fault a GPU refuses all further work of the process: the worker ends, and the next
    request gets a fresh one.
    """
    try:
        return _answer(request)
    except Exception as error:
        lost = _gpu_fault() if request["device"] == "cuda" else None
        if lost is not None:
            first_line = str(error).strip().split("\n")[0]
            print(f"{lost} ({first_line})", file=sys.stderr, flush=True)  # noqa: T201 - read by the parent
            os._exit(LOST_GPU)
        raise


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "expect":
        expect(Variant(**request["variant"]), request["seed"], request["device"])
        return {}
    module, device = _module(request["path"]), request["device"]
    if request["do"] == "check":
        reason = check(module, request["seed"], device)
        return {"error": "wrong", "reason": reason} if reason else {}
    problem = problem_from_dict(request["problem"])
    if request["do"] == "sustain":
        return {"us": stopwatch.sustained(module, problem, device, request["seconds"])}
    return {"us": stopwatch.timed(module, problem, device, request["warm_up"])}


def _gpu_fault() -> str | None:
    """What the GPU says of itself after a failure: None where it still works."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().split("\n")[0]
    return None


@functools.lru_cache(maxsize=32)
def _module(path: str) -> Module:
    return load(Path(path))


def awkward_cases(variant: Variant, schedule: Schedule | None, device: str) -> list[Case]:
    """Sizes around the blocks: several of them with a tail, GQA, rows that see nothing.

    On a GPU they are those of the largest blocks whatever the schedule, so that the oracle's
    answers, seconds of a core, are made once a variant.
    """
    unit = variant.head_dim_qk**-0.5  # logits of a few units, so that rounding stays small
    block_q = _rounded(getattr(schedule, "block_q", 64))
    block_kv = _rounded(getattr(schedule, "block_kv", 64))
    if device == "cuda":
        block_q, block_kv = max(block_q, _GPU_BLOCK), max(block_kv, _GPU_BLOCK)
    return [
        Case(Shape(1, 4, 2, 2 * block_q + 3, 2 * block_kv + 5), 1.5 * unit),
        Case(Shape(1, 2, 1, block_q + 29, block_kv // 2 + 7), -unit),
        Case(Shape(2, 3, 1, 1, block_kv + 1), 2 * unit),
    ]


def _rounded(block: int) -> int:
    """The next power of two, at most 512, so that many tiles share what is right of a case."""
    return min(1 << (block - 1).bit_length(), 512)


def expect(variant: Variant, seed: int, device: str) -> None:
    """Begin to make what is right of a variant's cases on a GPU, beside the requests to come."""
    if device == "cuda":
        for case in awkward_cases(variant, None, device):
            _answers.submit(_right, variant, case, seed, device)


def check(module: Module, seed: int, device: str = "cpu") -> str | None:
    """Why a module is wrong, or None; every case runs twice on poisoned memory.

    Inputs sit in NaN surroundings and are compared with a copy afterwards; outputs and workspace
    start as NaN, and the memory around a caller's output must stay as it was.
    """
    torch.use_deterministic_algorithms(True)  # with it torch.empty is filled with NaN
    try:
        for case in awkward_cases(module.variant, module.schedule, device):
            for attempt in ("first", "second"):
                reason = _check_case(module, case, seed, device)
                if reason:
                    return f"{attempt} call at {case.shape}: {reason}"
    finally:
        torch.use_deterministic_algorithms(False)
    return None


def _check_case(module: Module, case: Case, seed: int, device: str) -> str | None:
    tensors = {
        name: _in_nan(x.to(device)) for name, x in inputs(module.variant, case.shape, seed).items()
    }
    before = {name: x.clone() for name, x in tensors.items()}
    got, damage = _run_guarded(module, tensors, case, seed)
    if damage:
        return damage
    for name, x in tensors.items():
        if not torch.equal(x, before[name]):
            return f"input {name} was changed"
    return _right(module.variant, case, seed, device).why_wrong(got)


def inputs(variant: Variant, shape: Shape, seed: int) -> Tensors:
    """Random q, k, v (BSHD) and, for a backward, dout; seeded."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, variant.dtype)
    s = shape
    sizes = {
        "q": (s.batch, s.seq_q, s.heads_q, variant.head_dim_qk),
        "k": (s.batch, s.seq_kv, s.heads_kv, variant.head_dim_qk),
        "v": (s.batch, s.seq_kv, s.heads_kv, variant.head_dim_v),
    }
    if variant.pass_ == "backward":
        sizes["dout"] = (s.batch, s.seq_q, s.heads_q, variant.head_dim_v)
    return {name: torch.randn(n, generator=generator).to(dtype) for name, n in sizes.items()}


def _in_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view whose neighbours in memory are NaN."""
    b, s, h, d = x.shape
    padding = _PADDING[x.device.type]
    room = x.new_full((b, s + 2 * _MARGIN, h + 1, d + padding), math.nan)
    view = room[:, _MARGIN : _MARGIN + s, :h, :d]
    view.copy_(x)
    return view


def _run_guarded(module: Module, x: Tensors, case: Case, seed: int) -> tuple[Tensors, str | None]:
    """Run one call into guarded outputs; the second value says which guard was overwritten."""
    if module.variant.pass_ == "backward":
        return _run_backward(module, x, case, seed), None
    b, s, h, _ = x["q"].shape
    size = b * s * h * module.variant.head_dim_v
    room = x["q"].new_full((size + 2 * _GUARD_ELEMENTS,), _GUARD)
    out = room[_GUARD_ELEMENTS:-_GUARD_ELEMENTS].view(b, s, h, module.variant.head_dim_v)
    out.fill_(math.nan)
    out, lse = launch.forward(
        module, x["q"], x["k"], x["v"], case.softmax_scale, case.causal_offset, out=out
    )
    result = out.clone()
    out.fill_(_GUARD)
    intact = torch.equal(room, torch.full_like(room, _GUARD))
    return {"O": result, "LSE": lse}, None if intact else "memory outside the output was written"


def _run_backward(module: Module, x: Tensors, case: Case, seed: int) -> Tensors:
    out, lse = (
        y.to(x["q"].device) for y in _forward_result(module.variant, case, seed, x["q"].device.type)
    )
    dlse = torch.ones_like(lse)
    grads = launch.backward(
        module,
        x["q"],
        x["k"],
        x["v"],
        out,
        lse,
        x["dout"],
        dlse,
        case.softmax_scale,
        case.causal_offset,
    )
    return {
        name: grad for name, grad in zip(("dQ", "dK", "dV"), grads, strict=True) if grad is not None
    }


def _forward_result(
    variant: Variant, case: Case, seed: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """O in the storage type and LSE in float32, from the float64 oracle."""
    oracle = _right(variant, case, seed, device).oracle
    return oracle["O"].to(getattr(torch, variant.dtype)), oracle["LSE"].float()


def _right(variant: Variant, case: Case, seed: int, device: str) -> yardstick.Case:
    """What is right of a case; where another thread is making it, this one waits."""
    with _guard:
        lock = _locks.setdefault((variant, case, seed, device), threading.Lock())
    with lock:
        right = _inputs_of(variant, case, seed, device)
        # Made once, when they are first asked for.
        _ = right.oracle, right.units, right.plain_errors
        return right


@functools.lru_cache(maxsize=64)
def _inputs_of(variant: Variant, case: Case, seed: int, device: str) -> yardstick.Case:
    """The CPU family computes in float32 whatever it stores."""
    x, s = inputs(variant, case.shape, seed), case.shape
    backward = variant.pass_ == "backward"
    return yardstick.Case(
        x["q"],
        x["k"],
        x["v"],
        x["dout"] if backward else None,
        torch.ones(s.batch, s.heads_q, s.seq_q) if backward else None,
        softmax_scale=case.softmax_scale,
        causal=variant.causal,
        arithmetic=torch.float32 if device == "cpu" else None,
        foreign_lse=True,
    )
