"""The emulator finds a GPU program wrong that leaves out any kind of synchronisation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulated import FAMILIES, case_of
from emulator import attention
from emulator.processes import Emulator

from fa2tvm.problem import PassName, Variant

SEEDS = range(6)
# The forward's warpgroups only take turns by it: any order is right.
HARMLESS = {("sm90", "forward"): {"every tvm_builtin_ptx_bar_sync_count_sync"}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_every_kind_is_missed(emulator: Emulator, family: str, pass_: PassName) -> None:
    """And the program that leaves out nothing is right in the same orders."""
    program = attention.program(Variant(pass_, "bfloat16", 64, 64, True), family)
    case = case_of(program.variant, (1, 2, 1, 129, 600), torch.Generator().manual_seed(0))
    kinds = [name for name in emulator.mutants(program) if name.startswith("every ")]
    reasons = {}
    for mutant in range(-1, len(kinds)):
        one = dataclasses.replace(program, mutant=mutant)
        name = kinds[mutant] if mutant >= 0 else "nothing"
        wrong = (attention.why_wrong(emulator, one, case, seed) for seed in SEEDS)
        reasons[name] = next(filter(None, wrong), None)
    assert reasons.pop("nothing") is None
    missed = {name for name, reason in reasons.items() if reason is None}
    assert missed <= HARMLESS.get((family, pass_), set())
