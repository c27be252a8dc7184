"""The yardstick can fail: it finds each of these bugs, and passes what is right."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from yardstick import Case, Tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_case(
    generator: torch.Generator,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (1, 300, 300, 2, 1, 32, 24),
    causal: bool = True,
) -> Case:
    batch, seq_q, seq_kv, heads, heads_kv, d, dv = shape

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return Case(
        randn(batch, seq_q, heads, d),
        randn(batch, seq_kv, heads_kv, d),
        randn(batch, seq_kv, heads_kv, dv),
        randn(batch, seq_q, heads, dv),
        randn(batch, heads, seq_q).float(),
        causal=causal,
    )


def stored(results: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: x.to(torch.float32 if n == "LSE" else dtype) for n, x in results.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 1, 1),
        (1, 1, 77, 2, 1, 64, 8),
        (1, 300, 300, 2, 1, 32, 24),
        (2, 0, 4, 1, 1, 8, 8),
        (1, 9, 4, 3, 3, 16, 16),
    ],
)
def test_right_answers_pass(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    case = make_case(generator, dtype, shape)
    case.check(stored(case.oracle, dtype))
    case.check(case.plain)


def tile_local_max(case: Case) -> torch.Tensor:
    """O with the maximum of each tile of 64 keys instead of the running one (BUGS C07)."""
    s = case.scale * torch.einsum("bihc,bjkc->bhij", case.q.float(), case.k.float())
    s = s.masked_fill(~case.visible(), -math.inf)
    v = case.v.float()[:, :, 0]
    numerator, denominator = 0.0, 0.0
    for j in range(0, s.shape[3], 64):
        tile = s[..., j : j + 64]
        m = tile.amax(dim=-1, keepdim=True)
        p = (tile - m.where(m > -math.inf, 0)).exp()
        numerator = numerator + torch.einsum("bhij,bjc->bihc", p, v[:, j : j + 64])
        denominator = denominator + p.sum(dim=-1)
    return (numerator / denominator.transpose(1, 2)[..., None]).to(case.q.dtype)


def swapped_rows(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, [297, 298]] = y[:, [298, 297]]
    return y


def one_wrong_element(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0, 250, 0, 3] += 10 * torch.finfo(x.dtype).eps * unit[0, 250, 0, 3]
    return y


def biased_column(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """A column that is slightly but always too large: no element of it stands out."""
    y = x.clone()
    y[..., 2] += 2 * torch.finfo(x.dtype).eps * unit[..., 2]
    return y


def truncated(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Every element rounded down to seven bits less."""
    step = 128 * torch.finfo(x.dtype).eps * torch.exp2(x.double().abs().log2().floor())
    return ((x.double() / step).trunc() * step).to(x.dtype)


def one_nan(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0, 5, 0, 0] = math.nan
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["O", "dQ", "dK", "dV"])
@pytest.mark.parametrize(
    "bug", [swapped_rows, one_wrong_element, biased_column, truncated, one_nan]
)
def test_wrong_answers_fail(
    generator: torch.Generator,
    dtype: torch.dtype,
    name: str,
    bug: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    case = make_case(generator, dtype)
    right = stored(case.oracle, dtype)
    with pytest.raises(AssertionError, match=name):
        case.check({name: bug(right[name], case.units[name])})


@pytest.mark.parametrize("dtype", DTYPES)
def test_tile_local_maximum_fails(generator: torch.Generator, dtype: torch.dtype) -> None:
    case = make_case(generator, dtype)
    with pytest.raises(AssertionError, match="O: the worst element"):
        case.check({"O": tile_local_max(case)})


@pytest.mark.parametrize("softmax_scale", [0.17, -0.18, 0.0])
def test_another_scale_fails(generator: torch.Generator, softmax_scale: float) -> None:
    case = make_case(generator, torch.float32)
    other = Case(case.q, case.k, case.v, case.dO, softmax_scale=softmax_scale, causal=True)
    for name, x in other.oracle.items():
        with pytest.raises(AssertionError, match=name):
            case.check({name: x.float()})


def test_rows_that_see_nothing_must_be_zero(generator: torch.Generator) -> None:
    case = make_case(generator, torch.float32, (1, 9, 4, 1, 1, 8, 8))
    right = stored(case.oracle, torch.float32)
    for name, row in (("O", (0, 4)), ("dQ", (0, 4)), ("LSE", (0, 0, 4))):
        wrong = right[name].clone()
        wrong[row] = -1e-30
        with pytest.raises(AssertionError, match="it must be"):
            case.check({name: wrong})


def test_shape_and_dtype_are_checked(generator: torch.Generator) -> None:
    case = make_case(generator, torch.float16)
    with pytest.raises(AssertionError, match="shape"):
        case.check({"O": case.plain["O"][:, 1:]})
    with pytest.raises(AssertionError, match="dtype"):
        case.check({"O": case.plain["O"].float()})
    with pytest.raises(AssertionError, match="dtype"):
        case.check({"LSE": case.plain["LSE"].half()})
