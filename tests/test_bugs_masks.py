"""BUGS section C on what is built: causal alignment, tails, later tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from calls import DTYPES, assert_same_bits, forward, random_case, run
from yardstick import Case

pytestmark = pytest.mark.usefixtures("poisoned")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@all_dtypes
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"),
    [(1, 8), (3, 128), (2, 5), (64, 65), (130, 257), (5, 2), (257, 130), (128, 128)],
)
def test_mask_reader(seq_q: int, seq_kv: int, alignment: str, dtype: torch.dtype) -> None:
    """C01 (FA #282 #517 !436, cutlass #2336, PT #103082): O = 1 / visible exactly where visible.

    With q = 0 and v a piece of the identity, O is the mask itself: no tolerance to argue about.
    """
    for first in range(0, seq_kv, 64):
        v = torch.zeros(1, seq_kv, 1, 64, dtype=dtype)
        n = min(64, seq_kv - first)
        v[0, torch.arange(first, first + n), 0, torch.arange(n)] = 1
        case = Case(
            torch.zeros(1, seq_q, 1, 64, dtype=dtype),
            torch.ones(1, seq_kv, 1, 64, dtype=dtype),
            v,
            causal=True,
            alignment=alignment,
        )
        visible = case.visible()
        share = visible / visible.sum(dim=1, keepdim=True).clamp(min=1)
        want = share.float()[:, first : first + n].to(dtype)
        assert forward(case)["O"][0, :, 0, :n].equal(want)


@all_dtypes
@pytest.mark.parametrize("seq_kv", [1, 8, 129, 700])
def test_one_query_sees_every_key(
    dtype: torch.dtype, seq_kv: int, generator: torch.Generator
) -> None:
    """C01 (FA #517): for Sq = 1 bottom-right causal is no mask, bit by bit."""
    case = random_case(generator, dtype, batch=2, seq_q=1, seq_kv=seq_kv, heads=2, causal=True)
    assert_same_bits(forward(case), forward(dataclasses.replace(case, causal=False)))


@all_dtypes
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_later_tokens_change_nothing(
    dtype: torch.dtype, alignment: str, generator: torch.Generator
) -> None:
    """A12-like (FA !1025): O[i] keeps its bits when k[j], v[j] of unseen tokens change."""
    case = random_case(
        generator, dtype, seq_q=200, seq_kv=230, heads=2, causal=True, alignment=alignment
    )
    before = forward(case)
    for row in (0, 63, 64, 150):
        seen = row + case.causal_offset + 1
        k, v = case.k.clone(), case.v.clone()
        k[:, seen:] += 100
        v[:, seen:] += 1e4
        after = forward(dataclasses.replace(case, k=k, v=v))
        assert after["O"][:, : row + 1].equal(before["O"][:, : row + 1])
        assert after["LSE"][..., : row + 1].equal(before["LSE"][..., : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq", [1024, 1025])
def test_long_causal_rows(dtype: torch.dtype, seq: int, generator: torch.Generator) -> None:
    """C06, C07 (PT #153799, gcnasm !21): every row, not the first 8; the running maximum is used.

    Keys grow, so that each block has a larger maximum than the one before.
    """
    case = random_case(generator, dtype, seq_q=seq, causal=True)
    growing = torch.linspace(0.2, 3, seq).to(dtype)[None, :, None, None]
    for keys in (case.k, case.k * growing, case.k * growing.flip(1)):
        grown = dataclasses.replace(case, k=keys)
        results = run(grown)
        grown.check(results)
        cosine = torch.cosine_similarity(results["O"].double(), grown.oracle["O"], dim=-1)
        assert cosine.min() > 0.9999


@pytest.mark.parametrize("seq", [1, 2, 15, 17, 63, 65, 127, 129, 192, 255, 257, 296])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_that_are_no_multiple_of_a_block(
    seq: int, causal: bool, generator: torch.Generator
) -> None:
    """C08 (tilelang #1213, JAX #27224, flash-attention-jax #14)."""
    case = random_case(generator, torch.float32, batch=2, seq_q=seq, heads=2, causal=causal)
    case.check(run(case))


@pytest.mark.parametrize(("seq", "d"), [(17, 16), (129, 16), (63, 96), (1025, 96)])
def test_lengths_at_other_head_dims(seq: int, d: int, generator: torch.Generator) -> None:
    """C08: D of 16 and 96 as well."""
    case = random_case(generator, torch.float32, seq_q=seq, d=d, causal=True)
    case.check(run(case))


def test_the_reported_shape(generator: torch.Generator) -> None:
    """C08 (tilelang #1213): (B, H, S, D) = (4, 8, 296, 96) instead of 32 batches."""
    case = random_case(generator, torch.float32, batch=4, seq_q=296, heads=8, d=96, causal=True)
    case.check(run(case))


@pytest.mark.slow
def test_a_long_sequence(generator: torch.Generator) -> None:
    """C08: S = 4250, both passes."""
    case = random_case(generator, torch.float32, seq_q=4250, causal=True)
    case.check(run(case))
