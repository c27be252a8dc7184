"""What one tiny call costs: CPU time of all threads, where the arithmetic is next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fa2tvm.bench.check import Case
from fa2tvm.bench.rows import Row, new_row
from fa2tvm.workloads import Workload

_ROUNDS, _CALLS, _WARM_UP = 21, 400, 200


def measure_calls(workload: Workload, seed: int = 0) -> Iterator[Row]:
    """One row for each of fa2tvm.attention and F.scaled_dot_product_attention, and each pass.

    "forward" is one call under no_grad, "both" is a call and `torch.autograd.grad` of it. The
    rounds alternate; F.scaled_dot_product_attention gets its inputs already transposed, and
    chooses its backend itself as a user's call does.
    """
    import fa2tvm

    case = Case.make(workload, "float32", seed)
    causal = workload.causal
    transposed = [x.transpose(1, 2) for x in (case.q, case.k, case.v)]
    dout = case.dout

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fa2tvm.attention(q, k, v, causal=causal)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for pass_, pair in (("forward", _forward_only), ("both", _forward_and_backward)):
        loops = {
            "fa2tvm": pair(ours, [case.q, case.k, case.v], dout),
            "sdpa": pair(sdpa, transposed, dout.transpose(1, 2)),
        }
        for name, (cpu_us, wall_us) in _interleave(loops).items():
            row = new_row(
                "calls", workload.name, name, "calls", workload.problem("forward", "float32")
            )
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


def _interleave(loops: dict[str, Loop]) -> dict[str, tuple[list[float], list[float]]]:
    """CPU and wall microseconds of one call, a figure for each round."""
    for loop in loops.values():
        loop(_WARM_UP)
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in loops}
    names = list(loops)
    for number in range(_ROUNDS):
        for name in names if number % 2 else reversed(names):
            cpu, wall = time.process_time(), time.perf_counter()
            loops[name](_CALLS)
            figures[name][0].append(1e6 * (time.process_time() - cpu) / _CALLS)
            figures[name][1].append(1e6 * (time.perf_counter() - wall) / _CALLS)
    return figures
