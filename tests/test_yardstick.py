"""The yardstick can fail: it finds each of these bugs, and passes what is right."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import flash
import pytest
import torch
import yardstick_parts
from yardstick import Case, Tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPE = (1, 300, 300, 2, 1, 32, 24)


def make_case(
    generator: torch.Generator,
    dtype: torch.dtype,
    shape: tuple[int, ...] = SHAPE,
    causal: bool = True,
    arithmetic: torch.dtype | None = None,
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
        arithmetic=arithmetic,
    )


@pytest.fixture(scope="module")
def the_case(request: pytest.FixtureRequest) -> Callable[..., Case]:
    """One case of each kind for all tests of the module: its oracle and units are computed once."""
    seed = int(request.config.getoption("--seed"))

    def make(dtype: torch.dtype, *shape: int) -> Case:
        generator = torch.Generator().manual_seed(seed)
        return make_case(generator, dtype, shape or SHAPE, arithmetic=torch.float32)

    return functools.cache(make)


def stored(results: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: x.to(torch.float32 if n == "LSE" else dtype) for n, x in results.items()}


SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 1, 2, 1, 128, 128),
    (1, 1, 77, 2, 1, 64, 8),
    (1, 300, 300, 2, 1, 32, 24),
    (2, 0, 4, 1, 1, 8, 8),
    (1, 9, 4, 3, 3, 16, 16),
    (1, 127, 129, 4, 2, 64, 64),
]


@pytest.mark.parametrize("arithmetic", [torch.float32, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_right_answers_pass(
    generator: torch.Generator,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    arithmetic: torch.dtype | None,
) -> None:
    case = make_case(generator, dtype, shape, arithmetic=arithmetic)
    case.check(stored(case.oracle, dtype))
    case.check(stored(case.plain(torch.float32), dtype))
    for block_q, block_kv in ((64, 64), (32, 128)):
        case.check(flash.attention(case, block_q=block_q, block_kv=block_kv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_cores_are_held_to_the_storage_type(
    generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """P and dS rounded to the storage type before their products: right there, wrong in float32."""
    case = make_case(generator, dtype, shape)
    results = flash.attention(case, "P_in_storage")
    case.check(results)
    if min(shape[1:3]) > 1:
        with pytest.raises(AssertionError, match="the worst"):
            dataclasses.replace(case, arithmetic=torch.float32).check(results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bug", [bug for bug in flash.BUGS if bug != "P_in_storage"])
@pytest.mark.parametrize("shape", [(1, 300, 300, 4, 2, 32, 24), (1, 127, 129, 4, 2, 64, 64)])
def test_bugs_of_kernels_fail(
    the_case: Callable[..., Case], dtype: torch.dtype, shape: tuple[int, ...], bug: str
) -> None:
    case = the_case(dtype, *shape)
    if dtype != torch.float32 and bug in flash.BELOW_HALF:
        pytest.skip("smaller than the rounding of a stored half")
    with pytest.raises(AssertionError, match=flash.BUGS[bug]):
        case.check(flash.attention(case, bug))


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
    the_case: Callable[..., Case],
    dtype: torch.dtype,
    name: str,
    bug: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    case = the_case(dtype)
    right = stored(case.oracle, dtype)
    with pytest.raises(AssertionError, match=name):
        case.check({name: bug(right[name], case.units[name])})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["O", "dQ", "dK", "dV"])
def test_one_row_a_unit_in_the_last_place_off_fails(
    the_case: Callable[..., Case], dtype: torch.dtype, name: str
) -> None:
    """What float32 arithmetic stores is the nearest number of the storage type."""
    case = the_case(dtype)
    wrong = stored(case.oracle, dtype)[name].contiguous()
    wrong.view(torch.int16)[0, 250, 0] += 1
    with pytest.raises(AssertionError, match=name):
        case.check({name: wrong})


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
        case.check({"O": case.plain(torch.float16)["O"][:, 1:]})
    with pytest.raises(AssertionError, match="dtype"):
        case.check({"O": case.plain(torch.float16)["O"].float()})
    with pytest.raises(AssertionError, match="dtype"):
        case.check({"LSE": case.plain(torch.float16)["LSE"].half()})


def test_every_part_is_found_in_the_source() -> None:
    """What docs/yardstick.md says of a part, tests/yardstick_parts.py can measure again."""
    for part in yardstick_parts.PARTS:
        assert yardstick_parts.without(part).Case is not Case
