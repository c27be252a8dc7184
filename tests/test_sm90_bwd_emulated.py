"""Arrangements of the Hopper backward, executed on the CPU: each holds the contract's hard cases.

test_emulated_backward.py has the defaults in full; here are the other ways through a step, with
subsets of the gradients, which the sweep without dQ makes.
"""

from __future__ import annotations

import dataclasses

import emulated
import pytest
import torch
from emulated import Sizes, case_of
from emulator import attention
from emulator.modules import Program
from emulator.processes import Emulator

from fa2tvm.problem import Variant

pytestmark = pytest.mark.usefixtures("poisoned")

SIZES: tuple[Sizes, ...] = ((1, 1, 1, 1, 1), (1, 4, 2, 129, 257), (1, 2, 1, 300, 130))
# Rings as short as the schedule allows: one stage too few deadlocks.
SHORT = {"q_stages": 1, "do_stages": 1, "k_stages": 1}
SPLIT = {"block_kv": 80, **SHORT}
ROLES = {"block_kv": 64, **SHORT, "q_stages": 2}


def program_of(d: int, dv: int, causal: bool, **decisions: object) -> Program:
    return attention.program(Variant("backward", "bfloat16", d, dv, causal), "sm90", **decisions)


PROGRAMS = (
    program_of(64, 64, True, early_dv=False, halves=False, **SHORT),
    program_of(128, 128, True, halves=True, bulk_dq=False, **SHORT),
    program_of(256, 128, False, **SPLIT),
    program_of(256, 256, True, **ROLES),
)


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    emulated.build_selected(request, emulator)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "program" in metafunc.fixturenames:
        metafunc.parametrize("program", PROGRAMS, ids=emulated.name_of)


def test_contract(
    emulator: Emulator, program: Program, generator: torch.Generator, seed: int
) -> None:
    """Tails, masks, alignments and groups, with a gradient of LSE."""
    cases = emulated.named_cases(program.variant, SIZES, generator)
    attention.check_all(emulator, program, cases, seed)


@pytest.mark.parametrize("needed", [(1, 2), (0,), (2,)], ids=str)
def test_only_what_is_needed(
    emulator: Emulator,
    program: Program,
    needed: tuple[int, ...],
    generator: torch.Generator,
    seed: int,
) -> None:
    """BUGS B15: without dQ another sweep runs; dK and dV are the same bits from both."""
    case = case_of(program.variant, (1, 2, 1, 140, 170), generator)
    case = dataclasses.replace(case, foreign_lse=True)
    given = attention.given(case)
    needs = (0 in needed, 1 in needed, 2 in needed)
    got = attention.backward(emulator, program, case, given, seed, needs)
    case.check(got)
    whole = attention.backward(emulator, program, case, given, seed + 1, (True, True, True))
    for name in got.keys() - {"dQ"}:
        assert got[name].equal(whole[name])
