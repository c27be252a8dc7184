"""BUGS section D: any head dim from 1 to 512, and V of another width."""

from __future__ import annotations

import pytest
import torch
from calls import random_case, run
from compiled import build_all

from fa2tvm.problem import Variant

pytestmark = pytest.mark.usefixtures("poisoned")
# What the `ci` workloads have not: multiples of 8 that are none of 16, odd ones, large ones.
SAME = (8, 40, 59, 80, 160, 224, 256)
DIFFERENT = ((128, 96), (64, 32), (32, 64), (192, 128), (64, 128), (7, 512), (512, 7))


@pytest.fixture(scope="module", autouse=True)
def _compiled(fa2tvm_home: object) -> None:  # noqa: ARG001 - it must be there first
    build_all(
        Variant(pass_, "float32", d, dv, True)
        for d, dv in (*((d, d) for d in SAME), *DIFFERENT)
        for pass_ in ("forward", "backward")
    )


@pytest.mark.parametrize("d", SAME)
def test_any_head_dim(d: int, generator: torch.Generator) -> None:
    """D01 (FA #28 #277 #1347, FI #790): 1/sqrt(d) of the true d, gradients of exactly d columns."""
    case = random_case(generator, torch.float32, seq_q=65, heads=2, d=d, causal=True)
    results = run(case)
    assert results["dK"].shape == case.k.shape
    case.check(results)


@pytest.mark.parametrize(("d", "dv"), DIFFERENT)
def test_v_of_another_width(d: int, dv: int, generator: torch.Generator) -> None:
    """B03, D02 (FA #2552 #1541 #1471): dV is written by its own stride; no padding of V."""
    case = random_case(
        generator, torch.float32, seq_q=70, seq_kv=97, heads=4, heads_kv=2, d=d, dv=dv, causal=True
    )
    results = run(case)
    assert results["dV"].shape == case.v.shape
    case.check(results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(59, 59), (40, 24)])
def test_odd_widths_in_half_types(
    d: int, dv: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """D01, D02 in the types whose vectors hold twice as many columns."""
    case = random_case(generator, dtype, seq_q=65, seq_kv=33, heads=2, d=d, dv=dv)
    case.check(run(case))
