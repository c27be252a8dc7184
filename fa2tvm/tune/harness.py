"""Inside the runner's worker: one module against the oracle, then against the clock."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fa2tvm import launch, reference
from fa2tvm.compile import Module, load
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.records import problem_from_dict

# The yardstick of BUGS.md: twice the error of a plain implementation in the same dtype.
YARDSTICK = 2.0
# Absolute part, relative to the largest value: a plain result may be exact by luck.
FLOOR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# A timed round lasts at least this long, so that the clock and the launch do not matter.
ROUND_SECONDS = 0.02
MAX_CALLS = 200
# An input is surrounded by this many rows of NaN, an output by so many elements of a guard value.
_MARGIN = 3
_GUARD = 12345.0
_GUARD_ELEMENTS = 1024


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
    """Nothing: importing this module has imported all that a request needs."""


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Answer `check` (an empty answer means right) or `time` (`us`)."""
    module = _module(request["path"])
    problem = problem_from_dict(request["problem"])
    if request["do"] == "check":
        reason = check(module, request["seed"])
        return {"error": "wrong", "reason": reason} if reason else {}
    return {"us": timed(module, problem, request["seed"], warm_up=request["warm_up"])}


@functools.lru_cache(maxsize=32)
def _module(path: str) -> Module:
    return load(Path(path))


def awkward_cases(module: Module) -> list[Case]:
    """Sizes around the blocks: several of them with a tail, GQA, rows that see nothing."""
    unit = module.variant.head_dim_qk**-0.5  # logits of a few units, so that rounding stays small
    block_q = min(getattr(module.schedule, "block_q", 64), 512)
    block_kv = min(getattr(module.schedule, "block_kv", 64), 512)
    return [
        Case(Shape(1, 4, 2, 2 * block_q + 3, 2 * block_kv + 5), 1.5 * unit),
        Case(Shape(1, 2, 1, block_q + 29, block_kv // 2 + 7), -unit),
        Case(Shape(2, 3, 1, 1, block_kv + 1), 2 * unit),
    ]


def check(module: Module, seed: int) -> str | None:
    """Why a module is wrong, or None; every case runs twice on poisoned memory.

    Inputs sit in NaN surroundings and are compared with a copy afterwards; outputs and workspace
    start as NaN, and the memory around a caller's output must stay as it was.
    """
    torch.use_deterministic_algorithms(True)  # with it torch.empty is filled with NaN
    try:
        for case in awkward_cases(module):
            for attempt in ("first", "second"):
                reason = _check_case(module, case, seed)
                if reason:
                    return f"{attempt} call at {case.shape}: {reason}"
    finally:
        torch.use_deterministic_algorithms(False)
    return None


def _check_case(module: Module, case: Case, seed: int) -> str | None:
    expected = _expected(module.variant, case, seed)
    tensors = {name: _in_nan(x) for name, x in inputs(module.variant, case.shape, seed).items()}
    before = {name: x.clone() for name, x in tensors.items()}
    got, damage = _run_guarded(module, tensors, case, seed)
    if damage:
        return damage
    for name, x in tensors.items():
        if not torch.equal(x, before[name]):
            return f"input {name} was changed"
    for name, value in got.items():
        reason = _beyond_yardstick(name, value, *expected[name])
        if reason:
            return reason
    return None


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
    room = x.new_full((b, s + 2 * _MARGIN, h + 1, d + 1), math.nan)
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
    out, lse = _forward_result(module.variant, case, seed)
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


@functools.lru_cache(maxsize=32)
def _forward_result(variant: Variant, case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """O in the storage type and LSE in float32, from the float64 oracle."""
    x = inputs(variant, case.shape, seed)
    q, k, v = (x[name].double().numpy() for name in ("q", "k", "v"))
    out, lse = reference.attention(q, k, v, case.softmax_scale, variant.causal)
    return torch.from_numpy(out).to(x["q"].dtype), torch.from_numpy(lse).float()


@functools.lru_cache(maxsize=32)
def _expected(
    variant: Variant, case: Case, seed: int
) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Oracle and plain same-dtype result of every output."""
    x = inputs(variant, case.shape, seed)
    exact = {name: t.double().numpy() for name, t in x.items()}
    scale, causal = case.softmax_scale, variant.causal
    if variant.pass_ == "forward":
        oracle = dict(
            zip(
                ("O", "LSE"),
                reference.attention(exact["q"], exact["k"], exact["v"], scale, causal),
                strict=True,
            )
        )
    else:
        dlse = np.ones((case.shape.batch, case.shape.heads_q, case.shape.seq_q))
        grads = reference.attention_backward(
            exact["q"], exact["k"], exact["v"], exact["dout"], dlse, scale, causal
        )
        oracle = dict(zip(("dQ", "dK", "dV"), grads, strict=True))
    plain = _plain(variant, x, case)
    return {name: (value, plain[name].double().numpy()) for name, value in oracle.items()}


def _plain(variant: Variant, x: Tensors, case: Case) -> Tensors:
    """Textbook attention in the storage type, with torch's autograd."""
    needs_grad = variant.pass_ == "backward"
    q, k, v = (x[name].clone().requires_grad_(needs_grad) for name in ("q", "k", "v"))
    group = case.shape.group
    queries = q.transpose(1, 2)
    keys = k.repeat_interleave(group, 2).transpose(1, 2)
    values = v.repeat_interleave(group, 2).transpose(1, 2)
    s = queries @ keys.mT * case.softmax_scale
    n_q, n_k = s.shape[-2:]
    blind = torch.zeros(n_q, 1, dtype=torch.bool)
    if variant.causal:
        hidden = torch.arange(n_k) > torch.arange(n_q)[:, None] + (n_k - n_q)
        blind = hidden.all(1, keepdim=True)
        # A finite fill in rows that see nothing: autograd through a row of -inf gives NaN.
        s = s.masked_fill(hidden & ~blind, -math.inf)
    row_blind = blind.squeeze(1)
    p = s.softmax(-1).masked_fill(blind, 0.0)
    out = (p @ values).transpose(1, 2)
    if not needs_grad:
        # LSE is float32 for every storage type, and so is its plain counterpart.
        if q.dtype == torch.float32:
            lse = s.logsumexp(-1).masked_fill(row_blind, -math.inf)
        else:
            lse = _plain(variant, {n: t.float() for n, t in x.items()}, case)["LSE"]
        return {"O": out, "LSE": lse}
    seen_lse = s.float().logsumexp(-1).masked_fill(row_blind, 0.0)
    ((out * x["dout"]).float().sum() + seen_lse.sum()).backward()  # type: ignore[no-untyped-call]
    grads = {"dQ": q.grad, "dK": k.grad, "dV": v.grad}
    return {name: grad for name, grad in grads.items() if grad is not None}


def _beyond_yardstick(
    name: str, got: torch.Tensor, oracle: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]
) -> str | None:
    """Why one output is wrong: the worst element of all, against twice the plain error."""
    value = got.double().numpy()
    finite = np.isfinite(oracle)
    if not np.array_equal(value[~finite], oracle[~finite], equal_nan=True):
        return f"{name} is not {oracle[~finite].flat[0]} where it must be"
    error = np.abs(value - oracle)[finite]
    largest = float(np.abs(oracle[finite]).max(initial=0.0))
    plain_error = float(np.abs(plain - oracle)[finite].max(initial=0.0))
    limit = YARDSTICK * plain_error + FLOOR[_storage(got, name)] * max(largest, 1.0)
    worst = float(error.max(initial=0.0)) if not np.isnan(error).any() else math.nan
    if worst <= limit:
        return None
    return f"{name} is off by {worst:.3g}, but {limit:.3g} is allowed"


def _storage(got: torch.Tensor, name: str) -> torch.dtype:
    return torch.float32 if name == "LSE" else got.dtype


@functools.lru_cache(maxsize=2)
def _timing_inputs(problem: Problem, seed: int) -> Tensors:
    """Inputs at the problem's own sizes; a backward also gets out, lse and dlse."""
    x = inputs(problem.variant, problem.shape, seed)
    if problem.variant.pass_ == "backward":
        s = problem.shape
        x["out"] = torch.zeros(x["dout"].shape, dtype=x["dout"].dtype)
        # Any finite row sum does for timing: the cost does not depend on the values.
        x["lse"] = torch.full((s.batch, s.heads_q, s.seq_q), 8.0)
    return x


def timed(module: Module, problem: Problem, seed: int, warm_up: bool) -> float:
    """Microseconds of one call: the first call alone (warm-up), or the mean of one round."""
    x = _timing_inputs(problem, seed)
    scale, offset = problem.variant.head_dim_qk**-0.5, problem.causal_offset
    q, k, v = x["q"], x["k"], x["v"]

    def call() -> None:
        if problem.variant.pass_ == "forward":
            launch.forward(module, q, k, v, scale, offset)
        else:
            launch.backward(module, q, k, v, x["out"], x["lse"], x["dout"], None, scale, offset)

    once = _seconds(call, 1)
    if warm_up or once >= ROUND_SECONDS:
        return once * 1e6
    n_calls = min(MAX_CALLS, max(1, round(ROUND_SECONDS / once)))
    return _seconds(call, n_calls) / n_calls * 1e6


def _seconds(call: Callable[[], None], n_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(n_calls):
        call()
    return time.perf_counter() - start
