"""A kernel family for the tuner's tests: plain categorical decisions, and points that misbehave.

It is what a GPU family is to the tuner: a Schedule class and a builder, found through the dicts.
The program is a plain online-softmax attention on llvm; `fault` picks what is wrong with it.
"""

# ruff: noqa: ARG001 - the signatures are those of a family
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fa2tvm import lookup, records
from fa2tvm.device import Device
from fa2tvm.kernels import BUILDERS
from fa2tvm.problem import PassName, Problem, Variant
from fa2tvm.schedule import SCHEDULES, Footprint, Schedule

FAULTS = ("none", "wrong", "crash", "hang", "memory", "unbuildable", "slow_build", "poison")


@dataclass(frozen=True)
class ToyForward(Schedule):
    """Decisions of the toy: two change the program, `fault` breaks it."""

    family: ClassVar[str] = "toy"
    pass_: ClassVar[PassName] = "forward"
    # What `choices` offers; tests set it, worker processes never ask.
    offered: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_kv": (1, 2, 4),
        "order": ("ij", "ji"),
        "fault": ("none",),
    }

    block_kv: int = 1
    order: str = "ij"
    fault: str = "none"

    @classmethod
    def default(cls, variant: Variant, device: Device) -> ToyForward:
        """The plainest point."""
        return cls()

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """What the test says."""
        return cls.offered

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """A block of keys."""
        return Footprint(4 * self.block_kv * variant.head_dim_qk, self.block_kv)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Blocks above 64 keys do not fit."""
        return [f"block_kv is {self.block_kv}, but at most 64 fits."] if self.block_kv > 64 else []


def build(variant: Variant, schedule: ToyForward, device: Device) -> Any:
    """The module of the toy; its one function is `forward`."""
    import tvm

    if schedule.fault == "unbuildable":
        raise ValueError("the toy refuses to be built")
    if schedule.fault == "slow_build":
        time.sleep(600)
    if schedule.fault == "memory":
        hoard = [bytearray(1 << 28) for _ in range(1 << 10)]
        raise AssertionError(f"{len(hoard)} blocks of 256 MiB fitted into memory")
    return tvm.IRModule({"forward": program(variant, schedule)})


def program(variant: Variant, schedule: ToyForward) -> Any:
    """Online softmax, one query row a task; accumulates in O itself."""
    from tvm.script import tirx as T

    D, Dv = variant.head_dim_qk, variant.head_dim_v
    causal, fault, step = variant.causal, schedule.fault, schedule.block_kv
    head_major = schedule.order == "ij"
    f32 = "float32"
    far = 1 << 40 if fault == "crash" else 0
    spins = 1 << 60 if fault == "hang" else 1

    @T.prim_func(s_tir=True)
    def forward(
        q: T.handle,
        k: T.handle,
        v: T.handle,
        o: T.handle,
        lse: T.handle,
        softmax_scale: T.float32,
        causal_offset: T.int64,
    ):
        T.func_attr({"global_symbol": "forward", "tirx.noalias": True})
        batch, heads, heads_kv = T.int64(), T.int64(), T.int64()
        seq_q, seq_kv = T.int64(), T.int64()
        qs0, qs1, qs2 = T.int64(), T.int64(), T.int64()
        ks0, ks1, ks2 = T.int64(), T.int64(), T.int64()
        vs0, vs1, vs2 = T.int64(), T.int64(), T.int64()
        os0, os1, os2 = T.int64(), T.int64(), T.int64()
        Q = T.match_buffer(q, (batch, seq_q, heads, D), f32, strides=(qs0, qs1, qs2, 1), align=4)
        K = T.match_buffer(
            k, (batch, seq_kv, heads_kv, D), f32, strides=(ks0, ks1, ks2, 1), align=4
        )
        V = T.match_buffer(
            v, (batch, seq_kv, heads_kv, Dv), f32, strides=(vs0, vs1, vs2, 1), align=4
        )
        O = T.match_buffer(o, (batch, seq_q, heads, Dv), f32, strides=(os0, os1, os2, 1), align=4)
        LSE = T.match_buffer(lse, (batch, heads, seq_q), f32, align=4)
        n_keys: T.let = T.min(seq_kv, 1) if fault == "wrong" else seq_kv
        for task in T.parallel(batch * heads * seq_q):
            m = T.alloc_buffer((1,), f32)
            l = T.alloc_buffer((1,), f32)
            s = T.alloc_buffer((1,), f32)
            alpha = T.alloc_buffer((1,), f32)
            b: T.let = T.truncdiv(task, heads * seq_q)
            r: T.let = T.truncmod(task, heads * seq_q)
            h: T.let = T.truncdiv(r, seq_q) if head_major else T.truncmod(r, heads)
            i: T.let = T.truncmod(r, seq_q) if head_major else T.truncdiv(r, heads)
            hk: T.let = T.truncdiv(h, T.truncdiv(heads, heads_kv))
            l[0] = T.float32(0)
            for _spin in T.serial(T.int64(spins)):
                l[0] = l[0] * T.float32(0.5) + T.abs(Q[b + far, i, h, 0])
            m[0] = T.float32(-3.0e38) - l[0]  # the same number, which the compiler cannot know
            l[0] = T.float32(0)
            if fault != "poison":
                for c in range(Dv):
                    O[b, i, h, c] = T.float32(0)
            for j0 in range(T.truncdiv(n_keys + (step - 1), step)):
                for j1 in T.unroll(step):
                    j: T.let = j0 * step + j1
                    if j < n_keys and (not causal or j <= i + causal_offset):
                        s[0] = T.float32(0)
                        for d in range(D):
                            s[0] = s[0] + Q[b, i, h, d] * K[b, j, hk, d]
                        s[0] = s[0] * softmax_scale
                        alpha[0] = T.exp(m[0] - T.max(m[0], s[0]))
                        m[0] = T.max(m[0], s[0])
                        s[0] = T.exp(s[0] - m[0])
                        l[0] = l[0] * alpha[0] + s[0]
                        for c in range(Dv):
                            O[b, i, h, c] = O[b, i, h, c] * alpha[0] + s[0] * V[b, j, hk, c]
            LSE[b, h, i] = T.if_then_else(
                l[0] > T.float32(0), m[0] + T.log(l[0]), T.float32(float("-inf"))
            )
            for c in range(Dv):
                O[b, i, h, c] = O[b, i, h, c] / T.if_then_else(
                    l[0] > T.float32(0), l[0], T.float32(1)
                )

    return forward


BUILDERS["toy", "forward"] = __name__
SCHEDULES["toy", "forward"] = ToyForward
records.PROGRAM_SOURCES["toy", "forward"] = Path(__file__)
lookup.FAMILIES["toy"] = ("toy",)
