"""What a CUDA schedule becomes: source, machine code, registers, spills, shared memory, mix.

Compiling needs no GPU. Machine code is read by cuobjdump, of the toolkit or of pip's
nvidia-cuda-cuobjdump; without it everything else is still told.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa2tvm import cuda_runtime
from fa2tvm.compile_cuda import compile_module, needs_stubs, stub_environment
from fa2tvm.device import Device
from fa2tvm.errors import CompileFailed, Fa2tvmError
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.viz.explain import Fact, mix

# Kinds of instructions by the beginning of their SASS names; the first that fits counts.
_KINDS = (
    ("tensor core", r"HGMMA|HMMA|WARPGROUP"),
    ("exponential", r"MUFU"),
    ("float arithmetic", r"FFMA|FADD|FMUL|FMNMX|FSETP|FSEL|FCHK|HFMA|HADD|HMUL|HMNMX"),
    ("convert", r"F2F|F2I|I2F"),
    ("bulk copy", r"UTMA|UBLKCP|UBLKRED|LDGSTS|LDGDEPBAR"),
    ("shared memory", r"LDS|STS|LDSM|STSM|ATOMS"),
    ("global memory", r"LDG|STG|LD\b|ST\b|ATOMG|RED"),
    ("local memory (spills)", r"LDL|STL"),
    ("barrier", r"SYNCS|BAR|WARPSYNC|DEPBAR|FENCE|MEMBAR|ARRIVES"),
    ("shuffle and vote", r"SHFL|VOTE|MATCH|REDUX"),
)
# "        /*0120*/                   HGMMA.64x128x16.F32.BF16 R24, ...", perhaps with a predicate.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class CudaCode:
    """The CUDA source of a program, its machine code in words, and what ptxas said."""

    source: str
    sass: str | None
    registers: int
    spill_bytes: int
    warnings: tuple[str, ...]


def compile_code(variant: Variant, schedule: Schedule, device: Device) -> CudaCode:
    """Compile a variant's program and take it apart.

    Raises
    ------
    CompileFailed
        Where a compiler is missing or refuses the program.
    """
    with tempfile.TemporaryDirectory(prefix="fa2tvm-explain-") as place:
        folder = Path(place)
        if needs_stubs():
            said = _beside_stubs(variant, schedule, device, folder)
        else:
            said = _compile(variant, schedule, device, folder)
        source = (folder / "kernel.cu").read_text(encoding="utf-8")
        sass = disassemble(folder / "kernel.cubin")
    return CudaCode(source, sass, said["registers"], said["spill_bytes"], tuple(said["warnings"]))


def facts(code: CudaCode, variant: Variant, schedule: Schedule, device: Device) -> list[Fact]:
    """Registers, spills, shared memory and instruction mix of a program."""
    footprint = schedule.footprint(variant, device)
    shared = f"{footprint.scratch_bytes / 1024:.1f} of {device.shared_bytes / 1024:.0f} KiB"
    found = [
        ("threads of a block", str(footprint.threads)),
        ("shared memory", f"{shared} that a block may use"),
        ("registers", f"{code.registers} of each thread at the start"),
        ("spills", f"{code.spill_bytes} bytes" if code.spill_bytes else "none"),
        *(("ptxas warns", warning) for warning in code.warnings),
    ]
    if code.sass is None:
        why = "unknown: cuobjdump is missing (pip install nvidia-cuda-cuobjdump)"
        return [*found, ("instructions", why)]
    return [*found, *sass_facts(code.sass)]


def sass_facts(sass: str) -> list[Fact]:
    """Instruction mix of machine code as cuobjdump prints it.

    Counts are of the code as it stands, not of what runs: an instruction in a loop counts once.
    """
    names = [found[1] for line in sass.splitlines() if (found := _INSTRUCTION.match(line))]
    kinds: Counter[str] = Counter(
        next((kind for kind, start in _KINDS if re.match(start, name)), "integer and control")
        for name in names
        if name != "NOP"
    )
    tensor = Counter(name for name in names if name in ("HGMMA", "HMMA"))
    used = ", ".join(f"{n} {name}" for name, n in tensor.items()) or "none"
    return [("instructions", mix(kinds)), ("matrix instructions", used)]


def disassemble(cubin: Path) -> str | None:
    """Machine code in words; None where cuobjdump is missing.

    Raises
    ------
    CompileFailed
        Where it refuses the cubin.
    """
    tool = find_cuobjdump()
    if tool is None:
        return None
    done = subprocess.run(
        [tool, "-sass", os.fspath(cubin)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileFailed(f"{tool} cannot read the machine code: {done.stderr.strip()[-300:]}")
    return done.stdout


def find_cuobjdump() -> str | None:
    """The cuobjdump on PATH, of pip's package or of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    parents = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = [found for parent in parents for found in sorted(parent.glob("cu[1-9]*/bin"))]
    places = [os.environ.get("PATH", ""), *map(os.fspath, folders), "/usr/local/cuda/bin"]
    return shutil.which("cuobjdump", path=os.pathsep.join(places))


def _compile(variant: Variant, schedule: Schedule, device: Device, folder: Path) -> dict[str, Any]:
    report = compile_module(variant, schedule, device, folder, "kernel").report
    return {
        "registers": report.registers,
        "spill_bytes": report.spill_store_bytes + report.spill_load_bytes,
        "warnings": list(report.warnings),
    }


def _beside_stubs(
    variant: Variant, schedule: Schedule, device: Device, folder: Path
) -> dict[str, Any]:
    """`_compile` in a process that finds stubs of the driver: see compile_cuda."""
    request = {
        "variant": variant.to_dict(),
        "family": schedule.family,
        "schedule": schedule.to_dict(),
        "device": asdict(device),
        "folder": os.fspath(folder),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fa2tvm.viz.explain_cuda"],
        input=json.dumps(request),
        env=stub_environment(folder / "stubs") | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise CompileFailed(f"{variant.name} could not be compiled for {device.arch}: {last}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    """Compile what standard input asks for, and answer on standard output."""
    asked = json.loads(sys.stdin.read())
    variant = Variant(**asked["variant"])
    schedule = schedule_from_dict(asked["family"], variant.pass_, asked["schedule"])
    device = Device(**asked["device"] | {"features": tuple(asked["device"]["features"])})
    try:
        cuda_runtime.load_libraries()
        said = _compile(variant, schedule, device, Path(asked["folder"]))
    except Fa2tvmError as error:
        sys.exit(str(error))
    sys.stdout.write("\n" + json.dumps(said) + "\n")


if __name__ == "__main__":
    _main()
