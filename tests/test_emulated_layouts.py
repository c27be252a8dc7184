"""Divisions of the portable backward's work among its warps, executed on the CPU by the emulator.

The contract of every default is in test_emulated_backward.py; here are the others that Sm80Backward
has: queries of S shared or not, dK and dV on all warps or on half of them each, in this step or in
the next one, for which warps begin with different halves.
"""

from __future__ import annotations

import dataclasses

import emulated
import pytest
import torch
from calls import assert_same_bits
from emulated import Sizes, case_of
from emulator import attention
from emulator.modules import Program, emulated_device
from emulator.processes import Emulator

from fa2tvm.problem import DType, Variant
from fa2tvm.schedule import Sm80Backward

pytestmark = pytest.mark.usefixtures("poisoned")

# (batch, heads, key heads, queries, keys)
SIZES: tuple[Sizes, ...] = ((1, 1, 1, 1, 1), (2, 1, 1, 63, 65), (1, 4, 2, 200, 257))
LATE_AND_SPLIT = Sm80Backward(64, 128, 8, 3, 2, 1, split_gradients=True, late=True)


def _program(d: int, dtype: DType, causal: bool, schedule: Sm80Backward) -> Program:
    return Program(Variant("backward", dtype, d, d, causal), schedule, emulated_device("sm80"))


PROGRAMS = (
    _program(64, "bfloat16", True, LATE_AND_SPLIT),
    _program(64, "float16", True, Sm80Backward(32, 128, 4, late=True)),
    _program(128, "bfloat16", False, Sm80Backward(64, 64, 4, 2, 2, 2, split_gradients=True)),
    _program(128, "bfloat16", True, Sm80Backward(64, 64, 4, 3, 2, 2, True, late=True)),
    _program(128, "float16", True, Sm80Backward(64, 128, 8, 2, 2, 2)),
    _program(256, "bfloat16", True, Sm80Backward(64, 64, 8, 1, 2, 4, split_gradients=True)),
)


@pytest.fixture(scope="module", autouse=True)
def _compiled(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    emulated.build_selected(request, emulator)


@pytest.mark.parametrize("program", PROGRAMS, ids=emulated.name_of)
def test_contract(
    emulator: Emulator, program: Program, generator: torch.Generator, seed: int
) -> None:
    cases = emulated.named_cases(program.variant, SIZES, generator)
    attention.check_all(emulator, program, cases, seed)


def test_late_and_deterministic(emulator: Emulator, generator: torch.Generator, seed: int) -> None:
    """Warps that begin with different halves meet at the turn of each query block."""
    schedule = dataclasses.replace(LATE_AND_SPLIT, deterministic=True)
    program = _program(64, "bfloat16", True, schedule)
    case = case_of(program.variant, (1, 2, 1, 130, 400), generator)
    results = [
        attention.backward(emulator, program, case, attention.given(case), seed + n)
        for n in range(3)
    ]
    for other in results[1:]:
        assert_same_bits(other, results[0])
    dataclasses.replace(case, foreign_lse=True).check(results[0])
