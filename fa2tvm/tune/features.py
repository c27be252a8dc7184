"""What the cost model sees of a candidate: named columns of problem, schedule and device.

Family-agnostic: decisions come from the Schedule's fields, sizes from its footprint, and block
columns from `block_q` and `block_kv` where the family has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fa2tvm.blocks import ceil_div, key_blocks, query_blocks
from fa2tvm.device import Device
from fa2tvm.problem import DTYPE_BYTES, Problem
from fa2tvm.schedule import Schedule

Choices = dict[str, tuple[Any, ...]]


def columns(
    problem: Problem, schedule: Schedule, device: Device, choices: Choices
) -> dict[str, float]:
    """The features of one candidate by name; the names depend on the family alone.

    Sizes enter as base-2 logarithms: what matters of a tile is its ratio to another.
    """
    return (
        _problem_columns(problem)
        | _decision_columns(schedule, choices)
        | _footprint_columns(problem, schedule, device)
        | _block_columns(problem, schedule, device)
        | _gpu_columns(problem, schedule, device)
    )


def _log2(x: float) -> float:
    return math.log2(1 + x)


def _problem_columns(problem: Problem) -> dict[str, float]:
    s, v = problem.shape, problem.variant
    return {
        "heads": _log2(s.batch * s.heads_q),
        "group": _log2(s.group),
        "seq_q": _log2(s.seq_q),
        "seq_kv": _log2(s.seq_kv),
        "head_dim_qk": float(v.head_dim_qk),
        "head_dim_v": float(v.head_dim_v),
        "causal": float(v.causal),
        "element_bytes": float(DTYPE_BYTES[v.dtype]),
    }


def _decision_columns(schedule: Schedule, choices: Choices) -> dict[str, float]:
    """One column for a number, one per choice for anything else."""
    found: dict[str, float] = {}
    for name, value in schedule.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            found.update({f"{name}={choice}": float(choice == value) for choice in choices[name]})
        else:
            found[name] = _log2(value)
    return found


def _footprint_columns(problem: Problem, schedule: Schedule, device: Device) -> dict[str, float]:
    footprint = schedule.footprint(problem.variant, device)
    return {
        "scratch_bytes": _log2(footprint.scratch_bytes),
        "scratch_of_l1": footprint.scratch_bytes / max(device.l1_bytes, 1),
        "scratch_of_l2": footprint.scratch_bytes / max(device.l2_bytes, 1),
        "accumulator_registers": float(footprint.accumulator_registers),
        "threads": float(footprint.threads),
    }


def _gpu_columns(problem: Problem, schedule: Schedule, device: Device) -> dict[str, float]:
    """Of a GPU alone: how full a multiprocessor is, and how much of K and V the L2 can keep."""
    if device.kind == "llvm":
        return {}
    s, v = problem.shape, problem.variant
    footprint = schedule.footprint(problem.variant, device)
    head_bytes = s.seq_kv * (v.head_dim_qk + v.head_dim_v) * DTYPE_BYTES[v.dtype]
    return {
        "scratch_of_shared": footprint.scratch_bytes / max(device.shared_bytes, 1),
        "warps": footprint.threads / 32,
        "kv_head_of_l2": head_bytes / max(device.l2_bytes, 1),
        "kv_all_of_l2": _log2(s.batch * s.heads_kv * head_bytes / max(device.l2_bytes, 1)),
    }


@dataclass(frozen=True)
class _Grid:
    """Outer blocks (one task each) against inner blocks, for one head."""

    n_outer: int
    visited: int
    masked: int


def _grid(problem: Problem, block_q: int, block_kv: int) -> _Grid:
    """Blocks of Algorithm 1 (outer: queries) or 2 (outer: keys), sampled at most 64 times."""
    s, v = problem.shape, problem.variant
    forward = v.pass_ == "forward"
    n_outer = ceil_div(s.seq_q, block_q) if forward else ceil_div(s.seq_kv, block_kv)
    step = max(1, n_outer // 64)
    ranges = key_blocks if forward else query_blocks
    visited = masked = sampled = 0
    for index in range(0, n_outer, step):
        r = ranges(index, block_q, block_kv, s.seq_q, s.seq_kv, v.causal, problem.causal_offset)
        visited += r.end - r.start
        masked += (r.end - r.start) - max(0, r.full_end - r.full_start)
        sampled += 1
    scale = n_outer / max(sampled, 1)
    return _Grid(n_outer, round(visited * scale), round(masked * scale))


def _block_columns(problem: Problem, schedule: Schedule, device: Device) -> dict[str, float]:
    block_q = getattr(schedule, "block_q", None)
    block_kv = getattr(schedule, "block_kv", None)
    if not block_q or not block_kv:
        return {}
    s, v = problem.shape, problem.variant
    grid = _grid(problem, block_q, block_kv)
    tasks = s.batch * s.heads_q * grid.n_outer
    waves = tasks / max(device.cores, 1)
    gemms = v.head_dim_qk + v.head_dim_v
    if v.pass_ == "backward":
        gemms = 3 * v.head_dim_qk + 2 * v.head_dim_v
    block_flops = 2 * block_q * block_kv * gemms
    element = DTYPE_BYTES[v.dtype]
    inner = block_kv if v.pass_ == "forward" else block_q
    block_bytes = inner * (v.head_dim_qk + v.head_dim_v) * element
    wasted = grid.visited * block_q * block_kv / max(problem.visible_pairs(), 1)
    return {
        "tasks": _log2(tasks),
        "waves": _log2(waves),
        "tail": math.ceil(waves) / waves if waves else 1.0,
        "inner_blocks": _log2(grid.visited / max(grid.n_outer, 1)),
        "masked_share": grid.masked / max(grid.visited, 1),
        "wasted_work": wasted,
        "block_flops": _log2(block_flops),
        "block_bytes": _log2(block_bytes),
        "flops_per_byte": block_flops / max(block_bytes, 1),
    }
