"""The oracle against closed forms, finite differences and the paper's two algorithms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fa2tvm import reference
from fa2tvm.reference import algorithm_1, algorithm_2, attention, attention_backward

ALIGNMENTS = ("bottom_right", "top_left")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def inputs(
    rng: np.random.Generator,
    batch: int = 2,
    seq_q: int = 9,
    seq_kv: int = 13,
    heads: int = 4,
    heads_kv: int = 2,
    d: int = 6,
    dv: int = 5,
) -> tuple[np.ndarray, ...]:
    shapes = ((seq_q, heads, d), (seq_kv, heads_kv, d), (seq_kv, heads_kv, dv), (seq_q, heads, dv))
    return tuple(rng.normal(size=(batch, *shape)) for shape in shapes)


def test_one_row_by_hand() -> None:
    q, k, v = np.ones((1, 1, 1, 4)), np.zeros((1, 2, 1, 4)), np.zeros((1, 2, 1, 1))
    k[0, 1], v[0, :, 0, 0] = math.log(3), (8.0, 4.0)
    # Logits 0 and 4 log(3) / sqrt(4): weights 1/10 and 9/10.
    out, lse = attention(q, k, v)
    np.testing.assert_allclose(out.ravel(), [0.8 + 3.6])
    np.testing.assert_allclose(lse.ravel(), [math.log(10)])
    out, lse = attention(q, k, v, softmax_scale=-0.25)
    np.testing.assert_allclose(out.ravel(), [8 * 0.75 + 4 * 0.25])
    out, lse = attention(q, k, v, softmax_scale=0)
    np.testing.assert_allclose(out.ravel(), [6])
    np.testing.assert_allclose(lse.ravel(), [math.log(2)])


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "alignment", "counts"),
    [
        (1, 8, "bottom_right", [8]),
        (1, 8, "top_left", [1]),
        (2, 5, "bottom_right", [4, 5]),
        (5, 2, "bottom_right", [0, 0, 0, 1, 2]),
        (5, 2, "top_left", [1, 2, 2, 2, 2]),
    ],
)
def test_mask_reader(seq_q: int, seq_kv: int, alignment: Any, counts: list[int]) -> None:
    """BUGS, mask reader: q = 0 and v = identity give one over the number of visible keys."""
    q, k = np.zeros((1, seq_q, 1, 3)), np.ones((1, seq_kv, 1, 3))
    v = np.eye(seq_kv)[None, :, None]
    out, lse = attention(q, k, v, causal=True, alignment=alignment)
    want = [[1 / n if j < n else 0 for j in range(seq_kv)] for n in counts]
    np.testing.assert_array_equal(out[0, :, 0], want)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(counts))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax_scale", [None, 0.7, 0.0, -0.4])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(9, 13), (13, 9)])
def test_gradients_are_finite_differences(
    rng: np.random.Generator,
    alignment: Any,
    causal: bool,
    softmax_scale: float | None,
    seq_q: int,
    seq_kv: int,
) -> None:
    q, k, v, dO = inputs(rng, batch=1, seq_q=seq_q, seq_kv=seq_kv)
    dlse = rng.normal(size=(1, 4, seq_q))
    how: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "alignment": alignment,
    }

    def loss() -> float:
        out, lse = attention(q, k, v, **how)
        return float((out * dO).sum() + (np.where(lse > -np.inf, lse, 0) * dlse).sum())

    gradients = attention_backward(q, k, v, dO, dlse, **how)
    step = 1e-5
    for x, gradient in zip((q, k, v), gradients, strict=True):
        for _ in range(6):
            at = tuple(rng.integers(n) for n in x.shape)
            kept = x[at]
            x[at] = kept + step
            above = loss()
            x[at] = kept - step
            below = loss()
            x[at] = kept
            np.testing.assert_allclose((above - below) / (2 * step), gradient[at], atol=1e-7)


def test_groups_are_consecutive_heads(rng: np.random.Generator) -> None:
    """BUGS B02: K and V repeated for each query head give the same O, and dK, dV summed over it."""
    q, k, v, dO = inputs(rng, heads=6, heads_kv=2)
    k_all, v_all = k.repeat(3, axis=2), v.repeat(3, axis=2)
    for x, y in zip(attention(q, k, v), attention(q, k_all, v_all), strict=True):
        np.testing.assert_array_equal(x, y)
    dq, dk, dv = attention_backward(q, k, v, dO)
    dq_all, dk_all, dv_all = attention_backward(q, k_all, v_all, dO)
    np.testing.assert_array_equal(dq, dq_all)
    for x, y in ((dk, dk_all), (dv, dv_all)):
        np.testing.assert_allclose(x, y.reshape(2, 13, 2, 3, -1).sum(axis=3), atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_make_no_difference(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    q, k, v, dO = inputs(rng)
    whole = (*attention(q, k, v, causal=causal), *attention_backward(q, k, v, dO, causal=causal))
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 2 * 13)
    parts = (*attention(q, k, v, causal=causal), *attention_backward(q, k, v, dO, causal=causal))
    for x, y in zip(whole, parts, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-13)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_row_cannot_see_has_no_influence(rng: np.random.Generator, poison: float) -> None:
    q, k, v, dO = inputs(rng, seq_q=8, seq_kv=8)
    clean, clean_lse = attention(q, k, v, causal=True)
    clean_gradients = attention_backward(q[:, :5], k[:, :5], v[:, :5], dO[:, :5], causal=True)
    k[:, 5:], v[:, 5:] = poison, poison
    out, lse = attention(q, k, v, causal=True)
    np.testing.assert_allclose(out[:, :5], clean[:, :5], atol=1e-15)
    np.testing.assert_allclose(lse[..., :5], clean_lse[..., :5], atol=1e-15)
    assert not np.isfinite(out[:, 5:]).any()
    dq, _, _ = attention_backward(q, k, v, dO, causal=True)
    np.testing.assert_allclose(dq[:, :5], clean_gradients[0], atol=1e-14)


def test_nothing_visible() -> None:
    """BUGS A05: rows that see nothing give 0 and -inf, and their dO reaches nobody."""
    rng = np.random.default_rng(0)
    q, k, v, dO = inputs(rng, seq_q=5, seq_kv=2)
    out, lse = attention(q, k, v, causal=True)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == -np.inf).all()
    np.testing.assert_allclose(out[:, 3], v[:, 0].repeat(2, axis=1))
    first = attention_backward(q, k, v, dO, causal=True)
    dO[:, :3] = 1e4
    second = attention_backward(q, k, v, dO, causal=True)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (first[0][:, :3] == 0).all()


def test_logits_of_minus_infinity() -> None:
    """A key whose logit is -inf has no weight; a row of them alone sees nothing."""
    q, v = np.ones((1, 1, 1, 1)), np.ones((1, 2, 1, 1))
    out, lse = attention(q, np.array([-np.inf, 2.0]).reshape(1, 2, 1, 1), v)
    assert (out.item(), lse.item()) == (1, 2)
    out, lse = attention(q, np.full((1, 2, 1, 1), -np.inf), v)
    assert (out.item(), lse.item()) == (0, -np.inf)


@pytest.mark.parametrize(("batch", "seq_q", "seq_kv"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(batch: int, seq_q: int, seq_kv: int) -> None:
    q, k, v, dO = inputs(np.random.default_rng(0), batch, seq_q, seq_kv)
    out, lse = attention(q, k, v)
    assert out.shape == dO.shape
    assert not out.any()
    assert (lse == -np.inf).all()
    for x, like in zip(attention_backward(q, k, v, dO), (q, k, v), strict=True):
        assert x.shape == like.shape
        assert not x.any()


@pytest.mark.parametrize(("block_q", "block_kv"), [(4, 4), (8, 3), (3, 8), (64, 64), (1, 1)])
@pytest.mark.parametrize(
    ("causal", "alignment"), [(False, ALIGNMENTS[0]), *itertools.product([True], ALIGNMENTS)]
)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(16, 16), (5, 17), (17, 5), (1, 9), (7, 1), (6, 0)])
def test_algorithms_agree_with_the_oracle(
    rng: np.random.Generator,
    block_q: int,
    block_kv: int,
    causal: bool,
    alignment: Any,
    seq_q: int,
    seq_kv: int,
) -> None:
    q, k, v, dO = inputs(rng, 1, seq_q, seq_kv, 1, 1)
    how: dict[str, Any] = {"softmax_scale": 0.3, "causal": causal, "alignment": alignment}
    offset = reference.causal_offset(seq_q, seq_kv, alignment)
    out, lse = attention(q, k, v, **how)
    Q, K, V, dO_h = (x[0, :, 0] for x in (q, k, v, dO))
    O_h, L = algorithm_1(Q, K, V, block_q, block_kv, 0.3, causal, offset)
    np.testing.assert_allclose(O_h, out[0, :, 0], atol=1e-13)
    np.testing.assert_allclose(L, lse[0, 0], atol=1e-13)
    got = algorithm_2(Q, K, V, O_h, dO_h, L, block_q, block_kv, 0.3, causal, offset)
    for x, y in zip(got, attention_backward(q, k, v, dO, **how), strict=True):
        np.testing.assert_allclose(x, y[0, :, 0], atol=1e-13)


def test_the_printed_line_10_is_wrong(rng: np.random.Generator) -> None:
    """Dao-AILab/flash-attention issue 991: rescaling by the inverse diverges from the oracle."""
    q, k, v, _ = inputs(rng, 1, 4, 16, 1, 1)
    out, _ = attention(3 * q, k, v, softmax_scale=1)
    Q, K, V = 3 * q[0, :, 0], k[0, :, 0], v[0, :, 0]
    m, total, printed = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 5))
    for j in range(0, 16, 4):
        s = Q @ K[j : j + 4].T
        m_new = np.maximum(m, s.max(axis=1))
        p, rescale = np.exp(s - m_new[:, None]), np.exp(m - m_new)
        total = rescale * total + p.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(rescale > 0, 1 / rescale, 0)
        printed = inverse[:, None] * printed + p @ V[j : j + 4]
        m = m_new
    assert np.abs(printed / total[:, None] - out[0, :, 0]).max() > 1e-3


def test_scale_and_offset() -> None:
    assert reference.resolve_scale(None, 16) == 0.25
    assert reference.resolve_scale(0, 16) == 0
    assert reference.causal_offset(3, 5, "bottom_right") == 2
    assert reference.causal_offset(3, 5, "top_left") == 0
