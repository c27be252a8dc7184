"""Attention through emulated modules, as launch.py calls those of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from yardstick import Case, Tensors

from emulator.memory import Array
from emulator.modules import Program, emulated_device
from emulator.processes import Call, EmulationFailed, Emulator
from fa2tvm import cuda_launch
from fa2tvm.device import usable_cores
from fa2tvm.problem import PassName, Problem, Shape, Variant
from fa2tvm.schedule import schedule_class


def program(variant: Variant, family: str, **decisions: Any) -> Program:
    """A variant's default schedule on a small device of the family, some decisions replaced."""
    device = emulated_device(family)
    schedule = schedule_class(family, variant.pass_).default(variant, device)
    return Program(variant, dataclasses.replace(schedule, **decisions), device)


def variant_of(case: Case, pass_: PassName) -> Variant:
    dtype: Any = str(case.q.dtype).removeprefix("torch.")
    return Variant(pass_, dtype, case.q.shape[3], case.v.shape[3], case.causal)


def forward(emulator: Emulator, program: Program, case: Case, seed: int = 0) -> Tensors:
    """O and LSE.

    Raises
    ------
    EmulationFailed
        Where the kernel does what it must not, or leaves its counter at another value than zero.
    """
    q, scale, _ = cuda_launch.positive_scale(case.q, case.scale)
    batch, seq_q, heads, _ = q.shape
    out = torch.full((batch, seq_q, heads, case.v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full((batch, heads, seq_q), torch.nan)
    arguments: list[Any] = [_array("Q", q), _array("K", case.k), _array("V", case.v)]
    arguments += [_array("O", out, writable=True), _array("LSE", lse, writable=True)]
    if program.schedule.takes_counter:
        arguments.append(_array("counter", torch.zeros(1, dtype=torch.int32), writable=True))
    written = _call(emulator, program, (*arguments, scale, case.causal_offset), seed)
    if written.get("counter", np.zeros(1)).any():
        raise EmulationFailed(f"the counter is left at {written['counter'].view(np.int32)[0]}")
    return {"O": _filled(written["O"], out), "LSE": _filled(written["LSE"], lse)}


def backward(
    emulator: Emulator,
    program: Program,
    case: Case,
    results: Tensors,
    seed: int = 0,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Tensors:
    """Those of dQ, dK and dV that are needed, from the results of a forward."""
    assert case.dO is not None
    q, scale, factor = cuda_launch.positive_scale(case.q, case.scale)
    inputs = {"dQ": q, "dK": case.k, "dV": case.v}
    # The place of what is not needed is taken by an input, which must stay as it is.
    grads = {
        name: torch.full(x.shape, torch.nan, dtype=x.dtype) if needed else x
        for (name, x), needed in zip(inputs.items(), needs, strict=True)
    }
    shape = Shape(q.shape[0], q.shape[2], case.k.shape[2], q.shape[1], case.k.shape[1])
    problem = Problem(program.variant, shape, case.alignment)
    schedule: Any = program.schedule
    splits = schedule.splits(problem, 1)
    workspace = torch.full((schedule.workspace_floats(problem, splits),), torch.nan)
    dlse = results["LSE"] if case.dLSE is None else case.dLSE
    arguments = [_array("Q", q), _array("K", case.k), _array("V", case.v)]
    arguments += [_array("O", results["O"]), _array("LSE", results["LSE"])]
    arguments += [_array("dO", case.dO), _array("dLSE", dlse)]
    arguments += [
        _array(name, x, writable=needed)
        for (name, x), needed in zip(grads.items(), needs, strict=True)
    ]
    arguments.append(_array("workspace", workspace, writable=True))
    numbers = (scale, case.causal_offset, int(case.dLSE is not None), *map(int, needs), splits)
    written = _call(emulator, program, (*arguments, *numbers), seed)
    found = {n: _filled(written[n], x) for n, x in grads.items() if n in written}
    if "dQ" in found and factor != 1:
        found["dQ"] = found["dQ"] * factor
    return found


def why_wrong(emulator: Emulator, program: Program, case: Case, seed: int = 0) -> str | None:
    """What is wrong with the program's pass over a case, or None.

    A backward is given O and LSE of the oracle.
    """
    try:
        if program.variant.pass_ == "forward":
            case = dataclasses.replace(case, dO=None, dLSE=None)
            return case.why_wrong(forward(emulator, program, case, seed))
        case = dataclasses.replace(case, foreign_lse=True)
        return case.why_wrong(backward(emulator, program, case, given(case), seed))
    except EmulationFailed as error:
        return str(error).strip()


def given(case: Case) -> Tensors:
    """O and LSE of the oracle, as a forward stores them."""
    return {"O": case.oracle["O"].to(case.q.dtype), "LSE": case.oracle["LSE"].float()}


def check_all(
    emulator: Emulator, program: Program, cases: Iterable[tuple[str, Case]], seed: int
) -> None:
    """Raise AssertionError unless all named cases are right; they run on all cores."""
    named = dict(cases)
    with ThreadPoolExecutor(usable_cores()) as threads:
        reasons = threads.map(
            lambda x: why_wrong(emulator, program, x[1], seed + x[0]), enumerate(named.values())
        )
        wrong = [f"{n}: {reason}" for n, reason in zip(named, reasons, strict=True) if reason]
    assert not wrong, f"{program.schedule}, seed {seed}: " + "; ".join(wrong)


def _call(emulator: Emulator, program: Program, arguments: tuple[Any, ...], seed: int) -> Any:
    return emulator.run(
        Call(
            emulator.build(program),
            program.variant.pass_,
            arguments,
            seed,
            program.device,
            -1 if program.mutant is None else program.mutant,
        )
    )


def _array(name: str, x: torch.Tensor, *, writable: bool = False) -> Array:
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()
    dtype = str(x.dtype).removeprefix("torch.")
    return Array(name, dtype, storage, tuple(x.shape), x.stride(), x.storage_offset(), writable)


def _filled(storage: np.ndarray[Any, Any], like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor like another from its bytes."""
    return torch.from_numpy(storage).view(like.dtype).view(like.shape)
