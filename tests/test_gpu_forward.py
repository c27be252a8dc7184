"""The forward contract on an NVIDIA GPU, through the public API: numbers, layouts, sizes.

Streams, graphs, threads and frameworks are in test_gpu_calls.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import assert_same_bits, random_case
from gpu_pack import UNEQUAL, forward_variants
from yardstick import Case, Tensors

import fa2tvm
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned", "pack")]

Sizes = tuple[int, int, int, int, int]
# (batch, heads, key heads, queries, keys): one row, one key, tails, groups, more keys than queries
# and the reverse (rows that see nothing), several tiles a thread block.
SIZES: tuple[Sizes, ...] = (
    (1, 1, 1, 1, 1),
    (2, 3, 3, 1, 77),
    (1, 2, 1, 63, 65),
    (2, 4, 2, 129, 127),
    (1, 6, 2, 257, 300),
    (1, 2, 2, 300, 130),
    (8, 4, 4, 70, 1),
    (1, 4, 2, 515, 1027),
)
TAILS = (2, 15, 17, 64, 127, 128, 192, 255, 256, 296, 1025)
VARIANTS = forward_variants()
MAIN = ("bfloat16", "float16")


def dtype_of(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def case_of(variant: Variant, sizes: Sizes, generator: torch.Generator, **how: Any) -> Case:
    batch, heads, heads_kv, seq_q, seq_kv = sizes
    case = random_case(
        generator,
        dtype_of(variant.dtype),
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        d=variant.head_dim_qk,
        dv=variant.head_dim_v,
        causal=variant.causal,
        **how,
    )
    return Case(case.q, case.k, case.v, None, None, case.softmax_scale, case.causal, case.alignment)


def attend(case: Case, q: Any = None, k: Any = None, v: Any = None) -> Tensors:
    """O and LSE by the GPU, on the CPU; q, k, v are other views of the case's tensors there."""
    pairs = zip((case.q, case.k, case.v), (q, k, v), strict=True)
    tensors = [x.cuda() if y is None else y for x, y in pairs]
    with torch.no_grad():
        out, lse = fa2tvm.attention(
            *tensors,
            causal=case.causal,
            softmax_scale=case.softmax_scale,
            alignment=case.alignment,
            return_lse=True,
        )
    return {"O": out.cpu(), "LSE": lse.cpu()}


def alignments(variant: Variant, sizes: Sizes) -> Iterator[Any]:
    yield "bottom_right"
    if variant.causal and sizes[3] != sizes[4]:
        yield "top_left"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_contract(variant: Variant, generator: torch.Generator) -> None:
    """Every head dim, mask, alignment, group and tail, in both dtypes."""
    for sizes in SIZES:
        for alignment in alignments(variant, sizes):
            case = case_of(variant, sizes, generator, alignment=alignment)
            try:
                case.check(attend(case))
            except AssertionError as error:
                raise AssertionError(f"{sizes} {alignment}: {error}") from error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", TAILS)
def test_tails(seq: int, causal: bool, generator: torch.Generator) -> None:
    """BUGS C08."""
    case = case_of(Variant("forward", "bfloat16", 64, 64, causal), (2, 3, 3, seq, seq), generator)
    case.check(attend(case))


@pytest.mark.parametrize("scale", [0.5, 1.0, 0.0, -0.125, 1e-3])
@pytest.mark.parametrize("dtype", MAIN)
def test_any_scale(dtype: str, scale: float, generator: torch.Generator) -> None:
    variant = Variant("forward", dtype, 64, 64, True)
    case = case_of(variant, (1, 4, 2, 130, 190), generator, softmax_scale=scale)
    case.check(attend(case))


@pytest.mark.parametrize("factor", [4.0, 16.0, 64.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", MAIN)
def test_loud_logits(dtype: str, causal: bool, factor: float, generator: torch.Generator) -> None:
    """Logits that spread over hundreds of nats: no maximum of an early block can be trusted."""
    variant = Variant("forward", dtype, 64, 64, causal)
    scale = factor / math.sqrt(64)
    case = case_of(variant, (1, 4, 2, 200, 900), generator, softmax_scale=scale)
    case.check(attend(case))


@pytest.mark.parametrize("dtype", MAIN)
def test_rising_logits(dtype: str, generator: torch.Generator) -> None:
    """Each key block's logits are far above those of the block visited before it."""
    case = case_of(Variant("forward", dtype, 64, 64, False), (1, 2, 2, 150, 1000), generator)
    rise = torch.linspace(64, 0, 1000)[None, :, None, None]
    q, k = case.q.float(), case.k.float() / 8
    q[..., 0], k[..., 0] = 8.0, rise[..., 0]
    loud = Case(q.to(case.q.dtype), k.to(case.k.dtype), case.v)
    loud.check(attend(loud))


def test_huge_constants() -> None:
    """BUGS A10: all logits equal, so the output is V's mean, however large they are."""
    x = torch.full((1, 50, 1, 64), 1e4, dtype=torch.bfloat16)
    got = attend(Case(x, x, x))
    assert (got["O"] == x).all()
    assert got["LSE"].isfinite().all()


@pytest.mark.parametrize("dtype", MAIN)
def test_blind_rows(dtype: str, generator: torch.Generator) -> None:
    """BUGS A05: rows that see nothing are 0, with LSE = -inf."""
    case = case_of(Variant("forward", dtype, 64, 64, True), (1, 2, 1, 300, 120), generator)
    got = attend(case)
    assert (got["O"][:, :180] == 0).all()
    assert (got["LSE"][..., :180] == -math.inf).all()
    assert got["O"][:, 180].equal(case.v[:, 0].expand(-1, 2, -1))
    assert got["LSE"][..., 180:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_behind_the_end(causal: bool, generator: torch.Generator) -> None:
    """BUGS A07: NaN and infinity in memory next to the sequences reach nothing."""
    case = case_of(Variant("forward", "bfloat16", 64, 64, causal), (2, 2, 2, 200, 200), generator)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 100)).cuda() for x in vars_of(case)]
    clean = attend(case, *(x[:, :200] for x in padded))
    for x, poison in zip(padded, (math.nan, math.nan, math.inf), strict=True):
        x[:, 200:] = poison
    assert_same_bits(attend(case, *(x[:, :200] for x in padded)), clean)
    case.check(clean)


def vars_of(case: Case) -> tuple[torch.Tensor, ...]:
    return case.q, case.k, case.v


@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_what_sees_it(causal: bool, generator: torch.Generator) -> None:
    case = case_of(Variant("forward", "bfloat16", 64, 64, causal), (1, 2, 2, 200, 200), generator)
    case.k[0, 190, 1] = math.nan
    nan = attend(case)["O"].isnan().any(-1)
    assert nan[0, 190 if causal else 0 :, 1].all()
    assert not nan[0, : 190 if causal else 0, 1].any()
    assert not nan[0, :, 0].any()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("key", [3, 133, 190])
def test_what_is_not_finite_in_v_reaches_what_sees_it(
    key: int, bad: float, generator: torch.Generator
) -> None:
    """A hidden key's weight is 0, and 0 * NaN is NaN: its neighbours in the tile stay clean."""
    case = case_of(Variant("forward", "bfloat16", 64, 64, True), (1, 2, 2, 200, 200), generator)
    clean = attend(case)["O"]
    case.v[0, key, 1, 5] = bad
    out = attend(case)["O"]
    seen = torch.zeros_like(out, dtype=torch.bool)
    seen[0, key:, 1, 5] = True
    assert (~out.isfinite()).equal(seen)
    # A repaired row has weights in float32: it differs by the rounding of P and of O.
    torch.testing.assert_close(out[~seen], clean[~seen], rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 8), (3, 128), (2, 5), (64, 65), (130, 257), (5, 2), (300, 300)]
)
def test_mask_reader(seq_q: int, seq_kv: int) -> None:
    """BUGS C01: q = 0 and one-hot v read the mask exactly, 64 keys at a time."""
    q = torch.zeros(1, seq_q, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, seq_kv, 1, 64, dtype=torch.bfloat16)
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_kv)[None]
    for alignment, offset in (("bottom_right", seq_kv - seq_q), ("top_left", 0)):
        visible = j <= i + offset
        count = visible.sum(1, keepdim=True).clamp(min=1)
        for first in range(0, seq_kv, 64):
            v = torch.zeros(1, seq_kv, 1, 64, dtype=torch.bfloat16)
            keys = torch.arange(first, min(first + 64, seq_kv))
            v[0, keys, 0, keys - first] = 1
            got = attend(Case(q, k, v, causal=True, alignment=alignment))["O"][0, :, 0]
            expected = (visible / count)[:, first : first + 64].to(torch.bfloat16)
            assert got[:, : expected.shape[1]].equal(expected)


@pytest.mark.parametrize("causal", [False, True])
def test_layouts_are_read_in_place(
    causal: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS F03, F04, F05, E04: as their contiguous copies bit by bit, and never copied."""
    from fa2tvm import cuda_launch

    def fresh(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to("cuda", torch.bfloat16)

    packed = fresh(2, 150, 3, 4, 72)
    views = {
        "BHSD": [fresh(2, h, 150, 64).transpose(1, 2) for h in (4, 2, 2)],
        "packed": [packed[:, :, n, :, 8 * (n == 2) :][..., :64] for n in range(3)],
        "steps": [fresh(2, 300, 4, 64)[:, ::2], *(fresh(2, 340, 2, 64)[:, 1::2] for _ in "kv")],
        "expanded": [fresh(3, 140, 2, 64), *(fresh(1, 150, 2, 64).expand(3, -1, -1, -1),) * 2],
        "size 1": [fresh(1, 140, 1, 64).as_strided((1, 140, 1, 64), (7, 64, 3, 1))]
        + [fresh(1, 150, 1, 64)] * 2,
        "offset": [fresh(2, 158, 4, 64)[:, 8:] for _ in "qkv"],
        "only v": [fresh(1, 62, 4, 64), fresh(1, 62, 4, 64), fresh(1, 4, 62, 64).transpose(1, 2)],
    }
    with monkeypatch.context() as patch:
        patch.setattr(cuda_launch, "aligned", lambda x: x)
        with torch.no_grad():
            got = {n: fa2tvm.attention(*x, causal=causal) for n, x in views.items()}
    for name, tensors in views.items():
        with torch.no_grad():
            expected = fa2tvm.attention(*(x.clone(memory_format=torch.contiguous_format)
                                          for x in tensors), causal=causal)  # fmt: skip
        assert got[name].equal(expected), name


def test_other_layouts_are_copied(generator: torch.Generator) -> None:
    """BUGS F02: odd offsets and strides, a transposed head dim, lazily negated views."""
    flat = torch.randn(200000, generator=generator).to("cuda", torch.bfloat16)
    odd = flat[1 : 1 + 2 * 90 * 3 * 64].view(2, 90, 3, 64)
    strided = flat.as_strided((2, 90, 3, 64), (90 * 3 * 67, 3 * 67, 67, 1))
    turned = flat[: 2 * 90 * 3 * 64].view(2, 90, 64, 3).transpose(2, 3)
    for x in (odd, strided, turned, torch._neg_view(odd)):
        plain = x.resolve_neg().clone(memory_format=torch.contiguous_format)
        with torch.no_grad():
            got = fa2tvm.attention(x, x, x, causal=True)
            assert got.equal(fa2tvm.attention(plain, plain, plain, causal=True))


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 2, 2, 5, 0)], ids=str)
def test_empty(sizes: Sizes, generator: torch.Generator) -> None:
    """BUGS B09."""
    case = case_of(Variant("forward", "bfloat16", 64, 64, False), sizes, generator)
    got = attend(case)
    assert got["O"].shape == (sizes[0], sizes[3], 2, 64)
    assert (got["O"] == 0).all()
    assert (got["LSE"] == -math.inf).all()


def test_bitwise_repeatable(generator: torch.Generator) -> None:
    """Tiles are drawn from a counter in any order; twenty runs give the same bits."""
    for dtype in MAIN:
        for factor in (1.0, 8.0):
            q, k, v = (
                torch.randn(2, 1500, h, 64, generator=generator).to("cuda", dtype_of(dtype))
                for h in (40, 8, 8)
            )
            with torch.no_grad():
                runs = [
                    fa2tvm.attention(
                        q, k, v, causal=True, softmax_scale=factor / 8, return_lse=True
                    )
                    for _ in range(20)
                ]
            for out, lse in runs[1:]:
                assert out.equal(runs[0][0])
                assert lse.equal(runs[0][1])


def test_batch_mates_do_not_matter(generator: torch.Generator) -> None:
    """BUGS H06: within a length class a row alone is as in a batch of 17, bit by bit."""
    q, k, v = (torch.randn(17, 300, 4, 64, generator=generator).to("cuda", torch.bfloat16)
               for _ in "qkv")  # fmt: skip
    with torch.no_grad():
        together = fa2tvm.attention(q, k, v, causal=True)
        for n in (0, 16):
            alone = fa2tvm.attention(*(x[n : n + 1] for x in (q, k, v)), causal=True)
            assert alone[0].equal(together[n])


def last_rows(case_q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Case:
    return Case(case_q.cpu(), k.cpu(), v.cpu(), causal=causal)


def test_offsets_past_two_to_the_31() -> None:
    """BUGS E03, E04, E05: a packed tensor of more than 2**31 elements, and such an output."""
    rows = 2**31 // (3 * 32 * 64) + 300
    packed = torch.randn(1, rows, 3, 32, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed[:, -200:, 0], packed[:, -400:, 1], packed[:, -400:, 2]
    case = last_rows(q[:, :, :2], k[:, :, :2], v[:, :, :2], True)
    with torch.no_grad():
        out, lse = fa2tvm.attention(q, k, v, causal=True, return_lse=True)
    case.check({"O": out[:, :, :2].cpu(), "LSE": lse[:, :2].cpu()})
    del packed, q, k, v, out, lse
    rows = 2**31 // (128 * 64) + 130
    q = torch.randn(1, rows, 128, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 64, 128, 64, device="cuda", dtype=torch.bfloat16).unbind()
    with torch.no_grad():
        out, lse = fa2tvm.attention(q, k, v, return_lse=True)
    case = last_rows(q[:, -130:, -2:], k[:, :, -2:], v[:, :, -2:], False)
    case.check({"O": out[:, -130:, -2:].cpu(), "LSE": lse[:, -2:, -130:].cpu()})


def test_more_heads_than_a_grid_axis_holds() -> None:
    """batch * heads is 70400, above 65535."""
    q = torch.randn(1100, 17, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1100, 33, 32, 64, device="cuda", dtype=torch.bfloat16).unbind()
    with torch.no_grad():
        out, lse = fa2tvm.attention(q, k, v, causal=True, return_lse=True)
    for b in (0, 1023, 1099):
        case = last_rows(q[b : b + 1], k[b : b + 1], v[b : b + 1], True)
        case.check({"O": out[b : b + 1].cpu(), "LSE": lse[b : b + 1].cpu()})


def test_group_of_any_size(generator: torch.Generator) -> None:
    """GQA and MQA, also groups that are no power of two."""
    for heads, heads_kv in ((7, 1), (12, 4), (9, 3), (64, 2)):
        case = case_of(
            Variant("forward", "bfloat16", 64, 64, True), (1, heads, heads_kv, 70, 90), generator
        )
        case.check(attend(case))


def test_what_no_kernel_can_do_is_one_sentence() -> None:
    """BUGS H04, D01."""
    for dtype, d in ((torch.float32, 264), (torch.bfloat16, 264), (torch.bfloat16, 257)):
        x = torch.zeros(1, 4, 1, d, dtype=dtype, device="cuda")
        with pytest.raises(UnsupportedProblem, match=r"no kernel family can do .* on nvidia_"):
            fa2tvm.attention(x, x, x)
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UnsupportedProblem, match="to_dense"):
        fa2tvm.attention(q.to_sparse(), q, q)
    with pytest.raises(UnsupportedProblem, match="move them"):
        fa2tvm.attention(q, q.cpu(), q)


def test_every_unequal_pair_is_tested() -> None:
    tested = {(v.head_dim_qk, v.head_dim_v) for v in VARIANTS}
    assert set(UNEQUAL) <= tested
    assert {v.head_dim_qk for v in VARIANTS} == set(range(8, 257, 8))
