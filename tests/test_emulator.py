"""The emulator itself: small kernels are right in every order, and each mistake in one is found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import random_case
from emulator import attention, toolchain
from emulator.kernels import Launch
from emulator.memory import Array
from emulator.processes import EmulationFailed, Emulator

from fa2tvm.problem import Variant

THREADS = 64
SEEDS = range(12)
HELPERS, SIGNATURE = re.split(
    r'(?=extern "C")', (toolchain.HERE / "turn.cu").read_text(), maxsplit=1
)
BARRIER = "(&(((uint64_t*)pool_buf_ptr)[32]))"
FLOATS = "((float*)pool_buf_ptr)"
THROUGH_SHARED = f"""
  {FLOATS}[t] = from_ptr[t];
  __syncthreads();
  to_ptr[t] = {FLOATS}[63 - t];
"""
START = f"""
  if (t == 0) {{
    mbarrier_init(address_of({BARRIER}), (uint)1);
  }}
  __syncthreads();
  if (t == 0) {{
    arrive_expect_tx(address_of({BARRIER}), (uint)256);
    bulk_load(address_of(pool_buf_ptr), ((void*)(&(from_ptr[0]))), (uint)256,
              address_of({BARRIER}));
  }}
"""
BULK = f"""{START}
  mbarrier_wait({BARRIER}, 0);
  to_ptr[t] = {FLOATS}[63 - t];
"""
ARRIVALS = f"""
  if (t == 0) {{
    mbarrier_init(address_of({BARRIER}), (uint)64);
  }}
  __syncthreads();
  {FLOATS}[t] = from_ptr[t];
  mbarrier_arrive(address_of({BARRIER}), (uint)1);
  mbarrier_wait({BARRIER}, 0);
  to_ptr[t] = {FLOATS}[63 - t];
"""
RIGHT = {"shared memory": THROUGH_SHARED, "bulk copy": BULK, "arrivals": ARRIVALS}
# What is changed, and the sentence that says so.
WRONG = {
    "no __syncthreads": (THROUGH_SHARED, "__syncthreads();", "", None),
    "no wait for the copy": (BULK, f"mbarrier_wait({BARRIER}, 0);", "", None),
    "the other phase": (BULK, f"wait({BARRIER}, 0)", f"wait({BARRIER}, 1)", None),
    "one arrival too few": (ARRIVALS, "(uint)64", "(uint)65", "mbarrier"),
    "half of the arrivals": (ARRIVALS, "(uint)64", "(uint)32", None),
    "bytes that never come": (BULK, "), (uint)256);", "), (uint)272);", "mbarrier"),
    "no barrier": (BULK, f"mbarrier_init(address_of({BARRIER}), (uint)1);", "", "no mbarrier"),
    "half of the threads": (THROUGH_SHARED, "__syncthreads()", "if (t < 32) bar_sync(1, 64)",
                            "bar.sync"),
    "a store behind the end": (THROUGH_SHARED, "to_ptr[t]", "to_ptr[t + 1]", "to"),
    "a store before the start": (THROUGH_SHARED, "to_ptr[t]", "to_ptr[t - 1]", "to"),
    "a load behind the end": (THROUGH_SHARED, "from_ptr[t]", "from_ptr[t + 1]", "from"),
    "a store to an input": (THROUGH_SHARED, "to_ptr[t]", "from_ptr[t]", "from"),
    "a copy of what is not there": (BULK, "from_ptr[0]", "from_ptr[4]", "from"),
    "a copy to no multiple of 16": (BULK, "of(pool_buf_ptr)", "of(pool_buf_ptr + 8)",
                                    "multiple of 16"),
    "nothing stored": (THROUGH_SHARED, "to_ptr[t] =", "float unused =", None),
}  # fmt: skip


BODIES = [*RIGHT.values(), *(body.replace(old, new) for body, old, new, _ in WRONG.values())]


def code_of(bodies: Iterable[str], helpers: str = HELPERS) -> str:
    """The CUDA source of kernels turn_0, turn_1, ... with these bodies."""
    kernels = (
        f"{SIGNATURE.replace('turn_kernel', f'turn_{n}')}{body}}}\n"
        for n, body in enumerate(bodies)
    )
    return helpers + "".join(kernels)


def why_wrong(emulator: Emulator, kernel: int, seed: int) -> str | None:
    """What is wrong with a kernel of `BODIES` that is to turn 64 floats round."""
    numbers = np.arange(THREADS, dtype=np.float32)
    poison = np.full(THREADS, np.nan, np.float32)
    arrays = (
        Array("from", "float32", numbers.view(np.uint8), (THREADS,), (1,)),
        Array("to", "float32", poison.view(np.uint8), (THREADS,), (1,), writable=True),
    )
    launch = Launch(code_of(BODIES), f"turn_{kernel}", 1, THREADS, 512, arrays, seed)
    try:
        got = emulator.launch(launch)["to"].view(np.float32)
    except EmulationFailed as error:
        return str(error)
    return None if (got == numbers[::-1]).all() else f"the result is {got}"


@pytest.mark.parametrize("name", RIGHT)
def test_right_in_every_order(emulator: Emulator, name: str) -> None:
    kernel = list(RIGHT).index(name)
    assert [why_wrong(emulator, kernel, seed) for seed in SEEDS] == [None] * len(SEEDS)


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found(emulator: Emulator, name: str) -> None:
    """By the result in at least one order, or in every order by a sentence."""
    body, old, _, sentence = WRONG[name]
    assert old in body
    kernel = len(RIGHT) + list(WRONG).index(name)
    reasons = [why_wrong(emulator, kernel, seed) for seed in SEEDS]
    if sentence is None:
        assert any(reasons)
    else:
        assert all(reason and sentence in reason for reason in reasons), reasons


def test_unknown_instructions_are_named(emulator: Emulator) -> None:
    helper = """
__forceinline__ __device__ void odd(uint32_t __a) {
  asm volatile("griddepcontrol.surely_not %0;" :  : "r"(__a) : "memory");
}
"""
    launch = Launch(code_of(["odd(1);"], HELPERS + helper), "turn_0", 1, THREADS, 512, (), 0)
    with pytest.raises(Exception, match=r"griddepcontrol\.surely_not"):
        emulator.launch(launch)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_host_side_is_the_modules_own(emulator: Emulator, pass_: str) -> None:
    """Its argument checks refuse what they refuse on a GPU."""
    variant = Variant(pass_, "bfloat16", 64, 64, True)  # type: ignore[arg-type]
    program = attention.program(variant, "sm80")
    other = random_case(torch.Generator().manual_seed(0), torch.float16, seq_q=8, causal=True)
    assert "bfloat16" in str(attention.why_wrong(emulator, program, other))


def test_stand_ins_are_made_once(emulator: Emulator, tmp_path: Path) -> None:  # noqa: ARG001
    first = [path.stat().st_mtime_ns for path in toolchain.stand_ins(tmp_path)]
    assert [path.stat().st_mtime_ns for path in toolchain.stand_ins(tmp_path)] == first


def test_without_gcc_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its tests are then skipped with this reason."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert toolchain.why_not() == "the emulator needs g++"
