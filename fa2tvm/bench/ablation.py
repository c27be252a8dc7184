"""What FlashAttention-2 changed of version 1, each change alone and all together, on this GPU.

Every point is our portable forward kernel with other decisions, a peer of kind "ablation"; the
tuned or default schedule is "v2". Source: arXiv:2307.08691, sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch

from fa2tvm.bench.peers import PEERS, Peer, Prepare, Prepared, device_of
from fa2tvm.bench.suite import Cell
from fa2tvm.device import Device
from fa2tvm.errors import PeerUnavailable, UnsupportedProblem
from fa2tvm.lookup import lookup
from fa2tvm.problem import Problem, Variant
from fa2tvm.schedule import Sm80Forward
from fa2tvm.workloads import tagged

ABLATIONS = ("v1-v2",)
POINTS = (
    "v2",
    "v2 without trusted maxima",
    "split-K",
    "rescaling in each step",
    "no sequence parallelism",
    "m and l saved",
    "v1",
)
# Beside them: FlashAttention-2 as PyTorch has it.
COMPARED = (*POINTS, "sdpa-flash")
_LENGTHS = (512, 8192, 16384)
_HEAD_DIMS = (64, 128)


def require_known(name: str, kind: str) -> None:
    """Raise UnsupportedProblem for an ablation that does not exist, or not on that device."""
    if name not in ABLATIONS:
        raise UnsupportedProblem(
            f"ablation is {name!r}, but only {', '.join(ABLATIONS)} exist; choose one."
        )
    if kind != "cuda":
        raise UnsupportedProblem(
            f"ablation {name} compares GPU programs, but the device is native; say --device cuda."
        )


def cells() -> list[Cell]:
    """Dense problems of 16384 tokens with short, long and longest sequences."""
    return [
        (workload, "bfloat16", ("forward",))
        for workload in tagged("bench")
        if workload.shape.seq_kv in _LENGTHS
        and workload.head_dim_qk in _HEAD_DIMS
        and not workload.causal
    ]


def programs(device: Device) -> list[tuple[Variant, Sm80Forward]]:
    """Everything that the points of all cells run."""
    found: dict[tuple[Variant, Sm80Forward], None] = {}
    for workload, dtype, _ in cells():
        problem = workload.problem("forward", dtype)
        for point in POINTS:
            found[problem.variant, schedule_of(point, problem, device)] = None
    return list(found)


def schedule_of(point: str, problem: Problem, device: Device) -> Sm80Forward:
    """The schedule of a point, as good as that point allows: v2's, tuned where it is, but for it.

    Raises
    ------
    PeerUnavailable
        Where no block sizes of it fit the device.
    """
    variant = problem.variant
    v2 = cast(Sm80Forward, lookup(problem, device, family=Sm80Forward.family).schedule)
    plain: dict[str, Any] = {"trust_maximum": False, "lazy_rescale": 0}
    if point in ("v1", "split-K"):
        others: dict[str, Any] = {
            "rescale_each_step": True,
            "parallel_queries": False,
            "save_m_and_l": True,
            **plain,
        }
        return _split_keys(replace(v2, **others) if point == "v1" else v2, variant, device)
    changes: dict[str, dict[str, Any]] = {
        "v2": {},
        "v2 without trusted maxima": plain,
        "rescaling in each step": {"rescale_each_step": True},
        "no sequence parallelism": {"parallel_queries": False},
        "m and l saved": {"save_m_and_l": True},
    }
    return replace(v2, **changes[point])


def _split_keys(schedule: Sm80Forward, variant: Variant, device: Device) -> Sm80Forward:
    """The schedule with warps that split the keys, in the largest blocks that fit."""
    for blocks in (2, 1):
        for block_kv in (128, 64):
            candidate = replace(
                schedule,
                split_keys=True,
                block_q=32,
                block_kv=block_kv,
                warps=4,
                stages=2,
                blocks_per_multiprocessor=blocks,
                q_in_registers=False,
            )
            if candidate.feasible(variant, device):
                return candidate
    raise PeerUnavailable(f"no block sizes with split keys fit {variant.name} on {device.slug}.")


def _prepare(point: str) -> Prepare:
    def prepare(problem: Problem, device: str) -> Prepared:
        from fa2tvm import compile as modules

        here = device_of(device)
        schedule = schedule_of(point, problem, here)
        module = modules.load(modules.build(problem.variant, schedule, here))
        scale = 1 / math.sqrt(problem.variant.head_dim_qk)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batch, seq, heads, _ = q.shape
            out = q.new_empty(batch, seq, heads, v.shape[3])
            rows = batch * (2 if schedule.save_m_and_l else 1)
            statistics = q.new_empty(rows, heads, seq, dtype=torch.float32)
            module.function(q, k, v, out, statistics, scale, problem.causal_offset)
            return out

        return Prepared(
            attention,
            provenance={
                "family": schedule.family,
                "schedule": schedule.to_dict(),
                "origin": "ablation",
            },
        )

    return prepare


for _point in POINTS:
    PEERS[_point] = Peer(_point, _prepare(_point), ours=True, kinds=("ablation",))
