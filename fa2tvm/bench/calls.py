"""What one tiny call costs: CPU time of all threads, where the arithmetic is next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fa2tvm.bench.check import Case
from fa2tvm.bench.rows import Row, new_row
from fa2tvm.errors import Fa2tvmError
from fa2tvm.problem import DType
from fa2tvm.workloads import Workload

_ROUNDS, _CALLS, _WARM_UP, _WAKE_UP = 21, 400, 200, 20
# Of each loop: measured within the first second, the first of two workloads cost 1.4 times the
# second on an H200's host (2026-12-01).
_WARM_UP_S = 0.5
# The idle threads of an OpenMP pool spin for up to 4 ms (libgomp) after whoever woke them, which is
# as long as a whole round: without a pause F.scaled_dot_product_attention, which wakes a second
# thread where attention does not, charged half of its own CPU time to the other side's rounds.
_PAUSE_S = 0.02


def measure_calls(workload: Workload, seed: int = 0, device: str = "cpu") -> Iterator[Row]:
    """One row for each of fa2tvm.attention and F.scaled_dot_product_attention, and each pass.

    "forward" is one call under no_grad, "both" is a call and `torch.autograd.grad` of it. The
    rounds alternate; F.scaled_dot_product_attention gets its inputs already transposed, and
    chooses its backend itself as a user's call does. float32 on a CPU, bfloat16 on a GPU ("cuda"),
    where the work of the GPU takes less time than a call and is not waited for.
    """
    import fa2tvm

    dtype: DType = "float32" if device == "cpu" else "bfloat16"
    case = Case.make(workload, dtype, seed, device)
    causal = workload.causal
    transposed = [x.transpose(1, 2) for x in (case.q, case.k, case.v)]
    dout = case.dout
    settle = torch.cuda.synchronize if device == "cuda" else lambda: None

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fa2tvm.attention(q, k, v, causal=causal)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for pass_, pair in (("forward", _forward_only), ("both", _forward_and_backward)):
        loops = {
            "fa2tvm": pair(ours, [case.q, case.k, case.v], dout),
            "sdpa": pair(sdpa, transposed, dout.transpose(1, 2)),
        }
        problem = workload.problem("forward", dtype)
        for name in list(loops):
            try:
                loops[name](1)
            except Fa2tvmError as error:
                row = new_row("calls", workload.name, name, "calls", problem)
                yield {**row, "pass": pass_, "error": str(error)}
                del loops[name]
        for name, (cpu_us, wall_us) in interleave(loops, settle).items():
            row = new_row("calls", workload.name, name, "calls", problem)
            p20, p50, p80 = (round(float(p), 2) for p in np.percentile(wall_us, (20, 50, 80)))
            row.update({"pass": pass_, "us_p20": p20, "us_p50": p50, "us_p80": p80})
            row["cpu_us_p50"] = round(float(np.median(cpu_us)), 2)
            row["samples"] = len(wall_us)
            yield row


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Loop = Callable[[int], None]


def _forward_only(attention: Attention, inputs: list[torch.Tensor], dout: torch.Tensor) -> Loop:
    del dout
    q, k, v = inputs

    def loop(calls: int) -> None:
        with torch.no_grad():
            for _ in range(calls):
                attention(q, k, v)

    return loop


def _forward_and_backward(
    attention: Attention, inputs: list[torch.Tensor], dout: torch.Tensor
) -> Loop:
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v = leaves

    def loop(calls: int) -> None:
        for _ in range(calls):
            torch.autograd.grad(attention(q, k, v), leaves, dout)

    return loop


def interleave(
    loops: dict[str, Loop], settle: Callable[[], object]
) -> dict[str, tuple[list[float], list[float]]]:
    """CPU and wall microseconds of one call, a figure for each round.

    Before each round `settle` is called, idle threads fall asleep, and a few calls go untimed, so
    that a peer pays for the threads that it keeps busy itself, not for others and not for waking.
    """
    for loop in loops.values():
        until = time.perf_counter() + _WARM_UP_S
        loop(_WARM_UP)
        while time.perf_counter() < until:
            loop(_WARM_UP)
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in loops}
    names = list(loops)
    for number in range(_ROUNDS):
        for name in names if number % 2 else reversed(names):
            settle()
            time.sleep(_PAUSE_S)
            loops[name](_WAKE_UP)
            cpu, wall = time.process_time(), time.perf_counter()
            loops[name](_CALLS)
            figures[name][0].append(1e6 * (time.process_time() - cpu) / _CALLS)
            figures[name][1].append(1e6 * (time.perf_counter() - wall) / _CALLS)
    return figures
