"""The backward contract of the GPU programs, executed on the CPU by the emulator.

Each test has its own order of threads, copies and matrix products, from its seed.
"""

from __future__ import annotations

import dataclasses
import itertools

import emulated
import pytest
import torch
from calls import assert_same_bits
from emulated import FAMILIES, Sizes, case_of
from emulator import attention
from emulator.modules import Program
from emulator.processes import Emulator
from yardstick import Case, Tensors

from fa2tvm.problem import Variant

pytestmark = pytest.mark.usefixtures("poisoned")

# (batch, heads, key heads, queries, keys)
SIZES: tuple[Sizes, ...] = (
    (1, 1, 1, 1, 1),
    (2, 1, 1, 63, 65),
    (1, 4, 2, 129, 257),
    (1, 2, 1, 300, 127),
)
MAIN = Variant("backward", "bfloat16", 64, 64, True)
NAMES = ("dQ", "dK", "dV")
PROGRAMS = tuple(
    attention.program(Variant("backward", dtype, d, dv, causal), family)
    for family, d, dv, dtype, causal in (
        ("sm80", 64, 64, "bfloat16", True),
        ("sm80", 128, 96, "float16", False),
        ("sm90", 64, 64, "bfloat16", True),
        ("sm90", 128, 96, "float16", False),
        ("sm90", 256, 256, "bfloat16", True),
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    emulated.parametrize(metafunc, PROGRAMS, "backward")


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    emulated.build_selected(request, emulator)


@pytest.fixture(params=FAMILIES)
def main(request: pytest.FixtureRequest) -> Program:
    """The program of the named edges."""
    return attention.program(MAIN, request.param)


def gradients(
    emulator: Emulator,
    program: Program,
    case: Case,
    seed: int,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Tensors:
    """dQ, dK and dV from O and LSE of the oracle."""
    return attention.backward(emulator, program, case, attention.given(case), seed, needs)


def test_contract(
    emulator: Emulator, program: Program, generator: torch.Generator, seed: int
) -> None:
    """Tails, masks, alignments and groups of each program, with a gradient of LSE."""
    cases = emulated.named_cases(program.variant, SIZES, generator)
    attention.check_all(emulator, program, cases, seed)


def test_from_the_forward(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """Both passes, one after the other."""
    case = case_of(MAIN, (1, 2, 1, 129, 190), generator)
    before = attention.program(dataclasses.replace(MAIN, pass_="forward"), main.schedule.family)
    results = attention.forward(emulator, before, case, seed)
    case.check(results | attention.backward(emulator, main, case, results, seed))


def test_one_key(emulator: Emulator, main: Program, generator: torch.Generator, seed: int) -> None:
    """BUGS A02: softmax over one key is constant, so that dV = dO to the last bit."""
    case = dataclasses.replace(case_of(MAIN, (1, 1, 1, 1, 1), generator), dLSE=None)
    got = gradients(emulator, main, case, seed)
    assert got["dV"].equal(case.dO)
    # dQ and dK are what is left of dP - D, two sums of the same products.
    dataclasses.replace(case, foreign_lse=True).check(got)


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_any_scale(
    emulator: Emulator, main: Program, scale: float, generator: torch.Generator, seed: int
) -> None:
    case = case_of(MAIN, (1, 2, 1, 70, 90), generator, softmax_scale=scale)
    attention.check_all(emulator, main, [(f"scale {scale}", case)], seed)


@pytest.mark.parametrize("needed", [n for r in (1, 2) for n in itertools.combinations(range(3), r)])
def test_only_what_is_needed(
    emulator: Emulator,
    main: Program,
    needed: tuple[int, ...],
    generator: torch.Generator,
    seed: int,
) -> None:
    """BUGS B15: the others' places stay untouched; each is as when all are asked for."""
    case = dataclasses.replace(case_of(MAIN, (1, 2, 1, 33, 150), generator), foreign_lse=True)
    needs = (0 in needed, 1 in needed, 2 in needed)
    got = gradients(emulator, main, case, seed, needs)
    assert list(got) == [NAMES[n] for n in needed]
    case.check(got)


def test_gradients_of_any_layout(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """BUGS B04: dO transposed, sliced from a wider tensor."""
    case = case_of(MAIN, (2, 2, 1, 70, 90), generator)
    wide = torch.randn(2, 70, 2, 80, generator=generator).to(torch.bfloat16)
    turned = torch.randn(2, 2, 70, 64, generator=generator).to(torch.bfloat16)
    for dout in (wide[..., 8:72], turned.transpose(1, 2)):
        strided = dataclasses.replace(case, dO=dout)
        plain = dataclasses.replace(case, dO=dout.contiguous())
        got = gradients(emulator, main, strided, seed)
        again = gradients(emulator, main, plain, seed + 1)
        assert got["dK"].equal(again["dK"])
        assert got["dV"].equal(again["dV"])
        dataclasses.replace(strided, foreign_lse=True).check(got)


def test_blind_rows(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """BUGS A05: rows that see nothing have no gradient and give none, whatever dO holds there."""
    case = case_of(MAIN, (1, 2, 1, 200, 70), generator)
    loud = dataclasses.replace(case, dO=case.dO.clone())
    loud.dO[:, :130] = 1e4
    quiet, noisy = (gradients(emulator, main, x, seed + n) for n, x in enumerate((case, loud)))
    assert (quiet["dQ"][:, :130] == 0).all()
    assert (noisy["dQ"][:, :130] == 0).all()
    assert noisy["dK"].equal(quiet["dK"])
    assert noisy["dV"].equal(quiet["dV"])


def test_dk_and_dv_are_repeatable(
    emulator: Emulator, main: Program, generator: torch.Generator, seed: int
) -> None:
    """BUGS B10, B11: bit by bit in any order of threads; what is summed in any order is dQ."""
    case = case_of(MAIN, (1, 2, 1, 200, 200), generator)
    first, second = (gradients(emulator, main, case, seed + n) for n in range(2))
    assert first["dK"].equal(second["dK"])
    assert first["dV"].equal(second["dV"])


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic(
    emulator: Emulator, family: str, generator: torch.Generator, seed: int
) -> None:
    """BUGS B11: then dQ too is the same bits in every order."""
    program = attention.program(MAIN, family, deterministic=True)
    case = case_of(MAIN, (1, 2, 1, 130, 400), generator)
    first = gradients(emulator, program, case, seed)
    for n in (1, 2):
        assert_same_bits(gradients(emulator, program, case, seed + n), first)
    dataclasses.replace(case, foreign_lse=True).check(first)
