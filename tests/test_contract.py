"""The contract: every family and pass, on the `ci` workloads, in every dtype, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from calls import DTYPES, FAMILIES, random_case, run, variant_of
from compiled import build_all
from yardstick import Case

from fa2tvm.workloads import Workload, tagged

pytestmark = pytest.mark.usefixtures("poisoned")
CI = tagged("ci")


def make_case(workload: Workload, dtype: torch.dtype, generator: torch.Generator) -> Case:
    s = workload.shape
    return random_case(
        generator,
        dtype,
        batch=s.batch,
        seq_q=s.seq_q,
        seq_kv=s.seq_kv,
        heads=s.heads_q,
        heads_kv=s.heads_kv,
        d=workload.head_dim_qk,
        dv=workload.head_dim_v,
        dlse=True,
        causal=workload.causal,
        alignment=workload.alignment,
    )


@pytest.fixture(scope="module", autouse=True)
def _compiled(fa2tvm_home: object) -> None:  # noqa: ARG001 - it must be there first
    build_all(
        variant_of(make_case(w, dtype, torch.Generator()), pass_)
        for w in CI
        for dtype in DTYPES
        for pass_ in ("forward", "backward")
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_passes(
    family: str, workload: Workload, dtype: torch.dtype, generator: torch.Generator
) -> None:
    case = make_case(workload, dtype, generator)
    results = run(case, family)
    assert set(results) == {"O", "LSE", "dQ", "dK", "dV"}
    case.check(results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_stay_as_they_are(
    family: str, workload: Workload, dtype: torch.dtype, generator: torch.Generator
) -> None:
    case = make_case(workload, dtype, generator)
    inputs = {n: x for n, x in vars(case).items() if isinstance(x, torch.Tensor)}
    before = {n: x.clone() for n, x in inputs.items()}
    run(case, family)
    for name, x in inputs.items():
        assert x.equal(before[name]), f"{name} was written to"


@pytest.mark.parametrize("workload", CI, ids=lambda w: w.name)
def test_public_call(workload: Workload, generator: torch.Generator) -> None:
    """fa2tvm.attention and autograd hold the same contract with whatever lookup chooses."""
    import fa2tvm

    case = make_case(workload, torch.float32, generator)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = fa2tvm.attention(
        *leaves, causal=case.causal, alignment=case.alignment, return_lse=True
    )
    # A row that sees nothing has LSE = -inf, and a loss must not multiply that by its gradient.
    dlse = case.dLSE.where(lse.detach() > -torch.inf, 0)
    gradients = torch.autograd.grad((out, lse), leaves, (case.dO, dlse))
    names = ("O", "LSE", "dQ", "dK", "dV")
    results = dict(zip(names, (out.detach(), lse.detach(), *gradients), strict=True))
    dataclasses.replace(case, dLSE=dlse).check(results)
