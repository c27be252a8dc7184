"""What the tests of emulated GPU programs share: the programs, and cases of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from calls import random_case
from emulator import attention
from emulator.modules import Program, emulated_device
from emulator.processes import Emulator
from gpu_pack import backward_variants, forward_variants
from yardstick import Case

from fa2tvm.problem import PassName, Problem, Shape, Variant
from fa2tvm.schedule import schedule_class

FAMILIES = ("sm80", "sm90")
Sizes = tuple[int, int, int, int, int]


def everything(pass_: PassName) -> Iterator[Program]:
    """Every variant of the GPU tests, and every schedule that somebody picked by hand."""
    variants = forward_variants() if pass_ == "forward" else backward_variants()
    for family in FAMILIES:
        device = emulated_device(family)
        for variant in variants:
            schedules = schedule_class(family, pass_)
            yield attention.program(variant, family)
            if variant.dtype == "bfloat16" and variant.head_dim_qk % 32 == 0:
                problem = Problem(variant, Shape(1, 1, 1, 512, 512))
                for schedule in schedules.hand_picked(problem, device):
                    yield Program(variant, schedule, device)


def name_of(program: Program) -> str:
    """For a test's identity."""
    default = type(program.schedule).default(program.variant, program.device)
    changed = dataclasses.asdict(program.schedule).items() - dataclasses.asdict(default).items()
    decisions = ",".join(f"{name}={value}" for name, value in sorted(changed))
    return "-".join(filter(None, (program.schedule.family, program.variant.name, decisions)))


def parametrize(metafunc: pytest.Metafunc, programs: Iterable[Program], pass_: PassName) -> None:
    """Give `program` a module's few programs, or with --emulate-all every one."""
    if "program" in metafunc.fixturenames:
        if metafunc.config.getoption("--emulate-all"):
            programs = [*programs, *everything(pass_)]
        metafunc.parametrize("program", {name_of(p): p for p in programs}.values(), ids=name_of)


def build_selected(request: pytest.FixtureRequest, emulator: Emulator) -> None:
    """Begin to compile the programs of the selected tests, on all cores."""
    for item in request.session.items:
        program = getattr(item, "callspec", None) and item.callspec.params.get("program")  # type: ignore[attr-defined]
        if isinstance(program, Program):
            emulator.build(program)


def case_of(variant: Variant, sizes: Sizes, generator: torch.Generator, **how: Any) -> Case:
    batch, heads, heads_kv, seq_q, seq_kv = sizes
    return random_case(
        generator,
        getattr(torch, variant.dtype),
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        d=variant.head_dim_qk,
        dv=variant.head_dim_v,
        dlse=True,
        causal=variant.causal,
        arithmetic=None,
        **how,
    )


def named_cases(
    variant: Variant, sizes: Iterable[Sizes], generator: torch.Generator
) -> Iterator[tuple[str, Case]]:
    """A case of each size and, where it matters, of each alignment."""
    for one in sizes:
        for alignment in ("bottom_right", "top_left"):
            if alignment == "bottom_right" or (variant.causal and one[3] != one[4]):
                yield f"{one} {alignment}", case_of(variant, one, generator, alignment=alignment)
