"""The forward contract of the GPU programs, executed on the CPU by the emulator.

Each test has its own order of threads, copies and matrix products, from its seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import emulated
import pytest
import torch
from calls import assert_same_bits
from emulated import FAMILIES, case_of
from emulator import attention
from emulator.modules import Program
from emulator.processes import Emulator
from yardstick import Case, Tensors

from fa2tvm.problem import Variant

pytestmark = pytest.mark.usefixtures("poisoned")

# (batch, heads, key heads, queries, keys): one row, tails, groups, more keys than queries and the
# reverse (rows that see nothing), several tiles a thread block.
SIZES = (
    (1, 1, 1, 1, 1),
    (2, 1, 1, 63, 65),
    (1, 4, 2, 129, 257),
    (1, 2, 1, 300, 127),
)
MAIN = Variant("forward", "bfloat16", 64, 64, True)
PROGRAMS = tuple(
    attention.program(Variant("forward", dtype, d, dv, causal), family)
    for family, d, dv, dtype, causal in (
        ("sm80", 64, 64, "bfloat16", True),
        ("sm80", 72, 80, "float16", True),
        ("sm80", 256, 256, "bfloat16", False),
        ("sm90", 64, 64, "bfloat16", True),
        ("sm90", 72, 80, "float16", True),
        ("sm90", 128, 128, "bfloat16", True),
        ("sm90", 256, 256, "bfloat16", False),
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    emulated.parametrize(metafunc, PROGRAMS, "forward")


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    emulated.build_selected(request, emulator)


@pytest.fixture(params=FAMILIES)
def main(request: pytest.FixtureRequest) -> Program:
    """The program of the named edges."""
    return attention.program(MAIN, request.param)


def attend(emulator: Emulator, program: Program, case: Case, seed: int, **views: Any) -> Tensors:
    return attention.forward(emulator, program, dataclasses.replace(case, **views), seed)


def test_contract(
    emulator: Emulator, program: Program, generator: torch.Generator, seed: int
) -> None:
    """Tails, masks, alignments and groups of each program."""
    cases = emulated.named_cases(program.variant, SIZES, generator)
    attention.check_all(emulator, program, cases, seed)


def test_scales_and_loud_logits(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """Logits over hundreds of nats: no maximum of an early block can be trusted."""
    scales = (0.0, -0.125, 1e-3, 16 / math.sqrt(64))
    cases = {
        f"scale {scale}": case_of(MAIN, (1, 2, 1, 70, 300), generator, softmax_scale=scale)
        for scale in scales
    }
    attention.check_all(emulator, main, cases.items(), seed)


def test_rising_logits(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """Each key block's logits are far above those of the block visited before it."""
    case = case_of(MAIN, (1, 1, 1, 70, 300), generator)
    rise = torch.linspace(64, 0, 300)[None, :, None]
    q, k = case.q.float(), case.k.float() / 8
    q[..., 0], k[..., 0] = 8.0, rise
    loud = Case(q.to(case.q.dtype), k.to(case.k.dtype), case.v, causal=True)
    attention.check_all(emulator, main, [("rising", loud)], seed)


def test_huge_constants(emulator: Emulator, main: Program, seed: int) -> None:
    """BUGS A10: all logits equal, so the output is V's mean, however large they are."""
    x = torch.full((1, 50, 1, 64), 1e4, dtype=torch.bfloat16)
    got = attention.forward(emulator, main, Case(x, x, x, causal=True), seed)
    assert (got["O"] == x).all()
    assert got["LSE"].isfinite().all()


def test_blind_rows(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """BUGS A05: rows that see nothing are 0, with LSE = -inf."""
    case = case_of(MAIN, (1, 2, 1, 200, 70), generator)
    got = attend(emulator, main, case, seed)
    assert (got["O"][:, :130] == 0).all()
    assert (got["LSE"][..., :130] == -math.inf).all()
    assert got["O"][:, 130].equal(case.v[:, 0].expand(-1, 2, -1))
    assert got["LSE"][..., 130:].isfinite().all()


def test_what_lies_behind_the_end(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """BUGS A07: NaN and infinity in memory next to the sequences reach nothing."""
    case = case_of(MAIN, (2, 1, 1, 100, 100), generator)
    padded = {
        n: torch.nn.functional.pad(getattr(case, n), (0, 0, 0, 0, 0, 100)) for n in ("q", "k", "v")
    }
    clean = attend(emulator, main, case, seed, **{n: x[:, :100] for n, x in padded.items()})
    for x, poison in zip(padded.values(), (math.nan, math.nan, math.inf), strict=True):
        x[:, 100:] = poison
    again = attend(emulator, main, case, seed, **{n: x[:, :100] for n, x in padded.items()})
    assert_same_bits(again, clean)
    case.check(clean)


@pytest.mark.parametrize("key", [3, 90])
def test_what_is_not_finite_reaches_what_sees_it(
    emulator: Emulator, main: Program, key: int, generator: torch.Generator, seed: int
) -> None:
    """A hidden key's weight is 0, and 0 * NaN is NaN: its neighbours in the tile stay clean."""
    case = case_of(MAIN, (1, 2, 2, 100, 100), generator)
    clean = attend(emulator, main, case, seed)["O"]
    seen = torch.zeros_like(clean, dtype=torch.bool)
    for bad in (math.nan, -math.inf):
        v = case.v.clone()
        v[0, key, 1, 5] = bad
        out = attend(emulator, main, case, seed, v=v)["O"]
        seen[:] = False
        seen[0, key:, 1, 5] = True
        assert (~out.isfinite()).equal(seen)
        # A repaired row has weights in float32: it differs by the rounding of P and of O.
        torch.testing.assert_close(out[~seen], clean[~seen], rtol=2**-6, atol=2**-7)
    k = case.k.clone()
    k[0, key, 1] = math.nan
    seen[0, key:, 1] = True
    assert (~attend(emulator, main, case, seed, k=k)["O"].isfinite()).equal(seen)


@pytest.mark.parametrize("layout", ["BHSD", "packed", "steps", "expanded", "size 1"])
def test_layouts_are_read_in_place(
    emulator: Emulator, main: Program, layout: str, generator: torch.Generator, seed: int
) -> None:
    """BUGS F03, F04, E04: as their contiguous copies, bit by bit."""

    def fresh(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16)

    packed = fresh(2, 70, 3, 2, 72)
    views = {
        "BHSD": [fresh(2, h, 70, 64).transpose(1, 2) for h in (2, 1, 1)],
        "packed": [packed[:, :, n, :, 8 * (n == 2) :][..., :64] for n in range(3)],
        "steps": [fresh(1, 140, 2, 64)[:, ::2], *(fresh(1, 180, 1, 64)[:, 1::2] for _ in "kv")],
        "expanded": [fresh(2, 70, 2, 64), *(fresh(1, 90, 2, 64).expand(2, -1, -1, -1),) * 2],
        "size 1": [fresh(1, 70, 1, 64).as_strided((1, 70, 1, 64), (8, 64, 8, 1))]
        + [fresh(1, 90, 1, 64)] * 2,
    }[layout]
    case = Case(*views, causal=True)
    plain = Case(*(x.clone(memory_format=torch.contiguous_format) for x in views), causal=True)
    got = attention.forward(emulator, main, case, seed)
    assert_same_bits(got, attention.forward(emulator, main, plain, seed + 1))
    case.check(got)


def test_bitwise_repeatable(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """Whatever the order of tiles and threads."""
    case = case_of(MAIN, (1, 4, 2, 200, 200), generator)
    first = attend(emulator, main, case, seed)
    for n in (1, 2):
        assert_same_bits(attend(emulator, main, case, seed + n), first)
