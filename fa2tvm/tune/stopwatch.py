"""Inside the runner's worker: how long one call of a right module takes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from fa2tvm import launch
from fa2tvm.bench.clock import GpuClock
from fa2tvm.compile import Module
from fa2tvm.problem import Problem

# A timed round on a CPU lasts at least this long, so that the clock and the launch do not matter.
ROUND_SECONDS = 0.02
MAX_CALLS = 200
# Samples of a round on a GPU, each with a cold L2, and what a call costs the CPU at most. There are
# many short rounds: heat and power move the clock by several per cent while a batch is timed.
GPU_REPEATS = 3
GPU_CALL_S = 100e-6
SEED = 0

Tensors = dict[str, torch.Tensor]


def timed(module: Module, problem: Problem, device: str, warm_up: bool) -> float:
    """Microseconds of one call: the first call alone (warm-up), or of one round.

    A round is the mean of many calls on a CPU, the median of a burst on a GPU.
    """
    call = _call(module, problem, device)
    if device == "cuda":
        clock = _gpu_clock()
        if warm_up:
            call()
        return statistics.median(clock.burst(call, 1 if warm_up else GPU_REPEATS, GPU_CALL_S))
    once = _seconds(call, 1)
    if warm_up or once >= ROUND_SECONDS:
        return once * 1e6
    n_calls = min(MAX_CALLS, max(1, round(ROUND_SECONDS / once)))
    return _seconds(call, n_calls) / n_calls * 1e6


def sustained(module: Module, problem: Problem, device: str, seconds: float) -> float:
    """Microseconds of one call, back to back for so long: at the clocks that power leaves."""
    call = _call(module, problem, device)
    if device == "cuda":
        return statistics.median(_gpu_clock().sustained(call, seconds))
    n_calls = max(1, round(seconds / max(_seconds(call, 1), 1e-6)))
    return _seconds(call, n_calls) / n_calls * 1e6


@functools.cache
def _gpu_clock() -> GpuClock:
    return GpuClock(torch.device("cuda"))


def _call(module: Module, problem: Problem, device: str) -> Callable[[], None]:
    x = _inputs(problem, device)
    scale, offset = problem.variant.head_dim_qk**-0.5, problem.causal_offset
    q, k, v = x["q"], x["k"], x["v"]

    def call() -> None:
        if problem.variant.pass_ == "forward":
            launch.forward(module, q, k, v, scale, offset)
        else:
            launch.backward(module, q, k, v, x["out"], x["lse"], x["dout"], None, scale, offset)

    return call


@functools.lru_cache(maxsize=4)
def _inputs(problem: Problem, device: str) -> Tensors:
    """N(0, 1) inputs at the problem's own sizes; a backward also gets O, LSE and dO."""
    s, v = problem.shape, problem.variant
    sizes = {
        "q": (s.batch, s.seq_q, s.heads_q, v.head_dim_qk),
        "k": (s.batch, s.seq_kv, s.heads_kv, v.head_dim_qk),
        "v": (s.batch, s.seq_kv, s.heads_kv, v.head_dim_v),
    }
    if v.pass_ == "backward":
        sizes["out"] = sizes["dout"] = (s.batch, s.seq_q, s.heads_q, v.head_dim_v)
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = getattr(torch, v.dtype)
    x = {
        name: torch.randn(n, generator=generator, device=device).to(dtype)
        for name, n in sizes.items()
    }
    if v.pass_ == "backward":
        # Any O and row sum do for timing: the cost does not depend on their values.
        x["lse"] = torch.full((s.batch, s.heads_q, s.seq_q), 8.0, device=device)
    return x


def _seconds(call: Callable[[], None], n_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(n_calls):
        call()
    return time.perf_counter() - start
