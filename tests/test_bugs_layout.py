"""BUGS section F on kernels: odd offsets, strides, guard bytes around results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from calls import DTYPES, assert_same_bits, forward, module, random_case, run, variant_of
from test_random import LAYOUTS

from fa2tvm import launch

pytestmark = pytest.mark.usefixtures("poisoned")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@all_dtypes
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_odd_element_offsets(dtype: torch.dtype, offset: int, generator: torch.Generator) -> None:
    """F02 (TVM #8540 !9731): a vector load assumes the alignment of an element only."""
    case = random_case(generator, dtype, batch=2, seq_q=37, heads=2, d=3, dv=5, causal=True)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        flat = torch.full((x.numel() + 2 * offset,), math.nan, dtype=dtype)
        flat[offset:-offset] = x.flatten()
        return flat[offset:-offset].view(x.shape)

    moved = {n: shifted(getattr(case, n)) for n in ("q", "k", "v", "dO")}
    assert moved["q"].data_ptr() % (2 * dtype.itemsize)
    assert_same_bits(run(dataclasses.replace(case, **moved)), run(case))


@all_dtypes
@pytest.mark.parametrize("name", ["q", "k", "v", "dO"])
def test_each_input_in_each_layout(
    dtype: torch.dtype, name: str, generator: torch.Generator
) -> None:
    """F04, F05 (TVM #17529, FlagGems #5896): one input strided, the others not; the same bits."""
    case = random_case(
        generator, dtype, batch=2, seq_q=62, seq_kv=70, heads=4, heads_kv=2, causal=True
    )
    want = run(case)
    for layout in LAYOUTS:
        strided: Any = {name: layout(getattr(case, name))}
        assert_same_bits(run(dataclasses.replace(case, **strided)), want)


@all_dtypes
def test_one_buffer_for_qkv(dtype: torch.dtype, generator: torch.Generator) -> None:
    """F04 (E04's layout): q, k and v are views of one [B, S, 3, H, D] projection."""
    qkv = torch.randn(2, 90, 3, 2, 64, generator=generator).to(dtype)
    q, k, v = qkv.unbind(dim=2)
    case = random_case(generator, dtype, batch=2, seq_q=90, heads=2, causal=True)
    views = dataclasses.replace(case, q=q, k=k, v=v)
    copies = dataclasses.replace(case, q=q.clone(), k=k.clone(), v=v.clone())
    assert_same_bits(run(views), run(copies))


@all_dtypes
def test_expanded_over_batch_and_heads(dtype: torch.dtype, generator: torch.Generator) -> None:
    """F04: strides of 0 are read as they are."""
    case = random_case(generator, dtype, seq_q=40, seq_kv=50, heads=1, heads_kv=1)
    k, v = (x.expand(3, -1, 2, -1) for x in (case.k, case.v))
    q, dO = (x.expand(3, -1, 4, -1) for x in (case.q, case.dO))
    expanded = dataclasses.replace(case, q=q, k=k, v=v, dO=dO)
    copied = dataclasses.replace(
        case, q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), dO=dO.contiguous()
    )
    assert_same_bits(run(expanded), run(copied))


@all_dtypes
def test_nothing_is_written_around_the_results(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    """C09-like (FA !2337): guard bytes on both sides of O and LSE stay intact."""
    for seq_q, seq_kv, d, dv in ((1, 1, 3, 5), (37, 70, 3, 5), (129, 65, 64, 64)):
        case = random_case(generator, dtype, batch=2, seq_q=seq_q, seq_kv=seq_kv, d=d, dv=dv)
        want = forward(case)
        guarded = {}
        for name, x in want.items():
            flat = torch.full((x.numel() + 128,), 77, dtype=x.dtype)
            guarded[name] = (flat, flat[64:-64].view(x.shape))
        launch.forward(
            module(variant_of(case, "forward")),
            case.q,
            case.k,
            case.v,
            case.scale,
            case.causal_offset,
            out=guarded["O"][1],
            lse=guarded["LSE"][1],
        )
        assert_same_bits({n: view for n, (_, view) in guarded.items()}, want)
        for flat, _ in guarded.values():
            assert (flat[:64] == 77).all()
            assert (flat[-64:] == 77).all()


@all_dtypes
def test_layout_of_results(dtype: torch.dtype, generator: torch.Generator) -> None:
    """F07, F08 (FA !818, PT #133671): results are contiguous, whatever the inputs are."""
    case = random_case(generator, dtype, batch=2, seq_q=20, heads=2)
    strided = {n: LAYOUTS[1](getattr(case, n)) for n in ("q", "k", "v", "dO")}
    for name, x in run(dataclasses.replace(case, **strided)).items():
        assert x.is_contiguous(), name


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_does_not_depend_on_its_batch(
    dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    """H06 (TensorRT-LLM !16782, FA #1897): one sequence alone, or among 17: the same O and LSE."""
    case = random_case(
        generator, dtype, batch=17, seq_q=70, seq_kv=90, heads=4, heads_kv=2, causal=causal
    )
    together = forward(case)
    for b in (0, 8, 16):
        alone = dataclasses.replace(
            case, q=case.q[b : b + 1], k=case.k[b : b + 1], v=case.v[b : b + 1]
        )
        assert_same_bits(forward(alone), {n: x[b : b + 1] for n, x in together.items()})
