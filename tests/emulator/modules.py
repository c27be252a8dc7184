"""Emulated modules: a variant, its schedule and a device, compiled in a process of `processes`."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from emulator import mutants, toolchain
from fa2tvm import compile_cuda, manifest
from fa2tvm.cuda_toolchain import Cubin, PtxasReport
from fa2tvm.device import Device, gpu
from fa2tvm.lookup import home
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule

# Thread blocks that walk over all tiles, where a kernel is persistent: several tiles each.
MULTIPROCESSORS = 2
_GPUS = {"sm80": "nvidia_a100", "sm90": "nvidia_h200"}
_IMAGE = "fa2tvm-emulated:"


@dataclass(frozen=True)
class Program:
    """What an emulated module is made of.

    Attributes
    ----------
    mutant
        What is left out, by its place in `mutants.names`; -1 leaves out nothing, None is the
        program as it is.
    """

    variant: Variant
    schedule: Schedule
    device: Device
    mutant: int | None = None

    @property
    def path(self) -> Path:
        """Where the module is, or will be."""
        about = manifest.describe(self.variant, self.schedule, self.device)
        decisions = Path(inspect.getfile(type(self.schedule))).read_bytes()
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() + decisions)
        kind = "module" if self.mutant is None else "mutants"
        return folder() / f"{self.variant.name}-{digest.hexdigest()[:24]}-{kind}.so"

    @property
    def mutants(self) -> list[str]:
        """What the mutants of a compiled program leave out."""
        found: list[str] = json.loads(self.path.with_suffix(".json").read_text())
        return found


def folder() -> Path:
    """Where what is made with this emulator is kept: its own folder for each version of it."""
    made = home() / "emulated" / toolchain.version()
    made.mkdir(parents=True, exist_ok=True)
    return made


def emulated_device(family: str) -> Device:
    """A GPU of few multiprocessors that runs a family."""
    return dataclasses.replace(gpu(_GPUS[family]), cores=MULTIPROCESSORS)


def make(program: Program, path: Path) -> None:
    """Compile a program for the emulator, where it is not there yet.

    Raises
    ------
    CompileFailed
        Where TVM refuses the program or the emulator its code.
    InfeasibleSchedule
        Where the schedule does not fit.
    """
    if path.exists():
        return

    def compile_code(code: str, arch: str, what: str) -> Cubin:
        del arch, what
        if program.mutant is not None:
            path.with_suffix(".json").write_text(json.dumps(mutants.names(code)))
            code = mutants.instrument(code)
        library = toolchain.library(code, path.parent)
        return Cubin(f"{_IMAGE}{library}\0".encode(), PtxasReport(0, 0, 0, ()), "g++")

    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = compile_cuda.compile_module(
            program.variant, program.schedule, program.device, Path(scratch), "m", compile_code
        )
        made.library.rename(path)
