"""BUGS section B on what is built: gradients through groups, strides, empty sizes, and repeats."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from calls import DTYPES, assert_same_bits, backward, forward, random_case, run

pytestmark = pytest.mark.usefixtures("poisoned")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@all_dtypes
@pytest.mark.parametrize("heads_kv", [1, 2, 3, 6])
def test_groups_of_query_heads(
    dtype: torch.dtype, heads_kv: int, generator: torch.Generator
) -> None:
    """B02 (native-sparse-attention #27, levanter !449): dK, dV are summed over each group."""
    case = random_case(generator, dtype, batch=2, seq_q=64, heads=6, heads_kv=heads_kv, d=64)
    results = run(case)
    case.check(results)
    group = 6 // heads_kv
    repeated = dataclasses.replace(
        case, k=case.k.repeat_interleave(group, dim=2), v=case.v.repeat_interleave(group, dim=2)
    )
    whole = run(repeated)
    for name in ("O", "LSE"):
        assert results[name].equal(whole[name])
    for name in ("dK", "dV"):
        summed = whole[name].float().unflatten(2, (heads_kv, group)).sum(dim=3)
        tolerance = 8 * group * torch.finfo(dtype).eps
        size = whole[name].float().abs().max().item()
        torch.testing.assert_close(results[name].float(), summed, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_oracle_against_autograd_in_float64(
    causal: bool, alignment: str, generator: torch.Generator
) -> None:
    """The oracle's gradients are those of torch's autograd, so that both passes rest on two."""
    case = random_case(
        generator, torch.float32, seq_q=30, seq_kv=23, heads=4, heads_kv=2, d=8, dlse=True
    )
    case = dataclasses.replace(case, causal=causal, alignment=alignment)
    plain = case.plain(torch.float64)
    for name, x in case.oracle.items():
        torch.testing.assert_close(plain[name], x, rtol=1e-12, atol=1e-12)


@all_dtypes
@pytest.mark.parametrize("layout", ["transposed", "expanded", "wider"])
def test_strides_of_dout(dtype: torch.dtype, layout: str, generator: torch.Generator) -> None:
    """B04 (FA #355 #1149, xformers !282, PT #64529): dO is read by its strides."""
    case = random_case(
        generator, dtype, batch=2, seq_q=32, seq_kv=32, heads=4, heads_kv=1, causal=True
    )
    dO = case.dO
    if layout == "transposed":
        dO = dO.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        dO = torch.ones((), dtype=dtype).expand(dO.shape)
    else:
        dO = torch.cat((dO, torch.full_like(dO, math.nan)), dim=-1)[..., :64]
    case = dataclasses.replace(case, dO=dO)
    assert_same_bits(run(case), run(dataclasses.replace(case, dO=dO.contiguous())))


@all_dtypes
@pytest.mark.parametrize("zero", ["batch", "seq_q", "seq_kv"])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(dtype: torch.dtype, zero: str, causal: bool, generator: torch.Generator) -> None:
    """B09 (FA !2776, PT #174939): shapes are kept; what is not there contributes zero."""
    sizes = {"batch": 2, "seq_q": 5, "seq_kv": 7, zero: 0}
    case = random_case(generator, dtype, heads=2, d=64, dlse=True, causal=causal, **sizes)
    results = run(case)
    case.check(results)
    for name in ("dQ", "dK", "dV"):
        assert (results[name] == 0).all()
    assert (results["LSE"] == -math.inf).all()


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads", "heads_kv"), [(1, 1, 1), (1, 6, 2), (3, 4, 4)])
def test_repeats_are_bitwise_equal(
    dtype: torch.dtype,
    causal: bool,
    batch: int,
    heads: int,
    heads_kv: int,
    generator: torch.Generator,
) -> None:
    """B10, B11 (FA #359 #414 #988 #1245): no race and no atomics, whatever the threads do."""
    case = random_case(
        generator,
        dtype,
        batch=batch,
        seq_q=500,
        seq_kv=450,
        heads=heads,
        heads_kv=heads_kv,
        causal=causal,
    )
    first = run(case)
    for _ in range(5):
        assert_same_bits(run(case), first)


def test_many_runs_of_many_small_tasks(generator: torch.Generator) -> None:
    """B10 (FA #359): B = 300 tasks at once, 3 randn, 20 backward runs on one forward."""
    case = random_case(generator, torch.float16, batch=300, seq_q=24, seq_kv=40)
    case = dataclasses.replace(case, q=3 * case.q, k=3 * case.k, v=3 * case.v)
    results = forward(case)
    first = backward(case, results)
    for _ in range(19):
        assert_same_bits(backward(case, results), first)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, generator: torch.Generator) -> None:
    """B11: the thread count changes how dQ is split, and never more than roundings."""
    case = random_case(generator, torch.float32, seq_q=700, seq_kv=600, causal=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        results = run(case)
    finally:
        torch.set_num_threads(before)
    case.check(results)


@all_dtypes
def test_subsets_of_gradients(dtype: torch.dtype, generator: torch.Generator) -> None:
    """B15 (PT #136101 !188302): each of the 7 subsets gives the gradients of the full run."""
    case = random_case(
        generator, dtype, batch=2, seq_q=33, heads=4, heads_kv=2, causal=True, dlse=True
    )
    results = forward(case)
    full = backward(case, results)
    for needs in itertools.product((False, True), repeat=3):
        wanted = {n for n, need in zip(("dQ", "dK", "dV"), needs, strict=True) if need}
        got = backward(case, results, needs=needs)
        assert_same_bits(got, {n: x for n, x in full.items() if n in wanted})


@pytest.mark.parametrize("which", ["dO", "dLSE"])
def test_a_missing_gradient_is_zero(which: str, generator: torch.Generator) -> None:
    """B15 (PT !188302): only one of O and LSE has a gradient; the other pointer is not read."""
    case = random_case(generator, torch.float32, seq_q=70, causal=True, dlse=True)
    results = forward(case)
    zeros = dataclasses.replace(case, **{which: torch.zeros_like(getattr(case, which))})
    none = dataclasses.replace(case, **{which: None})
    for name, x in backward(zeros, results).items():
        torch.testing.assert_close(x, backward(none, results)[name])
