"""BUGS section A on what is built: NaN, infinity, extreme logits, the meaning of LSE."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from calls import DTYPES, assert_same_bits, backward, forward, random_case, run
from yardstick import Case, Tensors

pytestmark = pytest.mark.usefixtures("poisoned")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FINFO = torch.finfo


@pytest.mark.parametrize(
    ("dtype", "d"), [(torch.float16, 16), (torch.float32, 64), (torch.bfloat16, 64)], ids=str
)
def test_one_query_one_key(dtype: torch.dtype, d: int, generator: torch.Generator) -> None:
    """A02 (FA #334): the softmax of one logit is constant: O = V, dV = dO, dQ = dK = 0."""
    case = random_case(generator, dtype, seq_q=1, d=d)
    case = dataclasses.replace(
        case, q=3 * case.q, k=3 * case.k, v=3 * case.v, dO=torch.ones_like(case.dO)
    )
    results = run(case)
    case.check(results)
    assert results["O"].equal(case.v)
    # P is exp(S - LSE) with LSE rounded to float32, so that 1 is met up to |LSE| roundings.
    slack = 2 * FINFO(torch.float32).eps * (2 + results["LSE"].abs().max().item())
    torch.testing.assert_close(results["dV"], case.dO, rtol=slack, atol=0)
    size = case.scale * d * 3 * 3 * 3 * case.v.abs().max().item()
    for name in ("dQ", "dK"):
        assert results[name].abs().max() <= FINFO(torch.float32).eps * size


@all_dtypes
def test_tiny_lengths(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A02 (FA #334): every length from 1 to 17."""
    for seq in range(1, 18):
        case = random_case(generator, dtype, seq_q=seq)
        case.check(run(case))


@all_dtypes
@pytest.mark.parametrize("fill", [1e4, math.nan, math.inf])
def test_rows_that_see_nothing(dtype: torch.dtype, fill: float, generator: torch.Generator) -> None:
    """A05 (FI #4452, FA #1778, cutlass #2336): O = 0, LSE = -inf, dQ = 0; their dO is ignored."""
    case = random_case(generator, dtype, seq_q=5, seq_kv=2, causal=True)
    results = run(case)
    case.check(results)
    assert (results["O"][:, :3] == 0).all()
    assert (results["LSE"][..., :3] == -math.inf).all()
    assert results["O"][:, 3].equal(case.v[:, 0])
    assert (results["dQ"][:, :3] == 0).all()
    dO = case.dO.clone()
    dO[:, :3] = fill
    assert_same_bits(run(dataclasses.replace(case, dO=dO)), results)


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """A copy of x between rows, heads and columns of NaN, as recycled memory has them."""
    pads = [(1, 1), (3, 200), (1, 1), (1, 2)]
    wide = torch.full(
        [n + before + after for n, (before, after) in zip(x.shape, pads, strict=True)],
        math.nan,
        dtype=x.dtype,
    )
    view = wide
    for dim, (n, (before, _)) in enumerate(zip(x.shape, pads, strict=True)):
        view = view.narrow(dim, before, n)
    return view.copy_(x)


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_nan_outside_the_sequence(
    dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    """A07 (FA #1745, PT #101967, cudnn-frontend #624): what lies around the tensors is not read."""
    for seq_q, seq_kv in ((70, 101), (1, 3), (129, 65)):
        case = random_case(
            generator, dtype, batch=2, seq_q=seq_q, seq_kv=seq_kv, heads=2, causal=causal
        )
        fields = {n: inside_nan(getattr(case, n)) for n in ("q", "k", "v", "dO")}
        assert_same_bits(run(dataclasses.replace(case, **fields)), run(case))


@all_dtypes
def test_nan_in_keys_that_no_block_sees(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A07: keys behind the last visible one (top-left, Sk > Sq) never reach a result."""
    case = random_case(generator, dtype, seq_q=64, seq_kv=700, causal=True, alignment="top_left")
    clean = run(case)
    k, v = case.k.clone(), case.v.clone()
    k[:, 600:], v[:, 600:] = math.nan, math.inf
    dirty = run(dataclasses.replace(case, k=k, v=v))
    assert_same_bits(dirty, clean)
    assert (dirty["dK"][:, 64:] == 0).all()
    assert (dirty["dV"][:, 64:] == 0).all()


@all_dtypes
@pytest.mark.parametrize("constant", [1e4, -1e4, 100.0])
def test_huge_constant_inputs(dtype: torch.dtype, constant: float) -> None:
    """A10 (PT #125674 #119320): all logits are equal, so O = V, dQ = dK = 0, dV = sum(dO) / S.

    At 1e4 a logit is 8e8 and float32 cannot tell log(50) of it, but the backward sums such rows
    again.
    """
    x = torch.full((1, 50, 1, 64), constant).to(dtype)
    case = Case(x, x, x, torch.ones_like(x))
    results = run(case)
    torch.testing.assert_close(results["O"], x, rtol=2 * FINFO(torch.float32).eps, atol=0)
    logit = case.scale * 64 * float(x[0, 0, 0, 0]) ** 2
    want = torch.tensor(logit + math.log(50)).expand(1, 1, 50)
    torch.testing.assert_close(results["LSE"], want, rtol=1e-6, atol=0)
    # dP and D are both 64 * constant, each with roundings of float32 or of the stored O.
    residue = 64 * abs(constant) * 64 * FINFO(torch.float32).eps
    for name in ("dQ", "dK"):
        assert results[name].isfinite().all()
        assert results[name].abs().max() <= case.scale * 50 * abs(constant) * residue
    # 50 terms of 1 / 50.
    off = 8 * FINFO(torch.float32).eps + FINFO(dtype).eps / 2
    torch.testing.assert_close(results["dV"], torch.ones_like(x), rtol=off, atol=0)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits(size: float, generator: torch.Generator) -> None:
    """A10: logits of +-1e4 that differ: the largest wins, and nothing overflows."""
    case = random_case(generator, torch.float32, seq_q=90, seq_kv=130, causal=True)
    case = dataclasses.replace(case, softmax_scale=size / 32)
    results = run(case)
    case.check(results)


@all_dtypes
def test_one_logit_far_above_the_others(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A10: the winner is in any key block; all the rest has weight exactly 0."""
    for winner in (0, 63, 64, 100, 199):
        case = random_case(generator, dtype, seq_q=40, seq_kv=200)
        q, k = torch.full_like(case.q, 16), torch.full_like(case.k, -16)
        k[:, winner] = 16
        results = forward(dataclasses.replace(case, q=q, k=k))
        assert results["O"].equal(case.v[:, winner : winner + 1].expand_as(results["O"]))


@all_dtypes
def test_logits_of_minus_infinity(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A09-like: a key with a logit of -inf has no weight, and makes no NaN."""
    case = random_case(generator, dtype, seq_q=70, seq_kv=130)
    q, k = case.q.abs() + 1, case.k.clone()
    dead = torch.zeros(130, dtype=torch.bool)
    dead[:70] = True
    dead[::7] = True
    k[:, dead] = -math.inf
    results = forward(dataclasses.replace(case, q=q, k=k))
    alive = dataclasses.replace(case, q=q, k=case.k[:, ~dead], v=case.v[:, ~dead], dO=None)
    alive.check(results)


@all_dtypes
def test_all_logits_minus_infinity(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A05-like: a row whose logits are all -inf sees nothing."""
    case = random_case(generator, dtype, seq_q=3, seq_kv=70)
    k = torch.full_like(case.k, -math.inf)
    results = forward(dataclasses.replace(case, q=case.q.abs() + 1, k=k))
    assert (results["O"] == 0).all()
    assert (results["LSE"] == -math.inf).all()


@pytest.mark.parametrize("softmax_scale", [0.3, -0.3, 0.0, None])
def test_lse_is_natural_and_of_scaled_logits(
    softmax_scale: float | None, generator: torch.Generator
) -> None:
    """A14 (FA #404, flashinfer !46): LSE = ln sum exp(scale q k), float32, [B, H, Sq]."""
    case = random_case(
        generator, torch.float32, batch=2, seq_q=7, heads=3, softmax_scale=softmax_scale
    )
    lse = forward(case)["LSE"]
    s = case.scale * torch.einsum("bihc,bjhc->bhij", case.q.double(), case.k.double())
    assert lse.shape == (2, 3, 7)
    torch.testing.assert_close(lse, s.logsumexp(dim=-1).float(), rtol=1e-6, atol=1e-6)


@all_dtypes
@pytest.mark.parametrize("softmax_scale", [None, 0.0, -0.7, 1.0, 4.0])
def test_any_scale(
    dtype: torch.dtype, softmax_scale: float | None, generator: torch.Generator
) -> None:
    """Oracle: None is 1/sqrt(d) of the caller's d; 0 and negative scales are legal numbers."""
    case = random_case(
        generator,
        dtype,
        seq_q=60,
        seq_kv=75,
        heads=2,
        dlse=True,
        softmax_scale=softmax_scale,
        causal=True,
    )
    results = run(case)
    case.check(results)
    if softmax_scale == 0:
        assert (results["dQ"] == 0).all()
        assert (results["dK"] == 0).all()


def nan_results(case: Case, **dirty: torch.Tensor) -> tuple[Tensors, Tensors]:
    return run(case), run(dataclasses.replace(case, **dirty))


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_one_query_row(dtype: torch.dtype, causal: bool, generator: torch.Generator) -> None:
    """NaN in row i: O, LSE and dQ of row i are NaN, all other rows keep their bits."""
    case = random_case(generator, dtype, seq_q=150, heads=2, heads_kv=1, causal=causal)
    q = case.q.clone()
    q[0, 71, 1, 5] = math.nan
    clean, dirty = nan_results(case, q=q)
    for name in ("O", "dQ"):
        assert dirty[name][0, 71, 1].isnan().all()
        dirty[name][0, 71, 1] = clean[name][0, 71, 1]
    assert dirty["LSE"][0, 1, 71].isnan()
    dirty["LSE"][0, 1, 71] = clean["LSE"][0, 1, 71]
    # Every key that the row sees gets its NaN, and no other.
    seen = 72 if causal else 150
    for name in ("dK", "dV"):
        assert dirty[name][0, :seen].isnan().all()
        dirty[name][0, :seen] = clean[name][0, :seen]
    assert_same_bits(dirty, clean)


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_one_key(dtype: torch.dtype, causal: bool, generator: torch.Generator) -> None:
    """NaN in key j: every row that sees it is NaN, and no other is."""
    case = random_case(generator, dtype, batch=2, seq_q=600, causal=causal)
    k = case.k.clone()
    k[0, 500, 0, 3] = math.nan
    clean, dirty = nan_results(case, k=k)
    _assert_nan_where_seen(case, clean, dirty, key=500)


@all_dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_one_value(dtype: torch.dtype, causal: bool, generator: torch.Generator) -> None:
    """NaN in v[j, c]: column c of every row that sees it is NaN, LSE and all other columns stay."""
    case = random_case(generator, dtype, batch=2, seq_q=600, causal=causal)
    v = case.v.clone()
    v[0, 500, 0, 3] = math.nan
    clean = forward(case)
    dirty = forward(dataclasses.replace(case, v=v))
    first = 500 if causal else 0
    assert dirty["O"][0, first:, 0, 3].isnan().all()
    dirty["O"][0, first:, 0, 3] = clean["O"][0, first:, 0, 3]
    assert_same_bits(dirty, clean)


def _assert_nan_where_seen(case: Case, clean: Tensors, dirty: Tensors, key: int) -> None:
    first = key if case.causal else 0
    assert dirty["LSE"][0, :, first:].isnan().all()
    dirty["LSE"][0, :, first:] = clean["LSE"][0, :, first:]
    for name in ("O", "dQ"):
        assert dirty[name][0, first:].isnan().all()
        dirty[name][0, first:] = clean[name][0, first:]
    # Beside a NaN, dQ is summed in another order in the block that holds it.
    torch.testing.assert_close(dirty["dQ"], clean["dQ"])
    dirty["dQ"][0, 128:first] = clean["dQ"][0, 128:first]
    # A row that is NaN reaches dK and dV of every key that it sees: of all keys here.
    for name in ("dK", "dV"):
        assert dirty[name][0].isnan().all()
        dirty[name][0] = clean[name][0]
    assert_same_bits(dirty, clean)


def test_infinite_values_are_not_nan(generator: torch.Generator) -> None:
    """An infinite v[j, c] makes column c infinite, where P > 0, and nothing NaN."""
    case = random_case(generator, torch.float32, seq_q=20, seq_kv=70)
    v = case.v.clone()
    v[0, 40, 0, 2] = -math.inf
    out = forward(dataclasses.replace(case, v=v))["O"]
    assert (out[0, :, 0, 2] == -math.inf).all()
    others = torch.arange(64) != 2
    assert out[..., others].equal(forward(case)["O"][..., others])


@all_dtypes
def test_gradient_through_lse_alone(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Oracle: a gradient g on LSE is subtracted from D, so that dQ = scale (g P) K."""
    how: dict[str, Any] = {"heads": 4, "heads_kv": 2, "dlse": True, "causal": True}
    case = random_case(generator, dtype, seq_q=70, seq_kv=130, **how)
    case = dataclasses.replace(case, dO=torch.zeros_like(case.dO))
    results = run(case)
    case.check(results)
    assert (results["dV"] == 0).all()
    assert (backward(case, forward(case))["dQ"] != 0).any()
