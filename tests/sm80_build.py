"""Compile default schedules of the portable family, for any architecture, where no GPU need be.

    python tests/sm80_build.py DEST sm_89/backward/bfloat16/128/128/causal ...

Writes DEST/NAME.so and NAME.json (the compiler's facts) of each, / as - in the name. One process
imports TVM once and finds one folder of stubs, which saves each module seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm import compile_cuda
from fa2tvm.device import Device, nvidia_h200
from fa2tvm.problem import Variant
from fa2tvm.schedule import schedule_class

# Shared memory that one thread block may use. Source: CUDA programming guide, compute capabilities.
SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}


def device(arch: str) -> Device:
    """A GPU of an architecture; other sizes do not enter the program."""
    return dataclasses.replace(nvidia_h200(), arch=arch, shared_bytes=SHARED_BYTES[arch])


def spec_of(arch: str, variant: Variant) -> str:
    """What names a module on the command line."""
    v = variant
    mask = "causal" if v.causal else "full"
    return f"{arch}/{v.pass_}/{v.dtype}/{v.head_dim_qk}/{v.head_dim_v}/{mask}"


def name_of(spec: str) -> str:
    """What names its files."""
    return spec.replace("/", "-")


def compile_one(spec: str, dest: Path) -> None:
    """Compile a module and write what the compiler says of it."""
    arch, pass_, dtype, d, dv, mask = spec.split("/")
    variant = Variant(pass_, dtype, int(d), int(dv), mask == "causal")  # type: ignore[arg-type]
    schedule = schedule_class("sm80", variant.pass_).default(variant, device(arch))
    library = dest / f"{name_of(spec)}.so"
    facts = compile_cuda.compile_library(variant, schedule, device(arch), library)
    library.with_suffix(".json").write_text(json.dumps(facts) + "\n")


def main() -> None:
    """Compile every module named, with stubs of the driver on the path where there is none."""
    dest, specs = Path(sys.argv[1]), sys.argv[2:]
    if compile_cuda.needs_stubs():
        environment = compile_cuda.stub_environment(dest / f"stub_{os.getpid()}")
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    for spec in specs:
        compile_one(spec, dest)


if __name__ == "__main__":
    main()
