"""How the tests call a kernel family: its default schedule for this machine, through launch.py."""

from __future__ import annotations

import functools
from typing import Any

import compiled
import torch
from yardstick import Case, Tensors

from fa2tvm import compile as compiler
from fa2tvm import launch
from fa2tvm.compile import Module
from fa2tvm.problem import PassName, Variant
from fa2tvm.schedule import SCHEDULES, Schedule

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Families of this machine's CPU; those of GPUs are called through the public API (test_gpu_*.py).
FAMILIES = sorted({family for family, _ in SCHEDULES if family == "cpu"})


def dtype_name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")


@functools.cache
def module(variant: Variant, family: str = "cpu", schedule: Schedule | None = None) -> Module:
    """The loaded module of a variant; compiled once a run."""
    return compiler.load(compiled.build(variant, family, schedule))


def variant_of(case: Case, pass_: PassName) -> Variant:
    return Variant(pass_, dtype_name(case.q.dtype), case.q.shape[3], case.v.shape[3], case.causal)


def forward(case: Case, family: str = "cpu", **options: Any) -> Tensors:
    """O and LSE."""
    out, lse = launch.forward(
        module(variant_of(case, "forward"), family),
        case.q,
        case.k,
        case.v,
        case.scale,
        case.causal_offset,
        **options,
    )
    return {"O": out, "LSE": lse}


def backward(case: Case, results: Tensors, family: str = "cpu", **options: Any) -> Tensors:
    """dQ, dK and dV from the results of `forward`; those not needed are left out."""
    gradients = launch.backward(
        module(variant_of(case, "backward"), family),
        case.q,
        case.k,
        case.v,
        results["O"],
        results["LSE"],
        case.dO,
        case.dLSE,
        case.scale,
        case.causal_offset,
        **options,
    )
    named = zip(("dQ", "dK", "dV"), gradients, strict=True)
    return {n: x for n, x in named if x is not None}


def run(case: Case, family: str = "cpu") -> Tensors:
    """Everything that the case asks for."""
    results = forward(case, family)
    if case.dO is not None:
        results = results | backward(case, results, family)
    return results


def random_case(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    seq_q: int = 16,
    seq_kv: int | None = None,
    heads: int = 1,
    heads_kv: int | None = None,
    d: int = 64,
    dv: int | None = None,
    dlse: bool = False,
    arithmetic: torch.dtype | None = torch.float32,
    **how: Any,
) -> Case:
    """A case of standard normal data; sizes that are left out follow the others.

    `arithmetic` is the CPU family's; None holds a family to the storage type.
    """
    seq_kv = seq_q if seq_kv is None else seq_kv
    heads_kv = heads if heads_kv is None else heads_kv
    dv = d if dv is None else dv

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return Case(
        q=randn(batch, seq_q, heads, d),
        k=randn(batch, seq_kv, heads_kv, d),
        v=randn(batch, seq_kv, heads_kv, dv),
        dO=randn(batch, seq_q, heads, dv),
        dLSE=randn(batch, heads, seq_q).float() if dlse else None,
        arithmetic=arithmetic,
        **how,
    )


def assert_same_bits(ours: Tensors, theirs: Tensors) -> None:
    """Raise AssertionError unless both hold the same results, bit by bit; NaN equals NaN."""
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name]
        assert x.shape == y.shape, f"{name} has shape {x.shape}, not {y.shape}"
        different = x.ne(y) & ~(x.isnan() & y.isnan())
        assert not different.any(), (
            f"{name} differs in {int(different.sum())} of {x.numel()} elements, "
            f"the first at {different.nonzero()[0].tolist()}"
        )
